"""Intervals of means and tests of two samples, against SciPy and by their level."""

import dataclasses
import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.statistics import BatchSpread, BatchSums, MagnitudeHistogram
from loka_onnx.errors import InternalError
from loka_onnx.numerics.histograms import count_magnitudes, histogram_of
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
from loka_onnx.numerics.two_sample import (
    BatchSample,
    compare_means,
    exceedance_probability,
    holm,
    stability_index,
    variance_ratio,
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
    # Weighted rows of groups: the sums of the groups are the units.
    w, groups = rng.integers(1, 3, 400), rng.integers(0, 60, 400)
    ratio = (w * a).sum() / (w * b).sum()
    sums = np.bincount(groups, w * (a - ratio * b)) / (w * b).sum()
    half = stats.t.ppf(0.975, 59) * math.sqrt(60 / 59 * (sums**2).sum())
    got = ratio_interval(a, b, w, groups)
    assert (got.value, got.upper - got.value) == pytest.approx((ratio, half), rel=1e-10)


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


@pytest.mark.parametrize("count", [6, 7, 8, 10, 15, 40])
def test_ranks_are_the_narrowest_that_hold(count):
    values = [float(v) for v in range(1, count + 1)]
    found = median_interval(values)
    assert found is not None
    rank = int(found.lower)
    # The ends are the r-th smallest and the r-th largest of 1…n, so that r can be read from them.
    assert (found.lower, found.upper) == (rank, count + 1 - rank)
    assert found.confidence == pytest.approx(1 - 2 * stats.binom.cdf(rank - 1, count, 0.5))
    assert found.confidence >= 0.95 > 1 - 2 * stats.binom.cdf(rank, count, 0.5)
    assert (found.value, found.rows) == (np.median(values), count)
    # Five are too few for 95 %.
    assert median_interval(values[:5]) is None
    assert median_interval(values[:5], confidence=0.9) is not None


Draw = Callable[[np.random.Generator, int], np.ndarray]


def sample(values: np.ndarray) -> BatchSample:
    sums = BatchSums(ExactSum.of(values), ExactSum.of(np.square(values)))
    return BatchSample.of(BatchSpread(len(values), 512, {"x": sums}), "x")


def test_a_sample_is_mean_and_variance_of_the_batches_and_equal_means_are_equal():
    values = np.random.default_rng(0).normal(3.0, 2.0, 40)
    found = sample(values)
    assert found.batches == 40
    assert found.mean == pytest.approx(values.mean(), rel=1e-14)
    assert found.variance == pytest.approx(values.var(ddof=1), rel=1e-12)
    assert BatchSample.of(BatchSpread(9, 512, {}), "log2.3") == BatchSample(9, 0.0, 0.0)
    with pytest.raises(InternalError, match="'x' has 1"):
        BatchSample.of(BatchSpread(1, 512, {}), "x")
    constant = sample(np.full(10, 0.25))
    assert compare_means(constant, constant).p_value == 1.0
    assert compare_means(constant, sample(np.full(10, 0.5))).p_value == 0.0
    a, b = sample(np.full(10, 1.0)), sample(np.full(10, 1.0 + 1e-7))
    assert compare_means(a, b).p_value == 0.0
    assert compare_means(a, b, resolution=1e-6).p_value > 0.9
    assert compare_means(a, sample(np.full(10, 1.1)), resolution=1e-6).p_value < 1e-50


@pytest.mark.parametrize(("sizes", "spreads"), [((9, 30), (1, 5)), ((30, 9), (1, 5)), ((20, 20), (2, 2))])
def test_the_larger_p_value_of_welch_and_student(sizes, spreads):
    random = np.random.default_rng(3)
    a, b = (random.normal(i, sd, n) for i, (n, sd) in enumerate(zip(sizes, spreads, strict=True)))
    found = compare_means(sample(a), sample(b))
    welch, student = stats.ttest_ind(b, a, equal_var=False), stats.ttest_ind(b, a)
    assert found.p_value == pytest.approx(max(welch.pvalue, student.pvalue), rel=1e-9)
    assert found.difference == pytest.approx(b.mean() - a.mean())
    errors = [found.difference / test.statistic for test in (welch, student)]
    assert found.standard_error == pytest.approx(max(errors))


def test_variances_are_compared_in_comparable_units():
    pairs = [
        (BatchSample(9, 0.0, 2.0), BatchSample(9, 0.0, 10.0)),
        (BatchSample(9, 0.0, 400.0), BatchSample(9, 0.0, 1200.0)),
        (BatchSample(9, 0.0, 5.0), BatchSample(9, 0.0, 7.0)),
    ]
    assert variance_ratio(pairs, [1.0, 10.0, 0.0]) == pytest.approx((10 + 12) / (2 + 4))
    assert variance_ratio(pairs[:1], [0.0]) == 1.0
    assert variance_ratio([(BatchSample(9, 0.0, 0.0), BatchSample(9, 0.0, 1.0))], [1.0]) == 1.0
    a, b = BatchSample(24, 1.0, 2.0), BatchSample(16, 0.0, 0.0)
    found, wanted = compare_means(a, b, ratio=8.0), compare_means(a, BatchSample(16, 0.0, 16.0))
    assert found == wanted != compare_means(a, b)
    # The other way about, and where the set's own variance is the larger one.
    assert compare_means(b, a, ratio=1 / 8).p_value == found.p_value
    larger = BatchSample(16, 0.0, 40.0)
    assert compare_means(a, larger, ratio=8.0) == compare_means(BatchSample(24, 1.0, 5.0), larger)


UNCHANGED: dict[str, Draw] = {
    "normal": lambda random, n: random.normal(size=n),
    "skewed": lambda random, n: random.gamma(0.5, size=n),
    "rare": lambda random, n: random.poisson(0.1, n).astype(float),
    "in clusters": lambda random, n: random.poisson(0.1, n) * random.geometric(0.2, n).astype(float),
}


@pytest.mark.parametrize("sizes", [(1000, 8), (8, 1000), (120, 32)])
@pytest.mark.parametrize("kind", UNCHANGED)
def test_the_level_holds_without_any_change(kind, sizes):
    """At 1 % of single tests and far in the tail, where a family of a thousand tests looks."""
    random, rounds = np.random.default_rng(11), 2000
    pairs = ((_quick(UNCHANGED[kind](random, n)) for n in sizes) for _ in range(rounds))
    found = np.array([compare_means(*pair).p_value for pair in pairs])
    assert np.count_nonzero(found <= 0.01) <= stats.binom.ppf(0.999, rounds, 0.01)
    assert np.count_nonzero(found <= 1e-5) == 0


def _quick(values: np.ndarray) -> BatchSample:
    return BatchSample(len(values), float(values.mean()), float(values.var(ddof=1)))


@pytest.mark.parametrize(("live", "profile"), [(1, 1), (3, 5), (5, 3), (4, 4)])
def test_exceedance_is_the_share_of_rankings(live, profile):
    """By enumeration of which ranks the live batches take."""
    everywhere = range(live + profile)
    rankings = list(combinations(everywhere, live))
    for beyond in range(live + 1):
        # The `beyond` largest ranks are all live.
        wanted = set(everywhere[len(everywhere) - beyond :])
        share = sum(wanted <= set(ranks) for ranks in rankings) / len(rankings)
        assert exceedance_probability(beyond, live, profile) == pytest.approx(share)
    assert exceedance_probability(0, 100_000, 20) == 1.0
    assert exceedance_probability(5000, 5000, 5000) == 0.0


def test_holm_and_stability_index_by_hand():
    # m = 4: 4 × .005, 3 × .01, 2 × .03, 1 × .04, never falling.
    assert holm([0.04, 0.005, 0.03, 0.01]) == pytest.approx((0.06, 0.02, 0.06, 0.03))
    assert holm([0.6, 0.7]) == (1.0, 1.0)
    assert holm([]) == ()
    # Zeros, [1, 2) and [2, 4): 10, 50, 40 of 100 against 30, 50, 120 of 200.
    before = histogram_of(count_magnitudes(np.repeat([0.0, 1.5, -2.5], [10, 50, 40])))
    after = histogram_of(count_magnitudes(np.repeat([0.0, -1.1, 3.0], [30, 50, 120])))
    p = [10.5 / 101.5, 50.5 / 101.5, 40.5 / 101.5]
    q = [30.5 / 201.5, 50.5 / 201.5, 120.5 / 201.5]
    wanted = sum((b - a) * math.log(b / a) for a, b in zip(p, q, strict=True))
    assert stability_index(before, after) == pytest.approx(wanted, rel=1e-12)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20), st.floats(0.001, 0.2))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values, level):
    rejected, left = set[int](), sorted(range(len(p_values)), key=p_values.__getitem__)
    while left and p_values[left[0]] * len(left) <= level:
        rejected.add(left.pop(0))
    adjusted = holm(p_values)
    assert {i for i, p in enumerate(adjusted) if p <= level} == rejected


def test_stability_index_of_one_distribution_is_small_and_of_a_shifted_one_large():
    random = np.random.default_rng(1)
    values = [random.normal(0.0, sd, 20_000) for sd in (1.0, 1.0, 2.0)]
    first, same, doubled = (histogram_of(count_magnitudes(x)) for x in values)
    assert stability_index(first, same) < 0.01
    assert stability_index(first, doubled) > 0.25
    # An octave that only one of them has is finite, and an empty histogram says nothing.
    far = histogram_of(count_magnitudes(np.full(1000, 2.0**60)))
    assert 1.0 < stability_index(first, far) < math.inf
    assert stability_index(first, MagnitudeHistogram()) == 0.0
