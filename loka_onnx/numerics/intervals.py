"""Confidence intervals of means, ratios and medians over rows.

Every estimate but medians is linearized: estimate − truth ≈ Σ_i ψ_i with one influence ψ_i per row. Rows that
belong together (all of one user, of one request) are summed to one influence Ψ_g per group, and

    variance = G / (G − 1) · Σ_g Ψ_g²,   half width = t_{G−1} · √variance,

with G the groups, or the rows where nothing groups them. For a plain mean, ψ_i = (x_i − m)/n, and the
variance is the textbook s²/n with ddof = 1. For a ratio R = Σwa/Σwb, ψ_i = w_i·(a_i − R·b_i)/Σwb: the delta
method, which includes the denominator's own error. For one group the interval is infinite.

**Few rows that carry a sum.** Student's t needs a variance. KL is never negative, and few rows may carry it:
the sample then misses values beyond its largest, and the upper end is too low far too often. So (`Ends`)

* for a sum of nonnegative values the upper end moves out by the largest Ψ_g. The next unit is beyond all seen
  with probability 1/(G + 1), and a tail that falls faster than x⁻² has about that much beyond its largest;
* where the tail is heavy (`Tail`; of a loss change, where its influences are skewed), empirical Bernstein's
  bound is used, for values clipped at the largest: half width √(2·variance·ln(2/α)) + 7/3·ln(2/α)·G/(G −
  1)·max|Ψ_g| with α the risk of one end.

Both ignore events too rare for the sample: nothing is known of 1 row in n/3.
`benchmarks/records/interval_tails.json` records how often the ends hold.

Sources: Binder, "On the Variances of Asymptotically Normal Estimators from Complex Surveys" (1983); the ratio
as in Deng et al., "Applying the Delta Method in Metric Analytics" (KDD 2018); Maurer and Pontil, "Empirical
Bernstein Bounds and Sample Variance Penalization" (COLT 2009), theorem 4; the tail index is Hill's (Annals of
Statistics, 1975): below 2 there is no variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, ndtri, stdtrit

from loka_onnx.core.intervals import Interval
from loka_onnx.errors import InternalError

CONFIDENCE = 0.95

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.float64]


class Ends(Enum):
    """Rules for the ends of an interval."""

    STUDENT = "student"
    ONE_MORE = "one more"
    """For nonnegative values: the upper end is further out by the largest unit."""
    BERNSTEIN = "bernstein"
    """Empirical Bernstein's, for heavy tails."""
    BY_SKEWNESS = "by skewness"
    """Student's, or empirical Bernstein's where the influences are skewed by more than `MOST_SKEWNESS`."""


LEAST_TAIL_INDEX = 2.0
MOST_SKEWNESS = 0.3
MOST_TOP_SHARE = 0.3
"""A tail is heavy with an index below the first, or more of one of the others: held against simulation."""
LEAST_TAIL_ROWS = 10
"""Rows of the largest values that a tail index takes."""


@dataclass(frozen=True)
class Tail:
    """Part of a sum that few rows carry. `top_share` is the share that the hundredth of the rows with the
    largest values holds; `index` Hill's tail index over these rows, at least 10 (infinite where they are
    alike or the sum is 0, 0 where fewer rows are nonzero); `skewness` as in `Spread`.
    """

    top_share: float
    index: float
    skewness: float

    @property
    def is_heavy(self) -> bool:
        """True if Student's t cannot be trusted."""
        is_skewed = self.skewness > MOST_SKEWNESS or self.top_share > MOST_TOP_SHARE
        return self.index < LEAST_TAIL_INDEX or is_skewed


