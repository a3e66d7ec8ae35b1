"""Smoothing factors against the equation of the paper; errors of rounded products against the formula."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.core.formats import E5M2
from loka_onnx.core.recipe import Granularity
from loka_onnx.numerics.product_error import Rounding, SampledProduct
from loka_onnx.numerics.smoothing import is_gain, keeping_range, smoothing_factors, to_powers_of_two

RANDOM = np.random.default_rng(0)
K, N, M = 24, 20, 200
X = RANDOM.normal(size=(M, K)) * np.linspace(0.1, 3, K)
W = RANDOM.normal(size=(K, N))
AMAX = np.abs(X).max(axis=0) * 1.5
ALL = np.arange(N)
ONES = np.ones(K), np.ones(N)
PER_TENSOR = Rounding(weights=(Granularity.PER_TENSOR,))


def scaled(amax: float) -> float:
    """amax / 448 rounded up to a BF16 number."""
    near = float(ml_dtypes.bfloat16(amax / 448))
    if near >= amax / 448:
        return near
    return float(np.nextafter(ml_dtypes.bfloat16(near), ml_dtypes.bfloat16(np.inf)))


def rounded(values: np.ndarray, scale: float) -> np.ndarray:
    quotient = np.clip(values.astype(np.float32) / np.float32(scale), -448, 448)
    return quotient.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def expected(before: np.ndarray, behind: np.ndarray, units: np.ndarray) -> float:
    """Every fourth row under one of four scales; the whole weight under one."""
    x = np.empty_like(X)
    for turn, moved in enumerate((1.0, 1.03, 1.07, 1.13)):
        scale = scaled((AMAX / before).max() * moved)
        x[turn::4] = rounded(X[turn::4] / before, scale)
    weight = before[:, None] * W / behind
    w = rounded(weight, scaled(np.abs(weight).max()))
    error = ((x @ w) * behind - X @ W) * units
    return float((error**2).sum() / ((X @ W * units) ** 2).sum())


def measured(product, before, behind, rounding=PER_TENSOR):
    return product.relative_error(X, product.exact(X), before, behind, rounding)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_formula(seed):
    before, behind, units = np.ones(K), np.ones(N), np.ones(N)
    if seed is not None:
        random = np.random.default_rng(seed)
        before, behind, units = (np.exp(random.normal(size=size)) for size in (K, N, N))
    found = measured(SampledProduct(AMAX, W, ALL, units), before, behind)
    assert found == pytest.approx(expected(before, behind, units), rel=1e-6)
    assert 1e-4 < found < 1e-2


def test_saturation_another_format_and_nothing():
    assert measured(SampledProduct(AMAX / 100, W, ALL), *ONES) > 0.5
    # E5M2 has one bit less: four times the energy of E4M3.
    rounding = Rounding(E5M2, (Granularity.PER_TENSOR,))
    product = SampledProduct(AMAX, W, ALL)
    assert measured(product, *ONES, rounding) / measured(product, *ONES) == pytest.approx(4, rel=0.2)
    product = SampledProduct(AMAX, np.zeros((K, N)), ALL)
    assert measured(product, *ONES, Rounding()) == 0.0


def test_the_better_granularity_counts_for_some_columns_too():
    # One column is 10⁶ times as large: under one scale the others vanish.
    weight = W.copy()
    weight[:, 0] *= 1e6
    product = SampledProduct(AMAX, weight, np.arange(1, N))
    one = measured(product, *ONES)
    both = measured(product, *ONES, Rounding())
    assert one == pytest.approx(1.0, rel=1e-3)
    assert both < 2e-3
    assert both == measured(product, *ONES, Rounding(weights=(Granularity.PER_CHANNEL,)))
    weight = W.copy()
    weight[:, 0] *= 1e6
    assert measured(SampledProduct(AMAX, weight, np.array([3, 7])), *ONES) == pytest.approx(1.0, rel=1e-3)


MAGNITUDES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20)


def test_the_equation_and_the_example_of_the_paper():
    """Equation 4 of arXiv 2211.10438 at α = 0.5: max|x|^0.5 / max|w|^0.5.

    Figure 5: largest |X| of 2, 16, 2, 9 and |W| of 2, 1, 2, 1 give s = 1, 4, 1, 3.
    """
    factors = smoothing_factors(np.array([4.0, 16.0, 1.0]), np.array([1.0, 4.0, 25.0]), 0.5)
    np.testing.assert_allclose(factors, [2.0, 2.0, 0.2])
    factors = smoothing_factors(np.array([2.0, 16.0, 2.0, 9.0]), np.array([2.0, 1.0, 2.0, 1.0]), 0.5)
    np.testing.assert_allclose(factors, [1.0, 4.0, 1.0, 3.0])


@given(MAGNITUDES, st.floats(0, 1))
def test_both_ends_and_what_is_left(activation, strength):
    x = np.array(activation)
    w = x[::-1].copy()
    np.testing.assert_allclose(x / smoothing_factors(x, w, 1.0), 1.0)
    np.testing.assert_allclose(w * smoothing_factors(x, w, 0.0), 1.0)
    factors = smoothing_factors(x, w, strength)
    assert (factors > 0).all()
    # Applied once, there is nothing left to smooth.
    np.testing.assert_allclose(smoothing_factors(x / factors, w * factors, strength), 1.0, rtol=1e-9)


@pytest.mark.parametrize(
    ("activation", "weight", "strength"),
    [([1], [1, 2], 0.5), ([[1]], [[1]], 0.5), ([1], [1], 1.5), ([-1], [1], 0.5), ([1], [np.nan], 0.5)],
)
def test_what_has_no_factors(activation, weight, strength):
    with pytest.raises(ValueError, match=r"do not match|is not between 0 and 1|negative or not finite"):
        smoothing_factors(np.array(activation), np.array(weight), strength)


@given(MAGNITUDES, st.floats(0, 1))
def test_the_range_is_kept_by_a_power_of_two(activation, strength):
    x = np.array(activation)
    raw = smoothing_factors(x, x[::-1].copy() * 1e-3, strength)
    kept = keeping_range(raw, x)
    ratio = kept / raw
    np.testing.assert_allclose(ratio, ratio[0])
    assert np.log2(ratio[0]) == pytest.approx(round(np.log2(ratio[0])), abs=1e-9)
    assert 2**-0.51 <= (x / kept).max() / x.max() <= 2**0.51


@given(MAGNITUDES, st.floats(0, 1))
def test_what_was_smoothed_by_powers_of_two_is_left_alone(activation, strength):
    """Each factor is within √2 of the exact one, so that what is left of it rounds to a common power."""
    x = np.array(activation)
    w = x[::-1].copy()
    factors = keeping_range(to_powers_of_two(smoothing_factors(x, w, strength)), x)
    x, w = x / factors, w * factors
    left = np.log2(smoothing_factors(x, w, strength))
    # A tie may round either way.
    assert np.ptp(left) <= 1 + 1e-9


def test_a_gain_is_one_of_the_sum_that_costs_nobody():
    before = {"a": 1.0, "b": 0.01}
    assert is_gain(before, {"a": 0.5, "b": 0.01}, 0.1)
    assert is_gain(before, {"a": 0.5, "b": 0.0109}, 0.1)
    assert not is_gain(before, {"a": 0.92, "b": 0.01}, 0.1)
    assert not is_gain(before, {"a": 0.5, "b": 0.012}, 0.1)
    # What was exact may stay exact.
    assert is_gain({"a": 1.0, "b": 0.0}, {"a": 0.5, "b": 0.0}, 0.1)
