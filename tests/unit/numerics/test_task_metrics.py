"""Metrics against mpmath, brute force, DeLong and the bootstrap; sums and parts of a loss change."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from scipy.stats import mannwhitneyu

from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.errors import InternalError
from loka_onnx.numerics.column_sums import ROWS_HELD, ColumnSums
from loka_onnx.numerics.loss_change import SERIES_BELOW, kl_rows, labelled_rows, loss_change
from loka_onnx.numerics.task_metrics import (
    auc,
    auc_difference,
    auc_placements,
    base_rate_entropy,
    entropy_rows,
    log_loss_rows,
    logits_from_probabilities,
    normalized_entropy,
    normalized_squared_error,
    prediction_ratio,
    probabilities_from_logits,
    squared_error_rows,
    weighted_mean,
)

RNG = np.random.default_rng(3)


def brute_auc(scores, labels, weights):
    pairs = [
        (w1 * y1 * w2 * (1 - y2), 1.0 if s1 > s2 else 0.5 if s1 == s2 else 0.0)
        for s1, y1, w1 in zip(scores, labels, weights, strict=True)
        for s2, y2, w2 in zip(scores, labels, weights, strict=True)
    ]
    return sum(w * v for w, v in pairs) / sum(w for w, _ in pairs)


@pytest.mark.parametrize("z", [-1000.0, -40.0, -3.0, 0.0, 1e-9, 5.0, 40.0, 1000.0])
@pytest.mark.parametrize("y", [0.0, 0.25, 1.0])
def test_log_loss_is_precise_everywhere(z, y):
    with mpmath.workdps(600):
        p = 1 / (1 + mpmath.exp(-mpmath.mpf(z)))
        expected = float(-(y * mpmath.log(p) + (1 - y) * mpmath.log1p(-p)))
    assert log_loss_rows(np.array([z]), np.array([y]))[0] == pytest.approx(expected, rel=1e-14, abs=0)


@pytest.mark.parametrize("z", [-700.0, -40.0, -3.0, 0.0, 1e-9, 5.0, 40.0, 700.0])
def test_entropy_is_precise_everywhere(z):
    with mpmath.workdps(600):
        p = 1 / (1 + mpmath.exp(-mpmath.mpf(z)))
        expected = float(-p * mpmath.log(p) - (1 - p) * mpmath.log1p(-p))
    assert entropy_rows(np.array([z]))[0] == pytest.approx(expected, rel=1e-14, abs=0)


def test_probabilities_and_logits_invert_each_other_in_float64():
    z = np.linspace(-10, 10, 41)
    np.testing.assert_allclose(logits_from_probabilities(probabilities_from_logits(z), 1e-7), z, rtol=1e-11)
    ends = logits_from_probabilities(np.array([0.0, 1.0], np.float32), 1e-7)
    np.testing.assert_allclose(ends, [np.log(1e-7 / (1 - 1e-7)), -np.log(1e-7 / (1 - 1e-7))], rtol=1e-9)
    z = np.array([30.0], np.float32)
    assert log_loss_rows(z, np.array([True]))[0] == pytest.approx(np.exp(-30.0), rel=1e-12)


@pytest.mark.parametrize("clip", [0.0, 0.5, -1.0])
def test_a_clip_outside_the_half_unit_is_refused(clip):
    with pytest.raises(InternalError, match="a probability clip lies between 0 and one half"):
        logits_from_probabilities(np.array([0.5]), clip)


def test_normalized_entropy_of_the_base_rate_is_one_and_weights_repeat_rows():
    y = np.array([1.0, 0, 0, 1, 0])
    w = np.array([3.0, 1, 2, 1, 1])
    rate = np.average(y, weights=w)
    constant = np.full(5, np.log(rate / (1 - rate)))
    assert normalized_entropy(constant, y, w) == pytest.approx(1.0, rel=1e-14)
    z = RNG.normal(size=5)
    n = w.astype(int)
    repeated = np.repeat(z, n), np.repeat(y, n)
    assert normalized_entropy(z, y, w) == pytest.approx(normalized_entropy(*repeated), rel=1e-14)
    assert auc(z, y, w) == pytest.approx(auc(*repeated), rel=1e-14)
    p = probabilities_from_logits(z)
    assert prediction_ratio(p, y, w) == pytest.approx(
        prediction_ratio(np.repeat(p, n), repeated[1]), rel=1e-14
    )


def test_a_single_class_leaves_nothing_to_compare_and_regression_has_its_metrics():
    y = np.ones(4)
    assert auc(np.arange(4.0), y) is None
    assert base_rate_entropy(y) == 0.0
    assert np.isnan(normalized_entropy(np.arange(4.0), y))
    assert np.isnan(prediction_ratio(np.ones(4), 0 * y))
    assert np.isnan(normalized_squared_error(np.arange(4.0), y))
    # The other class is there, but weighs nothing.
    assert auc(np.arange(4.0), np.array([1.0, 0, 1, 1]), np.array([1.0, 0, 1, 1])) is None
    y, f = np.array([1.0, 2, 4]), np.array([1.5, 2, 2])
    assert squared_error_rows(f, y).tolist() == [0.25, 0.0, 4.0]
    assert weighted_mean(squared_error_rows(f, y)) == pytest.approx(4.25 / 3)
    assert normalized_squared_error(f, y) == pytest.approx(4.25 / 3 / np.var(y))
    scores = np.arange(5.0)
    assert auc_difference(scores, -scores, np.zeros(5)) is None
    one = auc_difference(scores, -scores, np.array([0.0, 0, 0, 0, 1]))
    assert (one.value, one.upper) == (-1.0, math.inf)


@given(
    rows=st.lists(
        st.tuples(st.integers(-4, 4), st.sampled_from([0.0, 1.0, 0.3]), st.sampled_from([0.0, 1.0, 2.5])),
        min_size=1,
        max_size=25,
    )
)
@settings(max_examples=80, deadline=None)
def test_auc_is_the_pair_count(rows):
    scores, labels, weights = (np.array(c, float) for c in zip(*rows, strict=True))
    if (weights * labels).sum() == 0 or (weights * (1 - labels)).sum() == 0:
        assert auc(scores, labels, weights) is None
    else:
        assert auc(scores, labels, weights) == pytest.approx(brute_auc(scores, labels, weights), rel=1e-12)


def test_auc_is_mann_whitney():
    scores = RNG.integers(0, 50, 2000).astype(np.float32)
    y = RNG.random(2000) < 0.1 + scores / 100
    u = mannwhitneyu(scores[y], scores[~y]).statistic
    assert auc(scores, y) == pytest.approx(u / (y.sum() * (~y).sum()), rel=1e-13)


def brute_delong(reference, candidate, labels):
    """ΔAUC and its standard error by O(m·n) kernels and sample covariances, DeLong 1988."""
    positive, negative = labels == 1, labels == 0
    v10, v01, areas = [], [], []
    for scores in (reference, candidate):
        x, y = scores[positive][:, None], scores[negative][None, :]
        kernel = (x > y) + 0.5 * (x == y)
        areas.append(kernel.mean())
        v10.append(kernel.mean(axis=1))
        v01.append(kernel.mean(axis=0))
    covariance = np.cov(v10) / positive.sum() + np.cov(v01) / negative.sum()
    contrast = np.array([-1.0, 1.0])
    return areas[1] - areas[0], math.sqrt(contrast @ covariance @ contrast)


def sample(rng, rows, noise=0.5):
    z = rng.normal(size=rows)
    y = (rng.random(rows) < 1 / (1 + np.exp(-z))).astype(float)
    return z, z + noise * rng.normal(size=rows), y


@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_is_delong(decimals):
    reference, candidate, y = sample(np.random.default_rng(12), 83)
    reference, candidate = reference.round(decimals), candidate.round(decimals)
    change, error = brute_delong(reference, candidate, y)
    got = auc_difference(reference, candidate, y)
    quantile = stats.t.ppf(0.975, min(y.sum(), 83 - y.sum()) - 1)
    assert (got.value, got.upper - got.value) == pytest.approx((change, quantile * error), rel=1e-10)
    assert got.rows == 83


def test_agrees_with_the_bootstrap_over_rows_and_over_groups():
    """600 resamples give the standard error to 3 %; 10 % is three of that."""
    rng = np.random.default_rng(13)
    reference, candidate, y = sample(rng, 900, noise=0.8)
    groups = np.arange(900) // 3
    # The three rows of a group are made alike, so that grouping matters.
    candidate = reference + np.repeat((candidate - reference)[::3], 3)
    y = np.repeat(y[::3], 3)
    for ids, spread_rows in ((None, np.arange(900)[:, None]), (groups, np.arange(900).reshape(300, 3))):
        draws = []
        for _ in range(600):
            rows = spread_rows[rng.integers(0, len(spread_rows), len(spread_rows))].ravel()
            before = auc_placements(reference[rows], y[rows])
            after = auc_placements(candidate[rows], y[rows])
            draws.append(after.auc - before.auc)
        got = auc_difference(reference, candidate, y, groups=ids)
        assert (got.upper - got.lower) / 2 / 1.97 == pytest.approx(np.std(draws), rel=0.1)


def test_weights_scale_out_and_equal_models_differ_by_nothing():
    reference, candidate, y = sample(np.random.default_rng(14), 200)
    plain = auc_difference(reference, candidate, y)
    same = auc_difference(reference, candidate, y, np.full(200, 7.0))
    assert (same.value, same.upper) == pytest.approx((plain.value, plain.upper), rel=1e-10)
    half = auc_difference(reference, candidate, y, np.r_[np.ones(100), np.zeros(100)])
    first = auc_difference(reference[:100], candidate[:100], y[:100])
    assert (half.value, half.upper) == pytest.approx((first.value, first.upper), rel=1e-10)
    reference, _, y = sample(np.random.default_rng(15), 50)
    same = auc_difference(reference, 2 * reference + 1, y)
    assert (same.value, same.lower, same.upper) == (0.0, 0.0, 0.0)


# The largest error seen on 20,000 random pairs was 6.1e-14, at |δ| just below SERIES_BELOW.
KL_RELATIVE = 3e-13

LOGIT = st.floats(-40, 40)
DELTA = st.floats(-30, 30) | st.floats(-0.02, 0.02) | st.floats(-1e-8, 1e-8)


def exact_kl(z: float, z_prime: float) -> mpmath.mpf:
    def softplus(v):
        return mpmath.log1p(mpmath.exp(v))

    z, z_prime = mpmath.mpf(z), mpmath.mpf(z_prime)
    p = 1 / (1 + mpmath.exp(-z))
    return p * (softplus(-z_prime) - softplus(-z)) + (1 - p) * (softplus(z_prime) - softplus(z))


@given(z=LOGIT, delta=DELTA)
@example(z=3.0, delta=0.0)
@example(z=0.0, delta=1e-5)
@example(z=8.0, delta=1e-9)
@example(z=39.0, delta=1e-12)
@example(z=2.0, delta=SERIES_BELOW)
@example(z=-2.0, delta=1.0)
@settings(max_examples=200, deadline=None)
def test_kl_keeps_its_relative_precision(z, delta):
    z_prime = z + delta
    with mpmath.workdps(100):
        expected = float(exact_kl(z, z_prime))
    got = kl_rows(np.array([z]), np.array([z_prime]))[0]
    assert got == pytest.approx(expected, rel=KL_RELATIVE, abs=1e-60)


@pytest.mark.parametrize(
    ("z", "z_prime", "expected"),
    [(-800.0, 800.0, 800.0), (800.0, -800.0, 800.0), (0.0, 2000.0, 1000.0 - np.log(2)), (900.0, 900.5, 0.0)],
)
def test_extreme_logits_do_not_overflow(z, z_prime, expected):
    assert kl_rows(np.array([z]), np.array([z_prime]))[0] == pytest.approx(expected, rel=1e-14)


@given(z=LOGIT, delta=st.floats(-30, 30), y=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_the_parts_add_up_to_the_loss_change(z, delta, y):
    a, b, label = np.array([z]), np.array([z + delta]), np.array([y])
    change = loss_change(OutputKind.LOGIT, a, b, label)
    direct = log_loss_rows(b, label) - log_loss_rows(a, label)
    # The direct difference of two losses of up to 70 nats is itself rounded.
    assert change.total[0] == pytest.approx(direct[0], abs=1e-13)
    assert change.kl[0] >= 0.0


def test_residuals_and_differences_of_fp32_are_kept():
    got = labelled_rows(np.array([50.0, -50.0]), np.array([51.0, -49.0]), np.array([1.0, 0.0]))
    np.testing.assert_allclose(got, [-np.exp(-50.0), np.exp(-50.0)], rtol=1e-12)
    z = np.array([10.0], np.float32)
    z_prime = np.nextafter(z, np.float32(11))
    delta = float(z_prime[0]) - 10.0
    p = 1 / (1 + np.exp(-10.0))
    assert kl_rows(z, z_prime)[0] == pytest.approx(0.5 * p * (1 - p) * delta**2, rel=1e-5)


@given(f=st.floats(-100, 100), delta=st.floats(-10, 10), y=st.floats(-100, 100))
@settings(max_examples=100, deadline=None)
def test_squared_error_parts_add_up(f, delta, y):
    a, b, label = np.array([f]), np.array([f + delta]), np.array([y])
    change = loss_change(OutputKind.REGRESSION, a, b, label)
    direct = squared_error_rows(b, label) - squared_error_rows(a, label)
    assert change.total[0] == pytest.approx(direct[0], abs=1e-10)
    # A power of a scalar and a square of an array may differ in the last bit.
    assert change.kl[0] == pytest.approx((b[0] - a[0]) ** 2, rel=1e-15, abs=0)


wild = st.one_of(st.just(0.0), st.floats(-1e300, 1e300), st.floats(-1.0, 1.0), st.just(5e-324))


def sums_of(table: np.ndarray) -> tuple[ExactSum, ...]:
    sums = ColumnSums()
    for row in table:
        sums.add(row)
    return sums.sums()


def expected(table: np.ndarray) -> tuple[ExactSum, ...]:
    return tuple(ExactSum.of(column) for column in table.T)


@given(arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(0, 5)), elements=wild))
def test_every_column_is_summed_exactly(table):
    assert sums_of(table) == expected(table)


def test_more_rows_than_are_held_and_all_magnitudes():
    """Sixty decades within a column: heads and rests of three rounds and more."""
    random = np.random.default_rng(0)
    shape = (2 * ROWS_HELD + 17, 12)
    table = random.standard_normal(shape) * 10.0 ** random.integers(-30, 30, shape)
    table[random.random(shape) < 0.3] = 0.0
    table[:, 3] = 0.0
    table[:, 4] = [(-1.0) ** row for row in range(len(table))]
    assert sums_of(table) == expected(table)
    assert sums_of(table)[3] == ExactSum() and sums_of(table)[4] == ExactSum.of([1.0])


def test_sums_can_be_read_between_rows_that_their_owner_uses_again():
    table = np.random.default_rng(1).standard_normal((9, 3))
    sums = ColumnSums()
    for number, row in enumerate(table, 1):
        sums.add(row)
        assert sums.sums() == expected(table[:number])
    sums, row = ColumnSums(), np.ones(1)
    sums.add(row)
    row[0] = 5.0
    assert sums.sums()[0].value == 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.7e308])
def test_what_has_no_exact_sum_is_refused(value):
    sums = ColumnSums()
    sums.add(np.array([1.0, value]))
    sums.add(np.array([1.0, value]))
    with pytest.raises(InternalError, match="exact sums take finite numbers"):
        sums.sums()
