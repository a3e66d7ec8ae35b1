"""Paired ΔAUC against DeLong's formulas by brute force, and against the bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from loka_onnx.numerics.task_metrics import auc_difference, auc_placements


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


def test_weights_scale_out_and_zero_weights_leave_the_value():
    reference, candidate, y = sample(np.random.default_rng(14), 200)
    plain = auc_difference(reference, candidate, y)
    same = auc_difference(reference, candidate, y, np.full(200, 7.0))
    assert (same.value, same.upper) == pytest.approx((plain.value, plain.upper), rel=1e-10)
    half = auc_difference(reference, candidate, y, np.r_[np.ones(100), np.zeros(100)])
    first = auc_difference(reference[:100], candidate[:100], y[:100])
    assert (half.value, half.upper) == pytest.approx((first.value, first.upper), rel=1e-10)


def test_equal_models_differ_by_exactly_nothing():
    reference, _, y = sample(np.random.default_rng(15), 50)
    same = auc_difference(reference, 2 * reference + 1, y)
    assert (same.value, same.lower, same.upper) == (0.0, 0.0, 0.0)


def test_a_single_class_has_no_area_and_a_single_positive_no_spread():
    scores = np.arange(5.0)
    assert auc_difference(scores, -scores, np.zeros(5)) is None
    one = auc_difference(scores, -scores, np.array([0.0, 0, 0, 0, 1]))
    assert (one.value, one.upper) == (-1.0, math.inf)
