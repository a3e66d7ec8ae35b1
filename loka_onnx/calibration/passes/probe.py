"""The range, magnitude and error passes over the calibration split.

All passes stream: a batch leaves a few numbers per site and counts of magnitudes (`observers.sampling`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np

from loka_onnx.calibration.observers.reductions import BatchTotals
from loka_onnx.calibration.observers.sampling import sampling_stride
from loka_onnx.calibration.observers.site_observers import observe_errors, observe_magnitudes, observe_ranges
from loka_onnx.calibration.passes.executors import (
    BatchExecutor,
    BatchResult,
    BatchWork,
    LocalExecutor,
    ReductionWork,
    Span,
    span_rows,
    spans_in_order,
    spans_in_random_order,
)
from loka_onnx.calibration.passes.totals import ErrorTotals, RangeTotals, RangeWork
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.progress import UNTIL, Progress, silent
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe, Scales
from loka_onnx.core.site import Site
from loka_onnx.core.statistics import ErrorStats, RangeStats, TensorRange
from loka_onnx.data import Dataset
from loka_onnx.errors import CalibrationError
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.scale_choice import activation_scaling

R = TypeVar("R")


@dataclass(frozen=True)
class PassOptions:
    """Options of the passes.

    Attributes:
        batch_size: Rows of one pass through the graph.
        rows: Rows, the first of the data set; None for all.
        range_rows: Least rows that ranges are taken from, in spans in random order; None for all. A further
            row exceeds the amax of n rows, and saturates, with probability 1/(n + 1).
        error_precision: The error pass may end, after at least eight spans in random order, when the 95 %
            interval of each error has this half width relative to its value. Where few rows hold most of the
            error, ask for all rows. None for all rows, in file order.
        sensitivity_rows: Most rows of the sensitivity pass; None for all.
        group: Column of rows that belong together; None where rows are independent.
        beside: Further rows, without their labels, for ranges alone: they may hold rare input values.
        draws: Noise seeds of the rounding (`observers.arithmetic`); 1 for the scales themselves only.
    """

    recipes: tuple[Recipe, ...] = (PER_TENSOR, PER_CHANNEL_WEIGHT)
    batch_size: int = 512
    rows: int | None = None
    range_rows: int | None = None
    error_precision: float | None = None
    seed: int = 0
    sensitivity_rows: int | None = None
    group: str | None = None
    draws: int = 4
    beside: tuple[Dataset, ...] = ()

    def rows_used(self, available: int) -> int:
        """Return the number of rows that are used of those of a data set."""
        return available if self.rows is None else min(self.rows, available)

    def range_spans(self, available: int) -> list[Span]:
        """Return spans of the used rows, enough to hold `range_rows` rows."""
        rows = self.rows_used(available)
        if self.range_rows is None or self.range_rows >= rows:
            return spans_in_order(rows, self.batch_size)
        spans = spans_in_random_order(rows, self.batch_size, self.seed)
        taken = accumulate(span.rows for span in spans)
        return spans[: next(i for i, rows in enumerate(taken, start=1) if rows >= self.range_rows)]


@dataclass(frozen=True)
class MeasuredErrors:
    """Output error of every site under every recipe, and the rows behind it."""

    by_site: dict[str, list[ErrorStats]]
    rows: int


def scales_of(ranges: Mapping[str, RangeStats], recipes: Sequence[Recipe]) -> dict[str, dict[str, float]]:
    """Return the scale, and in asymmetric formats the zero point, of every activation (`Scales`)."""
    scales: dict[str, dict[str, float]] = {}
    for recipe in {recipe.activation_id: recipe for recipe in recipes}.values():
        scalings = {tensor: activation_scaling(stats, recipe) for tensor, stats in ranges.items()}
        scales[recipe.activation_id] = {tensor: each.scale for tensor, each in scalings.items()}
        if recipe.format.has_zero_point:
            scales[recipe.zero_point_id] = {tensor: float(s.zero_point) for tensor, s in scalings.items()}
    return scales


class Probe:
    """The passes over the calibration split.

    `model.path` must be readable here and where the executor runs. `rows` is the largest number of rows of
    each pass, `range_rows` that of the range pass.
    """

    def __init__(
        self,
        model: ModelArtifact,
        sites: tuple[Site, ...],
        data: Dataset,
        options: PassOptions | None = None,
        executor: BatchExecutor | None = None,
        progress: Progress = silent,
    ) -> None:
        self.model, self.sites, self.data, self.progress = model, sites, data, progress
        self.options = options or PassOptions()
        self.executor = executor or LocalExecutor()
        self.rows = self.options.rows_used(data.rows)
        self._ranged = [(each, self.options.range_spans(each.rows)) for each in (data, *self.options.beside)]
        self.range_rows = sum(span_rows(spans) for _, spans in self._ranged)

    def ranges(self, scratch: Path) -> dict[str, RangeStats]:
        """Return the range of every activation that a site reads, by tensor name, over `range_rows`.

        `scratch` must be on the file system of the model, here and below.
        """
        if not self.sites:
            return {}
        size = self.options.batch_size
        graph = GraphModel.load(self.model.path)
        totals = RangeTotals(observe_ranges(graph, self.sites, sampling_stride(size)), size)
        path = scratch / "ranges.onnx"
        graph.save(path)
        for result, where in self._run(RangeWork(path, totals.samples), self._ranged, "ranges"):
            totals.add(result, where)
        return totals.read()

    def magnitudes(self, scratch: Path) -> dict[str, TensorRange]:
        """Return magnitudes of non-constant FP32 tensors, by name; CalibrationError if one holds NaN."""
        graph = GraphModel.load(self.model.path)
        observers, totals = observe_magnitudes(graph), BatchTotals()
        path = scratch / "magnitudes.onnx"
        graph.save(path)
        spans = spans_in_order(self.rows, self.options.batch_size)
        for result, where in self._run(ReductionWork(path), [(self.data, spans)], "magnitudes"):
            values = result.value
            if any(np.isnan(vector).any() for vector in values.values()):  # infinities are magnitudes
                extremes = {o.tensor: [o.low.read(values), o.high.read(values)] for o in observers}
                first = next(name for name, ends in extremes.items() if np.isnan(ends).any())
                raise CalibrationError(
                    f"E0507 tensor '{first}' is not a number in {where}",
                    evidence=f"of {len(observers)} tensors it is the first",
                    remedy="a model that makes NaN of these rows cannot be served: drop them, or mend the "
                    "model",
                )
            totals.add(values, result.rows)
        return {observer.tensor: observer.read(totals) for observer in observers}

    def errors(self, scratch: Path, ranges: Mapping[str, RangeStats], scales: Scales) -> MeasuredErrors:
        """Return errors over as many rows as the precision needs; CalibrationError if not finite."""
        if not self.sites:
            return MeasuredErrors({}, 0)
        size, precision = self.options.batch_size, self.options.error_precision
        graph = GraphModel.load(self.model.path)
        totals = ErrorTotals(observe_errors(graph, self.sites, self.options.recipes, scales, ranges))
        path = scratch / "errors.onnx"
        graph.save(path)
        spans = (
            spans_in_order(self.rows, size)
            if precision is None
            else spans_in_random_order(self.rows, size, self.options.seed)
        )
        ends = set(accumulate(span.rows for span in spans))
        task = "fp8 error" if precision is None else f"fp8 error{UNTIL}precise"
        with closing(self._run(ReductionWork(path), [(self.data, spans)], task)) as steps:
            for result, where in steps:
                totals.add(result, where)
                if precision is None or totals.rows not in ends:
                    continue
                totals.end_span()
                if totals.is_precise(precision):
                    self.progress(task, totals.rows, totals.rows)
                    break
        by_site = totals.read()
        return MeasuredErrors({site.name: by_site.get(site.name, []) for site in self.sites}, totals.rows)

    def _run(
        self, work: BatchWork[R], parts: Sequence[tuple[Dataset, Sequence[Span]]], task: str
    ) -> Generator[tuple[BatchResult[R], str]]:
        """Yield each batch, and what messages call it."""
        size, done, total = self.options.batch_size, 0, sum(span_rows(spans) for _, spans in parts)
        for data, spans in parts:
            batches = -(-self.options.rows_used(data.rows) // size)
            numbers = (n for span in spans for n in range(span.start // size, -(-span.stop // size)))
            with closing(self.executor.run(work, data, spans, size)) as results:
                for result, number in zip(results, numbers, strict=True):
                    yield result, f"batch {number + 1} of {batches} of '{data.name}'"
                    done += result.rows
                    self.progress(task, done, total)
