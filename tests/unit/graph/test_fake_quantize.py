"""Rounding written as graph operations, against ml_dtypes, and the float types of a model."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from loka_onnx.core.formats import FLOATS, INT8, UINT8, NumberFormat
from loka_onnx.core.recipe import Scaling
from loka_onnx.errors import ModelError
from loka_onnx.export.preflight import Batches, check_conversion
from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.fake_quantize import Bounds, fake_quantize, round_to_bfloat16
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.sites import find_sites
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


RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((8, 8))
TYPES = {"float16": np.float16, "double": np.float64}


def run(path: Path, **feeds: np.ndarray) -> np.ndarray:
    return np.asarray(OnnxSession(path).run(feeds)["y"])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("external", [False, True])
def test_weights_and_ends_become_fp32(kind: str, external: bool, write_model, tmp_path: Path) -> None:
    graph = f"g ({kind}[b,8] x) => ({kind}[b,8] y) {{ h = MatMul(x, w)  y = Relu(h) }}"
    path = write_model(graph, {"w": WEIGHT.astype(TYPES[kind])})
    if external:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=1)
    canonical = canonicalize(path)
    assert any("to FP32" in note for note in canonical.notes)
    canonical.model.save(tmp_path / "out" / "out.onnx")
    x = RANDOM.standard_normal((5, 8)).astype(np.float16)
    expected, found = run(path, x=x.astype(TYPES[kind])), run(tmp_path / "out/out.onnx", x=x.astype("f4"))
    assert found.dtype == np.float32
    exact = np.maximum(x.astype(np.float64) @ WEIGHT.astype(TYPES[kind]).astype(np.float64), 0)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6 * exact.max())
    limit = 1e-3 if kind == "float16" else 1e-6
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit * exact.max())
    assert [site.k for site in find_sites(canonical.model)] == [8]


def test_casts_within_an_fp32_model_and_integer_weights_stay(write_model, tmp_path: Path) -> None:
    graph = "g (float[b,8] x) => (float[b,8] y) { c = Cast<to=11>(x)  d = Cast<to=1>(c)  y = MatMul(d, w) }"
    canonical = canonicalize(write_model(graph, {"w": WEIGHT.astype(np.float32)}))
    assert [int(node.attrs["to"]) for node in canonical.model.nodes if node.op == "Cast"] == [11, 1]
    assert not any("FP32" in note for note in canonical.notes)
    graph = "g (float[b,8] x) => (float[b,8] y) { d = DequantizeLinear<axis=1>(q, s)  y = MatMul(x, d) }"
    stored = RANDOM.integers(-128, 128, (8, 8)).astype(np.int8)
    path = write_model(graph, {"q": stored, "s": np.full(8, 0.01, np.float32)})
    (site,) = find_sites(canonicalize(path).model)
    assert (site.k, site.n) == (8, 8)


def test_tables_of_fp16_stay_as_they_are_stored(write_model, tmp_path: Path) -> None:
    """Also where the rest of the model is of FP16: what is looked up is cast."""
    table, weight = (RANDOM.standard_normal((6, 8)).astype(np.float16), WEIGHT.astype(np.float16))
    graph = "g (int64[b] i) => (float16[b,8] y) { e = Gather(t, i)  y = MatMul(e, w) }"
    path = write_model(graph, {"t": table, "w": weight})
    model = canonicalize(path).model
    kinds = {name: values_of(tensor).dtype for name, tensor in model.tensors().items() if name in {"t", "w"}}
    assert kinds == {"t": np.float16, "w": np.float32}
    model.save(tmp_path / "out.onnx")
    ids = np.array([0, 5, 3])
    expected = table[ids].astype(np.float64) @ weight.astype(np.float64)
    np.testing.assert_allclose(run(tmp_path / "out.onnx", i=ids), expected, atol=1e-5)


def test_casts_constants_and_branches_follow(write_model, tmp_path: Path) -> None:
    graph = """g (float16[b,8] x) => (float16[b,8] y) {
        s = Shape<start=0, end=1>(x)
        v = Squeeze(s)
        c = Greater(v, one)
        a = Constant<value_float=2.0>()
        h = MatMul(x, w)
        y = If(c) <then_branch = t () => (float16[b,8] p) { p = Mul(h, a) },
                   else_branch = e () => (float16[b,8] q) { r = Cast<to=1>(h) u = Exp(r) q = Cast<to=10>(u) }>
    }"""
    path = write_model(graph, {"w": WEIGHT.astype(np.float16), "one": np.array(1)})
    model = onnx.load(path)
    constant = next(node for node in model.graph.node if node.op_type == "Constant")
    value = onnx.numpy_helper.from_array(np.array([2.0], np.float16))
    constant.attribute[0].CopyFrom(onnx.helper.make_attribute("value", value))
    onnx.save(model, path)
    canonicalize(path).model.save(tmp_path / "out.onnx")
    for rows in (1, 4):
        x = (RANDOM.standard_normal((rows, 8)) / 4).astype(np.float16)
        expected, found = run(path, x=x), run(tmp_path / "out.onnx", x=x.astype(np.float32))
        np.testing.assert_allclose(found, expected, rtol=0, atol=4e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("kind", "weight", "code"),
    [("double", WEIGHT * 1e300, "E0309"), ("bfloat16", WEIGHT.astype(ml_dtypes.bfloat16), "E0308")],
)
def test_what_fp32_cannot_hold_and_bf16_are_refused(kind: str, weight, code: str, write_model) -> None:
    graph = f"g ({kind}[b,8] x) => ({kind}[b,8] y) {{ y = MatMul(x, w) }}"
    with pytest.raises(ModelError) as refused:
        canonicalize(write_model(graph, {"w": weight}))
    assert (refused.value.code, refused.value.where) == (code, "tensor 'w'")


@pytest.mark.parametrize("node", ["q = QuantizeLinear(x, s, z)", "q, s, z = DynamicQuantizeLinear(x)"])
def test_a_model_that_is_quantized_already_is_refused(node: str, write_model) -> None:
    weights = {"s": np.float32(0.1), "z": np.int8(0)} if "(x, s" in node else {}
    body = f"{{ {node}  d = DequantizeLinear(q, s, z)  y = MatMul(d, w) }}"
    path = write_model(f"g (float[b,8] x) => (float[b,8] y) {body}", {"w": (8, 8), **weights})
    with pytest.raises(ModelError) as refused:
        canonicalize(path)
    assert refused.value.code == "E0306" and "QuantizeLinear)" in refused.value.where


@pytest.mark.parametrize("by_axis", [False, True])
def test_sparse_weights_are_stored_densely(by_axis: bool, write_model, tmp_path: Path) -> None:
    places = np.array([1, 9, 63])
    dense = np.zeros(64, np.float32)
    dense[places] = [1.0, -2.0, 3.0]
    index = np.stack(np.unravel_index(places, (8, 8)), axis=1) if by_axis else places
    path = write_model("g (float[b,8] x) => (float[b,8] y) { y = MatMul(x, w) }")
    model = onnx.load(path)
    parts = onnx.numpy_helper.from_array(dense[places], "w"), onnx.numpy_helper.from_array(index)
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(*parts, [8, 8]))
    onnx.save(model, path)
    canonical = canonicalize(path)
    np.testing.assert_array_equal(values_of(canonical.model.tensors()["w"]), dense.reshape(8, 8))
    assert "1 sparse weights stored densely" in canonical.notes


def test_a_model_that_rests_on_the_digits_of_fp64_is_refused(write_model) -> None:
    """2³⁰ + x − 2³⁰ is x in FP64, and a multiple of 64 in FP32."""
    graph = "g (double[b,8] x) => (double[b,8] y) { a = Add(x, big)  c = Sub(a, big)  y = MatMul(c, w) }"
    path = write_model(graph, {"w": WEIGHT, "big": np.array(2.0**30)})
    batches = Batches({"x": RANDOM.standard_normal((64, 8)).astype(np.float32)}, largest=32, threads=1)
    with pytest.raises(ModelError) as refused:
        check_conversion(path, canonicalize(path).model, batches, ["y"])
    assert refused.value.code == "E0409"
    assert "(MatMul)" in refused.value.where and "output 'y'" in refused.value.evidence


@pytest.mark.parametrize("kind", TYPES)
def test_rounding_alone_passes(kind: str, write_model) -> None:
    graph = f"g ({kind}[b,8] x) => ({kind}[b,8] y) {{ h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, w) }}"
    path = write_model(graph, {"w": WEIGHT.astype(TYPES[kind])})
    batches = Batches({"x": RANDOM.standard_normal((64, 8)).astype(np.float32)}, largest=32, threads=1)
    check_conversion(path, canonicalize(path).model, batches, ["y"])


def test_casts_of_fp32_weights_are_rounding_alone(write_model) -> None:
    """autocast, exported without constant folding: no weight and no input is of FP16."""
    cast = "s = Cast<to=10>(x)  v = Cast<to=10>(w)  m = MatMul(s, v)  c = Cast<to=1>(m)"
    weights = {"w": WEIGHT.astype(np.float32)}
    path = write_model(f"g (float[b,8] x) => (float[b,8] y) {{ {cast}  y = MatMul(c, w) }}", weights)
    batches = Batches({"x": RANDOM.standard_normal((64, 8)).astype(np.float32)}, largest=32, threads=1)
    check_conversion(path, canonicalize(path).model, batches, ["y"])
