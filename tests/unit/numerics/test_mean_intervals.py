"""Intervals against textbook formulas, simulation of their coverage."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from loka_onnx.errors import InternalError
from loka_onnx.numerics.intervals import (
    Ends,
    Spread,
    interval_around,
    mean_interval,
    median_interval,
    ratio_interval,
    required_rows,
    spread_of,
    tail_of,
)


def test_mean_interval_is_the_textbook_one_at_any_offset():
    x = np.random.default_rng(4).normal(3, 2, 50)
    got = mean_interval(x)
    low, high = stats.t.interval(0.95, 49, x.mean(), x.std(ddof=1) / math.sqrt(50))
    assert (got.value, got.lower, got.upper) == pytest.approx((x.mean(), low, high), rel=1e-12)
    assert (got.rows, got.confidence) == (50, 0.95)
    assert mean_interval(x, confidence=0.5).upper < got.upper
    x = np.random.default_rng(5).normal(size=1000)
    plain, offset = mean_interval(x), mean_interval(x + 1e9)
    assert offset.upper - offset.lower == pytest.approx(plain.upper - plain.lower, rel=1e-6)


def test_weights_and_groups_that_change_nothing():
    x = np.random.default_rng(6).normal(size=40)
    plain = mean_interval(x)
    equal = mean_interval(x, np.full(40, 2.5))
    assert (equal.value, equal.lower) == pytest.approx((plain.value, plain.lower), rel=1e-10)
    w = np.r_[np.ones(20), np.zeros(20)]
    assert mean_interval(x, w).value == pytest.approx(x[:20].mean())
    x = np.random.default_rng(7).normal(size=30)
    names = np.array([f"user {i}" for i in range(30)])
    assert mean_interval(x, groups=names).upper == pytest.approx(mean_interval(x).upper, rel=1e-12)
    copied = mean_interval(np.repeat(x, 5), groups=np.repeat(names, 5))
    assert (copied.lower, copied.upper) == pytest.approx((mean_interval(x).lower, mean_interval(x).upper))
    assert copied.rows == 150


def test_ratio_interval_matches_the_delta_method_written_out():
    rng = np.random.default_rng(8)
    b = rng.gamma(2.0, size=400)
    a = 0.3 * b + rng.normal(scale=0.2, size=400)
    ratio = a.mean() / b.mean()
    cov = np.cov(a, b)
    variance = (cov[0, 0] - 2 * ratio * cov[0, 1] + ratio**2 * cov[1, 1]) / b.mean() ** 2 / 400
    half = stats.t.ppf(0.975, 399) * math.sqrt(variance)
    got = ratio_interval(a, b)
    assert (got.value, got.upper - got.value) == pytest.approx((ratio, half), rel=1e-10)


def test_coverage_of_clustered_weighted_ratios():
    """At 60 clusters and 600 trials the nominal 95 % has a standard error of 0.9 %."""
    rng = np.random.default_rng(9)
    clusters, size, trials = 60, 5, 600
    groups = np.repeat(np.arange(clusters), size)
    covered = covered_ignoring_groups = 0
    for _ in range(trials):
        user = np.repeat(rng.normal(size=clusters), size)
        b = rng.uniform(0.5, 1.5, clusters * size)
        a = (0.2 + user) * b + 0.5 * rng.normal(size=b.size)
        w = rng.integers(1, 3, b.size)
        grouped, alone = ratio_interval(a, b, w, groups), ratio_interval(a, b, w)
        covered += grouped.lower <= 0.2 <= grouped.upper
        covered_ignoring_groups += alone.lower <= 0.2 <= alone.upper
    assert 0.92 <= covered / trials <= 0.975
    assert covered_ignoring_groups / trials < 0.85


def test_one_unit_says_nothing_about_the_spread_and_misuse_is_refused():
    one = mean_interval(np.array([3.0]))
    assert (one.value, one.lower, one.upper) == (3.0, -math.inf, math.inf)
    assert mean_interval(np.arange(4.0), groups=np.zeros(4)).upper == math.inf
    assert spread_of(np.arange(4.0), np.zeros(4)) == Spread(math.inf, 1, 6.0, 6.0)
    for misuse in (
        lambda: mean_interval(np.array([])),
        lambda: ratio_interval(np.ones(3), np.ones(2)),
        lambda: ratio_interval(np.ones(2), np.array([1.0, -1.0])),
        lambda: interval_around(0.0, Spread(1.0, 5), 5, 1.0),
        lambda: median_interval([]),
    ):
        with pytest.raises(InternalError):
            misuse()


def test_required_rows_brings_the_interval_to_the_budget():
    # The label-free figure of facts/accuracy-movielens.md: 80 % × logit RMSE .035 / √n against .005 %.
    assert required_rows(0.0, 0.80 * 0.035, 0.5e-4 * 1.959964) == pytest.approx(313_600, rel=1e-4)
    x = np.random.default_rng(10).normal(0.1, 1, 100)
    n = required_rows(x.mean(), x.std(ddof=1), 0.0)
    assert n is not None
    assert 1.959964 * x.std(ddof=1) / math.sqrt(n) <= abs(x.mean())
    assert 1.959963 * x.std(ddof=1) / math.sqrt(n - 1) > abs(x.mean())


@pytest.mark.parametrize(
    ("estimate", "sd"), [(0.1, 1.0), (0.0, math.inf), (math.nan, 1.0), (0.1 - 1e-16, 1e300)]
)
def test_no_number_of_rows(estimate, sd):
    assert required_rows(estimate, sd, 0.1) is None


@pytest.mark.parametrize("index", [1.2, 2.5, 6.0])
def test_the_tail_index_is_that_of_a_pareto_distribution(index):
    values = np.random.default_rng(0).pareto(index, 200_000) + 1.0
    found = tail_of(values, np.ones(values.size))
    assert found.index == pytest.approx(index, rel=4 / math.sqrt(2000))
    top = np.sort(values)[-2000:]
    assert found.top_share == pytest.approx(top.sum() / values.sum())
    assert found.skewness == pytest.approx(stats.skew(values) / math.sqrt(values.size), rel=1e-6)
    assert found.is_heavy == (index < 2 or found.skewness > 0.3)


def test_the_tail_does_not_depend_on_units_or_order_and_equal_values_have_none():
    found = tail_of(np.full(5000, 0.25), np.ones(5000))
    assert (found.index, found.is_heavy) == (math.inf, False)
    assert found.top_share == pytest.approx(0.01)
    random = np.random.default_rng(1)
    values, weights = random.pareto(3, 5000), random.uniform(1, 2, 5000)
    groups = random.integers(0, 300, 5000)
    found = tail_of(values, weights, groups)
    for scale in (1e-9, 1e9):
        again = tail_of(scale * values, weights, groups)
        assert dataclasses.astuple(again) == pytest.approx(dataclasses.astuple(found), rel=1e-9)
    order = random.permutation(5000)
    shuffled = tail_of(values[order], weights[order], -groups[order])
    assert dataclasses.astuple(shuffled) == pytest.approx(dataclasses.astuple(found), rel=1e-9)


@pytest.mark.parametrize("ends", list(Ends))
def test_ends_of_an_interval_are_never_narrower_than_student_s(ends):
    random = np.random.default_rng(2)
    for size in (2, 8, 100, 3000):
        values, base = random.exponential(size=size), random.uniform(0.5, 1.5, size)
        plain = ratio_interval(values, base)
        found = ratio_interval(values, base, ends=ends)
        assert found.value == plain.value and found.upper >= plain.upper
        assert found.lower <= plain.lower or ends is Ends.BERNSTEIN


# Medians ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [6, 7, 8, 10, 15, 40])
def test_ranks_are_the_narrowest_that_hold(count: int) -> None:
    values = [float(v) for v in range(1, count + 1)]
    found = median_interval(values)
    assert found is not None
    rank = int(found.lower)
    # The ends are the r-th smallest and the r-th largest of 1…n, so that r can be read from them.
    assert (found.lower, found.upper) == (rank, count + 1 - rank)
    assert found.confidence == pytest.approx(1 - 2 * stats.binom.cdf(rank - 1, count, 0.5))
    assert found.confidence >= 0.95 > 1 - 2 * stats.binom.cdf(rank, count, 0.5)
    assert (found.value, found.rows) == (np.median(values), count)


def test_medians_of_five_and_of_ten_far_from_normal() -> None:
    assert median_interval([1.0] * 5) is None
    assert median_interval([1.0] * 5, confidence=0.9) is not None
    draws = np.random.default_rng(3).exponential(size=(2000, 10))
    found = [median_interval(row.tolist()) for row in draws]
    inside = np.mean([i is not None and i.lower <= np.log(2) <= i.upper for i in found])
    # 2,000 draws of a coverage of 97.85 % have a standard error of .33 %.
    assert inside == pytest.approx(0.9785, abs=0.011)
