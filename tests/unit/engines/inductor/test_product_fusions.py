"""What fusions of products and concatenations take and leave, and that the fused graph computes the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from fusion_models import (
    BATCH,
    BF16,
    FP8,
    RANDOM,
    ULP,
    Model,
    bf16,
    fused,
    half,
    ops,
    product,
    run,
    unchanged,
)

from loka_onnx.engines.inductor.fusions import DOMAIN, fuse
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("behind", ["", "relu", "cross"])
@pytest.mark.parametrize("outputs", ["wide", "quantized", "quantized and wide"])
def test_a_product_takes_along_what_follows(bias, behind, outputs, tmp_path):
    model = product(bias, behind, outputs)
    graph, report = fused(model, tmp_path)
    assert [found.sites for found in report.fused["float8-product"]] == [("fc",)]
    left = ops(graph)
    assert f"{DOMAIN}::Float8Product" in left
    assert not {"Gemm", "Relu", "Add", "Mul"} & set(left)
    assert left.count("QuantizeLinear") == 1
    c = {name: value.astype(np.float64) for name, value in model.constants.items()}
    x = RANDOM.standard_normal((BATCH, 32)).astype(np.float32)
    rows = x.astype(BF16).astype(np.float64)
    q = np.clip(rows / c["s"], -448, 448).astype(np.float32).astype(FP8).astype(np.float64)
    z = (q * c["s"]) @ (c["w"] * c["ws"][:, None]).T + (c["b"] if bias else 0.0)
    if behind == "relu":
        z = np.maximum(z, 0.0)
    if behind == "cross":
        x0 = (rows @ c["m"]).astype(np.float32).astype(BF16).astype(np.float64)
        z = x0 * z + x0
    got = dict(zip(model.outputs, run(graph, x), strict=True))
    magnitude = np.abs(z).max()
    if "wide" in outputs:
        np.testing.assert_allclose(got["wide"], z, rtol=4 * ULP, atol=4 * ULP * magnitude)
    if "quantized" in outputs:
        steps = np.clip(z / c["s2"], -448, 448)
        np.testing.assert_allclose(
            got["y"] / c["s2"], steps, rtol=2.0**-4 + 4 * ULP, atol=4 * ULP * magnitude / c["s2"] + 2.0**-9
        )


def test_both_scales_are_multiplied_when_the_graph_is_fused(tmp_path):
    """An engine would multiply them in every request, in a kernel of its own."""
    model = product(bias=True, behind="relu", outputs="wide")
    graph, _ = fused(model, tmp_path)
    (made,) = [node for node in graph.nodes if node.op == "Float8Product"]
    wanted = model.constants["ws"].astype(np.float32) * model.constants["s"].astype(np.float32)
    np.testing.assert_array_equal(made.reads(8).values, wanted)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("behind", ["", "relu", "cross", "quantized", "relu, quantized"])
def test_a_product_in_bf16_takes_along_what_follows(behind, transposed, tmp_path):
    model = half(behind, transposed=transposed)
    graph, report = fused(model, tmp_path)
    # The cross layer's x0 is a product with nothing behind it.
    wanted = [("fc",), ("other",)] if behind == "cross" else [("fc",)]
    assert [found.sites for found in report.fused["half-product"]] == wanted
    assert not {"Gemm", "Relu", "Add", "Mul", "QuantizeLinear"} & set(ops(graph))
    # Quantizing the site would leave the fusion as it is.
    assert report.joined == {}
    c = {name: value.astype(np.float64) for name, value in model.constants.items()}
    x = RANDOM.standard_normal((BATCH, 32)).astype(np.float32)
    rows = x.astype(BF16).astype(np.float64)
    z = rows @ (c["w"].T if transposed else c["w"]) + c["b"]
    z = np.maximum(z, 0.0) if "relu" in behind else z
    if "cross" in behind:
        x0 = (rows @ c["m"]).astype(np.float32).astype(BF16).astype(np.float64)
        z = x0 * z + x0
    (got,) = run(graph, x)
    magnitude = np.abs(z).max()
    if "quantized" in behind:
        z = np.clip(z, -448 * c["s2"], 448 * c["s2"])
        np.testing.assert_allclose(got, z, rtol=2.0**-4 + 4 * ULP, atol=4 * ULP * magnitude + 2.0**-9)
    else:
        np.testing.assert_allclose(got, z, rtol=4 * ULP, atol=4 * ULP * magnitude)


def test_a_product_in_bf16_of_a_width_that_no_kernel_takes_is_left_to_the_library(tmp_path):
    # Multiples of 16.
    assert fused(half("relu", width=13), tmp_path)[1].fused == {}


def joined(reader: str = "wide", parts: int = 2) -> Model:
    """Computed columns beside rounded ones, and their Q."""
    model = Model((4, 8)).constant("flat", np.array([0, 32], np.int64)).constant("m", bf16(32, 16, scale=0.3))
    model.add("Reshape", ["x", "flat"], "rows").add("MatMul", ["rows", "m"], "left", name="other")
    model.add("Concat", ["left", *["rows"] * (parts - 1)], "joined", name="cat", axis=1)
    model.constant("s", np.array(0.0078125, BF16)).constant("zero", np.array(0, FP8))
    model.add("QuantizeLinear", ["joined", "s", "zero"], "q").add("DequantizeLinear", ["q", "s", "zero"], "y")
    if reader == "wide":
        model.add("Identity", ["joined"], "wide")
        model.outputs = ("y", "wide")
    return model


@pytest.mark.parametrize("reader", ["wide", "none"])
def test_a_concatenation_is_quantized_as_it_is_written(reader, tmp_path):
    model = joined(reader)
    graph, report = fused(model, tmp_path)
    assert [place.sites for place in report.fused["concat-quantize"]] == [()]
    left = ops(graph)
    assert f"{DOMAIN}::ConcatQuantize" in left and not {"Concat", "QuantizeLinear"} & set(left)
    (made,) = [node for node in graph.nodes if node.op == "ConcatQuantize"]
    # The columns that come from the model's FP32 input are read before they are rounded.
    assert [made.reads(0).kind, made.reads(1).kind] == [onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT]
    x = RANDOM.standard_normal((BATCH, 4, 8)).astype(np.float32)
    rows = x.reshape(BATCH, 32).astype(BF16).astype(np.float64)
    c = {name: value.astype(np.float64) for name, value in model.constants.items()}
    whole = np.concatenate([(rows @ c["m"]).astype(np.float32).astype(BF16).astype(np.float64), rows], axis=1)
    got = dict(zip(model.outputs, run(graph, x), strict=True))
    steps = np.clip(whole / c["s"], -448, 448)
    np.testing.assert_allclose(got["y"] / c["s"], steps, rtol=2.0**-4 + 4 * ULP, atol=2.0**-9 + 4 * ULP)
    if reader == "wide":
        np.testing.assert_allclose(got["wide"], whole, rtol=4 * ULP, atol=4 * ULP * np.abs(whole).max())


def test_other_concatenations_are_left_to_the_compiler(tmp_path):
    _, report = fused(joined(parts=3), tmp_path)
    assert report.declined["concat-quantize"] == ("cat: it joins 3 tensors, the kernel two",)
    plain = joined()
    # Nothing quantizes it.
    plain.nodes = [node for node in plain.nodes if node.op_type not in {"QuantizeLinear", "DequantizeLinear"}]
    plain.outputs = ("wide",)
    _, report = fused(plain, tmp_path)
    assert "concat-quantize" not in {**report.fused, **report.declined}


def test_a_weight_that_is_not_transposed_is_stored_so(tmp_path):
    """Matrix units read FP8 along K from both factors."""
    model = product(bias=True, behind="relu", outputs="wide")
    x = RANDOM.standard_normal((3, 32), np.float32)
    transposed, _ = fused(model, tmp_path)
    expected = run(transposed, x)[0]
    gemm = next(node for node in model.nodes if node.op_type == "Gemm")
    del gemm.attribute[:]
    model.constants["w"] = np.ascontiguousarray(model.constants["w"].T)
    next(n for n in model.nodes if n.output[0] == "dw").attribute[0].i = 1
    graph, _ = fused(model, tmp_path)
    np.testing.assert_array_equal(run(graph, x)[0], expected)
    read = (tensor for node in graph.live_nodes() for tensor in node.inputs if tensor is not None)
    assert {t.shape for t in read if t.kind == TensorProto.FLOAT8E4M3FN and len(t.shape or ()) == 2} == {
        (48, 32),
        (None, 32),
    }


def test_products_that_share_a_weight_share_its_transpose() -> None:
    rows = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["N", 64]) for name in "ab"]
    made = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["N", 32]) for name in "yz"]
    nodes = [helper.make_node("MatMul", [x, "w"], [y], f"fc_{x}") for x, y in ("ay", "bz")]
    stored = numpy_helper.from_array(bf16(64, 32), "w")
    proto = helper.make_model(helper.make_graph(nodes, "towers", rows, made, [stored]))
    graph = PlannedGraph(proto)
    assert [found.sites for found in fuse(graph).fused["half-product"]] == [("fc_a",), ("fc_b",)]
    first, second = (node.reads(2) for node in graph.nodes if node.outputs)
    assert first is second
    np.testing.assert_array_equal(first.values, numpy_helper.to_array(stored).T)


def test_scales_of_rows_of_a_weight_are_not_those_of_its_columns(tmp_path):
    model = product(bias=False, behind="", outputs="wide")
    model.constants["ws"] = np.abs(bf16(32)) * BF16(0.01) + BF16(0.005)
    model.constants["wz"] = np.zeros(32, FP8)
    next(n for n in model.nodes if n.output[0] == "dw").attribute[0].i = 1
    report = unchanged(model, tmp_path, RANDOM.standard_normal((BATCH, 32)).astype(np.float32))
    assert "float8-product" not in report.fused


def test_a_row_that_is_broadcast_is_no_x0(tmp_path):
    model = product(bias=False, behind="", outputs="")
    model.constant("row32", RANDOM.standard_normal((1, 48)).astype(np.float32))
    model.add("Cast", ["row32"], "row", to=TensorProto.BFLOAT16).add("Mul", ["row", "g"], "gm")
    model.add("Add", ["gm", "row"], "wide")
    model.outputs = ("wide",)
    unchanged(model, tmp_path, RANDOM.standard_normal((BATCH, 32)).astype(np.float32))
    assert "Mul" in ops(fused(model, tmp_path)[0])
