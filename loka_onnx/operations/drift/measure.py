"""Drift of live data from a profile: size, significance and relevance of every change, and alarms.

Units are batches of as many rows as the profile's, in file order, as the profile's were: rows of a user may
have much in common, but batches differ as much as batches do. Every statistic of every tensor is a test
(`numerics.two_sample`), and p-values are adjusted for all of them together, so that the probability of any
false alarm is bounded however many tensors a model has. What alarms must be large as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, sqrt
from pathlib import Path
from statistics import NormalDist

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
from loka_onnx.operations.drift.live import Baseline, Live, measure_live
from loka_onnx.operations.drift.report import (
    Alarm,
    DriftOptions,
    DriftReport,
    Measure,
    OutputDrift,
    RangeShift,
    Relevance,
    Shift,
    SiteDrift,
    TensorDrift,
)

RESOLUTION = 2.0**-20
"""Error of a mean or an rms over the rms, on another machine: sixteen units in the last place of FP32."""
_ORDER = tuple(reversed(Measure))
"""Harm comes first, then the feature that may be why, then the effect on tensors."""
_OCTAVE = "log2."


def measure_drift(
    baseline: Baseline,
    data: Dataset,
    scratch: Path,
    options: DriftOptions | None = None,
    progress: Progress = silent,
) -> DriftReport:
    """Run live rows under the profile's scales and compare; labels are not read.

    `scratch` is a directory for instrumented models, on the file system of the model. Raises CalibrationError
    where an activation or an output is not finite, DataError where a row cannot be used.
    """
    options = options or DriftOptions()
    return drift_report(baseline, measure_live(baseline, data, scratch, options, progress), options)


def drift_report(baseline: Baseline, live: Live, options: DriftOptions) -> DriftReport:
    """Return the report on live statistics, worst first."""
    # Full batches that every tensor was measured over.
    ours, theirs = (
        min((stats.spread.batches for stats in ranges.values()), default=0)
        for ranges in (baseline.ranges, live.ranges)
    )
    not_judged = _too_few(baseline, ours, theirs)
    compared = [_compare_tensor(baseline, live, name, is_judged=not not_judged) for name in baseline.ranges]
    tensors, tests = _adjusted(compared)
    sites = list(_compare_sites(baseline, live))
    outputs = [_compare_output(baseline, live, name) for name in baseline.profile.baseline_loss]
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
        alarms=() if not_judged else _find_alarms(tensors, sites, outputs, options),
        synthetic=baseline.profile.synthetic,
        not_judged=not_judged,
    )


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
    batches, p_beyond = after.spread.batches, 1.0
    if is_judged:
        p_beyond = exceedance_probability(beyond, batches, before.spread.batches)
    return TensorDrift(
        tensor=name,
        sites=tuple(entry.site for entry in baseline.profile.sites if name in entry.operands),
        range=RangeShift(before.amax, after.amax, beyond, batches, p_beyond),
        shifts=_shifts(before, after) if is_judged else (),
        stability_index=stability_index(before.histogram, after.histogram),
        columns=baseline.columns.get(name, ()),
    )


@dataclass(frozen=True)
class _Statistic:
    """One statistic over batches, and the root mean square of what it is taken from; 0 for a share.

    `kind` says which others vary like it: ``share``, ``column mean``, ``column rms``, or its own name.
    """

    kind: str
    samples: tuple[BatchSample, BatchSample]
    unit: float
    rms: float


def _statistic(profile: RangeStats, live: RangeStats, name: str) -> _Statistic:
    samples = BatchSample.of(profile.spread, name), BatchSample.of(live.spread, name)
    column, _, which = name.rpartition(".")
    if which not in {"mean", "rms"}:
        return _Statistic("share", samples, 1.0, 0.0)
    rms, deviation = _scale(profile, column)
    return _Statistic(
        f"column {which}" if column else which, samples, rms if which == "rms" else deviation, rms
    )


def _shifts(profile: RangeStats, live: RangeStats) -> tuple[Shift, ...]:
    known = {"mean", "rms", "zeros", *profile.spread.statistics, *live.spread.statistics}
    every = {name: _statistic(profile, live, name) for name in sorted(known)}
    ratios: dict[str, float] = {}
    for kind in dict.fromkeys(item.kind for item in every.values()):
        alike = [item for item in every.values() if item.kind == kind]
        if len(alike) > 1:
            units = [item.rms if kind != "share" else 1.0 for item in alike]
            ratios[kind] = variance_ratio([item.samples for item in alike], units)
    shifts = []
    for name, item in every.items():
        before, after = item.samples
        change = compare_means(before, after, RESOLUTION * item.rms, ratios.get(item.kind))
        shifts.append(Shift(name, before.mean, after.mean, item.unit, change.standard_error, change.p_value))
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


def _find_alarms(
    tensors: Sequence[TensorDrift],
    sites: Sequence[SiteDrift],
    outputs: Sequence[OutputDrift],
    options: DriftOptions,
) -> tuple[Alarm, ...]:
    """Return changes that are both significant and large enough, each as a sentence, worst first.

    Each needs a test of the same quantity: the mean's for the mean, a column's own, any octave's
    or that of the zeros for the distribution, any of the site's activation for its saturation. ΔNE has none
    of its own: it asks for a certain change of an activation that a counted site reads, and for a growth
    whose lower bound is beyond the threshold.
    """
    named = {tensor.tensor for tensor in tensors if tensor.columns}
    certainty = {tensor.tensor: tensor.smallest_adjusted for tensor in tensors}

    def badness(alarm: Alarm) -> tuple[int, bool, float, str]:
        # A feature that has a name comes before the hidden units that it feeds.
        excess = alarm.value / alarm.threshold if alarm.threshold else inf
        is_hidden = alarm.measure is Measure.COLUMN and alarm.where not in named
        return _ORDER.index(alarm.measure), is_hidden, -excess, alarm.where

    alarms = chain(
        *(_of_tensor(tensor, options.relevance) for tensor in tensors),
        *(_of_columns(tensor, options) for tensor in tensors),
        *(_of_site(site, options.relevance, certainty.get(site.tensor, 1.0)) for site in sites),
        _of_outputs(sites, outputs, certainty, options),
    )
    certain = (alarm for alarm in alarms if alarm.adjusted <= options.family_wise)
    return tuple(sorted(certain, key=badness))


def _of_tensor(tensor: TensorDrift, relevance: Relevance) -> Iterator[Alarm]:
    """Mean, rms, zeros, distribution and range."""
    name = _read_by(tensor)
    for measure in (Measure.MEAN, Measure.RMS, Measure.ZEROS):
        shift, threshold = tensor.shift(measure.value), getattr(relevance, measure.value)
        if shift is not None and abs(shift.effect) >= threshold:
            sentence = _described(shift, name)
            yield Alarm(tensor.tensor, measure, abs(shift.effect), threshold, shift.adjusted, sentence)
    index, threshold = tensor.stability_index, relevance.stability_index
    shares = [s for s in tensor.shifts if s.statistic == "zeros" or s.statistic.startswith(_OCTAVE)]
    if shares and index >= threshold:
        surest = min(shares, key=lambda shift: (shift.adjusted, shift.p_value))
        sentence = (
            f"the magnitudes of {name} are distributed otherwise: population stability index {index:.3f}, "
            f"most surely {_share_text(surest)}"
        )
        yield Alarm(tensor.tensor, Measure.DISTRIBUTION, index, threshold, surest.adjusted, sentence)
    wider, threshold = tensor.range, relevance.range_growth
    if wider.growth - 1.0 >= threshold:
        sentence = (
            f"the range of {name} is {wider.growth:.2f} times the profile's, {wider.live_amax:.4g} instead "
            f"of {wider.profile_amax:.4g}: {wider.beyond} of {wider.batches} batches go beyond it"
        )
        yield Alarm(tensor.tensor, Measure.RANGE, wider.growth - 1.0, threshold, wider.adjusted, sentence)


def _of_columns(tensor: TensorDrift, options: DriftOptions) -> Iterator[Alarm]:
    """The worst column, and how many others there are."""
    threshold = options.relevance.column
    certain = (
        s for s in tensor.shifts if s.statistic.startswith(COLUMN) and s.adjusted <= options.family_wise
    )
    shifts = [shift for shift in certain if abs(shift.effect) >= threshold]
    if not shifts:
        return
    worst = max(shifts, key=lambda shift: abs(shift.effect))
    column, others = _column_of(worst), len({_column_of(shift) for shift in shifts}) - 1
    name = f"column {column} of {_read_by(tensor)}"
    if column < len(tensor.columns) and tensor.columns[column]:
        name = f"'{tensor.columns[column]}' (column {column} of '{tensor.tensor}')"
    more = f", and so did {others} other column{'s' * (others > 1)}" if others else ""
    sentence = f"{_described(worst, name)}{more}"
    yield Alarm(tensor.tensor, Measure.COLUMN, abs(worst.effect), threshold, worst.adjusted, sentence)


def _of_site(site: SiteDrift, relevance: Relevance, certainty: float) -> Iterator[Alarm]:
    growth, threshold = site.live_saturated - site.profile_saturated, relevance.saturated_share
    if growth > 0.0 and growth >= threshold:
        clipped = (
            f"{site.live_saturated:.3%} of the activation of '{site.site}' are clipped under its FP8 scale"
        )
        sentence = f"{clipped}, {site.profile_saturated:.3%} in the profile"
        yield Alarm(site.site, Measure.SATURATION, growth, threshold, certainty, sentence)


def _of_outputs(
    sites: Sequence[SiteDrift],
    outputs: Sequence[OutputDrift],
    certainty: Mapping[str, float],
    options: DriftOptions,
) -> Iterator[Alarm]:
    counted = [site for site in sites if site.is_counted]
    surest = min((certainty[site.tensor] for site in counted if site.tensor in certainty), default=1.0)
    for output in outputs:
        threshold, name = options.most_delta_ne, output.output
        if threshold is None and output.budget is not None:
            threshold = options.relevance.delta_ne * output.budget
        if threshold is None or output.live_kl is None or not counted:
            continue
        lower = output.predicted - NormalDist().inv_cdf(1.0 - options.family_wise) * output.standard_error
        if lower <= 0.0 or lower < threshold:
            continue
        worst = max(counted, key=lambda site: site.predicted.get(name, 0.0))
        of_budget = "" if output.budget is None else f", budget {output.budget:.4%}"
        sentence = (
            f"FP8's share of ΔNE on '{name}' is predicted to grow by {output.predicted:.4%}, from "
            f"{output.kl:.4%} to {output.live_kl:.4%}{of_budget}; "
            f"{worst.predicted.get(name, 0.0):.4%} of it at '{worst.site}'"
        )
        yield Alarm(name, Measure.DELTA_NE, output.predicted, threshold, surest, sentence)


def _described(shift: Shift, name: str) -> str:
    """The shift of a mean, an rms or a share of zeros, and how certain it is."""
    kind = shift.statistic.rpartition(".")[2]
    what = f"{shift.live:.1%} of {name} are zero, {shift.profile:.1%} in the profile"
    if kind == "mean":
        move = f"moved by {shift.effect:+.2f} standard deviations"
        what = f"the mean of {name} {move}, from {shift.profile:.4g} to {shift.live:.4g}"
    elif kind == "rms":
        move = f"is {1.0 + shift.effect:.2f} times the profile's"
        what = f"the rms of {name} {move}, {shift.live:.4g} instead of {shift.profile:.4g}"
    return f"{what} ({abs(shift.deviation):.0f} standard errors)"


def _share_text(shift: Shift) -> str:
    what = "the zeros"
    if shift.statistic != "zeros":
        octave = int(shift.statistic.removeprefix(_OCTAVE))
        what = f"magnitudes from {2.0**octave:.3g} to {2.0 ** (octave + 1):.3g}"
    moved = f"{shift.live:.2%} instead of {shift.profile:.2%}"
    return f"{what}: {moved} ({abs(shift.deviation):.0f} standard errors)"


def _column_of(shift: Shift) -> int:
    return int(shift.statistic.removeprefix(COLUMN).partition(".")[0])


def _read_by(tensor: TensorDrift) -> str:
    sites = " and ".join(f"'{site}'" for site in tensor.sites[:2])
    more = f" and {len(tensor.sites) - 2} more" if len(tensor.sites) > 2 else ""
    return f"'{tensor.tensor}' (read by {sites}{more})"
