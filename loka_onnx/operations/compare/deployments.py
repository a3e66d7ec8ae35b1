"""Difference of two deployments on the same rows, in accuracy and in latency.

A takes the place that the exported FP32 model has in an evaluation: losses are compared row by row, ΔNE is
relative to A's loss, and every interval is the one that `evaluation.accuracy` computes. Where requests go to
different engines by their size, each pair of engines that answers some size is judged by itself, in requests
of such a size.

Latency is measured by turns (`evaluation.latency`): one request to each, again and again, on rows of the
data, through all that a server calls. Where memory happens to lie makes one load of an engine faster than
another for as long as it lives (Mytkowicz et al., "Producing Wrong Data Without Doing Anything Obviously
Wrong!", ASPLOS 2009), which no number of requests averages out. So both are loaded several times, and the
unit is the load: `planning.speed` gives the ratio of the medians and its interval over loads, as it does for
the engines of a run over the parts of one measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loka_onnx.config.data_sections import BatchConfig
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.devices import CPU
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
from loka_onnx.evaluation.predictions import Predictions, padded, predict
from loka_onnx.numerics.intervals import mean_interval
from loka_onnx.operations.compare.deployment_document import (
    AccuracyDifference,
    Comparison,
    Deployment,
    LatencyComparison,
    LatencyDifference,
    Moved,
    Ratio,
)
from loka_onnx.operations.compare.rows import JudgedRows, RowOptions, open_rows
from loka_onnx.operations.compare.sides import Opening, Side, open_side, refuse_different_requests
from loka_onnx.planning.speed import Speed
from loka_onnx.sessions.host_devices import is_target


@dataclass(frozen=True)
class CompareOptions:
    """Options of comparing two deployments.

    Attributes:
        batches: Rows per request to serve; empty for the sizes that they were timed at when they were made.
        seconds: Time for each side at each batch size, over all loads.
        loads: How many times both are loaded to be timed; an interval takes 2 at least.

    Raises:
        ConfigError: They are not loaded at all.
    """

    rows: RowOptions = field(default_factory=RowOptions)
    opening: Opening = field(default_factory=Opening)
    batches: tuple[int, ...] = ()
    latency: bool = True
    seconds: float = 3.0
    loads: int = 6

    def __post_init__(self) -> None:
        if self.loads < 1:
            raise ConfigError("to be timed, deployments are loaded", evidence=f"{self.loads} times")


def compare(
    a: Path, b: Path, data: Path, options: CompareOptions | None = None, progress: Progress = silent
) -> Comparison:
    """Run two deployments on the same rows and return the paired difference of B from A.

    Each is a bundle (directory or single file) or an ``.onnx`` file; the rows are a Parquet or npz file. The
    caller asks for what is beyond the budget (`Comparison.beyond_budget`), and for sides that failed while
    they were timed (`LatencyComparison.failures`).

    Raises:
        ConfigError: There is nothing at a path; A and B take or give different tensors, or have no batch
            size in common; an option names what is not there.
        BundleInvalid: A bundle does not verify.
        DataError: A row or a column cannot be used.
        EngineError: A side cannot be loaded, or fails on a batch that is judged.
        EvaluationError: An output cannot be judged.
    """
    options = options or CompareOptions()
    with ExitStack() as place:
        with ExitStack() as engines:
            one = open_side(a, "A", options.opening, place, engines)
            other = open_side(b, "B", options.opening, place, engines)
            refuse_different_requests(one, other)
            batches = _batches(one, other, options.batches)
            rows = open_rows(one, other, data, options.rows)
            accuracy = tuple(
                _judge(one, other, rows, pair, progress)
                for pair in _pairs(one.deployment, other.deployment)
                if not options.batches or any(pair.least <= size <= pair.most for size in options.batches)
            )
        # What was judged is freed by now: two large bundles need not be in memory twice.
        latency = _time(one, other, rows.data, batches, options, progress) if options.latency else None
    return Comparison(
        a=one.deployment,
        b=other.deployment,
        rows=rows.described,
        accuracy=accuracy,
        latency=latency,
        budget=options.rows.budget,
        budget_source=rows.budget_source,
        notes=(*_sides_apart(one.deployment, other.deployment), *rows.notes),
        unjudged=dict(rows.unanswered),
    )


def _sides_apart(a: Deployment, b: Deployment) -> Iterator[str]:
    if a.model_digest != b.model_digest:
        yield (
            "A and B are of different exported models "
            f"({a.model_digest[:12]}… and {b.model_digest[:12]}…): what differs is not precision alone"
        )


# Which engines answer -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """An engine of each side, and the requests that both answer: `least` to `most` rows."""

    engine_a: str
    engine_b: str
    least: int
    most: int


def _range(a: Deployment, b: Deployment) -> tuple[int, int]:
    least, most = max(a.least_rows, b.least_rows), min(a.most_rows, b.most_rows)
    if least > most:
        raise ConfigError(
            "A and B take no request of the same size",
            evidence=f"A takes {a.least_rows} to {a.most_rows} rows, B {b.least_rows} to {b.most_rows}",
            remedy="build both for a batch size in common (`batch` in the run file)",
        )
    return least, most


def _pairs(a: Deployment, b: Deployment) -> tuple[_Pair, ...]:
    """Pairs of engines by ascending size of the request."""
    least, most = _range(a, b)
    ends = sorted({most, *(route.rows for route in (*a.routes, *b.routes) if least <= route.rows < most)})
    pairs = list[_Pair]()
    for end in ends:
        found = _Pair(a.engine_for(end), b.engine_for(end), least, end)
        if pairs and (pairs[-1].engine_a, pairs[-1].engine_b) == (found.engine_a, found.engine_b):
            found = _Pair(found.engine_a, found.engine_b, pairs.pop().least, end)
        pairs.append(found)
        least = end + 1
    return tuple(pairs)


def _batches(a: Side, b: Side, wanted: Sequence[int]) -> tuple[int, ...]:
    """Batch sizes to serve, ascending."""
    least, most = _range(a.deployment, b.deployment)
    for size in wanted:
        if not least <= size <= most:
            raise ConfigError(
                f"A and B do not both take {size} rows",
                where="--batch",
                evidence=f"both take requests of {least} to {most} rows",
                remedy="ask for batch sizes in this range",
            )
    sizes = set(wanted) or {*a.timed_at, *b.timed_at}
    known = sorted(size for size in sizes if least <= size <= most)
    usual = [size for size in BatchConfig().serve if least <= size <= most]
    return tuple(known or usual or [most])


# Accuracy -----------------------------------------------------------------------------------------


def _judge(a: Side, b: Side, rows: JudgedRows, pair: _Pair, progress: Progress) -> AccuracyDifference:
    size = max(pair.least, min(pair.most, REQUEST_ROWS))
    described = rows.described
    split = Split("data", rows.data, rows.columns, described.group, described.slices, size)
    before, after = (_predict(side, split, rows, pair, progress) for side in (a, b))
    units = Units.of(before.columns, described.group, described.slices)
    try:
        return AccuracyDifference(
            engine_a=pair.engine_a,
            engine_b=pair.engine_b,
            request_rows=size,
            least_rows=pair.least,
            most_rows=pair.most,
            before=evaluate_reference(before.outputs, before.columns, rows.specs),
            outputs=evaluate_outputs(before.outputs, after.outputs, before.columns, rows.specs, units),
            moved=tuple(_moved(before, after, rows, units)),
        )
    except LokaError as error:
        # The evaluation speaks of a reference and a candidate.
        raise type(error)(
            error.what,
            where=f"B ('{b.deployment.path}') as the candidate, A ('{a.deployment.path}') as the reference",
            evidence=error.evidence,
            remedy=error.remedy,
        ) from error


def _predict(side: Side, split: Split, rows: JudgedRows, pair: _Pair, progress: Progress) -> Predictions:
    names = (*(spec.name for spec in rows.specs), *rows.unjudged)
    task = f"{side.name}: {pair.engine_a if side.name == 'A' else pair.engine_b}"
    return predict(
        padded(side.run, pair.least),
        split.batches(),
        names,
        split.columns,
        lambda done: progress(task, done, split.rows),
    )


def _moved(before: Predictions, after: Predictions, rows: JudgedRows, units: Units) -> Iterator[Moved]:
    for spec in rows.specs:
        yield _moved_scores(spec, before, after, units)
    for name, reason in rows.unjudged.items():
        delta = _values(after, name, "B") - _values(before, name, "A")
        yield Moved(name, "value", *_size_of(delta, None, units), reason)


def _moved_scores(spec: OutputSpec, before: Predictions, after: Predictions, units: Units) -> Moved:
    truth = read_truth(before.columns, spec, units.groups)
    one, other = (
        read_scores(found.outputs, spec, truth.rows, is_reference=found is before).scores
        for found in (before, after)
    )
    unit = "value" if spec.kind is OutputKind.REGRESSION else "logit"
    return Moved(spec.name, unit, *_size_of((other - one)[:, None], truth.weights, units))


def _values(found: Predictions, name: str, side: str) -> Array:
    """(rows, n) in float64."""
    values = found.outputs[name].reshape(found.rows, -1).astype(np.float64)
    if not np.isfinite(values).all():
        wrong = int((~np.isfinite(values)).any(axis=1).sum())
        raise EvaluationError(
            f"output '{name}' of {side} is not finite",
            evidence=f"{wrong} of {found.rows} rows",
            remedy="check the inputs and weights of the model for NaN and overflow",
        )
    return values


def _size_of(delta: Array, weights: Array | None, units: Units) -> tuple[Interval, float]:
    """Root mean square, with the root of the interval of the mean square, and the largest magnitude.

    `delta` is (rows, n), `weights` (rows,), None for equal weights.
    """
    square = mean_interval(np.square(delta).mean(axis=1), weights, units.groups)
    value, lower, upper = (math.sqrt(max(0.0, end)) for end in (square.value, square.lower, square.upper))
    rmse = Interval(value, lower, upper, square.confidence, square.rows)
    return rmse, float(np.abs(delta).max(initial=0.0))


# Latency ------------------------------------------------------------------------------------------


def _time(
    a: Side, b: Side, data: Dataset, batches: tuple[int, ...], options: CompareOptions, progress: Progress
) -> LatencyComparison:
    engines = (*a.deployment.engines, *b.deployment.engines)
    doubts = tuple(_doubts(a.deployment, b.deployment))
    requests = {size: _requests(data, size) for size in batches}
    total, done = options.loads * len(batches), iter(range(1, options.loads * len(batches) + 1))
    timing = LatencyOptions(
        max_seconds=options.seconds / options.loads, on_batch=lambda: progress("latency", next(done), total)
    )
    progress("latency", 0, total)
    timed = list[Interleaved]()
    with device_alone(next((e.architecture for e in engines if e.architecture != CPU), CPU)):
        for index in range(options.loads):
            with ExitStack() as stack:
                # Neither is always the one that memory is left for, or that goes first.
                sides = (b, a) if index % 2 else (a, b)
                timed.append(
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
        Speed({each.batch: each for each in over_loads([load.latencies[side.name] for load in timed])})
        for side in (a, b)
    )
    both = [size for size in batches if size in before.latencies and size in after.latencies]
    return LatencyComparison(
        batches=tuple(
            LatencyDifference(
                batch=size,
                engine_a=a.deployment.engine_for(size),
                engine_b=b.deployment.engine_for(size),
                a=before.latencies[size],
                b=after.latencies[size],
                ratio=_ratio(after.at(size), before.at(size)),
            )
            for size in both
        ),
        overall=_ratio(after, before) if both else None,
        threads=options.opening.threads,
        loads=options.loads,
        failures={side: failure for load in timed for side, failure in load.failures.items()},
        says_nothing=doubts,
    )


def _ratio(after: Speed, before: Speed) -> Ratio | None:
    found = after.over(before)
    if found is None:
        return None
    # Without rows it has no width because nothing is known, not because it is sure.
    return Ratio(found.value, found if found.rows else None)


def _doubts(a: Deployment, b: Deployment) -> Iterator[str]:
    """Why a ratio says nothing about a target."""
    for name, side in (("A", a), ("B", b)):
        for engine in side.engines:
            if engine.simulated:
                yield f"{name}: the FP8 of {engine.id} is simulated"
            elif not is_target(engine.target, engine.architecture):
                yield f"{name}: {engine.id} is for {engine.target}, and ran on {engine.device}"


def _requests(data: Dataset, size: int) -> Iterator[Mapping[str, Array]]:
    """Requests of so many rows of the data, from the first on, again and again; short ones repeat rows."""
    while True:
        for batch in data.batches(size):
            places = np.arange(size) % batch.rows
            yield {name: values[places] for name, values in batch.inputs.items()}
