"""The Probe stage: ranges, then FP8 error under the scales that the ranges give, then sensitivity.

Three passes, because FP8 error depends on the scale and the scale on the final range. Every pass streams:
a batch leaves behind a few numbers a site (ranges, errors), counts of magnitudes (`sampling`), or one loss
change a row (sensitivity, whose rows are capped), so memory does not grow with the number of batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.reductions import Outputs
from loka_onnx.calibration.sampling import MagnitudeTotals, SampleTap, sampling_stride
from loka_onnx.calibration.sensitivity import measure_sensitivities
from loka_onnx.calibration.switchable import Switch, SwitchableModel
from loka_onnx.calibration.taps import ErrorTap, RangeTap, recipes_for, tap_errors, tap_ranges
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.profile import Profile, SiteProfile
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Granularity, Recipe
from loka_onnx.core.site import Site
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.data import Batch, Dataset
from loka_onnx.errors import CalibrationError, InternalError
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.numerics.histograms import count_magnitudes, histogram_of
from loka_onnx.numerics.scale_choice import activation_scale
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.streams import map_in_order, stream_count


@dataclass(frozen=True)
class ProbeOptions:
    """How calibration runs.

    Attributes:
        recipes: Recipes whose error is measured.
        weight: Granularity of the recipe whose sensitivity is measured, and which the plan will use; None
            for any. Of the recipes that it leaves, the one with the smallest measured error is taken, site by
            site; the first of several.
        batch_size: Rows of one pass through the graph.
        rows: Rows for ranges and errors; None for all.
        sensitivity_rows: Most rows for the sensitivity pass.
        threads: Batches at once, each on one thread; 0 for one a core.
        group: Column of rows that belong together; None where rows are independent.
        synthetic: Whether the data was generated.
        only: Sites to calibrate; None for all.
    """

    recipes: tuple[Recipe, ...] = (PER_TENSOR, PER_CHANNEL_WEIGHT)
    weight: Granularity | None = None
    batch_size: int = 512
    rows: int | None = None
    sensitivity_rows: int = 16384
    threads: int = 0
    group: str | None = None
    synthetic: bool = False
    only: frozenset[str] | None = field(default=None)

    def __post_init__(self) -> None:
        if not any(recipe.weight is Granularity.PER_TENSOR for recipe in self.recipes):
            raise InternalError(
                "calibration needs a recipe with per-tensor weights: interactions have no other",
                evidence=f"recipes {', '.join(recipe.id for recipe in self.recipes) or '(none)'}",
            )


def calibrate(
    model: ModelArtifact,
    outputs: tuple[OutputSpec, ...],
    data: Dataset,
    scratch: Path,
    options: ProbeOptions | None = None,
    progress: Progress = silent,
) -> Profile:
    """Measure every site on real rows.

    Args:
        model: The model; its path must be readable from here.
        outputs: Judged outputs.
        data: The calibration split.
        scratch: Directory for instrumented models, on the file system of the model.
        options: How to run.
        progress: Called as rows are done.

    Raises:
        CalibrationError: An activation is not finite.
    """
    options = options or ProbeOptions()
    sites = tuple(s for s in model.sites if options.only is None or s.name in options.only)
    probe = Probe(model, sites, data, options, progress)
    began = time.perf_counter()
    ranges = probe.ranges(scratch)
    after_ranges = time.perf_counter()
    scales = scales_of(ranges, options.recipes)
    errors = probe.errors(scratch, ranges)
    after_errors = time.perf_counter()
    sensitivity_rows = min(options.sensitivity_rows, probe.rows)
    switches = [Switch(site, _planned_recipe(site, options, errors[site.name])) for site in sites]
    switchable = SwitchableModel(GraphModel.load(model.path), switches, scales, scratch)
    measured = measure_sensitivities(
        switchable,
        data.batches(options.batch_size, stop=sensitivity_rows),
        outputs,
        options.group,
        _counted(progress, sensitivity_rows),
        stream_count(options.threads),
    )
    finished = time.perf_counter()
    graph = GraphModel.load(model.path)
    return Profile(
        model_digest=model.digest,
        data_digest=data.digest,
        rows=probe.rows,
        sensitivity_rows=sensitivity_rows,
        synthetic=options.synthetic,
        sites=tuple(
            SiteProfile(
                site=site.name,
                operands=_operand_ranges(graph, site, ranges),
                errors=tuple(errors[site.name]),
                sensitivities=measured.by_site[site.name],
                origins=site.merged_from,
            )
            for site in sites
        ),
        baseline_loss=measured.baseline_loss,
        seconds={
            "ranges": after_ranges - began,
            "errors": after_errors - after_ranges,
            "sensitivity": finished - after_errors,
        },
    )


def scales_of(ranges: Mapping[str, RangeStats], recipes: Sequence[Recipe]) -> dict[str, dict[str, float]]:
    """Activation scale of every tensor, by `Recipe.activation_id` and tensor name."""
    one_each = {recipe.activation_id: recipe for recipe in recipes}
    return {
        name: {tensor: activation_scale(stats, recipe) for tensor, stats in ranges.items()}
        for name, recipe in one_each.items()
    }


@dataclass(frozen=True)
class _Measured:
    """What an instrumented graph returned for one batch."""

    outputs: Outputs
    rows: int


class Probe:
    """The passes over the calibration split.

    Args:
        model: The model.
        sites: Sites to calibrate.
        data: The calibration split.
        options: How to run.
        progress: Called as rows are done.
    """

    def __init__(
        self,
        model: ModelArtifact,
        sites: tuple[Site, ...],
        data: Dataset,
        options: ProbeOptions,
        progress: Progress = silent,
    ) -> None:
        self.model, self.sites, self.data, self.options, self.progress = model, sites, data, options, progress
        self.rows = data.rows if options.rows is None else min(options.rows, data.rows)

    def ranges(self, scratch: Path) -> dict[str, RangeStats]:
        """Range of every activation that a site reads."""
        graph = GraphModel.load(self.model.path)
        taps = tap_ranges(graph, self.sites, sampling_stride(self.options.batch_size))
        totals: dict[str, RangeStats] = {}
        magnitudes = {tap.slots.sample: MagnitudeTotals() for tap in taps}
        for number, measured in enumerate(self._measure(graph, scratch / "ranges.onnx", "ranges")):
            for tap in taps:
                stats = tap.read(measured.outputs, measured.rows)
                self._check_finite(tap, stats, number)
                totals[tap.tensor] = totals[tap.tensor].merge(stats) if tap.tensor in totals else stats
            for sample, total in magnitudes.items():
                total.add(sample.read(measured.outputs))
        return {tap.tensor: _with_magnitudes(tap, totals[tap.tensor], magnitudes) for tap in taps}

    def errors(self, scratch: Path, ranges: Mapping[str, RangeStats]) -> dict[str, list[ErrorStats]]:
        """Output error of every site under every recipe."""
        graph = GraphModel.load(self.model.path)
        scales = scales_of(ranges, self.options.recipes)
        taps = tap_errors(graph, self.sites, self.options.recipes, scales, ranges)
        totals: dict[ErrorTap, ErrorStats] = {}
        for measured in self._measure(graph, scratch / "errors.onnx", "fp8 error"):
            for tap in taps:
                stats = tap.read(measured.outputs, measured.rows)
                totals[tap] = totals[tap].merge(stats) if tap in totals else stats
        by_site: dict[str, list[ErrorStats]] = {site.name: [] for site in self.sites}
        for tap, stats in totals.items():
            by_site[tap.site].append(stats)
        return by_site

    def _measure(self, graph: GraphModel, path: Path, task: str) -> Iterator[_Measured]:
        graph.save(path)
        session = OnnxSession(path, SessionOptions(threads=1))

        def run(batch: Batch) -> _Measured:
            return _Measured(session.run(batch.inputs), batch.rows)

        done = 0
        batches = self.data.batches(self.options.batch_size, stop=self.rows)
        for measured in map_in_order(run, batches, stream_count(self.options.threads)):
            yield measured
            done += measured.rows
            self.progress(task, done, self.rows)

    def _check_finite(self, tap: RangeTap, stats: RangeStats, batch: int) -> None:
        if math.isfinite(stats.amax) and math.isfinite(stats.total_squares):
            return
        batches = -(-self.rows // self.options.batch_size)
        raise CalibrationError(
            f"site '{tap.site}': its input '{tap.tensor}' is not finite in batch {batch + 1} of {batches} "
            f"of '{self.data.name}'",
            evidence=f"amax {stats.amax:g}, sum of squares {stats.total_squares:g}, {stats.count} elements",
            remedy="an FP8 scale needs a finite range: drop those rows, or clamp the input in the model",
        )


def _planned_recipe(site: Site, options: ProbeOptions, errors: Sequence[ErrorStats]) -> Recipe:
    """The recipe that a plan will use at the site: the one with the smallest error among those allowed."""
    applicable = recipes_for(site, options.recipes)
    allowed = [r for r in applicable if options.weight in (None, r.weight)] or list(applicable)
    measured = {error.recipe: error.relative_error for error in errors}
    return min(allowed, key=lambda recipe: measured.get(recipe.id, math.inf))


def _counted(progress: Progress, total: int) -> Callable[[int], None]:
    return lambda done: progress("sensitivity", done, total)


def _operand_ranges(
    graph: GraphModel, site: Site, activations: Mapping[str, RangeStats]
) -> dict[str, RangeStats]:
    node = graph.node(site.name)
    return {
        operand.tensor: _weight_range(values_of(node.inputs[operand.index]))
        if operand.constant
        else activations[operand.tensor]
        for operand in site.operands
    }


def _with_magnitudes(
    tap: RangeTap, stats: RangeStats, magnitudes: Mapping[SampleTap, MagnitudeTotals]
) -> RangeStats:
    found = magnitudes[tap.slots.sample]
    channels = () if tap.is_layout else found.channel_amax
    return replace(stats, histogram=histogram_of(found.counts), channel_amax=channels)


def _weight_range(values: npt.NDArray[Any]) -> RangeStats:
    wide = values.astype(np.float64)
    return RangeStats(
        count=wide.size,
        amax=float(np.abs(wide).max()),
        minimum=float(wide.min()),
        maximum=float(wide.max()),
        total=float(wide.sum()),
        total_squares=float(np.square(wide).sum()),
        histogram=histogram_of(count_magnitudes(values)),
        channel_amax=tuple(np.abs(wide).reshape(-1, wide.shape[-1]).max(axis=0).tolist())
        if wide.ndim
        else (),
    )
