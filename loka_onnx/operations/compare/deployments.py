"""Difference of two deployments on the same rows, in accuracy and in latency.

A takes the place that the exported FP32 model has in an evaluation: ΔNE is relative to A's loss, and every
interval is the one that `evaluation.accuracy` computes. Where requests go to different engines by their size,
each pair of engines that answers some size is judged by itself, in requests of such a size.

Latency is measured by turns (`evaluation.latency`) on rows of the data. Where memory happens to lie makes one
load of an engine faster than another for as long as it lives (Mytkowicz et al., "Producing Wrong Data Without
Doing Anything Obviously Wrong!", ASPLOS 2009), which no number of requests averages out. So both are loaded
several times, and the unit is the load: `planning.speed` gives the ratio of medians and its interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from loka_onnx.config.data_sections import BatchConfig
from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.devices import CPU
from loka_onnx.core.evaluation import BudgetStatus, OutputEvaluation, PairedDifference
from loka_onnx.core.intervals import Interval
from loka_onnx.core.progress import Progress, silent
from loka_onnx.data import Dataset
from loka_onnx.engines.device_lock import device_alone
from loka_onnx.errors import ConfigError, EvaluationError, LokaError
from loka_onnx.evaluation.accuracy import Units, evaluate_outputs, evaluate_reference
from loka_onnx.evaluation.columns import read_scores, read_truth
from loka_onnx.evaluation.engines import REQUEST_ROWS, Split
from loka_onnx.evaluation.latency import (
    Array,
    Interleaved,
    LatencyOptions,
    from_host,
    measure_interleaved,
    over_loads,
)
from loka_onnx.evaluation.predictions import Predictions, any_size, predict
from loka_onnx.numerics.intervals import mean_interval
from loka_onnx.operations.compare.difference import Difference, Row, Section, number, row, times
from loka_onnx.operations.compare.rows import JudgedRows, RowOptions, open_rows
from loka_onnx.operations.compare.sides import Opening, OpenSide, open_side, refuse_different_requests
from loka_onnx.planning.choice import NOISE
from loka_onnx.planning.speed import Speed
from loka_onnx.report import numbers
from loka_onnx.report.document import BUDGET_TONES
from loka_onnx.report.figures import Told, metric_interval, percent_interval, told
from loka_onnx.report.slice_tables import slice_name
from loka_onnx.report.verdict import NO_LABELS
from loka_onnx.sessions.host_devices import is_target


@dataclass(frozen=True)
class CompareOptions:
    """Options of comparing two deployments; without `batches`, sizes are those of their own timings.

    `seconds` is the time for each side at each size, over all `loads`: at least 1, and 2 for an interval.
    """

    rows: RowOptions = field(default_factory=RowOptions)
    opening: Opening = field(default_factory=Opening)
    batches: tuple[int, ...] = ()
    latency: bool = True
    seconds: float = 3.0
    loads: int = 6

    def __post_init__(self) -> None:
        if self.loads < 1:
            raise ConfigError("E1601 to be timed, deployments are loaded", evidence=f"{self.loads} times")


def compare(
    a: Path, b: Path, data: Path, options: CompareOptions | None = None, progress: Progress = silent
) -> Difference:
    """Run two deployments on the same rows and return the paired difference of B from A.

    Each is a bundle (directory or single file) or an ``.onnx`` file; the rows are a Parquet or npz file.
    Sections are ``accuracy``, one for each pair of engines that answers requests of some size, and
    ``latency``. Nothing is raised for an exceeded budget (`Difference.beyond`) or for a side that failed
    while it was timed (`Difference.failures`).

    Raises ConfigError if there is nothing at a path, A and B take or give different tensors or have no batch
    size in common, or an option names what is not there; BundleInvalid, DataError for a row or column that
    cannot be used, EngineError for a side that cannot be loaded or fails on a judged batch, EvaluationError
    for an output that cannot be judged.
    """
    options = options or CompareOptions()
    with ExitStack() as place:
        with ExitStack() as engines:
            before = open_side(a, "A", options.opening, place, engines)
            after = open_side(b, "B", options.opening, place, engines)
            refuse_different_requests(before, after)
            batches = _batches(before, after, options.batches)
            rows = open_rows(before, after, data, options.rows)
            accuracy = [
                _judge(before, after, rows, pair, progress)
                for pair in _pairs(before, after)
                if not options.batches or any(pair.least <= size <= pair.most for size in options.batches)
            ]
        # What was judged is freed by now: two large bundles need not be in memory twice.
        sections, failures = [_accuracy_section(pair, rows) for pair in accuracy], dict[str, str]()
        if options.latency:
            section, failures = _time(before, after, rows.data, batches, options, progress)
            sections.append(section)
    is_held = options.rows.budget is not None
    apart = (
        f"A and B are of different exported models ({before.digest[:12]}… and {after.digest[:12]}…): "
        "what differs is not precision alone"
    )
    return Difference(
        "Two deployments",
        before.described,
        after.described,
        tuple(sections),
        is_different=any(moved.largest > 0.0 for pair in accuracy for moved in pair.moved),
        basis=rows.basis,
        notes=rows.notes if before.digest == after.digest else (apart, *rows.notes),
        beyond=tuple(text for pair in accuracy for text in _beyond(pair, rows)) if is_held else (),
        failures=failures,
    )


@dataclass(frozen=True)
class _Pair:
    """An engine of each side, and the requests that both answer: `least` to `most` rows."""

    engine_a: str
    engine_b: str
    least: int
    most: int


def _range(a: OpenSide, b: OpenSide) -> tuple[int, int]:
    least, most = max(a.least_rows, b.least_rows), min(a.most_rows, b.most_rows)
    if least > most:
        raise ConfigError(
            "E1602 A and B take no request of the same size",
            evidence=f"A takes {a.least_rows} to {a.most_rows} rows, B {b.least_rows} to {b.most_rows}",
            remedy="build both for a batch size in common (`batch` in the run file)",
        )
    return least, most


def _pairs(a: OpenSide, b: OpenSide) -> tuple[_Pair, ...]:
    """Pairs of engines by ascending size of the request."""
    least, most = _range(a, b)
    pairs = list[_Pair]()
    for end in sorted({most, *(rows for rows in (*a.routes, *b.routes) if least <= rows < most)}):
        engines = a.engine_for(end), b.engine_for(end)
        if pairs and (pairs[-1].engine_a, pairs[-1].engine_b) == engines:
            least = pairs.pop().least
        pairs.append(_Pair(*engines, least, end))
        least = end + 1
    return tuple(pairs)


def _batches(a: OpenSide, b: OpenSide, wanted: Sequence[int]) -> tuple[int, ...]:
    """Batch sizes to serve, ascending."""
    least, most = _range(a, b)
    for size in wanted:
        if not least <= size <= most:
            raise ConfigError(
                f"E1603 A and B do not both take {size} rows",
                where="--batch",
                evidence=f"both take requests of {least} to {most} rows",
                remedy="ask for batch sizes in this range",
            )
    known = sorted(size for size in set(wanted) or {*a.timed_at, *b.timed_at} if least <= size <= most)
    usual = [size for size in BatchConfig().serve if least <= size <= most]
    return tuple(known or usual or [most])


@dataclass(frozen=True)
class _Moved:
    """Root mean square of B less A on an output, and the largest; `unit` is ``logit`` or ``value``."""

    output: str
    unit: str
    rmse: Interval
    largest: float


@dataclass(frozen=True)
class _Judged:
    """Quality of A, and that of B with its paired difference, for one pair of engines."""

    pair: _Pair
    request_rows: int
    before: tuple[OutputEvaluation, ...]
    after: tuple[OutputEvaluation, ...]
    moved: tuple[_Moved, ...]


def _judge(a: OpenSide, b: OpenSide, rows: JudgedRows, pair: _Pair, progress: Progress) -> _Judged:
    size = max(pair.least, min(pair.most, REQUEST_ROWS))
    split = Split("data", rows.data, rows.columns, rows.group, rows.slices, size)
    before = _predict(a, pair.engine_a, split, rows, pair.least, progress)
    after = _predict(b, pair.engine_b, split, rows, pair.least, progress)
    units = Units.of(before.columns, rows.group, rows.slices)
    try:
        return _Judged(
            pair,
            size,
            before=evaluate_reference(before.outputs, before.columns, rows.specs),
            after=evaluate_outputs(before.outputs, after.outputs, before.columns, rows.specs, units),
            moved=tuple(_moved(before, after, rows, units)),
        )
    except LokaError as error:
        # The evaluation speaks of a reference and a candidate.
        error.restate(where=f"B ('{b.path}') as the candidate, A ('{a.path}') as the reference")
        raise


def _predict(
    side: OpenSide, engine: str, split: Split, rows: JudgedRows, least: int, progress: Progress
) -> Predictions:
    return predict(
        any_size(side.run, least),
        split.batches(),
        (*(spec.name for spec in rows.specs), *rows.unjudged),
        split.columns,
        lambda done: progress(f"{side.name}: {engine}", done, split.rows),
    )


def _moved(before: Predictions, after: Predictions, rows: JudgedRows, units: Units) -> Iterator[_Moved]:
    for spec in rows.specs:
        truth = read_truth(before.columns, spec, units.groups)
        reference = read_scores(before.outputs, spec, truth.rows, is_reference=True).scores
        scores = read_scores(after.outputs, spec, truth.rows, is_reference=False).scores
        unit = "value" if spec.kind is OutputKind.REGRESSION else "logit"
        yield _Moved(spec.name, unit, *_size_of((scores - reference)[:, None], truth.weights, units))
    for name in rows.unjudged:
        delta = _values(after, name, "B") - _values(before, name, "A")
        yield _Moved(name, "value", *_size_of(delta, None, units))


def _values(predictions: Predictions, name: str, side: str) -> Array:
    """(rows, n) in float64."""
    values = predictions.outputs[name].reshape(predictions.rows, -1).astype(np.float64)
    if not np.isfinite(values).all():
        wrong = int((~np.isfinite(values)).any(axis=1).sum())
        raise EvaluationError(
            f"E1604 output '{name}' of {side} is not finite",
            evidence=f"{wrong} of {predictions.rows} rows",
            remedy="check the inputs and weights of the model for NaN and overflow",
        )
    return values


def _size_of(delta: Array, weights: Array | None, units: Units) -> tuple[Interval, float]:
    """Return root mean square of `delta` (rows, n) with its interval, and the largest magnitude."""
    square = mean_interval(np.square(delta).mean(axis=1), weights, units.groups)
    value, lower, upper = (math.sqrt(max(0.0, end)) for end in (square.value, square.lower, square.upper))
    rmse = Interval(value, lower, upper, square.confidence, square.rows)
    return rmse, float(np.abs(delta).max(initial=0.0))


def _beyond(judged: _Judged, rows: JudgedRows) -> Iterator[str]:
    """Outputs that are not within the requested budget and the guards beside it."""
    for output in judged.after:
        what = f"output '{output.output}' of {judged.pair.engine_b}"
        if output.difference is None:
            yield f"{what} has no difference"
        elif output.budget_status != BudgetStatus.WITHIN:
            interval = numbers.percent_interval(output.difference.judged, output.budget)
            remarks = "; ".join((f"budget {numbers.budget_percent(output.budget)}", *output.remarks))
            yield f"{what}: {output.difference.judged_name} {interval} ({remarks})"
    for name, reason in rows.unanswered.items():
        yield f"output '{name}' of {judged.pair.engine_b} is not judged: {reason}"


def _accuracy_section(judged: _Judged, rows: JudgedRows) -> Section:
    pair, items = judged.pair, list[Row]()
    before, after = ({output.output: output for output in side} for side in (judged.before, judged.after))
    for moved in judged.moved:
        output = after.get(moved.output)
        if output is not None and output.difference is not None:
            items += _output_rows(before[moved.output], output, output.difference, rows.budget_source)
        reason = rows.unjudged.get(moved.output)
        largest = f"largest {numbers.scientific(moved.largest)}"
        items.append(
            row(
                f"{moved.output}: {moved.unit} RMSE",
                verdict=told("{} [{}, {}]", *(number(numbers.scientific, end) for end in _ends(moved.rmse))),
                note=f"{largest}; not judged: {reason}" if reason else largest,
            )
        )
    size = numbers.count(judged.request_rows)
    title = f"{pair.engine_b} from {pair.engine_a}, in requests of {size} rows"
    text = f"Engines for requests of {numbers.count(pair.least)} to {numbers.count(pair.most)} rows."
    return Section("accuracy", title, tuple(items), text)


def _output_rows(
    a: OutputEvaluation, b: OutputEvaluation, change: PairedDifference, source: str
) -> Iterator[Row]:
    name, before, after, tone = f"{b.output}: ", a.metrics, b.metrics, BUDGET_TONES[b.budget_status]
    remarks = [f"budget {numbers.budget_percent(b.budget)}, {source}", *b.remarks]
    if b.rows_to_decide is not None:
        remarks.append(f"about {numbers.count(b.rows_to_decide)} rows would decide it")
    if change.delta_ne is None:
        verdict = told("{}; {}", percent_interval(change.kl, b.budget), b.verdict)
        note = "; ".join((NO_LABELS, *remarks))
        yield row(f"{name}KL ({b.kind})", verdict=verdict, tone=tone, note=note)
    else:
        verdict = told("{}; {}", percent_interval(change.delta_ne, b.budget), b.verdict)
        sides = (number(numbers.metric, side.normalized_entropy) for side in (before, after))
        yield row(f"{name}NE ({b.kind})", *sides, verdict=verdict, tone=tone, note="; ".join(remarks))
        yield row(f"{name}KL, label-free", verdict=percent_interval(change.kl))
        if change.labelled is not None:
            yield row(f"{name}labelled part", verdict=percent_interval(change.labelled))
        for title, field_, delta in (
            ("AUC", "auc", change.delta_auc),
            ("prediction ratio", "prediction_ratio", change.delta_prediction_ratio),
        ):
            if delta is not None:
                sides = (number(numbers.metric, getattr(side, field_)) for side in (before, after))
                yield row(f"{name}{title}", *sides, verdict=metric_interval(delta))
    for item in b.slices:
        judged = told("{}; ", percent_interval(item.judged, b.budget)) if item.judged else Told("")
        verdict, tone = told("{}{}", judged, item.status), BUDGET_TONES[item.status]
        what = f"{name}{slice_name(item)}, {numbers.count(item.rows)} rows"
        yield row(what, verdict=verdict, tone=tone, note=item.reason)


def _time(
    a: OpenSide,
    b: OpenSide,
    data: Dataset,
    batches: tuple[int, ...],
    options: CompareOptions,
    progress: Progress,
) -> tuple[Section, dict[str, str]]:
    """Return the section, and by side the error that ended its measurements."""
    engines = (*a.engines, *b.engines)
    doubts = tuple(_doubts(a, b))
    requests = {size: _requests(data, size) for size in batches}
    total, done = options.loads * len(batches), count(1)
    timing = LatencyOptions(
        max_seconds=options.seconds / options.loads, on_batch=lambda: progress("latency", next(done), total)
    )
    progress("latency", 0, total)
    loads = list[Interleaved]()
    with device_alone(next((e.architecture for e in engines if e.architecture != CPU), CPU)):
        for index in range(options.loads):
            with ExitStack() as stack:
                # Sides take turns in being loaded and timed first, with more memory left.
                sides = (b, a) if index % 2 else (a, b)
                loads.append(
                    measure_interleaved(
                        {side.name: from_host(side.load(stack)) for side in sides},
                        lambda size: next(requests[size]),
                        batches,
                        timing,
                        device=" and ".join(dict.fromkeys(engine.device for engine in engines)),
                        counts_for_choice=not doubts,
                    )
                )
    before, after = (
        Speed({each.batch: each for each in over_loads([load.latencies[side.name] for load in loads])})
        for side in (a, b)
    )
    both = [size for size in batches if size in before.latencies and size in after.latencies]
    rows = [
        _latency_row(
            f"batch {numbers.count(size)}",
            after.at(size).over(before.at(size)),
            (times(before.latencies[size]), times(after.latencies[size])),
            ", ".join(dict.fromkeys((a.engine_for(size), b.engine_for(size)))),
        )
        for size in both
    ]
    if len(both) > 1:
        rows.append(_latency_row("over all, per row", after.over(before)))
    failures = {side: failure for load in loads for side, failure in load.failures.items()}
    rows += [row(f"{side} failed", note=failure) for side, failure in failures.items()]
    rows += [row(f"not meaningful for the target: {doubt}") for doubt in doubts]
    threads = f", threads: {options.opening.threads}" if options.opening.threads else ""
    how = f"{options.loads} loads of both" if options.loads > 1 else "one load of both"
    title = f"Latency, in turns, {how}, inputs in host memory{threads}; B over A [95 % interval]"
    return Section("latency", title, tuple(rows)), failures


def _latency_row(
    what: str, ratio: Interval | None, sides: tuple[str | None, str | None] = (None, None), note: str = ""
) -> Row:
    if ratio is None:
        return row(what, *sides, verdict=numbers.NOT_MEASURED, note=note)
    if not ratio.rows:
        # Its spread is unknown, which gives it no width.
        verdict = told("{}; too few loads for an interval", number("×{:.3f}".format, ratio.value))
        return row(what, *sides, verdict=verdict, note=note)
    # Within `NOISE` two loads of one and the same engine differ for certain.
    pace = "no difference beyond noise"
    if ratio.upper < 1.0 - NOISE:
        pace = "B is faster"
    elif ratio.lower > 1.0 + NOISE:
        pace = "B is slower"
    ends = (number("{:.3f}".format, end) for end in _ends(ratio))
    return row(what, *sides, verdict=told("×{} [{}, {}]; {}", *ends, pace), note=note)


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.lower, interval.upper


def _doubts(a: OpenSide, b: OpenSide) -> Iterator[str]:
    """Reasons why a ratio is not meaningful for a target."""
    for side in (a, b):
        for engine in side.engines:
            if engine.simulated:
                yield f"{side.name}: the FP8 of {engine.id} is simulated"
            elif not is_target(engine.target, engine.architecture):
                yield f"{side.name}: {engine.id} is for {engine.target}, and ran on {engine.device}"


def _requests(data: Dataset, size: int) -> Iterator[Mapping[str, Array]]:
    """Requests of so many rows of the data, from the first on, again and again; short ones repeat rows."""
    while True:
        for batch in data.batches(size):
            places = np.arange(size) % batch.rows
            yield {name: values[places] for name, values in batch.inputs.items()}
