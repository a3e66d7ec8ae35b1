"""Task metrics against mpmath, brute force and closed forms."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from loka_onnx.errors import InternalError
from loka_onnx.numerics.task_metrics import (
    auc,
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


def test_float32_logits_are_computed_in_float64():
    z = np.array([30.0], np.float32)
    assert log_loss_rows(z, np.array([True]))[0] == pytest.approx(np.exp(-30.0), rel=1e-12)


def test_probabilities_and_logits_invert_each_other_and_clip():
    z = np.linspace(-10, 10, 41)
    np.testing.assert_allclose(logits_from_probabilities(probabilities_from_logits(z), 1e-7), z, rtol=1e-11)
    ends = logits_from_probabilities(np.array([0.0, 1.0], np.float32), 1e-7)
    np.testing.assert_allclose(ends, [np.log(1e-7 / (1 - 1e-7)), -np.log(1e-7 / (1 - 1e-7))], rtol=1e-9)


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


def test_a_single_class_leaves_nothing_to_compare():
    y = np.ones(4)
    assert auc(np.arange(4.0), y) is None
    assert base_rate_entropy(y) == 0.0
    assert np.isnan(normalized_entropy(np.arange(4.0), y))
    assert np.isnan(prediction_ratio(np.ones(4), 0 * y))
    assert np.isnan(normalized_squared_error(np.arange(4.0), y))
    # The other class is there, but weighs nothing.
    assert auc(np.arange(4.0), np.array([1.0, 0, 1, 1]), np.array([1.0, 0, 1, 1])) is None


def test_regression_metrics():
    y, f = np.array([1.0, 2, 4]), np.array([1.5, 2, 2])
    assert squared_error_rows(f, y).tolist() == [0.25, 0.0, 4.0]
    assert weighted_mean(squared_error_rows(f, y)) == pytest.approx(4.25 / 3)
    assert normalized_squared_error(f, y) == pytest.approx(4.25 / 3 / np.var(y))


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
