"""Tables of the candidates: accuracy, latency, fallbacks."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import (
    DELTA_NE_NAME,
    KL_NAME,
    BudgetStatus,
    Evaluation,
    OutputEvaluation,
)
from loka_onnx.core.formats import Precision
from loka_onnx.report import numbers
from loka_onnx.report.data import SELECTION, ReportData
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, cell
from loka_onnx.report.verdict import NO_LABELS, SIMULATED_LATENCY, budget_sentence

_NAMES = (Column("Engine"), Column("Output"))
_ENGINE_COLUMNS = (
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
    """Every candidate, on every split that anything was evaluated on."""
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
        tables=(*(_accuracy_table(data, split) for split in splits), *parts, *_latency_tables(data)),
        chart=True,
    )


def fallbacks_section(data: ReportData) -> Section:
    """Sites that an engine does not run as planned."""
    rows = tuple(
        (
            cell(engine.id),
            cell(site.site),
            cell(site.planned),
            cell(" × ".join(site.operands) or "unknown", Tone.WARN),
            cell(
                f"planned {site.planned}, runs in {' × '.join(site.operands) or 'unknown'}: {site.evidence}"
            ),
        )
        for engine in data.engines
        for site in engine.fallbacks
    )
    columns = (
        Column("Engine"),
        Column("Site"),
        Column("Planned"),
        Column("Runs in"),
        Column("Evidence", prose=True),
    )
    if not rows:
        checked = sum(bool(e.sites) for e in data.engines)
        said = f"None. Engines whose compiled form was read: {checked} of {len(data.engines)}."
        return Section("fallbacks", "Fallbacks", (said,))
    return Section(
        "fallbacks",
        "Fallbacks",
        ("What the compiled engine was found to run, where that is not what the plan asked for.",),
        tables=(Table("Sites that do not run as planned", columns, rows, keys=2),),
    )


def fp8_sites(data: ReportData, engine: EngineArtifact) -> str:
    """Sites that run in FP8 of those planned, ``5 of 7``."""
    plan = data.plan(engine.plan)
    planned = len(plan.fp8_sites) if plan is not None else 0
    if not engine.sites:
        return f"{planned} planned" if planned else "0"
    engaged = sum(s.engaged and s.planned == Precision.FP8 for s in engine.sites)
    return f"{engaged} of {planned}" if planned else "0"


def fp8_share(data: ReportData, engine: EngineArtifact) -> str:
    """Share of the FP8-able FLOPs in FP8; marked as planned where the engine does not honour the plan."""
    plan = data.plan(engine.plan)
    if plan is None:
        return numbers.NONE
    lost = {s.site for s in engine.fallbacks} & set(plan.fp8_sites)
    unread = plan.fp8_sites and not engine.sites
    return numbers.share(plan.fp8_share) + (" planned" if lost or unread else "")


def delta_text(output: OutputEvaluation) -> str:
    """What is judged with its interval: ΔNE, or KL by name where there are no labels."""
    if output.difference is None:
        return "reference"
    text = numbers.percent_interval(output.difference.judged, output.budget)
    return f"KL {text}" if output.difference.delta_ne is None else text


def delta_heading(data: ReportData) -> str:
    """What `delta_text` shows: ``ΔNE``, the KL of outputs without labels, or either."""
    outputs = {o.output for e in data.evaluations.evaluations for o in e.outputs if o.difference is not None}
    unlabelled = set(label_free_outputs(data))
    if not unlabelled:
        return DELTA_NE_NAME
    return KL_NAME if unlabelled == outputs else f"{DELTA_NE_NAME} or {KL_NAME}"


def label_free_outputs(data: ReportData) -> tuple[str, ...]:
    """Outputs that were judged without labels."""
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


def latency_text(data: ReportData, engine: EngineArtifact) -> str:
    """Median latency at the largest measured batch, or why there is none."""
    if engine.simulated:
        return SIMULATED_LATENCY
    measured = [
        latency
        for split in data.splits
        for latency in getattr(data.evaluation(engine.id, split), "latencies", ())
    ]
    if not measured:
        return numbers.NOT_MEASURED
    largest = max(measured, key=lambda item: item.batch)
    text = f"{numbers.latency(largest.p50_us)} at batch {numbers.count(largest.batch)}"
    return text if largest.counts_for_choice else f"{text} on {largest.device}, not the target"


def _accuracy_table(data: ReportData, split: str) -> Table:
    rows: list[tuple[Cell, ...]] = []
    emphasized: set[int] = set()
    evaluated = [e for e in data.evaluations.evaluations if e.split == split]
    rows_of_split = max((e.rows for e in evaluated), default=0)
    for reference in data.references:
        evaluation = data.evaluation(reference, split)
        if evaluation is not None:
            rows += [_reference_row(evaluation, output) for output in evaluation.outputs]
    for engine in data.engines:
        evaluation = data.evaluation(engine.id, split)
        # Certification is looked at once, for what is emitted; the others are not missing from it.
        if evaluation is None and split != SELECTION:
            continue
        for row in _engine_rows(data, engine, evaluation):
            if data.chosen(engine.id) is not None:
                emphasized.add(len(rows))
            rows.append(row)
    caption = f"Candidates on {split}, {numbers.count(rows_of_split)} rows" if evaluated else "Candidates"
    columns = (*_NAMES, Column(f"{delta_heading(data)} [95 % interval]", numeric=True), *_ENGINE_COLUMNS)
    return Table(caption, columns, tuple(rows), frozenset(emphasized))


def _parts_table(data: ReportData, split: str) -> Table:
    """KL and the labelled part call for different cures: less noise, or a change of another direction."""
    columns = (
        *_NAMES,
        Column("KL, label-free part", numeric=True),
        Column("Labelled first-order part", numeric=True),
        Column("ΔAUC", numeric=True),
        Column("ΔPrediction ratio", numeric=True),
        Column("RMS change of the score", numeric=True),
        Column("Largest change", numeric=True),
    )
    rows = tuple(
        (
            cell(evaluation.engine),
            cell(output.output),
            cell(numbers.percent_interval(difference.kl)),
            cell(numbers.NONE if part is None else numbers.percent_interval(part)),
            cell(numbers.metric_interval(difference.delta_auc)),
            cell(numbers.metric_interval(difference.delta_prediction_ratio)),
            cell(numbers.scientific(difference.delta_rmse)),
            cell(numbers.scientific(difference.delta_max)),
        )
        for evaluation in data.evaluations.evaluations
        if evaluation.split == split
        for output in evaluation.outputs
        if (difference := output.difference) is not None
        for part in (difference.labelled,)
    )
    relative = " or ".join(
        dict.fromkeys(
            "the mean entropy" if o.difference.delta_ne is None else "the FP32 loss"
            for e in data.evaluations.evaluations
            for o in e.outputs
            if o.difference is not None
        )
    )
    return Table(f"What the change is made of on {split}, relative to {relative}", columns, rows)


def _reference_row(evaluation: Evaluation, output: OutputEvaluation) -> tuple[Cell, ...]:
    metrics = output.metrics
    return (
        cell(evaluation.engine),
        cell(output.output),
        cell("reference", Tone.MUTED),
        cell(numbers.budget_percent(output.budget)),
        cell(numbers.metric(metrics.normalized_entropy)),
        cell(numbers.metric(metrics.auc)),
        cell(numbers.ratio(metrics.prediction_ratio)),
        cell(numbers.NONE),
        cell("0"),
        cell(numbers.share(0.0)),
        cell(numbers.NONE),
        cell(evaluation.status),
        cell("The exported FP32 model that every engine is compared with."),
    )


def _engine_rows(
    data: ReportData, engine: EngineArtifact, evaluation: Evaluation | None
) -> Iterator[tuple[Cell, ...]]:
    build = (
        cell(fp8_sites(data, engine)),
        cell(fp8_share(data, engine)),
        cell(numbers.size(engine.bytes) if engine.path is not None else numbers.NONE),
        cell(engine.status, STATUS_TONES[engine.status]),
    )
    latency = latency_text(data, engine)
    speed = cell(latency, Tone.PLAIN if latency[0].isdigit() else Tone.MUTED)
    outcome = _outcome(data, engine, evaluation)
    if evaluation is None or not evaluation.outputs:
        missing = cell(numbers.NOT_MEASURED, Tone.MUTED)
        empty = cell(numbers.NONE)
        yield (cell(engine.id), empty, missing, *[empty] * 4, speed, *build, cell(outcome))
        return
    for output in evaluation.outputs:
        metrics = output.metrics
        yield (
            cell(engine.id),
            cell(output.output),
            cell(delta_text(output), delta_tone(output)),
            cell(f"{output.budget_status}, {numbers.budget_percent(output.budget)}", delta_tone(output)),
            cell(numbers.metric(metrics.normalized_entropy)),
            cell(numbers.metric(metrics.auc)),
            cell(numbers.ratio(metrics.prediction_ratio)),
            speed,
            *build,
            cell(_with_rows(outcome, output)),
        )


def _with_rows(outcome: str, output: OutputEvaluation) -> str:
    if output.budget_status != BudgetStatus.UNDECIDED:
        return outcome
    return f"{outcome} {output.output} is {budget_sentence(output)}.".strip()


def _outcome(data: ReportData, engine: EngineArtifact, evaluation: Evaluation | None) -> str:
    chosen = data.chosen(engine.id)
    parts = [f"Emitted for {chosen.target}: {chosen.reason}"] if chosen is not None else []
    reason = data.why_lost(engine.id)
    parts += [f"Not chosen: {reason}"] if reason and chosen is None else []
    # The reason of one that was not built is its detail already.
    parts += [engine.detail] if engine.detail and not any(engine.detail in part for part in parts) else []
    if evaluation is not None and not evaluation.outputs:
        parts.append(f"Accuracy: {evaluation.status}")
    if engine.simulated:
        parts.append("FP8 is simulated: its accuracy counts, its speed never does")
    return "; ".join(part.rstrip(".") for part in dict.fromkeys(parts)) + "." if parts else ""


def _latency_tables(data: ReportData) -> tuple[Table, ...]:
    timed = [
        (evaluation.engine, latency)
        for evaluation in data.evaluations.evaluations
        for latency in evaluation.latencies
        if not _is_simulated(data, evaluation.engine)
    ]
    if not timed:
        return ()
    is_cut = any(latency.lookup_p50_us is not None for _, latency in timed)
    rows = tuple(
        (
            cell(engine),
            cell(latency.device),
            cell(numbers.count(latency.batch)),
            cell(numbers.latency(latency.p50_us)),
            cell(numbers.latency(latency.p90_us)),
            cell(numbers.latency(latency.p99_us)),
            *((_lookup_cell(latency.lookup_p50_us),) if is_cut else ()),
            cell(numbers.count(latency.repeats)),
            cell("yes" if latency.counts_for_choice else "no", Tone.PLAIN),
        )
        for engine, latency in timed
    )
    columns = (
        Column("Engine"),
        Column("Device"),
        Column("Batch", numeric=True),
        Column("p50", numeric=True),
        Column("p90", numeric=True),
        Column("p99", numeric=True),
        *((Column("Lookup p50, not in these", numeric=True),) if is_cut else ()),
        Column("Requests", numeric=True),
        Column("Counts for the choice"),
    )
    return (Table("Latency per batch size", columns, rows),)


def _lookup_cell(p50_us: float | None) -> Cell:
    return cell(numbers.NONE if p50_us is None else numbers.latency(p50_us))


def _is_simulated(data: ReportData, engine_id: str) -> bool:
    engine = data.engine(engine_id)
    return engine is not None and engine.simulated
