"""Sessions refuse what they cannot run, and never load FP8 above BASIC."""

import gc
import re
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest

from loka_onnx.engines.onnxruntime.io_binding_session import IoBindingSession
from loka_onnx.engines.onnxruntime.io_binding_settings import IoBindingSettings
from loka_onnx.engines.onnxruntime.providers import CPU, session_options
from loka_onnx.errors import EngineError, ModelError
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions, holds_float8

ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'loka-onnx[cpu]'")

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
PLAIN = "g (float[b,4] x) => (float[b,4] y, float[b,4] z) { y = Relu(x)  z = Neg(x) }"
VECTOR = "g (float[b] x, bool c) => (float[b] y) "
FLOAT8 = {
    "a zero point": VECTOR + "{ q = QuantizeLinear(x, s, zero)  y = DequantizeLinear(q, s, zero) }",
    "a cast": VECTOR + "{ q = Cast<to=17>(x)  y = Cast<to=1>(q) }",
    "an output type": VECTOR + "{ q = QuantizeLinear<output_dtype=19>(x, s)  y = DequantizeLinear(q, s) }",
    "a cast in a branch": VECTOR + "{ y = If(c) <then_branch = t () => (r) { q = Cast<to=18>(x)"
    " r = Cast<to=1>(q) }, else_branch = e () => (r) { r = Relu(x) }> }",
    "a constant": VECTOR + "{ y = DequantizeLinear(k, s) }",
    "nowhere": VECTOR + "{ q = Cast<to=10>(x)  y = Cast<to=1>(q) }",
}


def parsed(text: str, *, zero: bool = False) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"{HEADER} {text}")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5).reshape(()), "s"))
    if zero:
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.zeros((), ml_dtypes.float8_e4m3fn), "zero")
        )
    return model


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    onnx.save(parsed(PLAIN), tmp_path / "plain.onnx")
    return tmp_path / "plain.onnx"


@pytest.mark.parametrize("where", FLOAT8)
def test_float8_is_found(where):
    model = parsed(FLOAT8[where], zero=where == "a zero point")
    if where == "a constant":
        values = onnx.numpy_helper.from_array(np.ones(3, ml_dtypes.float8_e4m3fn))
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["k"], value=values))
    assert holds_float8(model) is (where != "nowhere")


@pytest.fixture
def levels(monkeypatch):
    """Optimization levels of the sessions that are opened."""
    seen = []
    original = ort.InferenceSession

    def spy(source, settings, providers):
        seen.append(settings.graph_optimization_level)
        return original(source, settings, providers=providers)

    monkeypatch.setattr(ort, "InferenceSession", spy)
    return seen


@pytest.mark.parametrize("text", [PLAIN, FLOAT8["a zero point"]])
@pytest.mark.parametrize("optimize", [True, False])
def test_the_optimization_level(text, optimize, tmp_path, levels):
    onnx.save(parsed(text, zero=text is not PLAIN), tmp_path / "m.onnx")
    OnnxSession(tmp_path / "m.onnx", SessionOptions(optimize=optimize))
    level = "ORT_ENABLE_ALL" if text is PLAIN and optimize else "ORT_ENABLE_BASIC"
    assert levels == [getattr(ort.GraphOptimizationLevel, level)]


def test_outputs_come_by_name(plain):
    session = OnnxSession(plain)
    x = np.array([[1, -2, 3, -4]], np.float32)
    assert (session.input_names, session.output_names) == (("x",), ("y", "z"))
    assert list(session.run({"x": x})) == ["y", "z"]
    only = session.run({"x": np.asfortranarray(x), "unused": x}, ["z"])
    assert list(only) == ["z"]
    np.testing.assert_array_equal(only["z"], -x)


def test_a_batch_that_fails_or_lacks_an_input_is_an_engine_error(plain):
    with pytest.raises(EngineError, match=r"failed on a batch(?s:.*)Got: 3 Expected: 4"):
        OnnxSession(plain).run({"x": np.ones((2, 3), np.float32)})
    with pytest.raises(EngineError, match="an input of the model is missing"):
        OnnxSession(plain).run({})


@pytest.mark.parametrize(
    "opened", [OnnxSession, lambda path: IoBindingSession(path, IoBindingSettings("cpu", ""))]
)
def test_a_batch_that_fails_names_the_shapes_and_not_the_source_of_the_runtime(opened, tmp_path):
    model = parsed(
        "g (float[b,4] x, int64[k] to) => (float[c,d] y) { r = Reshape(x, to) y = Concat<axis=1>(x, r) }"
    )
    onnx.save(model, tmp_path / "m.onnx")
    for shape, shown in (
        ([8, 3], "Input shape:{2,4}, requested shape:{8,3}"),
        ([2, 4, 1], "Ranks of input data are different, cannot concatenate them. expected rank: 2 got: 3"),
    ):
        with pytest.raises(EngineError) as failed:
            opened(tmp_path / "m.onnx").run({"x": np.ones((2, 4), np.float32), "to": np.array(shape)})
        assert failed.value.evidence.endswith(shown)
        assert "onnxruntime" not in failed.value.evidence


def test_a_model_that_is_refused_says_why(tmp_path):
    path, model = tmp_path / "bad.onnx", parsed("g (float[b,4] x) => (float[b,4] y) { y = Frobnicate(x) }")
    onnx.save(model, path)
    for opened in (lambda: OnnxSession(path), lambda: OnnxSession.in_memory(model, {}, path)):
        with pytest.raises(ModelError, match=re.escape(f"refuses '{path}'") + "(?s:.*)Frobnicate"):
            opened()


