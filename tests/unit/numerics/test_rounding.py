"""Floating casts against an enumeration of all 256 codes, integer ones against int64, both against ONNX."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from loka_onnx.core.formats import E4M3FN, E4M3FNUZ, E5M2, FLOATS, INT8, UINT8, NumberFormat
from loka_onnx.errors import CalibrationError, InternalError
from loka_onnx.numerics.rounding import dequantize, fake_quantize, quantize, storage_type

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
SCALES = st.floats(min_value=2.0**-60, max_value=2.0**60, width=32)

# (exponent bits, mantissa bits, bias), from the ONNX page "Float stored in 8 bits".
LAYOUT = {E4M3FN: (4, 3, 7), E4M3FNUZ: (4, 3, 8), E5M2: (5, 2, 15)}


def decode(code: int, format: NumberFormat) -> float:
    exponent_bits, mantissa_bits, bias = LAYOUT[format]
    sign = -1.0 if code >> 7 else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if format is E4M3FNUZ and code == 0x80:
        return float("nan")
    if format is E4M3FN and code & 0x7F == 0x7F:
        return float("nan")
    if format is E5M2 and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)


CODES = {format: [(v, c) for c in range(256) if np.isfinite(v := decode(c, format))] for format in FLOATS}


def nearest_even(x: float, format: NumberFormat) -> float:
    """Slow reference: the closest of all finite codes, the even code on a tie."""
    distance = min(abs(x - v) for v, _ in CODES[format])
    ties = {v: c for v, c in CODES[format] if abs(x - v) == distance}
    return next(v for v, c in ties.items() if len(ties) == 1 or c % 2 == 0)


def qdq_model(x, scale, format, axis=0, zero_point=0):
    zero = np.full(np.shape(scale), zero_point, storage_type(format))
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=axis),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=axis),
    ]
    types = {"x": TensorProto.FLOAT, "q": format.onnx_type, "y": TensorProto.FLOAT}
    given, *ends = (helper.make_tensor_value_info(name, kind, x.shape) for name, kind in types.items())
    stored = [numpy_helper.from_array(np.float32(scale), "s"), numpy_helper.from_array(zero, "z")]
    graph = helper.make_graph(nodes, "qdq", [given], ends, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def onnx_reference(x, scale, format, axis=0):
    return ReferenceEvaluator(qdq_model(x, scale, format, axis)).run(None, {"x": x})


@pytest.mark.parametrize("format", FLOATS)
def test_every_code_decodes_as_the_layout_says(format):
    codes = np.arange(256, dtype=np.uint8).view(storage_type(format))
    expected = np.array([decode(c, format) for c in range(256)], np.float32)
    np.testing.assert_array_equal(dequantize(codes, 1.0), expected)


@pytest.mark.parametrize("format", FLOATS)
def test_rounds_to_the_nearest_code_and_even_on_ties(format):
    """Every tie and its neighbours: between two of them all values are rounded alike."""
    values = np.unique([v for v, _ in CODES[format]])
    assert (values[-1], values[values > 0][0]) == (format.max, format.smallest)
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate([middle, *(np.nextafter(middle, np.float32(end)) for end in (9e9, -9e9))])
    got = fake_quantize(x, 1.0, format)
    np.testing.assert_array_equal(got, [nearest_even(float(v), format) for v in x])


@pytest.mark.parametrize("format", FLOATS)
@given(values=st.lists(FLOAT32, min_size=1, max_size=20), scale=SCALES)
@settings(max_examples=40, deadline=None)
def test_agrees_with_the_onnx_reference_evaluator(format, values, scale):
    x = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        q, y = onnx_reference(x, scale, format)
    np.testing.assert_array_equal(quantize(x, scale, format).view(np.uint8), q.view(np.uint8))
    np.testing.assert_array_equal(dequantize(q, scale), y)


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_per_channel_agrees_with_the_onnx_reference_evaluator(format, axis):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 4, 5)).astype(np.float32)
    scale = rng.uniform(1e-3, 1e-1, x.shape[axis]).astype(np.float32)
    q, y = onnx_reference(x, scale, format, axis % 3)
    np.testing.assert_array_equal(quantize(x, scale, format, axis).view(np.uint8), q.view(np.uint8))
    np.testing.assert_array_equal(fake_quantize(x, scale, format, axis), y)


@pytest.mark.parametrize("format", FLOATS)
def test_specials_saturate_and_nan_stays(format):
    x = np.array([np.inf, -np.inf, np.nan, 1e30, 0.0], np.float32)
    limit = format.max
    np.testing.assert_array_equal(fake_quantize(x, 1.0, format), [limit, -limit, np.nan, limit, 0.0])
    # FP32 cannot hold the quotient, nor the float64 input.
    beyond = quantize(np.array([3e38, -1e300]), 1e-3, format).astype(np.float32)
    np.testing.assert_array_equal(beyond, [limit, -limit])


def test_fnuz_has_one_zero_and_products_beyond_fp32_are_infinite():
    q = quantize(np.array([448.0]), 1.0, E4M3FN)
    assert dequantize(q, 1e38).tolist() == [np.inf]
    x = np.array([-0.0, -1e-9, 0.0], np.float32)
    assert quantize(x, 1.0, E4M3FNUZ).view(np.uint8).tolist() == [0, 0, 0]
    assert quantize(x, 1.0, E4M3FN).view(np.uint8).tolist() == [0x80, 0x80, 0]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-60])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(CalibrationError) as caught:
        quantize(np.ones(2, np.float32), np.array([1.0, scale]), E5M2, axis=0)
    assert caught.value.code == "E1902" and f"scale 1 of 2 is {scale:g}" in caught.value.evidence


@pytest.mark.parametrize(("shape", "axis"), [((3,), None), ((3,), 0), ((3,), 5), ((2, 1), 0)])
def test_scales_that_do_not_fit_are_refused(shape, axis):
    with pytest.raises(InternalError, match="per-channel scales do not fit the tensor"):
        quantize(np.ones((2, 3), np.float32), np.ones(shape, np.float32), E4M3FN, axis)


def by_int64(x, scale, format, zero_point):
    """Nearest even by comparing twice the remainder, saturation by comparing codes."""
    low, high = {INT8: (-128, 127), UINT8: (0, 255)}[format]
    quotient = (x / np.asarray(scale, np.float32)).astype(np.float64)
    below = np.floor(np.clip(quotient, -1e6, 1e6))
    twice = 2 * (np.clip(quotient, -1e6, 1e6) - below)
    code = below.astype(np.int64)
    code += (twice > 1) | ((twice == 1) & (code % 2 == 1))
    return np.minimum(np.maximum(code + zero_point, low), high)


INTEGERS = [(INT8, 0), (INT8, -3), (UINT8, 0), (UINT8, 128), (UINT8, 255)]


@pytest.mark.parametrize(("format", "zero_point"), INTEGERS)
@pytest.mark.parametrize("scale", [1.0, 0.0078125, 1.6640625, 3e28])
def test_integers_against_int64_and_onnx_runtime(format, zero_point, scale):
    ort = pytest.importorskip("onnxruntime")
    every = np.arange(-300, 301) / 2
    ties = np.concatenate([every, np.nextafter(every, 999), np.nextafter(every, -999), [1e9, -1e9]])
    x = (np.concatenate([ties, np.random.default_rng(0).normal(0, 100, 999)]) * scale).astype(np.float32)
    expected = by_int64(x, scale, format, zero_point)
    values = ((expected - zero_point).astype(np.float32)) * np.float32(scale)
    codes = quantize(x, scale, format, zero_point=zero_point)
    assert codes.dtype == storage_type(format)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(fake_quantize(x, scale, format, zero_point=zero_point), values)
    model = qdq_model(x, scale, format, zero_point=zero_point).SerializeToString()
    q, y = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_array_equal(q, expected)
    np.testing.assert_array_equal(y, values)


def test_integer_channels_and_specials():
    w = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    scale = np.float32([0.01, 0.1, 1.0])
    codes = quantize(w, scale, INT8, 0)
    np.testing.assert_array_equal(codes, by_int64(w, scale[:, None], INT8, 0))
    np.testing.assert_array_equal(dequantize(codes, scale, 0), codes.astype(np.float32) * scale[:, None])
    assert quantize(np.float32([np.inf, -np.inf]), 1.0, UINT8, zero_point=9).tolist() == [255, 0]
    with pytest.raises(CalibrationError, match="INT8 holds no NaN"):
        quantize(np.float32([np.nan]), 1.0, INT8)
