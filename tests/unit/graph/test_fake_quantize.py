"""FP8 rounding in FP32 arithmetic, run through ONNX Runtime, against ml_dtypes: every mantissa."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from loka_onnx.core.formats import FLOATS, INT8, UINT8, NumberFormat
from loka_onnx.core.recipe import Scaling
from loka_onnx.graph.fake_quantize import Bounds, fake_quantize, round_to_bfloat16
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

pytest.importorskip("onnxruntime")

of_floats = pytest.mark.parametrize("format", FLOATS)
IDENTITY = "g (float[n] x) => (float[n] y) { y = Identity(x) }"


def session_of(
    write_model, format: NumberFormat, scale: float, bounds: Bounds | None = None, zero_point: int = 0
) -> OnnxSession:
    """x → its FP8 value times the scale, and |x / scale|; at the optimization level that calibration uses."""
    model = GraphModel.load(write_model(IDENTITY))
    (output,) = model.outputs
    scaling = Scaling(scale, zero_point)
    quantized = fake_quantize(model, model.inputs[0], scaling, format, "q", bounds or Bounds())
    model.make_output(output, quantized.values)
    model.add_output(quantized.scaled, np.float32, ["n"])
    quantized.scaled.name = "magnitude"
    return session(model, write_model)


def session(model: GraphModel, write_model) -> OnnxSession:
    path = write_model(IDENTITY, name="saved.onnx")
    model.save(path)
    return OnnxSession(path, SessionOptions(threads=1))


def through(session: OnnxSession, x: np.ndarray) -> np.ndarray:
    return session.run({"x": x}, ["y"])["y"]


def by_ml_dtypes(x: np.ndarray, scale: float, format: NumberFormat) -> np.ndarray:
    clipped = np.clip(x / np.float32(scale), -np.float32(format.max), np.float32(format.max))
    return clipped.astype(getattr(ml_dtypes, format.storage)).astype(np.float32) * np.float32(scale)


@pytest.mark.slow
@of_floats
def test_every_mantissa_of_a_binade_and_the_subnormal_range_densely(format, write_model):
    """2**23 values in [1, 2), among them each tie, as the operations commute with powers of two; two million
    values, evenly spaced, over the subnormals and the first normal binade.
    """
    session = session_of(write_model, format, 1.0)
    binade = np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32)
    small = np.linspace(-2 * format.min_normal, 2 * format.min_normal, 2_000_001, dtype=np.float32)
    for x in (binade, small):
        want = x.astype(getattr(ml_dtypes, format.storage)).astype(np.float32)
        np.testing.assert_array_equal(through(session, x), want)


@of_floats
def test_every_binade_at_and_around_its_ties(format, write_model):
    """From far below the smallest subnormal to beyond the maximum, either sign."""
    session = session_of(write_model, format, 1.0)
    values = np.arange(128, dtype=np.uint8).view(getattr(ml_dtypes, format.storage)).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    exact = np.concatenate([values, middles, 2.0 ** np.arange(-126, 60), [format.max * 1.5, format.max + 1]])
    exact = exact.astype(np.float32)
    steps = [exact]
    for direction in (-np.inf, np.inf):
        near = exact
        for _ in range(3):
            near = np.nextafter(near, np.float32(direction))
            steps.append(near)
    x = np.concatenate(steps)
    x = np.concatenate([x, -x])
    np.testing.assert_array_equal(through(session, x), by_ml_dtypes(x, 1.0, format))


@pytest.mark.parametrize("scale", [2.0**-126, 3.0517578125e-05, 0.0078125, 1.6640625, 1.7e30])
@of_floats
def test_scales_divide_and_multiply_as_quantize_and_dequantize_do(format, scale, write_model):
    session = session_of(write_model, format, scale)
    normal = np.random.default_rng(0).standard_normal(100_000) * format.max * scale / 3
    x = np.append(np.clip(normal, -3e38, 3e38), [3e38, -3e38]).astype(np.float32)
    magnitude = session.run({"x": x}, ["magnitude"])["magnitude"]
    # The quotient of the last two may overflow: it saturates.
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(through(session, x), by_ml_dtypes(x, scale, format))
        np.testing.assert_array_equal(magnitude, np.abs(x / np.float32(scale)))


@of_floats
def test_what_is_known_of_a_tensor_saves_operations_and_changes_nothing(format, write_model):
    limit, scale = format.max, 0.0078125
    x = np.linspace(0, limit * scale, 100_001, dtype=np.float32)
    for saturates, is_signed in ((False, False), (False, True), (True, False)):
        session = session_of(write_model, format, scale, Bounds(saturates, is_signed))
        values = np.concatenate([x, x * 3]) if saturates else x
        values = np.concatenate([values, -values]) if is_signed else values
        np.testing.assert_array_equal(through(session, values), by_ml_dtypes(values, scale, format))


@pytest.mark.parametrize(("format", "zero_point"), [(INT8, 0), (UINT8, 0), (UINT8, 37), (UINT8, 255)])
@pytest.mark.parametrize("scale", [0.0078125, 1.6640625, 1.7e30])
def test_integers_against_int64(format, zero_point, scale, write_model):
    """Every tie and its neighbours, values far beyond the range, and with known bounds."""
    halves = np.arange(-600, 601) / 2
    steps = np.concatenate([halves, np.nextafter(halves, 999), np.nextafter(halves, -999), [3e7, -3e7, 0.2]])
    x = (steps * scale).astype(np.float32)
    quotient = (x / np.float32(scale)).astype(np.float64)
    low, high = (-128, 127) if format is INT8 else (0, 255)
    code = np.clip(np.rint(quotient).astype(np.int64) + zero_point, low, high)
    want = (code - zero_point).astype(np.float32) * np.float32(scale)
    got = through(session_of(write_model, format, scale, zero_point=zero_point), x)
    np.testing.assert_array_equal(got, want)
    inside = (np.rint(quotient) + zero_point >= low) & (np.rint(quotient) + zero_point <= high)
    bounded = session_of(write_model, format, scale, Bounds(saturates=False), zero_point)
    np.testing.assert_array_equal(through(bounded, x[inside]), want[inside])


@pytest.mark.slow
def test_bfloat16_over_every_mantissa(write_model):
    model = GraphModel.load(write_model(IDENTITY))
    model.make_output(model.outputs[0], round_to_bfloat16(model, model.inputs[0], "r"))
    rounding = session(model, write_model)
    binade = np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32)
    wide = np.random.default_rng(0).standard_normal(100_000) * 10.0 ** np.linspace(-30, 30, 100_000)
    for x in (binade, -binade, wide.astype(np.float32)):
        np.testing.assert_array_equal(through(rounding, x), x.astype(ml_dtypes.bfloat16).astype(np.float32))
