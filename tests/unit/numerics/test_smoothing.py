"""Smoothing factors against the equation of the paper, and what FP8 makes of powers of two."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.numerics.smoothing import is_gain, keeping_range, smoothing_factors, to_powers_of_two

MAGNITUDES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20)


def test_the_equation_and_the_example_of_the_paper() -> None:
    """Equation 4 of arXiv 2211.10438 at α = 0.5: max|x|^0.5 / max|w|^0.5.

    Figure 5: largest |X| of 2, 16, 2, 9 and |W| of 2, 1, 2, 1 give s = 1, 4, 1, 3.
    """
    factors = smoothing_factors(np.array([4.0, 16.0, 1.0]), np.array([1.0, 4.0, 25.0]), 0.5)
    np.testing.assert_allclose(factors, [2.0, 2.0, 0.2])
    factors = smoothing_factors(np.array([2.0, 16.0, 2.0, 9.0]), np.array([2.0, 1.0, 2.0, 1.0]), 0.5)
    np.testing.assert_allclose(factors, [1.0, 4.0, 1.0, 3.0])


@given(MAGNITUDES, st.floats(0, 1))
def test_both_ends_and_what_is_left(activation: list[float], strength: float) -> None:
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
def test_what_has_no_factors(activation: list[float], weight: list[float], strength: float) -> None:
    with pytest.raises(ValueError, match=r"do not match|is not between 0 and 1|negative or not finite"):
        smoothing_factors(np.array(activation), np.array(weight), strength)


def test_powers_of_two_change_fp8_only_where_it_underflows_or_saturates() -> None:
    """What the module says: rounding commutes with them between both ends."""
    random = np.random.default_rng(0)
    values = random.normal(size=10_000).astype(np.float32)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)

    for exponent in (-3, 1, 4):
        factor = np.float32(2.0**exponent)
        both = np.abs(values) * min(factor, 1) >= 2.0**-6
        np.testing.assert_array_equal(rounded(values * factor)[both], rounded(values)[both] * factor)
    small = rounded(values * np.float32(2.0**-12))
    assert (small == 0).mean() > 0.5


@given(MAGNITUDES, st.floats(0, 1))
def test_the_range_is_kept_by_a_power_of_two(activation: list[float], strength: float) -> None:
    x = np.array(activation)
    raw = smoothing_factors(x, x[::-1].copy() * 1e-3, strength)
    kept = keeping_range(raw, x)
    ratio = kept / raw
    np.testing.assert_allclose(ratio, ratio[0])
    assert np.log2(ratio[0]) == pytest.approx(round(np.log2(ratio[0])), abs=1e-9)
    assert 2**-0.51 <= (x / kept).max() / x.max() <= 2**0.51


@given(MAGNITUDES, st.floats(0, 1))
def test_what_was_smoothed_by_powers_of_two_is_left_alone(activation: list[float], strength: float) -> None:
    """Each factor is within √2 of the exact one, so that what is left of it rounds to a common power."""
    x = np.array(activation)
    w = x[::-1].copy()
    factors = keeping_range(to_powers_of_two(smoothing_factors(x, w, strength)), x)
    x, w = x / factors, w * factors
    left = np.log2(smoothing_factors(x, w, strength))
    # A tie may round either way.
    assert np.ptp(left) <= 1 + 1e-9


def test_a_gain_is_one_of_the_sum_that_costs_nobody() -> None:
    before = {"a": 1.0, "b": 0.01}
    assert is_gain(before, {"a": 0.5, "b": 0.01}, 0.1)
    assert is_gain(before, {"a": 0.5, "b": 0.0109}, 0.1)
    assert not is_gain(before, {"a": 0.92, "b": 0.01}, 0.1)
    assert not is_gain(before, {"a": 0.5, "b": 0.012}, 0.1)
    # What was exact may stay exact.
    assert is_gain({"a": 1.0, "b": 0.0}, {"a": 0.5, "b": 0.0}, 0.1)
