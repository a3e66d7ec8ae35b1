"""Relative speed of engines, and its confidence.

The time of an engine over several batch sizes is the mean of its median latencies per row, so that a large
batch does not outweigh a small one by its size alone.

**The load is the unit.** A reloaded engine lies elsewhere in memory and may run 1 or 2 % faster or slower
until the next load, however often it is timed. So engines are loaded several times, in turns, and each load
gives one value, the logarithm of its least time: what else a busy host does only adds to requests, in some
loads to most of them. With x_el of engine e in load l,

    x_el = engine_e + load_l + ε_el,

least squares over all engines timed together gives s², the variance of ε, with as many degrees of freedom as
values less fitted means; a slow load slows all engines and cancels. Two engines with n loads in common differ
by the mean of their n differences ± t·s·√(2/n), with t the quantile of Student's distribution for `risk`,
divided by the number of pairs of engines (Bonferroni), of batch sizes judged one by one, and of `ANALYSES`.
A tie goes to the most exact engine. So only engines that may still be the fastest are loaded again: after the
first load if one of them looks faster than the most exact, after the second if it looks much faster, as on a
busy host. If it still does after the last, by the median over loads (`LOOKS_APART`), an interval that holds 1
is too wide to show a tie, and that median decides.
Engines timed apart have only the ratio of medians, without an interval: it contains differences of machines
and days.

Sources: Montgomery, "Design and Analysis of Experiments" (8th edition), sections 4.1 (the additive model of
randomized blocks) and 3.5.7 (Bonferroni's comparisons of all pairs).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt
from statistics import fmean, median

import numpy as np
from scipy.special import stdtrit

from loka_onnx.core.evaluation import Evaluation, Latency
from loka_onnx.core.intervals import Interval

RISK = 0.05
"""Risk that the interval of the ratio of two engines fails."""
ANALYSES = {3: 0.004, 6: 0.012, 12: 0.004}
"""Loads of each analysis, and its risk of telling any two equal engines apart: 2 % over all."""
FIRST_LOADS, LOADS, MOST_LOADS = ANALYSES
"""Loads of all engines; of those between which the choice is then open; of all those if some look apart."""
LOOKS_APART = 0.05
"""Relative difference of medians that is worth `MOST_LOADS`, and decides after them: for equal engines whose
loads differ by 2 % it is five standard errors then."""

_ROUNDING = 1e-9
"""Half width below which loads are alike but for the rounding of least squares."""


@dataclass(frozen=True)
class Speed:
    """Time of one engine on the target, by batch size.

    `rivals` are the latencies of all engines of the contest, this one included; empty for two. `contests`
    share the risk: batch sizes judged one by one.
    """

    latencies: Mapping[int, Latency]
    rivals: tuple[Mapping[int, Latency], ...] = ()
    contests: int = 1

    @classmethod
    def of(cls, evaluation: Evaluation | None, is_simulated: bool) -> Speed | None:
        """Return the speed of an engine; None where it was not measured on the target, or is simulated."""
        latencies = () if is_simulated or evaluation is None else evaluation.latencies
        is_measured = latencies and all(latency.counts_for_choice for latency in latencies)
        return cls({latency.batch: latency for latency in latencies}) if is_measured else None

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes, ascending."""
        return tuple(sorted(self.latencies))

    @property
    def per_row_us(self) -> float:
        """Mean over batch sizes of the median latency per row."""
        return _per_row(self.latencies, self.batches)

    def at(self, batch: int) -> Speed:
        """Return the speed at one batch size; among rivals each size is a contest of its own."""
        contests = len(self.latencies) if self.rivals else 1
        return replace(self, latencies={batch: self.latencies[batch]}, contests=contests)

    def ratio(self, other: Speed) -> float:
        """Return this engine's time over another's by their medians, wherever they were timed."""
        batches = self._in_common(other)
        return _per_row(self.latencies, batches) / _per_row(other.latencies, batches)

    def over(self, other: Speed) -> Interval | None:
        """Return this engine's time divided by the other's at common batch sizes, with interval.

        The geometric mean over loads; each counts by its least time, so that a stalled request does not move
        it. `rows` is the number of loads; below 2 it is 0, and the value is the ratio of medians, without
        width. None if the two were not timed in turns. Raises KeyError if they have no batch size in common.
        """
        batches = self._in_common(other)
        if _timed_in(self.latencies, batches) != _timed_in(other.latencies, batches):
            return None
        ratio = self.ratio(other)
        ours, theirs = _loads(self.latencies, batches), _loads(other.latencies, batches)
        loads = min(len(ours), len(theirs))
        risk, rivals = RISK, [ours, theirs]
        if self.rivals:
            risk = next(risk for most, risk in ANALYSES.items() if loads <= most)
            place = _timed_in(self.latencies, batches)
            timed = [rival for rival in self.rivals if set(batches) <= rival.keys()]
            rivals = [_loads(rival, batches) for rival in timed if _timed_in(rival, batches) == place]
        if loads < 2:
            return Interval(ratio, ratio, ratio, 1.0 - risk, 0)
        middle = fmean(a - b for a, b in zip(ours[:loads], theirs[:loads], strict=True))
        pairs = max(1, len(rivals) * (len(rivals) - 1) // 2)
        half = _margin(rivals, loads, risk / pairs / self.contests)
        half = half if half >= _ROUNDING else 0.0
        return Interval(exp(middle), exp(middle - half), exp(middle + half), 1.0 - risk, loads)

    def is_slower(self, other: Speed, noise: float) -> bool:
        """True if surely slower by more than `noise`; engines timed apart are compared by their medians."""
        times = self.over(other)
        if times is None:
            return self.ratio(other) > 1.0 + noise
        return self.looks_slower(other) or (times.value > 1.0 + noise and times.lower > 1.0)

    def looks_slower(self, other: Speed, margin: float = 0.0) -> bool:
        """True if after `MOST_LOADS` in turns the median over loads tells them apart, by `margin` or more."""
        times = self.over(other)
        is_looked_at = times is not None and times.rows >= MOST_LOADS
        return is_looked_at and self.typical_ratio(other) >= 1.0 + max(margin, LOOKS_APART)

    def typical_ratio(self, other: Speed) -> float:
        """Median over loads of this engine's time over the other's: a few wild loads do not move it."""
        batches = self._in_common(other)
        both = zip(_loads(self.latencies, batches), _loads(other.latencies, batches), strict=False)
        ratios = [exp(ours - theirs) for ours, theirs in both]
        return median(ratios) if ratios else self.ratio(other)

    def _in_common(self, other: Speed) -> tuple[int, ...]:
        batches = tuple(batch for batch in self.batches if batch in other.latencies)
        if not batches:
            raise KeyError("the engines were not timed at a batch size in common")
        return batches


def rivals(speeds: Mapping[str, Speed]) -> dict[str, Speed]:
    """Return the speeds of compared engines, each with all of them as its rivals."""
    known = tuple(speed.latencies for speed in speeds.values())
    return {name: replace(speed, rivals=known) for name, speed in speeds.items()}


def not_slower(speeds: Mapping[str, Speed], noise: float) -> list[str]:
    """Return the id of the fastest engine, then of those not slower than any by more than `noise`, surely."""
    fastest = min(speeds, key=lambda name: speeds[name].per_row_us)
    close = (n for n in speeds if not any(speeds[n].is_slower(other, noise) for other in speeds.values()))
    return [fastest, *(name for name in close if name != fastest)]


def contenders(
    timed: Mapping[str, Sequence[Latency]], noise: float, margin: float = inf, least: float = 0.0
) -> tuple[str, ...]:
    """Return ids of engines whose further loads may change the choice.

    `timed` are engines, timed in turns, the most exact first: the first that is not surely slower than any
    is chosen, over all sizes and at each. The choice is open while another looks faster by more than `noise`
    over all sizes, or `margin` at one (there also than the choice over all sizes), and than `least` in both.
    The chosen engine is returned with its rivals.
    """
    batches = max((frozenset(item.batch for item in items) for items in timed.values()), key=len, default=())
    every = {name: {item.batch: item for item in items} for name, items in timed.items()}
    # An engine that failed at a size is excluded.
    speeds = rivals({name: Speed(items) for name, items in every.items() if items.keys() == batches})
    if not batches or len(speeds) == 1:
        return ()
    close_ones: set[str] = set()
    at_sizes = (({name: speed.at(b) for name, speed in speeds.items()}, margin) for b in batches)
    mains: Collection[str] = speeds
    for contest, gain in ((speeds, noise), *at_sizes):
        close, limit = not_slower(contest, noise), 1.0 + max(gain, least)
        chosen = next(name for name in speeds if name in close)
        faster = [n for n in close if contest[chosen].typical_ratio(contest[n]) > limit]
        is_open = any(contest[main].typical_ratio(contest[n]) > limit for n in faster for main in mains)
        if contest is speeds:
            mains = close if is_open else [chosen]
        close_ones |= {*close} if is_open else set()
    return tuple(name for name in timed if name in close_ones)


def _margin(engines: Sequence[Sequence[float]], loads: int, risk: float) -> float:
    """Return the two-sided half width of the difference of two engines over so many loads.

    `engines` are (engines, loads) logarithms of times; residuals of the additive model are pooled over them.
    """
    cells = [(e, load, value) for e, values in enumerate(engines) for load, value in enumerate(values)]
    design = np.zeros((len(cells), len(engines) + max(map(len, engines))))
    for row, (engine, load, _) in enumerate(cells):
        design[row, engine] = design[row, len(engines) + load] = 1.0
    values = np.array([value for *_, value in cells])
    fitted, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    freedom = len(cells) - int(rank)
    if freedom < 1:
        return inf
    residual = values - design @ fitted
    variance = float(residual @ residual) / freedom
    return float(stdtrit(freedom, 1.0 - risk / 2.0)) * sqrt(2.0 * variance / loads)


def _timed_in(latencies: Mapping[int, Latency], batches: Sequence[int]) -> list[tuple[str, str]]:
    """Return job and device of each time; equal for engines timed in turns."""
    return [(latencies[batch].job, latencies[batch].device) for batch in batches]


def _per_row(latencies: Mapping[int, Latency], batches: Sequence[int]) -> float:
    return fmean(latencies[batch].p50_us / batch for batch in batches)


def _loads(latencies: Mapping[int, Latency], batches: Sequence[int]) -> list[float]:
    """Return the logarithm of the mean time per row of each load; empty where batch sizes differ in loads."""
    loads = {batch: latencies[batch].least_us or latencies[batch].loads_us for batch in batches}
    parts = [[us / batch for us in loads[batch]] for batch in batches]
    if len({len(each) for each in parts}) != 1:
        return []
    return [log(fmean(same)) for same in zip(*parts, strict=True)]
