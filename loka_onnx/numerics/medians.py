"""Median of a few values with its interval, and ties of two medians."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
from scipy.special import bdtr

from loka_onnx.core.intervals import Interval
from loka_onnx.errors import InternalError


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Return the median and two of the values that enclose the true one, with the exact coverage.

    The number of values below the true median is binomial with p = ½, so the r-th smallest and the r-th
    largest of n enclose it with probability 1 − 2·P(B(n, ½) ≤ r − 1) (David and Nagaraja, *Order Statistics*,
    3rd edition, section 7.1). r is the largest for which that is at least the confidence. None where there
    are too few values (fewer than 6 at 0.95). Raises InternalError if there is no value.
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
    """Return the lower and upper quartile, interpolated between values.

    Raises InternalError if there is no value.
    """
    if not values:
        raise InternalError("there is no value to take quartiles of")
    low, high = np.quantile(values, [0.25, 0.75])
    return float(low), float(high)


def is_tie(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """True if the quartiles (lower, upper) of two sets overlap: the ratio of their medians is then a tie."""
    return one[0] <= other[1] and other[0] <= one[1]
