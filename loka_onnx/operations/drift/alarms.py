"""Alarms: changes that are both significant and large enough, each as a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from statistics import NormalDist

from loka_onnx.calibration.observers.batch_spread import COLUMN
from loka_onnx.core.drift import Alarm, Measure, OutputDrift, Relevance, Shift, SiteDrift, TensorDrift

_ORDER = tuple(reversed(Measure))
"""What harms comes first, then the feature that may be why, then what it does to tensors."""
_OCTAVE = "log2."


def find_alarms(
    tensors: Sequence[TensorDrift],
    sites: Sequence[SiteDrift],
    outputs: Sequence[OutputDrift],
    family_wise: float,
    relevance: Relevance,
    most_delta_ne: float | None = None,
) -> tuple[Alarm, ...]:
    """Return the alarms, worst first.

    Each needs a test of the same quantity: the mean's for the mean, a column's own, any octave's
    or that of the zeros for the distribution, any of the site's activation for its saturation. ΔNE has none
    of its own: it asks for a certain change of an activation that a counted site reads, and for a growth
    whose lower bound is beyond the threshold.

    Args:
        family_wise: Largest probability of any false alarm.
        most_delta_ne: Largest accepted predicted growth of ΔNE; None for `relevance.delta_ne` of the budget.
    """
    named = {tensor.tensor for tensor in tensors if tensor.columns}
    certainty = {tensor.tensor: tensor.smallest_adjusted for tensor in tensors}

    def badness(alarm: Alarm) -> tuple[int, bool, float, str]:
        # A feature that has a name comes before the hidden units that it feeds.
        excess = alarm.value / alarm.threshold if alarm.threshold else inf
        is_hidden = alarm.measure is Measure.COLUMN and alarm.where not in named
        return _ORDER.index(alarm.measure), is_hidden, -excess, alarm.where

    found = chain(
        *(rule(tensor, relevance) for rule in (_moved, _redistributed, _stretched) for tensor in tensors),
        *(_columns(tensor, family_wise, relevance.column) for tensor in tensors),
        *(_saturated(site, relevance, certainty.get(site.tensor, 1.0)) for site in sites),
        _harmed(sites, outputs, certainty, family_wise, relevance, most_delta_ne),
    )
    return tuple(sorted((alarm for alarm in found if alarm.adjusted <= family_wise), key=badness))


def _moved(tensor: TensorDrift, relevance: Relevance) -> Iterator[Alarm]:
    """Mean, rms and zeros."""
    for statistic, measure, threshold in (
        ("mean", Measure.MEAN, relevance.mean),
        ("rms", Measure.RMS, relevance.rms),
        ("zeros", Measure.ZEROS, relevance.zeros),
    ):
        shift = tensor.shift(statistic)
        if shift is not None and abs(shift.effect) >= threshold:
            sentence = f"{_said(shift, _read_by(tensor))}{_certainty(shift)}"
            yield Alarm(tensor.tensor, measure, abs(shift.effect), threshold, shift.adjusted, sentence)


def _redistributed(tensor: TensorDrift, relevance: Relevance) -> Iterator[Alarm]:
    shares = [s for s in tensor.shifts if s.statistic == "zeros" or s.statistic.startswith(_OCTAVE)]
    if shares and tensor.stability_index >= relevance.stability_index:
        most = min(shares, key=lambda shift: (shift.adjusted, shift.p_value))
        yield Alarm(
            tensor.tensor,
            Measure.DISTRIBUTION,
            tensor.stability_index,
            relevance.stability_index,
            most.adjusted,
            f"the magnitudes of {_read_by(tensor)} are distributed otherwise: population stability index "
            f"{tensor.stability_index:.3f}, most surely {_share(most)}",
        )


def _columns(tensor: TensorDrift, family_wise: float, threshold: float) -> Iterator[Alarm]:
    """The worst column, and how many others there are."""
    found = [
        shift
        for shift in tensor.shifts
        if shift.statistic.startswith(COLUMN)
        and shift.adjusted <= family_wise
        and abs(shift.effect) >= threshold
    ]
    if not found:
        return
    worst = max(found, key=lambda shift: abs(shift.effect))
    column, others = _column_of(worst), len({_column_of(shift) for shift in found}) - 1
    name = f"column {column} of {_read_by(tensor)}"
    if column < len(tensor.columns) and tensor.columns[column]:
        name = f"'{tensor.columns[column]}' (column {column} of '{tensor.tensor}')"
    more = f", and so did {others} other column{'s' * (others > 1)}" if others else ""
    sentence = f"{_said(worst, name)}{_certainty(worst)}{more}"
    yield Alarm(tensor.tensor, Measure.COLUMN, abs(worst.effect), threshold, worst.adjusted, sentence)


def _stretched(tensor: TensorDrift, relevance: Relevance) -> Iterator[Alarm]:
    wider = tensor.range
    if wider.growth - 1.0 >= relevance.range_growth:
        yield Alarm(
            tensor.tensor,
            Measure.RANGE,
            wider.growth - 1.0,
            relevance.range_growth,
            wider.adjusted,
            f"the range of {_read_by(tensor)} is {wider.growth:.2f} times the profile's, "
            f"{wider.live_amax:.4g} instead of {wider.profile_amax:.4g}: "
            f"{wider.beyond} of {wider.batches} batches go beyond it",
        )


def _saturated(site: SiteDrift, relevance: Relevance, certainty: float) -> Iterator[Alarm]:
    growth = site.live_saturated - site.profile_saturated
    if growth > 0.0 and growth >= relevance.saturated_share:
        yield Alarm(
            site.site,
            Measure.SATURATION,
            growth,
            relevance.saturated_share,
            certainty,
            f"{site.live_saturated:.3%} of the activation of '{site.site}' are clipped under its FP8 "
            f"scale, {site.profile_saturated:.3%} in the profile",
        )


def _harmed(
    sites: Sequence[SiteDrift],
    outputs: Sequence[OutputDrift],
    certainty: Mapping[str, float],
    family_wise: float,
    relevance: Relevance,
    most_delta_ne: float | None,
) -> Iterator[Alarm]:
    counted = [site for site in sites if site.is_counted]
    surest = min((certainty[site.tensor] for site in counted if site.tensor in certainty), default=1.0)
    for output in outputs:
        threshold = most_delta_ne
        if threshold is None and output.budget is not None:
            threshold = relevance.delta_ne * output.budget
        if threshold is None or output.live_kl is None or not counted:
            continue
        surely = output.predicted - NormalDist().inv_cdf(1.0 - family_wise) * output.standard_error
        if surely <= 0.0 or surely < threshold:
            continue
        worst = max(counted, key=lambda site: site.predicted.get(output.output, 0.0))
        of_budget = "" if output.budget is None else f", budget {output.budget:.4%}"
        yield Alarm(
            output.output,
            Measure.DELTA_NE,
            output.predicted,
            threshold,
            surest,
            f"FP8's share of ΔNE on '{output.output}' is predicted to grow by {output.predicted:.4%}, from "
            f"{output.kl:.4%} to {output.live_kl:.4%}{of_budget}; "
            f"{worst.predicted.get(output.output, 0.0):.4%} of it at '{worst.site}'",
        )


def _said(shift: Shift, name: str) -> str:
    """Describe the shift of a mean, an rms or a share of zeros."""
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
    named = " and ".join(f"'{site}'" for site in tensor.sites[:2])
    more = f" and {len(tensor.sites) - 2} more" if len(tensor.sites) > 2 else ""
    return f"'{tensor.tensor}' (read by {named}{more})"
