"""FP8 casts against an enumeration of all 256 codes and against the ONNX reference evaluator."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from loka_onnx.core.formats import FLOAT8_SPECS, Float8
from loka_onnx.errors import CalibrationError, InternalError
from loka_onnx.numerics.float8 import dequantize, fake_quantize, float8_dtype, quantize

FORMATS = list(Float8)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
SCALES = st.floats(min_value=2.0**-60, max_value=2.0**60, width=32)

# (exponent bits, mantissa bits, bias), from the ONNX page "Float stored in 8 bits".
LAYOUT = {Float8.E4M3FN: (4, 3, 7), Float8.E4M3FNUZ: (4, 3, 8), Float8.E5M2: (5, 2, 15)}


def decode(code: int, format: Float8) -> float:
    exponent_bits, mantissa_bits, bias = LAYOUT[format]
    sign = -1.0 if code >> 7 else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if format is Float8.E4M3FNUZ and code == 0x80:
        return float("nan")
    if format is Float8.E4M3FN and code & 0x7F == 0x7F:
        return float("nan")
    if format is Float8.E5M2 and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)


CODES = {format: [(v, c) for c in range(256) if np.isfinite(v := decode(c, format))] for format in FORMATS}


def nearest_even(x: float, format: Float8) -> float:
    """Slow reference: the closest of all finite codes, the even code on a tie."""
    distance = min(abs(x - v) for v, _ in CODES[format])
    ties = {v: c for v, c in CODES[format] if abs(x - v) == distance}
    return next(v for v, c in ties.items() if len(ties) == 1 or c % 2 == 0)


def onnx_reference(x, scale, format, axis=0):
    onnx_type = FLOAT8_SPECS[format].onnx_type
    zero = np.zeros(np.shape(scale), float8_dtype(format))
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=axis),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=axis),
    ]
    graph = helper.make_graph(
        nodes,
        "qdq",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [
            helper.make_tensor_value_info("q", onnx_type, x.shape),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape),
        ],
        [numpy_helper.from_array(np.float32(scale), "s"), numpy_helper.from_array(zero, "z")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    onnx.checker.check_model(model)
    return ReferenceEvaluator(model).run(None, {"x": x})


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_decodes_as_the_layout_says(format):
    codes = np.arange(256, dtype=np.uint8).view(float8_dtype(format))
    expected = np.array([decode(c, format) for c in range(256)], np.float32)
    np.testing.assert_array_equal(dequantize(codes, 1.0), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_constants_of_the_format(format):
    finite = [v for v, _ in CODES[format] if v > 0]
    spec = FLOAT8_SPECS[format]
    assert (max(finite), min(finite)) == (spec.max, spec.min_subnormal)


@pytest.mark.parametrize("format", FORMATS)
@given(x=FLOAT32)
@settings(max_examples=150, deadline=None)
def test_rounds_to_the_nearest_code_and_even_on_ties(format, x):
    limit = FLOAT8_SPECS[format].max
    expected = nearest_even(min(max(x, -limit), limit), format)
    assert float(fake_quantize(np.array([x], np.float32), 1.0, format)[0]) == expected


@pytest.mark.parametrize("format", FORMATS)
def test_every_tie_and_its_neighbours(format):
    values = np.unique([v for v, _ in CODES[format]])
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate(
        [middle, np.nextafter(middle, np.float32(9e9)), np.nextafter(middle, np.float32(-9e9))]
    )
    got = fake_quantize(x, 1.0, format)
    np.testing.assert_array_equal(got, [nearest_even(float(v), format) for v in x])


@pytest.mark.parametrize("format", FORMATS)
@given(values=st.lists(FLOAT32, min_size=1, max_size=20), scale=SCALES)
@settings(max_examples=40, deadline=None)
def test_agrees_with_the_onnx_reference_evaluator(format, values, scale):
    x = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        q, y = onnx_reference(x, scale, format)
    np.testing.assert_array_equal(quantize(x, scale, format).view(np.uint8), q.view(np.uint8))
    np.testing.assert_array_equal(dequantize(q, scale), y)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_per_channel_agrees_with_the_onnx_reference_evaluator(format, axis):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 4, 5)).astype(np.float32)
    scale = rng.uniform(1e-3, 1e-1, x.shape[axis]).astype(np.float32)
    q, y = onnx_reference(x, scale, format, axis % 3)
    np.testing.assert_array_equal(quantize(x, scale, format, axis).view(np.uint8), q.view(np.uint8))
    np.testing.assert_array_equal(fake_quantize(x, scale, format, axis), y)


@pytest.mark.parametrize("format", FORMATS)
def test_specials_saturate_and_nan_stays(format):
    x = np.array([np.inf, -np.inf, np.nan, 1e30, 0.0], np.float32)
    limit = FLOAT8_SPECS[format].max
    np.testing.assert_array_equal(fake_quantize(x, 1.0, format), [limit, -limit, np.nan, limit, 0.0])
    # FP32 cannot hold the quotient, nor the float64 input.
    beyond = quantize(np.array([3e38, -1e300]), 1e-3, format).astype(np.float32)
    np.testing.assert_array_equal(beyond, [limit, -limit])


def test_a_product_beyond_fp32_dequantizes_to_infinity_as_in_onnx():
    q = quantize(np.array([448.0]), 1.0, Float8.E4M3FN)
    assert dequantize(q, 1e38).tolist() == [np.inf]


def test_fnuz_has_one_zero_and_no_nan_from_underflow():
    x = np.array([-0.0, -1e-9, 0.0], np.float32)
    assert quantize(x, 1.0, Float8.E4M3FNUZ).view(np.uint8).tolist() == [0, 0, 0]
    assert quantize(x, 1.0, Float8.E4M3FN).view(np.uint8).tolist() == [0x80, 0x80, 0]


def test_scalar_scale_in_a_vector_needs_no_axis():
    x = np.ones((2, 2), np.float16)
    np.testing.assert_array_equal(fake_quantize(x, np.array([0.5], np.float32), Float8.E4M3FN), x)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-60])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(CalibrationError, match="an FP8 scale must be positive and finite in FP32") as caught:
        quantize(np.ones(2, np.float32), np.array([1.0, scale]), Float8.E5M2, axis=0)
    assert f"scale 1 of 2 is {scale:g}" in str(caught.value)


@pytest.mark.parametrize(("shape", "axis"), [((3,), None), ((3,), 0), ((3,), 5), ((2, 1), 0)])
def test_scales_that_do_not_fit_are_refused(shape, axis):
    with pytest.raises(InternalError, match="per-channel scales do not fit the tensor"):
        quantize(np.ones((2, 3), np.float32), np.ones(shape, np.float32), Float8.E4M3FN, axis)
