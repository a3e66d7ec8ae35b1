"""Live rows through the instrumented model, under the scales of a profile.

Three passes, each through an executor: the range of every activation with the number of batches that went
beyond the profile's, the FP8 error of every product in the recipe that its sensitivity was measured in, and
the KL of the counted sites, one at a time (`live_kl`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loka_onnx.calibration.effects.switchable import write_switchable
from loka_onnx.calibration.observers.sampling import sampling_stride
from loka_onnx.calibration.observers.site_observers import (
    ErrorObserver,
    ErrorObserverBuilder,
    RangeObserver,
    observe_ranges,
)
from loka_onnx.calibration.passes.error_pass import ErrorTotals
from loka_onnx.calibration.passes.executors import (
    BatchResult,
    BatchWork,
    Executor,
    ReductionWork,
    Span,
    spans_in_order,
)
from loka_onnx.calibration.passes.range_pass import RangeBatch, RangeTotals, RangeWork
from loka_onnx.calibration.passes.row_order import first_rows, scattered
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.data import Dataset
from loka_onnx.graph.model import GraphModel
from loka_onnx.operations.drift.baseline import Baseline
from loka_onnx.operations.drift.live_kl import KlTotals, KlWork, LiveKl

R = TypeVar("R")


@dataclass(frozen=True)
class LiveRanges:
    """Range of every activation, and full batches beyond the profile's range, by tensor name."""

    rows: int
    ranges: dict[str, RangeStats]
    beyond: dict[str, int]

    def merge(self, other: LiveRanges) -> LiveRanges:
        """Return both sets of rows together; of the same tensors."""
        return LiveRanges(
            self.rows + other.rows,
            {name: stats.merge(other.ranges[name]) for name, stats in self.ranges.items()},
            {name: count + other.beyond[name] for name, count in self.beyond.items()},
        )


@dataclass(frozen=True)
class Live:
    """Measurements on live rows: errors by site, KL by output (empty where no site is counted)."""

    digest: str
    ranges: LiveRanges
    errors: dict[str, ErrorStats]
    kl: dict[str, LiveKl]


class RangeWatch:
    """Adds up ranges of batches and counts full batches beyond the ranges of a profile, in place."""

    def __init__(
        self, observers: Sequence[RangeObserver], profile: dict[str, RangeStats], batch_rows: int
    ) -> None:
        self.totals = RangeTotals(observers, batch_rows)
        self._batch_rows = batch_rows
        self._known = {
            observer.tensor: profile[observer.tensor].amax
            for observer in observers
            if observer.tensor in profile
        }
        self._beyond = dict.fromkeys(self._known, 0)
        self._rows = 0

    def add(self, result: BatchResult[RangeBatch], where: str) -> None:
        """Add one batch.

        Raises:
            CalibrationError: An activation is not finite.
        """
        self.totals.add(result, where)
        self._rows += result.rows
        if result.rows != self._batch_rows:
            return
        for observer in self.totals.observers:
            reduced, slots = result.value.reduced, observer.slots
            amax = max(-slots.minimum.read(reduced), slots.maximum.read(reduced))
            if observer.tensor in self._known and amax > self._known[observer.tensor]:
                self._beyond[observer.tensor] += 1

    def read(self) -> LiveRanges:
        """Return the totals."""
        totals = self.totals.read()
        return LiveRanges(self._rows, {name: totals[name] for name in self._known}, dict(self._beyond))


@dataclass(frozen=True)
class LiveOptions:
    """Options of a pass over live rows.

    Attributes:
        rows: Rows, the first of the data set; None for all.
        kl_rows: Most rows for KL, from all over the data.
        seed: Which of the rows those are.
    """

    batch_rows: int
    rows: int | None = None
    kl_rows: int = 16384
    seed: int = 0


