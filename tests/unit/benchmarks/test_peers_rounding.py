"""Foreign graphs are judged by what they say: held against an independent reference."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parents[3]))
pytest.importorskip("torch", reason="needs torch")

from benchmarks.peers.judging import ONE_THREAD, against_reference_evaluator, as_run
from benchmarks.peers.rounding import narrow_types
from loka_onnx.sessions.onnx_session import OnnxSession

ROWS, K, N = 32, 24, 16
RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(ROWS, K)).astype(np.float32)
W = RANDOM.normal(size=(K, N)).astype(np.float32)
B = RANDOM.normal(size=(N,)).astype(np.float32)
X_SCALE, W_SCALE = np.float32(0.01171875), np.float32(0.0078125)


def saved(nodes: list[onnx.NodeProto], stored: list[onnx.TensorProto], path: Path) -> Path:
    """A graph of ``x`` (float32) and ``y`` (float32)."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", N])],
        stored,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def float8_graph(path: Path) -> Path:
    """As a tool writes it: a pair at the activation, one at the weight, a bias, a Relu."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x.scale", "zero"], ["x.q"]),
        helper.make_node("DequantizeLinear", ["x.q", "x.scale", "zero"], ["x.dq"]),
        helper.make_node("QuantizeLinear", ["w", "w.scale", "zero"], ["w.q"]),
        helper.make_node("DequantizeLinear", ["w.q", "w.scale", "zero"], ["w.dq"]),
        helper.make_node("Gemm", ["x.dq", "w.dq", "b"], ["z"]),
        helper.make_node("Relu", ["z"], ["y"]),
    ]
    stored = [
        numpy_helper.from_array(np.zeros((), ml_dtypes.float8_e4m3fn), "zero"),
        numpy_helper.from_array(X_SCALE, "x.scale"),
        numpy_helper.from_array(W_SCALE, "w.scale"),
        numpy_helper.from_array(W, "w"),
        numpy_helper.from_array(B, "b"),
    ]
    return saved(nodes, stored, path)


def float8(values: np.ndarray, scale: np.float32) -> np.ndarray:
    limited = np.clip(values / scale, -448, 448)
    return limited.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def test_float8_pairs_are_executed_as_they_are_written(tmp_path: Path) -> None:
    path = float8_graph(tmp_path / "model.onnx")

    found = OnnxSession(as_run(path, tmp_path), ONE_THREAD).run({"x": X})["y"]

    expected = np.maximum(float8(X, X_SCALE) @ float8(W, W_SCALE) + B, 0)
    # The order of sums alone: 24 products of magnitude 1 to 10.
    np.testing.assert_allclose(found, expected, atol=2e-5)
    # The effect of FP8 is thousands of times as large, so that an exact product would not pass.
    assert np.abs(np.maximum(X @ W + B, 0) - expected).max() > 0.05
    assert against_reference_evaluator(path, {"x": X}, "y", tmp_path) < 2e-5


@pytest.mark.parametrize(
    ("kind", "dtype"), [(TensorProto.BFLOAT16, ml_dtypes.bfloat16), (TensorProto.FLOAT16, np.float16)]
)
def test_narrow_types_are_rounded_behind_each_node(kind: int, dtype: type, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["xn"], to=kind),
        helper.make_node("Gemm", ["xn", "w", "b"], ["z"]),
        helper.make_node("Mul", ["z", "z"], ["s"]),
        helper.make_node("Relu", ["s"], ["r"]),
        helper.make_node("Cast", ["r"], ["y"], to=TensorProto.FLOAT),
    ]
    stored = [numpy_helper.from_array(a.astype(dtype), name) for a, name in ((W, "w"), (B, "b"))]
    path = saved(nodes, stored, tmp_path / "model.onnx")
    assert narrow_types(onnx.load(path)) == {kind}

    found = OnnxSession(as_run(path, tmp_path), ONE_THREAD).run({"x": X})["y"]

    def narrow(values: np.ndarray) -> np.ndarray:
        return values.astype(dtype).astype(np.float32)

    z = narrow(narrow(X) @ narrow(W) + narrow(B))
    expected = narrow(z * z)
    # Every result is a number of the type; a sum in another order may fall to the other side of a tie.
    np.testing.assert_array_equal(found, narrow(found))
    assert (found != expected).mean() < 0.02
    unit = np.finfo(np.float16).eps if dtype is np.float16 else 2.0**-8
    np.testing.assert_allclose(found, expected, rtol=3 * unit)
    # Rounding matters here: the same without it is elsewhere nearly everywhere.
    assert (expected != (X @ W + B) ** 2).mean() > 0.9
