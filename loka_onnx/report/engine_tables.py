"""Tables of the candidates: accuracy, latency, fallbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from loka_onnx.core.engine import BuildStatus, EngineArtifact, SitePrecision
from loka_onnx.core.evaluation import (
    DELTA_NE_NAME,
    KL_NAME,
    Because,
    BudgetStatus,
    Evaluation,
    InputPlace,
    Latency,
    OutputEvaluation,
    PairedDifference,
)
from loka_onnx.core.formats import Precision
from loka_onnx.report import numbers
from loka_onnx.report.data import SELECTION, ReportData, confidence_text
from loka_onnx.report.document import (
    BUDGET_TONES,
    Cell,
    Column,
    Item,
    Section,
    Table,
    Tone,
    number,
    prose,
    table_of,
    text,
)
from loka_onnx.report.figures import (
    Place,
    Told,
    counted,
    derive,
    formed,
    joined,
    metric_interval,
    percent_interval,
    shown,
    told,
)
from loka_onnx.report.site_tables import share_heading
from loka_onnx.report.verdict import NO_LABELS, SIMULATED_LATENCY, budget_sentence, busy

STATUS_TONES = {
    BuildStatus.READY: Tone.PLAIN,
    BuildStatus.BUILT_NOT_RUN: Tone.WARN,
    BuildStatus.DECLINED: Tone.MUTED,
    BuildStatus.FAILED: Tone.BAD,
    BuildStatus.WAITING: Tone.MUTED,
    BuildStatus.RUN_ELSEWHERE: Tone.PLAIN,
}
_NONE = Cell(numbers.NONE)


def engines_section(data: ReportData) -> Section:
    """Return every candidate on every evaluated split."""
    splits = data.splits or (SELECTION,)
    paragraphs = [
        "Accuracy is that of the built engine's own outputs, paired row by row with the exported FP32 model. "
        "A budget is held against the upper end of the interval."
    ]
    if unlabelled := label_free_outputs(data):
        paragraphs.append(f"Judged on {NO_LABELS}. This concerns {', '.join(unlabelled)}.")
    parts = [table for split in splits if (table := _parts_table(data, split)).rows]
    accuracy = (_accuracy_table(data, split) for split in splits)
    tables = (*accuracy, *parts, *latency_tables(data))
    return Section("engines", "Engines", paragraphs=tuple(paragraphs), tables=tables)


def fallbacks_section(data: ReportData) -> Section:
    """Return sites that an engine does not run as planned."""
    sites = [(engine.id, site) for engine in data.engines for site in engine.fallbacks]
    remarks = [(engine.id, remark) for engine in data.engines for remark in engine.remarks]

    def evidence(row: tuple[str, SitePrecision]) -> str:
        return f"planned {row[1].planned}, runs in {_operands(row)}: {row[1].evidence}"

    site_columns: tuple[Column[tuple[str, SitePrecision]], ...] = (
        text("Engine", lambda row: row[0]),
        text("Site", lambda row: row[1].site),
        text("Planned", lambda row: row[1].planned),
        text("Runs in", lambda row: Cell(_operands(row), Tone.WARN)),
        prose("Evidence", evidence),
    )
    remark_columns: tuple[Column[tuple[str, str]], ...] = (
        text("Engine", lambda row: row[0]),
        prose("What, where and why", lambda row: row[1]),
    )
    tables = [table_of("Sites that do not run as planned", site_columns, sites)] if sites else []
    tables += [table_of("What engine makers left out", remark_columns, remarks)] if remarks else []
    note: str = "What the compiled engine was found to run, where that is not what the plan asked for."
    if not sites:
        checked = derive("entries", *(Place(engine, "sites") for engine in data.engines if engine.sites))
        counts = formed(numbers.count, checked), counted(data, "engines")
        note = told("None. Engines whose compiled form was read: {} of {}.", *counts)
    return Section("fallbacks", "Fallbacks", (note,), tables=tuple(tables))


def _operands(row: tuple[str, SitePrecision]) -> str:
    return " × ".join(row[1].operands) or "unknown"


def fp8_sites(data: ReportData, engine: EngineArtifact) -> Told:
    """Return FP8 (or INT8) sites over planned ones, ``5 of 7``."""
    plan = data.plan(engine.plan)
    if plan is None:
        return Told(numbers.NONE)
    parts = []
    for precision in plan.precisions or (Precision.FP8,):
        planned = counted(plan, "decisions", precision=precision)
        if not plan.quantized_sites:
            return planned
        told_of = f" {precision.upper()}" if len(plan.precisions) > 1 else ""
        if engine.sites:
            ran = counted(engine, "sites", engaged=True, planned=precision)
            parts.append(told(f"{{}} of {{}}{told_of}", ran, planned))
        else:
            parts.append(told(f"{{}} planned{told_of}", planned))
    return joined(", ", parts)


def fp8_share(data: ReportData, engine: EngineArtifact) -> Told:
    """Return the quantized share of the FP8-able FLOPs; marked where the engine does not honour the plan."""
    plan = data.plan(engine.plan)
    if plan is None:
        return Told(numbers.NONE)
    lost = {s.site for s in engine.fallbacks} & set(plan.quantized_sites)
    unread = plan.quantized_sites and not engine.sites
    return told("{}{}", shown(numbers.share, plan, "fp8_share"), " planned" if lost or unread else "")


def delta_text(output: OutputEvaluation) -> Told:
    """Return the judged quantity with its interval: ΔNE, or KL by name without labels."""
    if output.difference is None:
        return Told("reference")
    text = percent_interval(output.difference.judged, output.budget)
    return told("KL {}", text) if output.difference.delta_ne is None else text


def delta_heading(data: ReportData) -> str:
    """Return the heading of `delta_text`: ``ΔNE``, the KL of outputs without labels, or either."""
    outputs = {output.output for _, output, _ in _differences(data)}
    unlabelled = set(label_free_outputs(data))
    if not unlabelled:
        return DELTA_NE_NAME
    return KL_NAME if unlabelled == outputs else f"{DELTA_NE_NAME} or {KL_NAME}"


def label_free_outputs(data: ReportData) -> tuple[str, ...]:
    """Return outputs that were judged without labels."""
    names = (output.output for _, output, difference in _differences(data) if difference.delta_ne is None)
    return tuple(dict.fromkeys(names))


def delta_tone(output: OutputEvaluation) -> Tone:
    """Colour of a budget status."""
    return Tone.MUTED if output.difference is None else BUDGET_TONES[output.budget_status]


def latency_text(data: ReportData, engine: EngineArtifact) -> Told:
    """Return the median latency at the largest measured batch, or why there is none."""
    if engine.simulated:
        return Told(SIMULATED_LATENCY)
    largest = max(data.latencies(engine.id), key=lambda latency: latency.batch, default=None)
    if largest is None:
        return Told(numbers.NOT_MEASURED)
    return told(
        "{} at batch {}{}",
        shown(numbers.latency, largest, "p50_us"),
        shown(numbers.count, largest, "batch"),
        "" if largest.counts_for_choice else f" on {largest.device}, not the target",
    )


@dataclass(frozen=True)
class _Row:
    """One output of one candidate; `engine` is None for the reference, `output` where none was measured."""

    name: str
    engine: EngineArtifact | None
    evaluation: Evaluation | None
    output: OutputEvaluation | None


def _rows(data: ReportData, split: str) -> Iterator[_Row]:
    for reference in data.references:
        evaluation = data.evaluation(reference, split)
        yield from (_Row(reference, None, evaluation, output) for output in data.outputs(reference, split))
    for engine in data.engines:
        evaluation = data.evaluation(engine.id, split)
        # Only selected engines are certified; others are not missing here.
        if evaluation is not None or split == SELECTION:
            for measured in data.outputs(engine.id, split) or (None,):
                yield _Row(engine.id, engine, evaluation, measured)


def _accuracy_table(data: ReportData, split: str) -> Table:
    def of_engine(show: Any) -> Any:
        return lambda row: _NONE if row.engine is None else show(data, row.engine)

    caption = "Candidates"
    if evaluated := [e for e in data.evaluations.evaluations if e.split == split]:
        rows_of_split = derive("max", *(Place(evaluation, "rows") for evaluation in evaluated))
        caption = told("Candidates on {}, {} rows", split, formed(numbers.count, rows_of_split))
    judged = f"{delta_heading(data)} [{confidence_text(data, split)} interval]"
    columns: tuple[Column[_Row], ...] = (
        text("Engine", "name"),
        text("Output", lambda row: row.output.output if row.output is not None else _NONE),
        number(judged, _judged),
        number("KL [95 % interval]", lambda row: _guarded(row, Because.MAX_KL)),
        number("ΔAUC [95 % interval]", lambda row: _guarded(row, Because.MAX_AUC_DROP)),
        text("Budget", _budget),
        number("NE", lambda row: _metric(row, numbers.metric, "normalized_entropy")),
        number("AUC", lambda row: _metric(row, numbers.metric, "auc")),
        number("Prediction ratio", lambda row: _metric(row, numbers.ratio, "prediction_ratio")),
        number("Latency p50", of_engine(_latency_cell)),
        number(f"Sites in {data.plans.quantized}", of_engine(fp8_sites)),
        number(f"{share_heading(data)} of FLOPs", of_engine(fp8_share)),
        number("Size", of_engine(_size)),
        text("Status", _status),
        prose("Outcome", lambda row: _outcome(data, row)),
    )
    return table_of(caption, columns, _rows(data, split), lambda row: data.chosen(row.name) is not None)


def _judged(row: _Row) -> Cell:
    if row.output is None:
        return Cell(numbers.NOT_MEASURED, Tone.MUTED)
    return Cell(delta_text(row.output), delta_tone(row.output))


def _guarded(row: _Row, guard: Because) -> Cell:
    """Return KL or the change of AUC, coloured by its guard."""
    change = row.output.difference if row.output is not None else None
    if row.output is None or change is None:
        return _NONE
    tones = {held.name: BUDGET_TONES[held.status] for held in row.output.guards}
    text = percent_interval(change.kl) if guard is Because.MAX_KL else metric_interval(change.delta_auc)
    return Cell(text, tones.get(guard, Tone.PLAIN))


def _budget(row: _Row) -> Cell:
    if row.output is None:
        return _NONE
    budget = shown(numbers.budget_percent, row.output, "budget")
    if row.engine is None:
        return Cell(budget)
    return Cell(told("{}, {}", row.output.verdict, budget), delta_tone(row.output))


def _metric(row: _Row, form: Any, name: str) -> str:
    return numbers.NONE if row.output is None else shown(form, row.output.metrics, name)


def _latency_cell(data: ReportData, engine: EngineArtifact) -> Cell:
    latency = latency_text(data, engine)
    return Cell(latency, Tone.PLAIN if latency[0].isdigit() else Tone.MUTED)


def _size(_: ReportData, engine: EngineArtifact) -> Told:
    return shown(numbers.size, engine, "bytes") if engine.path is not None else Told(numbers.NONE)


def _status(row: _Row) -> Cell:
    if row.engine is not None:
        return Cell(row.engine.status, STATUS_TONES[row.engine.status])
    return Cell(row.evaluation.status) if row.evaluation is not None else _NONE


def _outcome(data: ReportData, row: _Row) -> str:
    """Return prose: reasons and remarks have numbers of their own, so none of them has a source here."""
    if row.engine is None:
        return ""
    # The choice was made on the judged split: its words say nothing of another.
    is_judged = row.evaluation is None or row.evaluation.split == data.judged_split
    targets = data.choice.targets if is_judged else ()
    chosen = next((target for target in targets if row.name in target.engines), None)
    losers = (loser for target in targets for loser in target.losers)
    reason = "; ".join(dict.fromkeys(loser.reason for loser in losers if loser.engine == row.name))
    parts = [f"Emitted for {chosen.target}: {chosen.reason}"] if chosen is not None else []
    parts += [f"Not chosen: {reason}"] if reason and chosen is None else []
    # For an engine that was not built, the reason equals its detail.
    detail = row.engine.detail
    parts += [detail] if detail and not any(detail in part for part in parts) else []
    if row.evaluation is not None:
        failure, is_judged = row.evaluation.latency_failure, bool(row.evaluation.outputs)
        parts += [] if is_judged else [f"Accuracy: {row.evaluation.status}"]
        parts += [f"Timing failed: {failure}"] if failure else []
    if row.engine.simulated:
        parts.append("FP8 is simulated: its accuracy counts, its speed never does")
    outcome = "; ".join(part.rstrip(".") for part in dict.fromkeys(parts)) + "." if parts else ""
    output = row.output
    if output is None or (output.budget_status != BudgetStatus.UNDECIDED and not output.remarks):
        return outcome
    return f"{outcome} {output.output} is {budget_sentence(output)}.".lstrip()


_Difference = tuple[Evaluation, OutputEvaluation, PairedDifference]


def _differences(data: ReportData) -> list[_Difference]:
    pairs = ((e, output) for e in data.evaluations.evaluations for output in e.outputs)
    return [(e, output, output.difference) for e, output in pairs if output.difference is not None]


def _parts_table(data: ReportData, split: str) -> Table:
    """Return what the change has beside KL; the labelled part needs another direction, not less noise."""
    columns: tuple[Column[_Difference], ...] = (
        text("Engine", lambda row: row[0].engine),
        text("Output", lambda row: row[1].output),
        number("Labelled first-order part", lambda row: percent_interval(row[2].labelled)),
        number("ΔPrediction ratio", lambda row: metric_interval(row[2].delta_prediction_ratio)),
        number("RMS change of the score", lambda row: shown(numbers.scientific, row[2], "delta_rmse")),
        number("Largest change", lambda row: shown(numbers.scientific, row[2], "delta_max")),
    )
    every = _differences(data)
    relative = ("the mean entropy" if d.delta_ne is None else "the FP32 loss" for _, _, d in every)
    caption = f"What the change is made of on {split}, relative to {' or '.join(dict.fromkeys(relative))}"
    return table_of(caption, columns, (row for row in every if row[0].split == split))


_CAPTIONS = {
    InputPlace.HOST: "inputs in host memory, the copies to the device and back included",
    InputPlace.DEVICE: "inputs on the device already, the engine alone",
}


def latency_tables(data: ReportData) -> Iterator[Table]:
    """Yield one table for each memory of inputs."""
    names = dict.fromkeys(e.engine for e in data.evaluations.evaluations if not data.is_simulated(e.engine))
    timed = [(name, latency) for name in names for latency in data.latencies(name)]
    for place, caption in _CAPTIONS.items():
        if rows := [row for row in timed if row[1].inputs is place]:
            yield table_of(f"Latency per batch size, {caption}", _latency_columns(rows), rows)


def load_columns(items: Iterable[Item], of: Callable[[Item], Latency | None]) -> tuple[Column[Item], ...]:
    """Return the column of the load of the hosts that timed latencies, if one of them was busy."""
    if not any(busy(latency) for latency in map(of, items) if latency is not None):
        return ()

    def load(item: Item) -> Cell | str:
        latency = of(item)
        if latency is None or latency.host_load is None:
            return numbers.NONE
        return Cell(shown("{:.1f}".format, latency, "host_load"), Tone.WARN if busy(latency) else Tone.PLAIN)

    return (number("Host load a core", load),)


def _latency_columns(rows: list[tuple[str, Latency]]) -> tuple[Column[tuple[str, Latency]], ...]:
    def time(title: str, name: str) -> Column[tuple[str, Latency]]:
        return number(title, lambda row: shown(numbers.latency, row[1], name))

    def counts(row: tuple[str, Latency]) -> Cell | str:
        is_target = row[1].counts_for_choice
        return "yes" if is_target else Cell("no, another device than the target", Tone.WARN)

    is_cut = any(latency.lookup_p50_us is not None for _, latency in rows)
    return (
        text("Engine", lambda row: row[0]),
        text("Device", lambda row: row[1].device),
        number("Batch", lambda row: shown(numbers.count, row[1], "batch")),
        time("p50", "p50_us"),
        time("p90", "p90_us"),
        time("p99", "p99_us"),
        *((time("Lookup p50, not in these", "lookup_p50_us"),) if is_cut else ()),
        number("Requests", lambda row: shown(numbers.count, row[1], "repeats")),
        *load_columns(rows, lambda row: row[1]),
        text("Counts for the choice", counts),
    )