class LiveProbe:
    """The passes over live rows."""

    def __init__(
        self,
        baseline: Baseline,
        data: Dataset,
        options: LiveOptions,
        executor: Executor,
        progress: Progress = silent,
    ) -> None:
        self.baseline, self.data, self.options = baseline, data, options
        self.executor, self.progress = executor, progress
        self.rows = data.rows if options.rows is None else min(options.rows, data.rows)

    def measure(self, scratch: Path) -> Live:
        """Run all passes.

        Args:
            scratch: Directory for instrumented models, on the file system of the model.

        Raises:
            CalibrationError: An activation or an output is not finite.
        """
        ranges = self._ranges(scratch / "live-ranges.onnx")
        errors = self._errors(scratch / "live-errors.onnx", ranges)
        return Live(self.data.digest, ranges, errors, self._kl(scratch / "live-switchable.onnx"))

    def _ranges(self, path: Path) -> LiveRanges:
        size, model = self.options.batch_rows, GraphModel.load(self.baseline.model.path)
        watch = RangeWatch(observe_activations(model, self.baseline, size), self.baseline.ranges, size)
        model.save(path)
        for where, result in self._run(RangeWork(path, watch.totals.samples), "ranges"):
            watch.add(result, where)
        return watch.read()

    def _errors(self, path: Path, ranges: LiveRanges) -> dict[str, ErrorStats]:
        model = GraphModel.load(self.baseline.model.path)
        totals = ErrorTotals(observe_products(model, self.baseline, ranges.ranges))
        model.save(path)
        for where, result in self._run(ReductionWork(path), "fp8 error"):
            totals.add(result, where)
        return {site: errors[0] for site, errors in totals.read().items()}

    def _kl(self, path: Path) -> dict[str, LiveKl]:
        outputs, switches = self.baseline.outputs, self.baseline.counted_switches
        if not outputs or not switches:
            return {}
        size, scales = self.options.batch_rows, self.baseline.profile.scales
        file = write_switchable(GraphModel.load(self.baseline.model.path), switches, scales, path)
        # From all over the data: a file may be sorted.
        spans = first_rows(scattered(self.rows, size, self.options.seed), self.options.kl_rows, size)
        work = KlWork(file.path, file, outputs)
        totals = KlTotals(work)
        for where, result in self._run(work, "kl", spans):
            totals.add(result, where)
        return totals.read()

    def _run(
        self, work: BatchWork[R], task: str, spans: Sequence[Span] | None = None
    ) -> Generator[tuple[str, BatchResult[R]]]:
        """Yield the name of each batch and its result."""
        size = self.options.batch_rows
        chosen = spans_in_order(self.rows, size) if spans is None else spans
        total, done = sum(span.stop - span.start for span in chosen), 0
        numbers = (start // size + 1 for s in chosen for start in range(s.start, s.stop, size))
        with closing(self.executor.run(work, self.data, chosen, size)) as results:
            for result, number in zip(results, numbers, strict=True):
                yield f"batch {number} of {-(-self.rows // size)} of '{self.data.name}'", result
                done += result.rows
                self.progress(task, done, total)


def observe_activations(model: GraphModel, baseline: Baseline, batch_rows: int) -> tuple[RangeObserver, ...]:
    """Add the range of every activation that a profiled site reads to a graph, as its only outputs."""
    profiled = {entry.site for entry in baseline.profile.sites}
    sites = [site for site in baseline.model.sites if site.name in profiled]
    return observe_ranges(model, sites, sampling_stride(batch_rows))


def observe_products(
    model: GraphModel, baseline: Baseline, ranges: dict[str, RangeStats]
) -> tuple[ErrorObserver, ...]:
    """Add the output error of every product in its recipe to a graph, as its only outputs.

    Args:
        ranges: Range of each activation over the same rows, as far as it is known.
    """
    builder = ErrorObserverBuilder(model, baseline.profile.scales, ranges)
    for switch in baseline.switches:
        builder.add_product(switch.site, switch.recipe)
    builder.reductions.finish()
    return tuple(builder.found)
