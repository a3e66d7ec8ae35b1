"""Operands of products as an ONNX graph has them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper as h
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from loka_onnx.core.formats import Precision
from loka_onnx.engines.onnx_operands import OperandReader, OperandSource, is_same_up_to_transpose
from loka_onnx.engines.onnxruntime.site_precision import Graphs, site_precision

F8 = ml_dtypes.float8_e4m3fn


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """fc: Q/DQ on a transposed activation, per-channel FP8 weight; plain: floats; folded: fused by ORT."""
    body = """
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) t = Transpose<perm=[1,0]>(d)
        [wdq] wd = DequantizeLinear<axis=1>(w8, ws, wz)
        [fc] y = MatMul(t, wd) [plain] y2 = MatMul(y, w) [folded] out = Gemm(y2, w)
    """
    random = np.random.default_rng(0)
    constants = {"w8": random.normal(size=(8, 4)).astype(F8), "wz": np.zeros(4, F8), "z": np.array(0, F8)}
    constants |= {"ws": [0.5, 1.0, 2.0, 3.0], "s": 0.1, "w": random.normal(size=(4, 4))}
    made = parsed(body, constants, inputs="float[8,n] x", outputs="float out, float[8,4] wd")
    made.graph.node[-1].name = "folded/MatMulAddFusion"
    path = tmp_path / "model.onnx"
    onnx.save(made, path, save_as_external_data=True, location="model.data", size_threshold=0)
    return path


def operands(model: Path, site: str) -> tuple[OperandSource, ...]:
    reader = OperandReader(model)
    node = reader.product(site)
    assert node is not None
    return reader.operands(node)


def test_operands_are_seen_through_layout_and_fused_products_by_their_first_node(model: Path) -> None:
    assert operands(model, "fc") == (OperandSource("float", "float8e4m3fn"),) * 2
    assert operands(model, "plain") == (OperandSource("float"), OperandSource("float", constant="w"))
    assert OperandReader(model).float_types() == {"float", "float8e4m3fn"}
    reader = OperandReader(model)
    fused = reader.product("folded")
    assert fused is not None
    assert fused.op_type == "Gemm"
    assert reader.product("fold") is None


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
    assert [source.element_type for source in operands(model, "fc")] == ["float", "float"]


def test_the_dequantized_weight_is_the_reference_evaluators(model: Path) -> None:
    found = OperandReader(model).dequantized_weight("fc")
    inputs = {"x": np.zeros((8, 1), np.float32)}
    expected = ReferenceEvaluator(onnx.load(model)).run(["wd"], inputs)[0]
    assert found is not None
    np.testing.assert_array_equal(found, expected)
    assert OperandReader(model).dequantized_weight("plain") is None
    a = np.arange(6.0).reshape(2, 3)
    assert is_same_up_to_transpose(a, a)
    assert is_same_up_to_transpose(a, a.T)
    assert not is_same_up_to_transpose(a, a + 1)


@pytest.mark.parametrize(("error", "engaged"), [(0.0, True), (1e-3, False)])
def test_a_folded_weight_counts_as_fp8_only_with_fp8_values(model: Path, error: float, engaged: bool) -> None:
    before = OperandReader(model)
    values = before.dequantized_weight("fc")
    assert values is not None
    folded = onnx.load(model)
    nodes = [node for node in folded.graph.node if node.name != "wdq"]
    del folded.graph.node[:]
    folded.graph.node.extend(nodes)
    folded.graph.initializer.append(numpy_helper.from_array(values + np.float32(error), "wd"))
    onnx.save(folded, model.with_name("folded.onnx"))
    after = OperandReader(model.with_name("folded.onnx"))
    assert site_precision("fc", Precision.FP8, Graphs(before, after, True)).engaged is engaged
