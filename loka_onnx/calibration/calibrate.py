"""The Probe stage: ranges, then FP8 error under the scales of those ranges, then sensitivity.

FP8 error depends on the scale and the scale on the final range, so the passes run in turn. Each one streams:
only sums are kept, so memory does not grow with the rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.effects.perturbation import draw_factors
from loka_onnx.calibration.effects.sensitivity import (
    Sensitivities,
    SensitivityPass,
    SwitchedModel,
)
from loka_onnx.calibration.effects.switchable import Switch
from loka_onnx.calibration.observers.site_observers import recipes_for
from loka_onnx.calibration.passes.executors import Executor, LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.profile import Profile, SiteProfile
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.recipe import Granularity, Recipe, Scales
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import ErrorStats, RangeStats, TensorRange
from loka_onnx.data import Dataset
from loka_onnx.errors import InternalError
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.numerics.histograms import count_magnitudes, histogram_of

OpenVerdicts = Callable[[Profile], tuple[str, ...]]
"""Names the sites whose verdict a profile leaves open."""


@dataclass(frozen=True)
class ProbeOptions(PassOptions):
    """Options of calibration, those of the passes included.

    Attributes:
        weight: Weight granularity of the recipe whose sensitivity is measured (the plan will use it); None
            for any. Of the recipes left, each site takes the one with the smallest measured error.
        planned: Id of the recipe whose sensitivity is measured, by site; None to choose as above.
        scales: Activation scales; None for those of the ranges. Rows measured with the scales and recipes of
            a profile merge with it.
        only: Sites to calibrate; None for all.
        synthetic: Whether the data was generated.
        open_verdicts: Called at each interim analysis of the sensitivity pass, which ends when no verdict is
            open. None for one analysis at the end.
        magnitudes: Whether to measure the magnitudes of all tensors, as FP16 needs: one more inference pass.
        threads: Batches run at once, each on one thread; 0 for one per core.
        executor: Where batches run; None for threads of this process.
    """

    error_precision: float | None = 0.02
    weight: Granularity | None = None
    planned: Mapping[str, str] | None = None
    scales: Scales | None = None
    only: frozenset[str] | None = None
    synthetic: bool = False
    open_verdicts: OpenVerdicts | None = None
    magnitudes: bool = False
    threads: int = 0
    executor: Executor | None = None

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
    """Measure every site on the rows of the calibration split.

    Instrumented models are written to `scratch`, on the file system of the model. Raises CalibrationError if
    an activation or an output is not finite, or a loss is 0; ConfigError if an option is out of range.
    """
    options = options or ProbeOptions()
    # Fail before the first pass, not at the last.
    draw_factors(options.draws)
    sites = tuple(s for s in model.sites if options.only is None or s.name in options.only)
    executor = options.executor or LocalExecutor(options.threads)
    clock = _Clock()
    probe = Probe(model, sites, data, options, executor, progress)
    with clock.times("ranges"):
        ranges = probe.ranges(scratch)
    tensors: dict[str, TensorRange] = {}
    if options.magnitudes:
        with clock.times("magnitudes"):
            tensors = probe.magnitudes(scratch)
    scales = (
        scales_of(ranges, options.recipes)
        if options.scales is None
        else {rounding: dict(known) for rounding, known in options.scales.items()}
    )
    with clock.times("errors"):
        errors = probe.errors(scratch, ranges, scales)
    switches = tuple(Switch(s, _planned_recipe(s, options, errors.by_site[s.name])) for s in sites)
    graph = GraphModel.load(model.path)
    entries = tuple(
        SiteProfile(
            site=site.name,
            operands=_operand_ranges(graph, site, ranges),
            errors=tuple(errors.by_site[site.name]),
            sensitivities=(),
            origins=site.merged_from,
        )
        for site in sites
    )
    weights = tuple(sorted({o.tensor for site in sites for o in site.operands if o.constant}))

    def profile_of(measured: Sensitivities) -> Profile:
        return Profile(
            model_digest=model.digest,
            data_digest=data.digest,
            rows=probe.range_rows,
            error_rows=errors.rows,
            sampling=measured.sampling,
            synthetic=options.synthetic,
            sites=tuple(replace(e, sensitivities=measured.by_site[e.site]) for e in entries),
            baseline_loss=measured.baseline_loss,
            scales=scales,
            seconds=clock.seconds,
            groups=measured.groups,
            weights=weights,
            tensors=tensors,
        )

    ask = options.open_verdicts
    sensitivity = SensitivityPass(
        SwitchedModel(model.path, switches, scales, outputs),
        data,
        options,
        executor,
        progress,
    )
    with clock.times("draws"):
        drawn = sensitivity.draws(scratch)
    with clock.times("sensitivity"):
        measured = sensitivity.measure(
            scratch, drawn, None if ask is None else lambda interim: ask(profile_of(interim))
        )
    return profile_of(measured)


class _Clock:
    """Wall time of passes, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, ExactSum] = {}

    @contextmanager
    def times(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds = {**self.seconds, name: ExactSum.of((time.perf_counter() - began,))}


def _planned_recipe(site: Site, options: ProbeOptions, errors: Sequence[ErrorStats]) -> Recipe:
    """Return the recipe that a plan will use at the site: the allowed one with the smallest error."""
    applicable = recipes_for(site, options.recipes)
    if options.planned is not None and site.kind is not SiteKind.NORM:
        wanted, known = options.planned.get(site.name), {recipe.id: recipe for recipe in applicable}
        if wanted not in known:
            raise InternalError(
                f"site '{site.name}' is planned in a recipe that is not measured there",
                evidence=f"'{wanted}' is not among {', '.join(known)}",
            )
        return known[wanted]
    allowed = [r for r in applicable if options.weight in (None, r.weight)] or list(applicable)
    measured = {error.recipe: error.relative_error for error in errors}
    return min(allowed, key=lambda recipe: measured.get(recipe.id, math.inf))


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


def _weight_range(values: npt.NDArray[Any]) -> RangeStats:
    wide = values.astype(np.float64)
    return RangeStats(
        count=wide.size,
        amax=float(np.abs(wide).max()),
        minimum=float(wide.min()),
        maximum=float(wide.max()),
        total=ExactSum.of((wide.sum(),)),
        total_squares=ExactSum.of((np.square(wide).sum(),)),
        histogram=histogram_of(count_magnitudes(values)),
        channel_amax=tuple(np.abs(wide).reshape(-1, wide.shape[-1]).max(axis=0).tolist())
        if wide.ndim
        else (),
    )