def tail_of(values: Array, denominators: Array, groups: Array | None = None) -> Tail:
    """Return the tail of the numerator of a ratio of sums, of (rows,) weighted, nonnegative values. `groups`
    are ids of rows that belong together. Raises as `spread_of`; ZeroDivisionError if denominators sum to 0.
    """
    _check_rows(values, denominators, groups)
    total = float(values.sum())
    if total == 0.0:
        return Tail(0.0, math.inf, 0.0)
    count = max(LEAST_TAIL_ROWS, values.size // 100)
    top = np.sort(np.partition(values, -min(count + 1, values.size))[-min(count + 1, values.size) :])
    excess = float(np.log(top[1:] / top[0]).mean()) if top[0] > 0.0 and top.size > 1 else math.inf
    share = float(top[-max(1, values.size // 100) :].sum()) / total
    influence = values - total / float(denominators.sum()) * denominators
    skewness = spread_of(influence, groups).skewness
    return Tail(share, math.inf if excess == 0.0 else 1.0 / excess, skewness)


@dataclass(frozen=True)
class Spread:
    """Standard error of an estimate in its unit; infinite for fewer than two units (groups, or rows).
    `largest` and `farthest` are the largest influence of a unit and the largest magnitude of one; `skewness`
    is Σ Ψ³ / (Σ Ψ²)^1.5 over units, the skewness of a unit over √G.
    """

    standard_error: float
    units: int
    largest: float = 0.0
    farthest: float = 0.0
    skewness: float = 0.0


def interval_around(
    value: float, spread: Spread, rows: int, confidence: float = CONFIDENCE, ends: Ends = Ends.STUDENT
) -> Interval:
    """Return the two-sided interval of a point estimate over `rows` rows; infinite for fewer than two units.
    Raises InternalError if the confidence is not between 0 and 1.
    """
    if not 0.0 < confidence < 1.0:
        raise InternalError("a confidence lies between 0 and 1", evidence=f"it is {confidence:g}")
    if spread.units < 2 or not math.isfinite(spread.standard_error):
        return Interval(value, -math.inf, math.inf, confidence, rows)
    is_skewed = ends is Ends.BY_SKEWNESS and spread.skewness > MOST_SKEWNESS
    if ends is Ends.BERNSTEIN or is_skewed:
        log = math.log(4.0 / (1.0 - confidence))
        half = math.sqrt(2.0 * log) * spread.standard_error
        half += 7.0 / 3.0 * log * spread.units / (spread.units - 1) * spread.farthest
        return Interval(value, value - half, value + half, confidence, rows)
    half = float(stdtrit(spread.units - 1, 0.5 + confidence / 2.0)) * spread.standard_error
    beyond = max(spread.largest, 0.0) if ends is Ends.ONE_MORE else 0.0
    return Interval(value, value - half, value + half + beyond, confidence, rows)


def spread_of(influence: Array, groups: Array | None = None) -> Spread:
    """Return the cluster-robust standard error from the (rows,) influence ψ of each row. `groups` are (rows,)
    ids of rows that belong together; None for independent rows. Raises InternalError if the arrays are of
    different lengths or empty.
    """
    _check_rows(influence, groups)
    sums = _unit_sums(influence, groups)
    units, largest, farthest = int(sums.size), float(sums.max()), float(np.abs(sums).max())
    if units < 2:
        return Spread(math.inf, units, largest, farthest)
    squares = float(sums @ sums)
    error = math.sqrt(squares * units / (units - 1))
    skewness = float((sums**3).sum()) / squares**1.5 if squares > 0.0 else 0.0
    return Spread(error, units, largest, farthest, skewness)


def _unit_sums(values: Array, groups: Array | None) -> Rows:
    """Return (units,) sums over the rows of each unit."""
    sums = values.astype(np.float64)
    if groups is None:
        return sums
    if groups.dtype.kind not in "iu" or groups.min() < 0 or groups.max() > 2 * groups.size:
        groups = np.unique(groups, return_inverse=True)[1]
    return np.bincount(groups, weights=sums)[np.bincount(groups) > 0].astype(np.float64)


def ratio_interval(
    numerators: Array,
    denominators: Array,
    weights: Array | None = None,
    groups: Array | None = None,
    confidence: float = CONFIDENCE,
    ends: Ends = Ends.STUDENT,
) -> Interval:
    """Return the delta-method interval of Σwa / Σwb, whose denominator is estimated from the same (rows,).
    Weights are nonnegative, None for equal ones; `groups` are ids of rows that belong together, None for
    independent rows. Raises InternalError if lengths differ, there is no row, or the denominators sum to 0.
    """
    _check_rows(numerators, denominators, weights, groups)
    a, b = numerators.astype(np.float64), denominators.astype(np.float64)
    if weights is not None:
        w = weights.astype(np.float64)
        a, b = a * w, b * w
    total = float(b.sum())
    if total == 0.0:
        raise InternalError("the denominator of a ratio sums to 0", evidence=f"over {a.size} rows")
    ratio = float(a.sum()) / total
    return interval_around(ratio, spread_of((a - ratio * b) / total, groups), a.size, confidence, ends)


def mean_interval(
    values: Array, weights: Array | None = None, groups: Array | None = None, confidence: float = CONFIDENCE
) -> Interval:
    """Return the interval of a (weighted) mean; arguments and errors are those of `ratio_interval`."""
    # Centring first keeps a large common offset out of the sums.
    x = values.astype(np.float64)
    centre = float(x.mean()) if x.size else 0.0
    around = ratio_interval(x - centre, np.ones(x.shape), weights, groups, confidence)
    return Interval(
        around.value + centre, around.lower + centre, around.upper + centre, confidence, around.rows
    )


def required_rows(estimate: float, sd: float, budget: float, confidence: float = CONFIDENCE) -> int | None:
    """Return the smallest n with z·sd/√n ≤ |budget − estimate|: rows that decide if the estimate stays. `sd`
    is the standard deviation of one row's contribution, in the unit of the estimate: standard error · √rows.
    None where no number is enough (the estimate is on the budget) or the spread is unknown.
    """
    gap = abs(budget - estimate)
    if gap == 0.0 or not math.isfinite(gap) or not math.isfinite(sd):
        return None
    needed = (float(ndtri(0.5 + confidence / 2.0)) * sd / gap) ** 2
    return max(math.ceil(needed), 1) if math.isfinite(needed) else None


def _check_rows(first: Array, *others: Array | None) -> None:
    shapes = [first.shape, *(other.shape for other in others if other is not None)]
    if first.ndim != 1 or first.size == 0 or len(set(shapes)) != 1:
        raise InternalError(
            "an interval needs columns of equally many rows, at least one", evidence=str(shapes)
        )


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Return the median and two of the values that enclose the true one, with the exact coverage.

    The number of values below the true median is binomial with p = ½, so the r-th smallest and the r-th
    largest of n enclose it with probability 1 − 2·P(B(n, ½) ≤ r − 1) (David and Nagaraja, *Order Statistics*,
    3rd edition, section 7.1); r is the largest that reaches the confidence. None where there are too few
    values (fewer than 6 at 0.95). Raises InternalError if there is none.
    """
    if not values:
        raise InternalError("there is no value to take the median of")
    count, ordered = len(values), sorted(values)
    rank = 0
    while rank < count // 2 and 1.0 - 2.0 * float(bdtr(rank, count, 0.5)) >= confidence:
        rank += 1
    if rank == 0:
        return None
    coverage = 1.0 - 2.0 * float(bdtr(rank - 1, count, 0.5))
    return Interval(median(ordered), ordered[rank - 1], ordered[count - rank], coverage, count)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and upper quartile, interpolated between values; InternalError if there is none."""
    if not values:
        raise InternalError("there is no value to take quartiles of")
    low, high = np.quantile(values, [0.25, 0.75])
    return float(low), float(high)


def is_tie(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """True if the quartiles (lower, upper) of two sets overlap: the ratio of their medians is then a tie."""
    return one[0] <= other[1] and other[0] <= one[1]
