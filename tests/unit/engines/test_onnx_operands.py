"""Operands of products as an ONNX graph has them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx.reference import ReferenceEvaluator

from loka_onnx.core.formats import Precision
from loka_onnx.engines.onnx_operands import OperandReader, Source, is_same_up_to_transpose
from loka_onnx.engines.onnxruntime.site_precision import Graphs, site_precision

F8 = ml_dtypes.float8_e4m3fn


def tensor(name: str, value: np.ndarray, kind: int) -> onnx.TensorProto:
    return h.make_tensor(name, kind, value.shape, value.tobytes(), raw=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """fc: Q/DQ on a transposed activation, per-channel FP8 weight; plain: floats; folded: fused by ORT."""
    random = np.random.default_rng(0)
    weight = random.normal(size=(8, 4)).astype(F8)
    scale = np.array([0.5, 1.0, 2.0, 3.0], np.float32)
    inits = [
        tensor("w8", weight, T.FLOAT8E4M3FN),
        tensor("ws", scale, T.FLOAT),
        tensor("wz", np.zeros(4, F8), T.FLOAT8E4M3FN),
        tensor("s", np.array(0.1, np.float32), T.FLOAT),
        tensor("z", np.array(0, F8), T.FLOAT8E4M3FN),
        tensor("w", random.normal(size=(4, 4)).astype(np.float32), T.FLOAT),
    ]
    nodes = [
        h.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"], "q"),
        h.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"], "dq"),
        h.make_node("Transpose", ["xd"], ["xt"], "t", perm=[1, 0]),
        h.make_node("DequantizeLinear", ["w8", "ws", "wz"], ["wd"], "wdq", axis=1),
        h.make_node("MatMul", ["xt", "wd"], ["y"], "fc"),
        h.make_node("MatMul", ["y", "w"], ["y2"], "plain"),
        h.make_node("Gemm", ["y2", "w"], ["out"], "folded/MatMulAddFusion"),
    ]
    graph = h.make_graph(
        nodes,
        "g",
        [h.make_tensor_value_info("x", T.FLOAT, [8, "n"])],
        [h.make_tensor_value_info("out", T.FLOAT, None), h.make_tensor_value_info("wd", T.FLOAT, [8, 4])],
        inits,
    )
    path = tmp_path / "model.onnx"
    made = h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, path, save_as_external_data=True, location="model.data", size_threshold=0)
    return path


def test_fp8_operands_are_seen_through_layout_ops(model: Path) -> None:
    reader = OperandReader(model)
    node = reader.product("fc")
    assert node is not None
    assert reader.operands(node) == (Source("float", "float8e4m3fn"), Source("float", "float8e4m3fn"))


def test_where_nothing_is_inferred_the_scale_tells_the_type(model: Path) -> None:
    # ONNX infers nothing behind an operator that it does not know.
    proto = onnx.load(model, load_external_data=False)
    proto.graph.node.insert(0, h.make_node("Own", ["x"], ["own"], "own", domain="com.example"))
    proto.graph.node[1].input[0] = "own"
    proto.opset_import.append(h.make_opsetid("com.example", 1))
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear":
            node.domain = "com.microsoft"
    proto.opset_import.append(h.make_opsetid("com.microsoft", 1))
    onnx.save(proto, model)
    reader = OperandReader(model)
    node = reader.product("fc")
    assert node is not None
    assert [source.element_type for source in reader.operands(node)] == ["float", "float"]


def test_float_operands_are_floats(model: Path) -> None:
    reader = OperandReader(model)
    node = reader.product("plain")
    assert node is not None
    assert reader.operands(node) == (Source("float"), Source("float", constant="w"))
    assert reader.float_types() == {"float", "float8e4m3fn"}


def test_a_fused_product_is_found_by_its_first_node(model: Path) -> None:
    reader = OperandReader(model)
    fused = reader.product("folded")
    assert fused is not None
    assert fused.op_type == "Gemm"
    assert reader.product("fold") is None


def test_the_dequantized_weight_is_the_reference_evaluators(model: Path) -> None:
    found = OperandReader(model).dequantized_weight("fc")
    inputs = {"x": np.zeros((8, 1), np.float32)}
    expected = ReferenceEvaluator(onnx.load(model)).run(["wd"], inputs)[0]
    assert found is not None
    np.testing.assert_array_equal(found, expected)
    assert OperandReader(model).dequantized_weight("plain") is None


@pytest.mark.parametrize(("error", "engaged"), [(0.0, True), (1e-3, False)])
def test_a_folded_weight_counts_as_fp8_only_with_fp8_values(model: Path, error: float, engaged: bool) -> None:
    before = OperandReader(model)
    values = before.dequantized_weight("fc")
    assert values is not None
    folded = onnx.load(model)
    nodes = [node for node in folded.graph.node if node.name != "wdq"]
    del folded.graph.node[:]
    folded.graph.node.extend(nodes)
    folded.graph.initializer.append(tensor("wd", values + np.float32(error), T.FLOAT))
    onnx.save(folded, model.with_name("folded.onnx"))
    after = OperandReader(model.with_name("folded.onnx"))
    assert site_precision("fc", Precision.FP8, Graphs(before, after, True)).engaged is engaged


def test_same_up_to_transpose() -> None:
    a = np.arange(6.0).reshape(2, 3)
    assert is_same_up_to_transpose(a, a)
    assert is_same_up_to_transpose(a, a.T)
    assert not is_same_up_to_transpose(a, a + 1)
