"""Scales: no saturation, no waste, exact in every float type of a graph."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_onnx.core.formats import E4M3FN, FLOATS
from loka_onnx.core.recipe import Granularity
from loka_onnx.errors import CalibrationError
from loka_onnx.numerics.rounding import fake_quantize
from loka_onnx.numerics.scales import SMALLEST_SCALE, amax_scale, weight_scales

FORMATS = list(FLOATS)
FLOAT32_MAX = float(np.finfo(np.float32).max)
AMAX = st.floats(min_value=0.0, max_value=FLOAT32_MAX, exclude_min=True) | st.floats(
    min_value=1e-6, max_value=1e6
)


def bf16_ceiling(ratio: Fraction) -> Fraction:
    """The smallest BF16 number, of any exponent, that is not below the ratio; in exact arithmetic."""
    exponent = 0
    while ratio >= Fraction(2) ** (exponent + 8):
        exponent += 1
    while ratio < Fraction(2) ** (exponent + 7):
        exponent -= 1
    step = Fraction(2) ** exponent
    return -(-ratio // step) * step


@pytest.mark.parametrize("format", FORMATS)
@given(amax=AMAX)
@settings(max_examples=150, deadline=None)
def test_is_the_bf16_ceiling_of_the_ratio(format, amax):
    exact = bf16_ceiling(Fraction(amax) / Fraction(format.max))
    assert Fraction(amax_scale(amax, format)) == max(exact, Fraction(SMALLEST_SCALE))


@pytest.mark.parametrize("format", FORMATS)
@given(amax=AMAX)
@settings(max_examples=100, deadline=None)
def test_nothing_saturates_and_every_type_holds_the_scale(format, amax):
    scale, limit = amax_scale(amax, format), format.max
    assert Fraction(amax) / Fraction(scale) <= Fraction(limit)
    with np.errstate(over="ignore", under="ignore"):
        assert np.float32(amax) / np.float32(scale) <= limit
    assert float(np.float32(scale)) == scale
    assert float(ml_dtypes.bfloat16(scale)) == scale
    if 2.0**-14 <= scale <= 65504:
        assert float(np.float16(scale)) == scale


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("significand", range(128, 256))
def test_amax_on_and_just_beside_the_grid(format, significand):
    limit = format.max
    grid = significand * 2.0**-20
    assert amax_scale(grid * limit, format) == grid
    assert amax_scale(np.nextafter(grid * limit, np.inf), format) > grid


def test_zero_and_tiny_ranges():
    assert amax_scale(0.0, E4M3FN) == 1.0
    assert amax_scale(1e-45, E4M3FN) == 2.0**-126


@pytest.mark.parametrize("amax", [float("inf"), float("nan"), -1.0, 1e39])
def test_a_range_without_a_scale_is_refused(amax):
    with pytest.raises(CalibrationError, match=f"amax is {amax:g}:".replace("+", r"\+")) as caught:
        amax_scale(amax, E4M3FN)
    assert (caught.value.code, caught.value.evidence) == ("E1905", "1 of 1 ranges, the first is number 0")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_weight_scales_per_channel_are_those_of_each_channel(format, axis):
    w = np.random.default_rng(2).normal(size=(4, 6)).astype(np.float32)
    w[1] = 0.0
    w[:, 2] = 0.0
    channels = np.moveaxis(w, axis, 0)
    scales = weight_scales(w, Granularity.PER_CHANNEL, axis, format)
    assert scales.dtype == np.float32
    assert scales.tolist() == [amax_scale(float(np.abs(c).max()), format) for c in channels]
    assert 1.0 in scales
    # Half an ulp of the top binade bounds the error of every element.
    error = np.abs(fake_quantize(w, scales, format, axis) - w)
    bound = np.moveaxis(np.broadcast_to(scales, channels.T.shape).T, 0, axis)
    half_ulp = format.max * 2.0 ** -(format.mantissa_bits + 1)
    assert (error <= bound * half_ulp).all()


def test_weight_scale_per_tensor_ignores_the_axis():
    w = np.array([[1.0, -7.0]], np.float16)
    scale = weight_scales(w, Granularity.PER_TENSOR, 99, E4M3FN)
    assert scale.shape == ()
    assert float(scale) == 2.0**-6
    assert weight_scales(w[:0], Granularity.PER_TENSOR, 0, E4M3FN) == 1.0


def test_one_channel_without_a_scale_refuses_them_all():
    with pytest.raises(CalibrationError, match=r"1 of 3 ranges, the first is number 1"):
        weight_scales(np.array([[1.0], [1e39], [2.0]]), Granularity.PER_CHANNEL, 0, E4M3FN)


def test_a_weight_with_nan_is_refused():
    w = np.array([[1.0, np.nan], [np.inf, 0.0]], np.float32)
    with pytest.raises(CalibrationError) as caught:
        weight_scales(w, Granularity.PER_CHANNEL, 0, E4M3FN)
    assert (caught.value.code, caught.value.evidence) == ("E1904", "2 of 4 elements")
