"""Live rows through the instrumented model, under the scales of a profile.

Three passes, each through an executor: the range of every activation with the number of batches that went
beyond the profile's, the FP8 error of every product in the recipe that its sensitivity was measured in, and
the KL of the counted sites, one at a time (`live_kl`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
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
from loka_onnx.calibration.passes.executors import (
    BatchResult,
    BatchWork,
    LocalExecutor,
    ReductionWork,
    Span,
    first_rows,
    scattered,
    spans_in_order,
)
from loka_onnx.calibration.passes.totals import ErrorTotals, RangeBatch, RangeTotals, RangeWork
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.data import Dataset
from loka_onnx.graph.model import GraphModel
from loka_onnx.operations.drift.baseline import Baseline
from loka_onnx.operations.drift.live_kl import KlWork, LiveKl, total_kl
from loka_onnx.operations.drift.report import DriftOptions

R = TypeVar("R")
DEFAULT_BATCH_ROWS = 512
"""Batch size where the profile holds no full batch; nothing is judged then."""


@dataclass(frozen=True)
class Live:
    """Measurements on live rows.

    Attributes:
        ranges: Range of every activation.
        beyond: Full batches beyond the profile's range, by tensor.
        errors: By site.
        kl: By output; empty where no site is counted.
    """

    digest: str
    rows: int
    ranges: dict[str, RangeStats]
    beyond: dict[str, int]
    errors: dict[str, ErrorStats] = field(default_factory=dict)
    kl: dict[str, LiveKl] = field(default_factory=dict)

    def merge(self, other: Live) -> Live:
        """Both sets of rows together, of the same tensors and sites; KL is not kept."""
        return Live(
            self.digest,
            self.rows + other.rows,
            {name: stats.merge(other.ranges[name]) for name, stats in self.ranges.items()},
            {name: count + other.beyond[name] for name, count in self.beyond.items()},
            {site: stats.merge(other.errors[site]) for site, stats in self.errors.items()},
        )


class RangeWatch:
    """Adds up ranges of batches and counts full batches beyond the ranges of a profile, in place."""

    def __init__(
        self, observers: Sequence[RangeObserver], profile: Mapping[str, RangeStats], batch_rows: int
    ) -> None:
        self.totals = RangeTotals(observers, batch_rows)
        self._batch_rows = batch_rows
        self._known = {o.tensor: profile[o.tensor].amax for o in observers if o.tensor in profile}
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

    def read(self, digest: str) -> Live:
        """The totals, without errors and KL."""
        totals = self.totals.read()
        return Live(digest, self._rows, {name: totals[name] for name in self._known}, dict(self._beyond))


def measure_live(
    baseline: Baseline, data: Dataset, scratch: Path, options: DriftOptions, progress: Progress = silent
) -> Live:
    """Run all passes; `scratch` is for instrumented models, on the file system of the model.

    Raises:
        CalibrationError: An activation or an output is not finite.
    """
    size = baseline.batch_rows or DEFAULT_BATCH_ROWS
    rows = data.rows if options.rows is None else min(options.rows, data.rows)
    executor = LocalExecutor(options.threads)

    def run(
        work: BatchWork[R], task: str, spans: Sequence[Span] | None = None
    ) -> Generator[tuple[str, BatchResult[R]]]:
        """Yield the name of each batch and its result."""
        chosen = spans_in_order(rows, size) if spans is None else spans
        total, done = sum(span.stop - span.start for span in chosen), 0
        numbers = (start // size + 1 for s in chosen for start in range(s.start, s.stop, size))
        with closing(executor.run(work, data, chosen, size)) as results:
            for result, number in zip(results, numbers, strict=True):
                yield f"batch {number} of {-(-rows // size)} of '{data.name}'", result
                done += result.rows
                progress(task, done, total)

    path, model = scratch / "live-ranges.onnx", GraphModel.load(baseline.model.path)
    watch = RangeWatch(observe_activations(model, baseline, size), baseline.ranges, size)
    model.save(path)
    for where, ranges in run(RangeWork(path, watch.totals.samples), "ranges"):
        watch.add(ranges, where)
    live = watch.read(data.digest)

    path, model = scratch / "live-errors.onnx", GraphModel.load(baseline.model.path)
    totals = ErrorTotals(observe_products(model, baseline, live.ranges))
    model.save(path)
    for where, errors in run(ReductionWork(path), "fp8 error"):
        totals.add(errors, where)
    live = replace(live, errors={site: errors[0] for site, errors in totals.read().items()})

    switches = baseline.counted_switches
    if not baseline.outputs or not switches:
        return live
    path, model = scratch / "live-switchable.onnx", GraphModel.load(baseline.model.path)
    file = write_switchable(model, switches, baseline.profile.scales, path)
    work = KlWork(file.path, file, baseline.outputs)
    # From all over the data: a file may be sorted.
    spans = first_rows(scattered(rows, size, options.seed), options.kl_rows, size)
    return replace(live, kl=total_kl(work, run(work, "kl", spans)))


def observe_activations(model: GraphModel, baseline: Baseline, batch_rows: int) -> tuple[RangeObserver, ...]:
    """Add the range of every activation that a profiled site reads to a graph, as its only outputs."""
    profiled = {entry.site for entry in baseline.profile.sites}
    sites = [site for site in baseline.model.sites if site.name in profiled]
    return observe_ranges(model, sites, sampling_stride(batch_rows))


def observe_products(
    model: GraphModel, baseline: Baseline, ranges: Mapping[str, RangeStats]
) -> tuple[ErrorObserver, ...]:
    """Add the output error of every product in its recipe to a graph, as its only outputs.

    `ranges` are those of activations over the same rows, as far as they are known.
    """
    builder = ErrorObserverBuilder(model, baseline.profile.scales, ranges)
    for switch in baseline.switches:
        builder.add_product(switch.site, switch.recipe)
    builder.reductions.finish()
    return tuple(builder.found)
