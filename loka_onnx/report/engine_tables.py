"""Tables of the candidates: accuracy, latency, fallbacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from loka_onnx.core.engine import BuildStatus, EngineArtifact, SitePrecision
from loka_onnx.core.evaluation import (
    DELTA_NE_NAME,
    KL_NAME,
    Because,
    BudgetStatus,
    Evaluation,
    OutputEvaluation,
    PairedDifference,
)
from loka_onnx.core.formats import Precision
from loka_onnx.report import numbers
from loka_onnx.report.data import SELECTION, ReportData, confidence_text
from loka_onnx.report.document import (
    Cell,
    Column,
    Field,
    Section,
    Table,
    Tone,
    cell,
    number,
    prose,
    table_of,
    text,
)
from loka_onnx.report.figures import (
    Place,
    Told,
    at,
    derive,
    formed,
    metric_interval,
    percent_interval,
    shown,
    told,
)
from loka_onnx.report.latency_tables import latency_tables
from loka_onnx.report.verdict import NO_LABELS, SIMULATED_LATENCY, budget_sentence

_NAMES = (Column("Engine"), Column("Output"))
_ENGINE_COLUMNS = (
    Column("KL [95 % interval]", numeric=True),
    Column("ΔAUC [95 % interval]", numeric=True),
    Column("Budget"),
    Column("NE", numeric=True),
    Column("AUC", numeric=True),
    Column("Prediction ratio", numeric=True),
    Column("Latency p50", numeric=True),
    Column("Sites in FP8", numeric=True),
    Column("FP8 share of FLOPs", numeric=True),
    Column("Size", numeric=True),
    Column("Status"),
    Column("Outcome", prose=True),
)

STATUS_TONES = {
    BuildStatus.READY: Tone.PLAIN,
    BuildStatus.BUILT_NOT_RUN: Tone.WARN,
    BuildStatus.DECLINED: Tone.MUTED,
    BuildStatus.FAILED: Tone.BAD,
    BuildStatus.WAITING: Tone.MUTED,
    BuildStatus.RUN_ELSEWHERE: Tone.PLAIN,
}
_BUDGET_TONES = {
    BudgetStatus.WITHIN: Tone.GOOD,
    BudgetStatus.BEYOND: Tone.BAD,
    BudgetStatus.UNDECIDED: Tone.WARN,
}


def engines_section(data: ReportData) -> Section:
    """Return every candidate on every evaluated split."""
    splits = data.splits or (SELECTION,)
    paragraphs = [
        "Accuracy is that of the built engine's own outputs, paired row by row with the exported FP32 model. "
        "A budget is held against the upper end of the interval.",
    ]
    unlabelled = label_free_outputs(data)
    if unlabelled:
        paragraphs.append(f"Judged on {NO_LABELS}. This concerns {', '.join(unlabelled)}.")
    parts = [table for split in splits if (table := _parts_table(data, split)).rows]
    return Section(
        "engines",
        "Engines",
        paragraphs=tuple(paragraphs),
        tables=(*(_accuracy_table(data, split) for split in splits), *parts, *latency_tables(data)),
        chart=True,
    )


_FALLBACK_FIELDS: tuple[Field[tuple[EngineArtifact, SitePrecision]], ...] = (
    text("Engine", lambda found: found[0].id),
    text("Site", lambda found: found[1].site),
    text("Planned", lambda found: found[1].planned),
    text("Runs in", lambda found: cell(_operands(found[1]), Tone.WARN)),
    prose("Evidence", lambda found: _evidence(found[1])),
)


_REMARK_FIELDS: tuple[Field[tuple[EngineArtifact, str]], ...] = (
    text("Engine", lambda found: found[0].id),
    prose("What, where and why", lambda found: found[1]),
)


def _operands(site: SitePrecision) -> str:
    return " × ".join(site.operands) or "unknown"


def _evidence(site: SitePrecision) -> str:
    return f"planned {site.planned}, runs in {_operands(site)}: {site.evidence}"


def fallbacks_section(data: ReportData) -> Section:
    """Return sites that an engine does not run as planned."""
    found = [(engine, site) for engine in data.engines for site in engine.fallbacks]
    remarks = [(engine, remark) for engine in data.engines for remark in engine.remarks]
    left_out = (table_of("What engine makers left out", _REMARK_FIELDS, remarks),) if remarks else ()
    if not found:
        checked = derive("entries", *(Place(engine, "sites") for engine in data.engines if engine.sites))
        said = told(
            "None. Engines whose compiled form was read: {} of {}.",
            formed(numbers.count, checked),
            formed(numbers.count, derive("count", Place(data, "engines"))),
        )
        return Section("fallbacks", "Fallbacks", (said,), tables=left_out)
    return Section(
        "fallbacks",
        "Fallbacks",
        ("What the compiled engine was found to run, where that is not what the plan asked for.",),
        tables=(table_of("Sites that do not run as planned", _FALLBACK_FIELDS, found, keys=2), *left_out),
    )


def fp8_sites(data: ReportData, engine: EngineArtifact) -> Told:
    """Return FP8 sites over planned ones, ``5 of 7``."""
    plan = data.plan(engine.plan)
    if plan is None:
        return Told(numbers.NONE)
    planned = formed(numbers.count, derive("count", Place(plan, "decisions"), precision=Precision.FP8))
    if not plan.fp8_sites:
        return planned
    if not engine.sites:
        return told("{} planned", planned)
    engaged = derive("count", Place(engine, "sites"), engaged=True, planned=Precision.FP8)
    return told("{} of {}", formed(numbers.count, engaged), planned)


def fp8_share(data: ReportData, engine: EngineArtifact) -> Told:
    """Return the share of the FP8-able FLOPs in FP8; marked as planned where the engine does not honour the
    plan.
    """
    plan = data.plan(engine.plan)
    if plan is None:
        return Told(numbers.NONE)
    lost = {s.site for s in engine.fallbacks} & set(plan.fp8_sites)
    unread = plan.fp8_sites and not engine.sites
    return told("{}{}", shown(numbers.share, plan, "fp8_share"), " planned" if lost or unread else "")


def delta_text(output: OutputEvaluation) -> Told:
    """Return the judged quantity with its interval: ΔNE, or KL by name without labels."""
    if output.difference is None:
        return Told("reference")
    text = percent_interval(output.difference.judged, output.budget)
    return told("KL {}", text) if output.difference.delta_ne is None else text


def delta_heading(data: ReportData) -> str:
    """Return the heading of `delta_text`: ``ΔNE``, the KL of outputs without labels, or either."""
    outputs = {o.output for e in data.evaluations.evaluations for o in e.outputs if o.difference is not None}
    unlabelled = set(label_free_outputs(data))
    if not unlabelled:
        return DELTA_NE_NAME
    return KL_NAME if unlabelled == outputs else f"{DELTA_NE_NAME} or {KL_NAME}"


def label_free_outputs(data: ReportData) -> tuple[str, ...]:
    """Return outputs that were judged without labels."""
    names = (
        output.output
        for evaluation in data.evaluations.evaluations
        for output in evaluation.outputs
        if output.difference is not None and output.difference.delta_ne is None
    )
    return tuple(dict.fromkeys(names))


def delta_tone(output: OutputEvaluation) -> Tone:
    """Colour of a budget status."""
    return Tone.PLAIN if output.difference is None else _BUDGET_TONES[output.budget_status]


def latency_text(data: ReportData, engine: EngineArtifact) -> Told:
    """Return the median latency at the largest measured batch, or why there is none."""
    if engine.simulated:
        return Told(SIMULATED_LATENCY)
    measured = [
        latency
        for split in data.splits
        for latency in getattr(data.evaluation(engine.id, split), "latencies", ())
    ]
    if not measured:
        return Told(numbers.NOT_MEASURED)
    largest = max(measured, key=lambda item: item.batch)
    elsewhere = "" if largest.counts_for_choice else f" on {largest.device}, not the target"
    return told(
        "{} at batch {}{}",
        shown(numbers.latency, largest, "p50_us"),
        shown(numbers.count, largest, "batch"),
        elsewhere,
    )


def _accuracy_table(data: ReportData, split: str) -> Table:
    rows: list[tuple[Cell, ...]] = []
    emphasized: set[int] = set()
    evaluated = [e for e in data.evaluations.evaluations if e.split == split]
    for reference in data.references:
        evaluation = data.evaluation(reference, split)
        if evaluation is not None:
            rows += [_reference_row(evaluation, output) for output in evaluation.outputs]
    for engine in data.engines:
        evaluation = data.evaluation(engine.id, split)
        # Only selected engines are certified; others are not missing here.
        if evaluation is None and split != SELECTION:
            continue
        for row in _engine_rows(data, engine, evaluation):
            if data.chosen(engine.id) is not None:
                emphasized.add(len(rows))
            rows.append(row)
    caption = "Candidates"
    if evaluated:
        rows_of_split = derive("max", *(at(evaluation, "rows") for evaluation in evaluated))
        caption = told("Candidates on {}, {} rows", split, formed(numbers.count, rows_of_split))
    columns = (
        *_NAMES,
        Column(f"{delta_heading(data)} [{confidence_text(data, split)} interval]", numeric=True),
        *_ENGINE_COLUMNS,
    )
    return Table(caption, columns, tuple(rows), frozenset(emphasized))


_Difference = tuple[Evaluation, OutputEvaluation, PairedDifference]
_PART_FIELDS: tuple[Field[_Difference], ...] = (
    text("Engine", lambda found: found[0].engine),
    text("Output", lambda found: found[1].output),
    number("KL, label-free part", lambda found: percent_interval(found[2].kl)),
    number("Labelled first-order part", lambda found: percent_interval(found[2].labelled)),
    number("ΔPrediction ratio", lambda found: metric_interval(found[2].delta_prediction_ratio)),
    number("RMS change of the score", lambda found: shown(numbers.scientific, found[2], "delta_rmse")),
    number("Largest change", lambda found: shown(numbers.scientific, found[2], "delta_max")),
)


def _differences(evaluations: Iterable[Evaluation]) -> Iterator[_Difference]:
    for evaluation in evaluations:
        for output in evaluation.outputs:
            if output.difference is not None:
                yield evaluation, output, output.difference


def _parts_table(data: ReportData, split: str) -> Table:
    """Return KL and the labelled part: they need different cures, less noise or another direction."""
    every = data.evaluations.evaluations
    relative = " or ".join(
        dict.fromkeys(
            "the mean entropy" if difference.delta_ne is None else "the FP32 loss"
            for _, _, difference in _differences(every)
        )
    )
    caption = f"What the change is made of on {split}, relative to {relative}"
    return table_of(caption, _PART_FIELDS, _differences(e for e in every if e.split == split))


def _reference_row(evaluation: Evaluation, output: OutputEvaluation) -> tuple[Cell, ...]:
    metrics = output.metrics
    return (
        cell(evaluation.engine),
        cell(output.output),
        cell("reference", Tone.MUTED),
        *[cell(numbers.NONE)] * 2,
        cell(shown(numbers.budget_percent, output, "budget")),
        cell(shown(numbers.metric, metrics, "normalized_entropy")),
        cell(shown(numbers.metric, metrics, "auc")),
        cell(shown(numbers.ratio, metrics, "prediction_ratio")),
        *[cell(numbers.NONE)] * 4,
        cell(evaluation.status),
        cell("The exported FP32 model that every engine is compared with."),
    )


def _engine_rows(
    data: ReportData, engine: EngineArtifact, evaluation: Evaluation | None
) -> Iterator[tuple[Cell, ...]]:
    build = (
        cell(fp8_sites(data, engine)),
        cell(fp8_share(data, engine)),
        cell(shown(numbers.size, engine, "bytes") if engine.path is not None else numbers.NONE),
        cell(engine.status, STATUS_TONES[engine.status]),
    )
    latency = latency_text(data, engine)
    speed = cell(latency, Tone.PLAIN if latency[0].isdigit() else Tone.MUTED)
    outcome = _outcome(data, engine, evaluation)
    if evaluation is None or not evaluation.outputs:
        missing = cell(numbers.NOT_MEASURED, Tone.MUTED)
        empty = cell(numbers.NONE)
        yield (cell(engine.id), empty, missing, *[empty] * 6, speed, *build, cell(outcome))
        return
    for output in evaluation.outputs:
        metrics = output.metrics
        budget = shown(numbers.budget_percent, output, "budget")
        yield (
            cell(engine.id),
            cell(output.output),
            cell(delta_text(output), delta_tone(output)),
            *_beside(output),
            cell(told("{}, {}", output.verdict, budget), delta_tone(output)),
            cell(shown(numbers.metric, metrics, "normalized_entropy")),
            cell(shown(numbers.metric, metrics, "auc")),
            cell(shown(numbers.ratio, metrics, "prediction_ratio")),
            speed,
            *build,
            cell(_with_rows(outcome, output)),
        )


def _beside(output: OutputEvaluation) -> tuple[Cell, Cell]:
    """Return KL and the change of AUC, coloured by their guards."""
    change = output.difference
    if change is None:
        return cell(numbers.NONE), cell(numbers.NONE)
    tones = {guard.name: _BUDGET_TONES[guard.status] for guard in output.guards}
    return (
        cell(percent_interval(change.kl), tones.get(Because.MAX_KL, Tone.PLAIN)),
        cell(metric_interval(change.delta_auc), tones.get(Because.MAX_AUC_DROP, Tone.PLAIN)),
    )


def _with_rows(outcome: str, output: OutputEvaluation) -> str:
    """Return prose: reasons and remarks have numbers of their own, so none of them has a source here."""
    if output.budget_status != BudgetStatus.UNDECIDED and not output.remarks:
        return outcome
    return f"{outcome} {output.output} is {budget_sentence(output)}.".lstrip()


def _outcome(data: ReportData, engine: EngineArtifact, evaluation: Evaluation | None) -> str:
    chosen = data.chosen(engine.id)
    parts = [f"Emitted for {chosen.target}: {chosen.reason}"] if chosen is not None else []
    reason = data.why_lost(engine.id)
    parts += [f"Not chosen: {reason}"] if reason and chosen is None else []
    # For an engine that was not built, the reason equals its detail.
    parts += [engine.detail] if engine.detail and not any(engine.detail in part for part in parts) else []
    if evaluation is not None and not evaluation.outputs:
        parts.append(f"Accuracy: {evaluation.status}")
    if engine.simulated:
        parts.append("FP8 is simulated: its accuracy counts, its speed never does")
    return "; ".join(part.rstrip(".") for part in dict.fromkeys(parts)) + "." if parts else ""
