"""Tables of latency: each engine at each batch size, with the memory of its inputs."""

from __future__ import annotations

from loka_onnx.core.evaluation import Evaluation, InputPlace, Latency
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Field, Table, Tone, cell, number, prose, table_of, text
from loka_onnx.report.figures import shown

_Timed = tuple[str, Latency]
"""Id of an engine, and its latency."""
_CAPTIONS = {
    InputPlace.HOST: "inputs in host memory, the copies to the device and back included",
    InputPlace.DEVICE: "inputs on the device already, the engine alone",
}


def latency_tables(data: ReportData) -> tuple[Table, ...]:
    """Return one table for each memory of inputs, and one of engines that failed while timed."""
    timed = _timed(data)
    tables = tuple(
        table_of(f"Latency per batch size, {caption}", _fields(here), here)
        for place, caption in _CAPTIONS.items()
        if (here := [(engine, latency) for engine, latency in timed if latency.inputs is place])
    )
    failed = {e.engine: e for e in data.evaluations.evaluations if e.latency_failure}
    if not failed:
        return tables
    return (*tables, table_of("Engines that failed while they were timed", _FAILURES, failed.values()))


def _timed(data: ReportData) -> list[_Timed]:
    """Return each measurement once: an engine is timed once, but every split's evaluation repeats it."""
    found: dict[tuple[str, int, InputPlace, str], _Timed] = {}
    for evaluation in data.evaluations.evaluations:
        if not _is_simulated(data, evaluation.engine):
            for latency in evaluation.latencies:
                key = (evaluation.engine, latency.batch, latency.inputs, latency.device)
                found.setdefault(key, (evaluation.engine, latency))
    return list(found.values())


_FAILURES: tuple[Field[Evaluation], ...] = (
    text("Engine", lambda evaluation: cell(evaluation.engine)),
    prose("What it said", lambda evaluation: cell(evaluation.latency_failure, Tone.BAD)),
)


def _fields(timed: list[_Timed]) -> tuple[Field[_Timed], ...]:
    is_cut = any(latency.lookup_p50_us is not None for _, latency in timed)
    lookup: tuple[Field[_Timed], ...] = (
        number("Lookup p50, not in these", lambda item: shown(numbers.latency, item[1], "lookup_p50_us")),
    )
    return (
        text("Engine", lambda item: item[0]),
        text("Device", lambda item: item[1].device),
        number("Batch", lambda item: shown(numbers.count, item[1], "batch")),
        number("p50", lambda item: shown(numbers.latency, item[1], "p50_us")),
        number("p90", lambda item: shown(numbers.latency, item[1], "p90_us")),
        number("p99", lambda item: shown(numbers.latency, item[1], "p99_us")),
        *(lookup if is_cut else ()),
        number("Requests", lambda item: shown(numbers.count, item[1], "repeats")),
        text("Counts for the choice", lambda item: _counts(item[1])),
    )


def _counts(latency: Latency) -> Cell:
    return cell("yes") if latency.counts_for_choice else cell("no, another device than the target", Tone.WARN)


def _is_simulated(data: ReportData, engine_id: str) -> bool:
    engine = data.engine(engine_id)
    return engine is not None and engine.simulated
