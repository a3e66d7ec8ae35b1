"""Alarms: changes that are both significant and large enough, each as a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from statistics import NormalDist

from loka_onnx.calibration.observers.sampling import COLUMN
from loka_onnx.operations.drift.report import (
    Alarm,
    DriftOptions,
    Measure,
    OutputDrift,
    Relevance,
    Shift,
    SiteDrift,
    TensorDrift,
)

_ORDER = tuple(reversed(Measure))
"""Harm comes first, then the feature that may be why, then the effect on tensors."""
_OCTAVE = "log2."


def find_alarms(
    tensors: Sequence[TensorDrift],
    sites: Sequence[SiteDrift],
    outputs: Sequence[OutputDrift],
    options: DriftOptions,
) -> tuple[Alarm, ...]:
    """Return the alarms, worst first.

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
            sentence = f"{_described(shift, name)}{_certainty(shift)}"
            yield Alarm(tensor.tensor, measure, abs(shift.effect), threshold, shift.adjusted, sentence)
    index, threshold = tensor.stability_index, relevance.stability_index
    shares = [s for s in tensor.shifts if s.statistic == "zeros" or s.statistic.startswith(_OCTAVE)]
    if shares and index >= threshold:
        surest = min(shares, key=lambda shift: (shift.adjusted, shift.p_value))
        sentence = (
            f"the magnitudes of {name} are distributed otherwise: population stability index {index:.3f}, "
            f"most surely {_share(surest)}"
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
    shifts = [
        shift
        for shift in tensor.shifts
        if shift.statistic.startswith(COLUMN)
        and shift.adjusted <= options.family_wise
        and abs(shift.effect) >= threshold
    ]
    if not shifts:
        return
    worst = max(shifts, key=lambda shift: abs(shift.effect))
    column, others = _column_of(worst), len({_column_of(shift) for shift in shifts}) - 1
    name = f"column {column} of {_read_by(tensor)}"
    if column < len(tensor.columns) and tensor.columns[column]:
        name = f"'{tensor.columns[column]}' (column {column} of '{tensor.tensor}')"
    more = f", and so did {others} other column{'s' * (others > 1)}" if others else ""
    sentence = f"{_described(worst, name)}{_certainty(worst)}{more}"
    yield Alarm(tensor.tensor, Measure.COLUMN, abs(worst.effect), threshold, worst.adjusted, sentence)


def _of_site(site: SiteDrift, relevance: Relevance, certainty: float) -> Iterator[Alarm]:
    growth, threshold = site.live_saturated - site.profile_saturated, relevance.saturated_share
    if growth > 0.0 and growth >= threshold:
        sentence = (
            f"{site.live_saturated:.3%} of the activation of '{site.site}' are clipped under its FP8 "
            f"scale, {site.profile_saturated:.3%} in the profile"
        )
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
    """The shift of a mean, an rms or a share of zeros."""
    kind = shift.statistic.rpartition(".")[2]
    if kind == "mean":
        return (
            f"the mean of {name} moved by {shift.effect:+.2f} standard deviations, "
            f"from {shift.profile:.4g} to {shift.live:.4g}"
        )
    if kind == "rms":
        return (
            f"the rms of {name} is {1.0 + shift.effect:.2f} times the profile's, "
            f"{shift.live:.4g} instead of {shift.profile:.4g}"
        )
    return f"{shift.live:.1%} of {name} are zero, {shift.profile:.1%} in the profile"


def _certainty(shift: Shift) -> str:
    return f" ({abs(shift.deviation):.0f} standard errors)"


def _share(shift: Shift) -> str:
    what = "the zeros"
    if shift.statistic != "zeros":
        octave = int(shift.statistic.removeprefix(_OCTAVE))
        what = f"magnitudes from {2.0**octave:.3g} to {2.0 ** (octave + 1):.3g}"
    return f"{what}: {shift.live:.2%} instead of {shift.profile:.2%}{_certainty(shift)}"


def _column_of(shift: Shift) -> int:
    return int(shift.statistic.removeprefix(COLUMN).partition(".")[0])


def _read_by(tensor: TensorDrift) -> str:
    sites = " and ".join(f"'{site}'" for site in tensor.sites[:2])
    more = f" and {len(tensor.sites) - 2} more" if len(tensor.sites) > 2 else ""
    return f"'{tensor.tensor}' (read by {sites}{more})"