def outside(values: np.ndarray, name: str) -> onnx.TensorProto:
    tensor = onnx.numpy_helper.from_array(values, name)
    onnx.external_data_helper.set_external_data(tensor, "nowhere", 0, values.nbytes)
    tensor.ClearField("raw_data")
    return tensor


@pytest.mark.slow
def test_weights_in_memory_are_read_where_they_are_and_live_as_long_as_the_session():
    model = parsed("g (int64[b] x) => (float[b] y) { y = Gather(w, x) }")
    weight = np.arange(4, dtype=np.float32)
    model.graph.initializer.append(outside(weight, "w"))
    watched = weakref.ref(weight)
    session = OnnxSession.in_memory(model, {"w": weight}, Path("m.onnx"))
    weight[2] = 7
    changed = weight.copy()
    del weight
    gc.collect()
    x = np.array([3, 2, 2, 0])
    np.testing.assert_array_equal(session.run({"x": x})["y"], changed[x])
    assert watched() is not None
    del session
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize(
    ("product", "expected"),
    [("Mul(t, w)", lambda t, w: t * w), ("Max(w, t)", np.maximum), ("MatMul(t, w)", np.matmul)],
)
@pytest.mark.parametrize("inside", [False, True], ids=["beside", "in a branch"])
def test_weights_in_memory_keep_their_values_behind_a_transpose(product, expected, inside):
    """ONNX Runtime moves a Transpose behind an elementwise operator, and transposes its other factor."""
    branch = f"t () => (r) {{ t = Transpose<perm=[0,2,1]>(x)  r = {product} }}"
    text = f"y = If(c) <then_branch = {branch}, else_branch = e () => (r) {{ r = Relu(x) }}>"
    if not inside:
        text = f"t = Transpose<perm=[0,2,1]>(x)  m = {product}  y = Transpose<perm=[0,2,1]>(m)"
    model = parsed(f"g (float[b,3,3] x, bool c) => (float[b,3,3] y) {{ {text} }}")
    weight, x = np.arange(9, dtype=np.float32).reshape(3, 3), np.ones((2, 3, 3), np.float32)
    model.graph.initializer.append(outside(weight, "w"))
    session = OnnxSession.in_memory(model, {"w": weight}, Path("m.onnx"), SessionOptions(optimize=False))
    turned = x.transpose(0, 2, 1)
    wanted = expected(turned, weight) if inside else expected(turned, weight).transpose(0, 2, 1)
    np.testing.assert_array_equal(session.run({"x": x, "c": np.array(True)})["y"], wanted)


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16])
def test_weights_in_memory_have_types_that_numpy_lacks(kind, levels):
    model = parsed("g (float[b,4] x) => (float[b,4] y) { c = Cast<to=1>(w)  y = Mul(x, c) }")
    weight = np.array([0.5, -3, 448, 0.0625], kind)
    model.graph.initializer.append(outside(weight, "w"))
    session = OnnxSession.in_memory(model, {"w": weight}, Path("m.onnx"))
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(session.run({"x": x})["y"], x * weight.astype(np.float32))
    level = "ORT_ENABLE_ALL" if kind is ml_dtypes.bfloat16 else "ORT_ENABLE_BASIC"
    assert levels == [getattr(ort.GraphOptimizationLevel, level)]


def write_float8(folder: Path) -> Path:
    """A Gemm between FP8 factors, whose bias BASIC alone rounds to multiples of the scales' product, 1."""
    model = onnx.parser.parse_model(
        f"{HEADER} g (float[b,4] x) => (float[b,2] y) {{"
        " q = QuantizeLinear(x, one, zero)  d = DequantizeLinear(q, one, zero)"
        " w = DequantizeLinear(w8, one, zero)  h = Gemm(d, w, bias)"
        " q2 = QuantizeLinear(h, one, zero)  y = DequantizeLinear(q2, one, zero) }"
    )
    arrays = {
        "one": np.ones((), np.float32),
        "zero": np.zeros((), ml_dtypes.float8_e4m3fn),
        "w8": np.ones((4, 2), ml_dtypes.float8_e4m3fn),
        "bias": np.array([0.3, -0.4], np.float32),
    }
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in arrays.items())
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize(
    "opened", [OnnxSession, lambda path: IoBindingSession(path, IoBindingSettings("cpu", ""))]
)
def test_the_bias_of_a_gemm_between_fp8_factors_is_not_rounded(opened, tmp_path):
    """Above BASIC the graph would not load."""
    (y,) = opened(write_float8(tmp_path)).run({"x": np.ones((1, 4), np.float32)}).values()
    # 4.3 and 3.6 in E4M3; of a bias rounded to 0 they would be 4 and 4.
    np.testing.assert_array_equal(y, [[4.5, 3.5]])


@pytest.mark.parametrize("name", ["model.pt2", "model.json", "model.textproto", "model.onnx"])
def test_a_file_that_is_no_model_is_a_model_error_whatever_its_name(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"PK\x03\x04 not a model \xff\xff")
    for opened in (OnnxSession, lambda path: session_options(path, CPU)):
        with pytest.raises(ModelError, match="is not an ONNX model"):
            opened(path)


def test_a_shared_session_outlives_the_one_that_it_was_shared_by(plain):
    session = OnnxSession(plain)
    other = session.shared()
    fed = {"x": np.ones((2, 4), np.float32)}
    expected = session.run(fed)
    session.close()
    for name, value in other.run(fed).items():
        np.testing.assert_array_equal(value, expected[name])
    other.close()
    with pytest.raises(EngineError, match="the session is closed"):
        other.run(fed)
