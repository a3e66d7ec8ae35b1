"""Intervals of a median, against the binomial distribution and against draws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from loka_onnx.errors import InternalError
from loka_onnx.numerics.intervals import median_interval


@pytest.mark.parametrize("count", [6, 7, 8, 10, 15, 40])
def test_ranks_are_the_narrowest_that_hold(count: int) -> None:
    values = [float(v) for v in range(1, count + 1)]
    found = median_interval(values)
    assert found is not None
    rank = int(found.lower)
    # The ends are the r-th smallest and the r-th largest of 1…n, so that r can be read from them.
    assert (found.lower, found.upper) == (rank, count + 1 - rank)
    assert found.confidence == pytest.approx(1 - 2 * binom.cdf(rank - 1, count, 0.5))
    assert found.confidence >= 0.95 > 1 - 2 * binom.cdf(rank, count, 0.5)
    assert (found.value, found.rows) == (np.median(values), count)


def test_five_values_have_no_interval_at_95_percent() -> None:
    assert median_interval([1.0] * 5) is None
    assert median_interval([1.0] * 5, confidence=0.9) is not None


def test_coverage_of_draws_that_are_far_from_normal() -> None:
    draws = np.random.default_rng(3).exponential(size=(2000, 10))
    found = [median_interval(row.tolist()) for row in draws]
    inside = np.mean([i is not None and i.lower <= np.log(2) <= i.upper for i in found])
    # 2,000 draws of a coverage of 97.85 % have a standard error of .33 %.
    assert inside == pytest.approx(0.9785, abs=0.011)


def test_no_value_is_a_bug() -> None:
    with pytest.raises(InternalError, match="there is no value to take the median of"):
        median_interval([])
