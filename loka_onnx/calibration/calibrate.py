"""The Probe stage: ranges, then errors under the scales of those ranges, then sensitivity; further rows.

An error depends on the scale and the scale on the final range, so the passes run in turn. Each one streams:
only sums are kept, so memory does not grow with the rows.

Rows are added to a profile by measuring them alone under its own scales, and merging exactly; errors under
different scales do not add up. New rows beyond the old range widen the profile's range; they saturate, are
counted as saturated and are part of the measured error, as in the quantized model. Where that costs too much,
calibrate again on all rows for new scales.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.effects.sensitivity import Sensitivities, SensitivityPass, SwitchedModel
from loka_onnx.calibration.effects.switchable import Switch
from loka_onnx.calibration.observers.arithmetic import NORM_PRECISION, draw_factors
from loka_onnx.calibration.observers.site_observers import recipes_for
from loka_onnx.calibration.passes.executors import BatchExecutor, LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import Precision
from loka_onnx.core.profile import ENTROPY, LOSS, Profile, SiteProfile
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.recipe import Granularity, Recipe, Scales
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import ErrorStats, RangeStats, TensorRange
from loka_onnx.data import Dataset
from loka_onnx.errors import CalibrationError, InternalError
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.numerics.histograms import count_magnitudes, histogram_of

OpenVerdicts = Callable[[Profile], tuple[str, ...]]
"""Names the sites whose verdict a profile leaves open."""


@dataclass(frozen=True)
class ProbeOptions(PassOptions):
    """Options of calibration, those of the passes included.

    Attributes:
        weight: Weight granularity of the recipes whose sensitivity is measured (plans will use it); None
            for any. Of the recipes left, each site takes the one with the smallest measured error, in each
            precision.
        planned: Ids of the recipes whose sensitivity is measured, by site; None to choose as above.
        scales: Activation scales; None for those of the ranges. Rows measured with the scales and recipes of
            a profile merge with it.
        only: Sites to calibrate; None for all.
        synthetic: True if the data was generated.
        open_verdicts: Called at each interim analysis of the sensitivity pass, which ends when no verdict is
            open. None for one analysis at the end.
        magnitudes: True to measure the magnitudes of all tensors, which FP16 needs: one more inference pass.
        threads: Batches run at once, each on one thread; 0 for one per core.
        executor: Executor of batches; None for threads of this process.
    """

    error_precision: float | None = 0.02
    weight: Granularity | None = None
    planned: Mapping[str, Collection[str]] | None = None
    scales: Scales | None = None
    only: frozenset[str] | None = None
    synthetic: bool = False
    open_verdicts: OpenVerdicts | None = None
    magnitudes: bool = False
    threads: int = 0
    executor: BatchExecutor | None = None

    def __post_init__(self) -> None:
        per_tensor = {r.precision for r in self.recipes if r.weight is Granularity.PER_TENSOR}
        if not per_tensor or per_tensor != {recipe.precision for recipe in self.recipes}:
            raise InternalError(
                "calibration needs recipes with per-tensor weights: interactions have no other",
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
    seconds: dict[str, ExactSum] = {}
    probe = Probe(model, sites, data, options, executor, progress)
    with _timed(seconds, "ranges"):
        ranges = probe.ranges(scratch)
    tensors: dict[str, TensorRange] = {}
    if options.magnitudes:
        with _timed(seconds, "magnitudes"):
            tensors = probe.magnitudes(scratch)
    scales = (
        scales_of(ranges, options.recipes)
        if options.scales is None
        else {rounding: dict(known) for rounding, known in options.scales.items()}
    )
    with _timed(seconds, "errors"):
        errors = probe.errors(scratch, ranges, scales)
    switches = tuple(
        Switch(s, recipe) for s in sites for recipe in _planned_recipes(s, options, errors.by_site[s.name])
    )
    graph = GraphModel.load(model.path)
    operands = {site.name: _operand_ranges(graph, site, ranges) for site in sites}
    weights = tuple(sorted({o.tensor for site in sites for o in site.operands if o.constant}))

    def profile_of(measured: Sensitivities) -> Profile:
        return Profile(
            model_digest=model.digest,
            data_digest=data.digest,
            rows=probe.range_rows,
            error_rows=errors.rows,
            sampling=measured.sampling,
            synthetic=options.synthetic,
            sites=tuple(
                SiteProfile(
                    site=site.name,
                    operands=operands[site.name],
                    errors=tuple(errors.by_site[site.name]),
                    sensitivities=measured.by_site[site.name],
                    origins=site.merged_from,
                )
                for site in sites
            ),
            baseline_loss=measured.baseline_loss,
            scales=scales,
            seconds=dict(seconds),
            groups=measured.groups,
            weights=weights,
            tensors=tensors,
        )

    ask = options.open_verdicts
    sensitivity = SensitivityPass(
        SwitchedModel(model.path, switches, scales, outputs), data, options, executor, progress
    )
    with _timed(seconds, "draws"):
        drawn = sensitivity.draws(scratch)
    with _timed(seconds, "sensitivity"):
        measured = sensitivity.measure(
            scratch, drawn, None if ask is None else lambda interim: ask(profile_of(interim))
        )
    return profile_of(measured)


@contextmanager
def _timed(seconds: dict[str, ExactSum], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = ExactSum.of((time.perf_counter() - began,))


def _planned_recipes(site: Site, options: ProbeOptions, errors: Sequence[ErrorStats]) -> tuple[Recipe, ...]:
    """Return the recipes that plans will use at the site: in each precision the allowed one with the smallest
    error; one stands for the rounding of a norm.
    """
    applicable = recipes_for(site, options.recipes)
    if site.kind is SiteKind.NORM:
        return applicable[:1]
    if options.planned is not None:
        wanted, known = options.planned.get(site.name, ()), {recipe.id: recipe for recipe in applicable}
        if not wanted or not {*wanted} <= known.keys():
            raise InternalError(
                f"site '{site.name}' is planned in a recipe that is not measured there",
                evidence=f"'{', '.join(wanted)}' is not among {', '.join(known)}",
            )
        return tuple(known[name] for name in wanted)
    measured = {error.recipe: error.relative_error for error in errors}
    chosen: dict[Precision, Recipe] = {}
    for precision in dict.fromkeys(recipe.precision for recipe in applicable):
        of_precision = [recipe for recipe in applicable if recipe.precision is precision]
        allowed = [r for r in of_precision if options.weight in (None, r.weight)] or of_precision
        chosen[precision] = min(allowed, key=lambda recipe: measured.get(recipe.id, math.inf))
    return tuple(chosen.values())


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


def measured_recipes(profile: Profile) -> dict[str, tuple[str, ...]]:
    """Return the ids of the recipes that a profile measured the effect of, by site."""
    by_site = {entry.site: dict.fromkeys(s.recipe for s in entry.sensitivities) for entry in profile.sites}
    return {site: tuple(recipes) for site, recipes in by_site.items() if recipes}


_AGAIN = "calibrate again on all rows"


@dataclass(frozen=True)
class ProfiledModel:
    """A model and its judged outputs, as a profile was measured on them."""

    model: ModelArtifact
    outputs: tuple[OutputSpec, ...]


def update(
    profile: Profile,
    subject: ProfiledModel,
    data: Dataset,
    scratch: Path,
    options: ProbeOptions,
    progress: Progress = silent,
) -> Profile:
    """Measure further rows and merge them into a profile.

    Groups of rows (`ProbeOptions.group`) must not be split between both sets. Of `options`, recipes, scales,
    sites and batch size are replaced by the profile's. Raises CalibrationError if the rows are already in the
    profile; the profile is of another model, of other outputs or of recipes that the options lack; or a value
    is not finite.
    """
    _check(profile, subject, data)
    changed = _options(profile, options)
    later = calibrate(subject.model, subject.outputs, data, scratch, changed, progress)
    return profile.merge(later)


def _options(profile: Profile, options: ProbeOptions) -> ProbeOptions:
    measured = {e.recipe for entry in profile.sites for e in entry.errors} - {NORM_PRECISION}
    recipes = tuple(recipe for recipe in options.recipes if recipe.id in measured)
    if missing := measured - {recipe.id for recipe in recipes}:
        raise CalibrationError(
            "E0513 rows cannot be added in other recipes than the profile's",
            evidence=f"it was measured in {_listed(measured)}, and {_listed(missing)} is not asked for",
            remedy=f"set `plan.formats`, `plan.format` and `plan.scale` back, or {_AGAIN}",
        )
    # A profile without activations does not constrain the batch size.
    sizes = [s.spread.rows for entry in profile.sites for s in entry.operands.values() if s.spread.batches]
    return replace(
        options,
        recipes=recipes,
        planned=measured_recipes(profile),
        scales=profile.scales,
        only=frozenset(entry.site for entry in profile.sites),
        batch_size=sizes[0] if sizes else options.batch_size,
        magnitudes=bool(profile.tensors),
    )


def _check(profile: Profile, subject: ProfiledModel, data: Dataset) -> None:
    if profile.model_digest != subject.model.digest:
        raise CalibrationError(
            "E0514 the profile is of another model",
            evidence=f"it was measured on {profile.model_digest[:12]}, and this one is "
            f"{subject.model.digest[:12]}",
            remedy="name the model of the profile, or calibrate this one",
        )
    if data.digest in profile.data_digest.split("+"):
        raise CalibrationError(
            f"E0515 the rows of '{data.name}' are in the profile already, and would count twice",
            evidence=f"their digest is {data.digest[:12]}",
            remedy="give rows that it has not seen",
        )
    was = {(s.output, s.denominator) for entry in profile.sites for s in entry.sensitivities}
    now = {(spec.name, LOSS if spec.label is not None else ENTROPY) for spec in subject.outputs}
    if was != now:
        raise CalibrationError(
            "E0516 rows cannot be added for other outputs than the profile's, or relative to something else",
            evidence=f"it has {_listed(f'{o} relative to {d}' for o, d in was)}; "
            f"asked for is {_listed(f'{o} relative to {d}' for o, d in now)}",
            remedy=f"name the same outputs and labels, or {_AGAIN}",
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
