"""Drift of live data from a profile: size, significance and relevance of every change.

Units are batches of as many rows as the profile's: the elements of a row have much in common, and so may rows
of a user, but batches differ as much as batches do. Every statistic of every tensor is a test
(`numerics.two_sample`), and p-values are adjusted for all of them together, so that the probability of any
false alarm is bounded however many tensors a model has. Rows are taken in file order, as the profile's were:
shuffled live rows against a profile of rows sorted by time, or the reverse, differ in how much batches vary
and not in their means, which the tests of means allow for. What alarms must be large as well (`alarms`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from pathlib import Path

from loka_onnx.calibration.observers.sampling import COLUMN
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.statistics import BatchSums, ErrorStats, RangeStats
from loka_onnx.data import Dataset
from loka_onnx.numerics.two_sample import (
    FEWEST_BATCHES,
    BatchSample,
    compare_means,
    exceedance_probability,
    holm,
    stability_index,
    variance_ratio,
)
from loka_onnx.operations.drift.alarms import find_alarms
from loka_onnx.operations.drift.baseline import Baseline
from loka_onnx.operations.drift.live import Live, measure_live
from loka_onnx.operations.drift.report import (
    Alarm,
    DriftOptions,
    DriftReport,
    OutputDrift,
    RangeShift,
    Relevance,
    Shift,
    SiteDrift,
    TensorDrift,
)

RESOLUTION = 2.0**-20
"""Error of a mean or an rms over the rms, on another machine: sixteen units in the last place of FP32."""


def measure_drift(
    baseline: Baseline,
    data: Dataset,
    scratch: Path,
    options: DriftOptions | None = None,
    progress: Progress = silent,
) -> DriftReport:
    """Run live rows under the profile's scales and compare; labels are not read.

    `scratch` is a directory for instrumented models, on the file system of the model.

    Raises:
        CalibrationError: An activation or an output is not finite.
        DataError: A row cannot be used.
    """
    options = options or DriftOptions()
    return compare(baseline, measure_live(baseline, data, scratch, options, progress), options)


def compare(baseline: Baseline, live: Live, options: DriftOptions) -> DriftReport:
    """Return the report on live statistics, worst first."""
    ours = _batches(baseline.ranges)
    theirs = _batches(live.ranges)
    not_judged = _too_few(baseline, ours, theirs)
    compared = [_compare_tensor(baseline, live, name, is_judged=not not_judged) for name in baseline.ranges]
    tensors, tests = _adjusted(compared)
    sites = list(_compare_sites(baseline, live))
    outputs = [_compare_output(baseline, live, name) for name in baseline.profile.baseline_loss]
    alarms: tuple[Alarm, ...] = ()
    if not not_judged:
        alarms = find_alarms(tensors, sites, outputs, options)
    return DriftReport(
        model_digest=baseline.model.digest,
        profile_digest=baseline.profile.data_digest,
        live_digest=live.digest,
        profile_rows=baseline.profile.rows,
        live_rows=live.rows,
        batch_rows=baseline.batch_rows,
        profile_batches=ours,
        live_batches=theirs,
        family_wise=options.family_wise,
        tests=0 if not_judged else tests,
        basis=baseline.basis,
        relevance=options.relevance,
        tensors=tuple(sorted(tensors, key=lambda t: (-_size(t, options.relevance), t.tensor))),
        sites=tuple(sorted(sites, key=lambda s: (-sum(s.predicted.values()), -s.live_saturated, s.site))),
        outputs=tuple(outputs),
        alarms=alarms,
        synthetic=baseline.profile.synthetic,
        not_judged=not_judged,
    )


def _batches(ranges: Mapping[str, RangeStats]) -> int:
    """Full batches that every tensor was measured over."""
    return min((stats.spread.batches for stats in ranges.values()), default=0)


def _too_few(baseline: Baseline, ours: int, theirs: int) -> str:
    """Return why drift cannot be told from chance; empty if it can."""
    size = baseline.batch_rows
    if ours < FEWEST_BATCHES:
        have = f"{ours} full batches of {size} rows" if size else "no full batch"
        return (
            f"the profile holds {have}, and {FEWEST_BATCHES} are needed to know how much batches differ: "
            "calibrate on more rows, or with a smaller `calibration.batch_size`"
        )
    if theirs < FEWEST_BATCHES:
        return (
            f"the live rows fill {theirs} batches of {size} rows, as large as the profile's, and "
            f"{FEWEST_BATCHES} are needed: give at least {FEWEST_BATCHES * size} rows, or calibrate with a "
            "smaller `calibration.batch_size`"
        )
    return ""


def _compare_tensor(baseline: Baseline, live: Live, name: str, *, is_judged: bool) -> TensorDrift:
    before, after, beyond = baseline.ranges[name], live.ranges[name], live.beyond[name]
    shifts: tuple[Shift, ...] = ()
    p_beyond = 1.0
    if is_judged:
        shifts = _shifts(before, after)
        p_beyond = exceedance_probability(beyond, after.spread.batches, before.spread.batches)
    return TensorDrift(
        tensor=name,
        sites=tuple(entry.site for entry in baseline.profile.sites if name in entry.operands),
        range=RangeShift(before.amax, after.amax, beyond, after.spread.batches, p_beyond),
        shifts=shifts,
        stability_index=stability_index(before.histogram, after.histogram),
        columns=baseline.columns.get(name, ()),
    )


@dataclass(frozen=True)
class _Statistic:
    """One statistic over the batches of the profile (before) and of the live data (after).

    Attributes:
        kind: Which others vary like it: ``share``, ``column mean``, ``column rms``, or its own name.
        unit: See `Shift.unit`.
        rms: Of what it is taken from; 0 for a share.
    """

    name: str
    kind: str
    before: BatchSample
    after: BatchSample
    unit: float
    rms: float

    @classmethod
    def of(cls, profile: RangeStats, live: RangeStats, name: str) -> _Statistic:
        before, after = BatchSample.of(profile.spread, name), BatchSample.of(live.spread, name)
        column, _, which = name.rpartition(".")
        if which not in {"mean", "rms"}:
            return cls(name, "share", before, after, 1.0, 0.0)
        rms, deviation = _scale(profile, column)
        kind = f"column {which}" if column else which
        return cls(name, kind, before, after, rms if which == "rms" else deviation, rms)


def _shifts(profile: RangeStats, live: RangeStats) -> tuple[Shift, ...]:
    known = {"mean", "rms", "zeros", *profile.spread.statistics, *live.spread.statistics}
    every = [_Statistic.of(profile, live, name) for name in sorted(known)]
    ratios: dict[str, float] = {}
    for kind in dict.fromkeys(item.kind for item in every):
        alike = [item for item in every if item.kind == kind]
        if len(alike) > 1:
            units = [item.rms if kind != "share" else 1.0 for item in alike]
            ratios[kind] = variance_ratio([(item.before, item.after) for item in alike], units)
    shifts = []
    for item in every:
        change = compare_means(item.before, item.after, RESOLUTION * item.rms, ratios.get(item.kind))
        means = item.before.mean, item.after.mean
        shifts.append(Shift(item.name, *means, item.unit, change.standard_error, change.p_value))
    return tuple(shifts)


def _scale(stats: RangeStats, column: str) -> tuple[float, float]:
    """Return root mean square and standard deviation of all elements, or of one column's."""
    if not column:
        return sqrt(stats.total_squares.value / stats.count), sqrt(stats.variance)
    spread = stats.spread
    square = spread.statistics.get(f"{column}.rms", BatchSums()).squares.value / spread.batches
    mean = spread.statistics.get(f"{column}.mean", BatchSums()).total.value / spread.batches
    return sqrt(square), sqrt(max(square - mean * mean, 0.0))


def _adjusted(tensors: Sequence[TensorDrift]) -> tuple[list[TensorDrift], int]:
    """Return the tensors with p-values adjusted for all tests together, and the number of tests."""
    every = [p for tensor in tensors for p in (tensor.range.p_value, *(s.p_value for s in tensor.shifts))]
    left = iter(holm(every))
    adjusted = [
        replace(
            tensor,
            range=replace(tensor.range, adjusted=next(left)),
            shifts=tuple(replace(shift, adjusted=next(left)) for shift in tensor.shifts),
        )
        for tensor in tensors
    ]
    return adjusted, len(every)


def _size(tensor: TensorDrift, relevance: Relevance) -> float:
    """Return the largest change of a tensor over its threshold; without thresholds, the change."""
    columns = [abs(s.effect) for s in tensor.shifts if s.statistic.startswith(COLUMN)]
    parts = (
        (abs(tensor.effect("mean")), relevance.mean),
        (abs(tensor.effect("rms")), relevance.rms),
        (abs(tensor.effect("zeros")), relevance.zeros),
        (max(columns, default=0.0), relevance.column),
        (tensor.stability_index, relevance.stability_index),
        (tensor.range.growth - 1.0, relevance.range_growth),
    )
    return max(value / threshold if threshold else value for value, threshold in parts)


def _compare_sites(baseline: Baseline, live: Live) -> Iterator[SiteDrift]:
    losses = {name: mean.value for name, mean in baseline.profile.baseline_loss.items()}
    counted = {switch.site.name for switch in baseline.counted_switches}
    for switch in baseline.switches:
        name, recipe = switch.site.name, switch.recipe.id
        entry = baseline.profile.site(name)
        before, after = entry.error(recipe), live.errors[name]
        yield SiteDrift(
            site=name,
            recipe=recipe,
            tensor=switch.site.activation.tensor,
            is_counted=name in counted,
            profile_saturated=_share(before),
            live_saturated=_share(after),
            profile_noise=before.relative_error**2,
            live_noise=after.relative_error**2,
            kl={output: entry.sensitivity(recipe, output).kl.value for output in losses},
            live_kl={o: kl.by_site[name] / losses[o] for o, kl in live.kl.items() if name in kl.by_site},
        )


def _compare_output(baseline: Baseline, live: Live, name: str) -> OutputDrift:
    budgets = {spec.name: spec.budget for spec in baseline.outputs}
    loss = baseline.profile.baseline_loss[name].value
    before = [
        baseline.profile.site(switch.site.name).sensitivity(switch.recipe.id, name)
        for switch in baseline.counted_switches
    ]
    after = live.kl.get(name)
    # Sites err together on the same rows: at worst their standard errors add up.
    own = sum(item.kl_moments.standard_error for item in before)
    return OutputDrift(
        output=name,
        budget=budgets.get(name),
        kl=sum(item.kl.value for item in before),
        live_kl=None if after is None else sum(after.by_site.values()) / loss,
        standard_error=inf if after is None else sqrt(own**2 + (after.standard_error / loss) ** 2),
    )


def _share(stats: ErrorStats) -> float:
    return stats.saturated / stats.activation_count if stats.activation_count else 0.0
