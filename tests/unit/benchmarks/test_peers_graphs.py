"""Graphs of other tools: which sites are FP8, told from the graph alone, and what is executed of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.helper import make_node

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from benchmarks.peers.judging import ONE_THREAD, against_reference_evaluator, as_run
from benchmarks.peers.on_device_graphs import Form, formed
from benchmarks.peers.rounding import narrow_types
from benchmarks.peers.sites import quantized_products, quantized_sites
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.engines.inductor.lowering.model import lower
from loka_onnx.errors import ModelError
from loka_onnx.sessions.onnx_session import OnnxSession

E4M3FN = ml_dtypes.float8_e4m3fn


def built(
    nodes: list[NodeProto], stored: Mapping[str, Any], width: int, output: tuple[str, list[Any] | None]
) -> onnx.ModelProto:
    """A graph of ``x``, (batch, width) in FP32, and one output in FP32."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "ranker",
        [info("x", TensorProto.FLOAT, ["batch", width])],
        [info(output[0], TensorProto.FLOAT, output[1])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def pair(name: str, source: str, scale: str = "scale", zero: str = "zero", **more: int) -> list[NodeProto]:
    """A Q/DQ pair whose result is ``<name>``."""
    return [
        make_node("QuantizeLinear", [source, scale, zero], [f"{name}.q"], **more),
        make_node("DequantizeLinear", [f"{name}.q", scale, zero], [name], **more),
    ]


# ---- which sites are FP8 ---------------------------------------------------------------------------------


def site(name: str, k: int, n: int) -> Site:
    weight = Operand(f"{name}.w", 1, True, 0, (k, n))
    operands = (Operand(f"{name}.x", 0, False, 1, (None, k)), weight)
    return Site(name, SiteKind.LINEAR, "MatMul", operands, f"{name}.y", k, n, 1)


def with_weight(*nodes: NodeProto) -> onnx.ModelProto:
    """A graph with ``x`` in FP8 (``x8``), a weight stored in FP8 (``w.dq``), and one that is not."""
    stored = {
        "zero": np.zeros((), E4M3FN),
        "scale": np.float32(1),
        "plain": np.ones((16, 16), np.float32),
        "w": np.ones((16, 16), E4M3FN),
    }
    weight = make_node("DequantizeLinear", ["w", "scale", "zero"], ["w.dq"])
    return built([*pair("x8", "x"), weight, *nodes], stored, 16, ("y", None))


def test_both_operands_must_come_from_fp8():
    model = with_weight(
        make_node("MatMul", ["x8", "w.dq"], ["a"], name="both"),
        make_node("MatMul", ["x", "w.dq"], ["b"], name="weight alone"),
        make_node("MatMul", ["x8", "plain"], ["c"], name="activation alone"),
        make_node("Gemm", ["x8", "w.dq", "plain"], ["y"], name="bias stays wide"),
    )
    assert quantized_products(model) == ("both", "bias stays wide")


def test_movement_is_followed_and_arithmetic_is_not():
    model = with_weight(
        make_node("Transpose", ["w.dq"], ["w.t"]),
        make_node("Concat", ["x8", "x8"], ["xx"], axis=0),
        make_node("MatMul", ["xx", "w.t"], ["a"], name="moved"),
        make_node("Concat", ["x8", "x"], ["mixed"], axis=0),
        make_node("MatMul", ["mixed", "w.t"], ["b"], name="one part is wide"),
        make_node("Relu", ["x8"], ["r"]),
        make_node("MatMul", ["r", "w.t"], ["y"], name="behind a Relu"),
    )
    assert quantized_products(model) == ("moved",)


def test_the_share_counts_fp8_able_flops_only():
    # 2·64·64 and 2·64·32 operations can be FP8; K = 8 cannot be, though it is quantized here.
    sites = (site("big", 64, 64), site("small", 64, 32), site("narrow", 8, 64))
    model = with_weight(
        make_node("MatMul", ["x8", "w.dq"], ["a"], name="big"),
        make_node("MatMul", ["x8", "w.dq"], ["b"], name="narrow/MatMulAddFusion"),
        make_node("MatMul", ["x8", "w.dq"], ["y"], name="made by a tool"),
    )
    found = quantized_sites(model, ModelArtifact(Path("model.onnx"), "", 21, (), (), sites, ""))
    assert found.sites == ("big", "narrow")
    assert found.linear_sites == 3
    assert found.share == 64 * 64 / (64 * 64 + 64 * 32)
    assert found.unknown == ("made by a tool",)
    assert found.pairs == 1


# ---- what the judge executes -----------------------------------------------------------------------------

ROWS, K, N = 32, 24, 16
RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(ROWS, K)).astype(np.float32)
W = RANDOM.normal(size=(K, N)).astype(np.float32)
B = RANDOM.normal(size=(N,)).astype(np.float32)
X_SCALE, W_SCALE = np.float32(0.01171875), np.float32(0.0078125)


def executed(nodes: list[NodeProto], stored: Mapping[str, Any], directory: Path) -> tuple[Path, np.ndarray]:
    """The graph as a file, and its answer to `X`."""
    path = directory / "model.onnx"
    onnx.save(built(nodes, stored, K, ("y", ["batch", N])), path)
    return path, OnnxSession(as_run(path, directory), ONE_THREAD).run({"x": X})["y"]


def float8(values: np.ndarray, scale: np.float32) -> np.ndarray:
    return np.clip(values / scale, -448, 448).astype(E4M3FN).astype(np.float32) * scale


def test_float8_pairs_are_executed_as_they_are_written(tmp_path):
    """As a tool writes it: a pair at the activation, one at the weight, a bias, a Relu."""
    nodes = [
        *pair("x.dq", "x", "x.scale"),
        *pair("w.dq", "w", "w.scale"),
        make_node("Gemm", ["x.dq", "w.dq", "b"], ["z"]),
        make_node("Relu", ["z"], ["y"]),
    ]
    stored = {"zero": np.zeros((), E4M3FN), "x.scale": X_SCALE, "w.scale": W_SCALE, "w": W, "b": B}
    path, found = executed(nodes, stored, tmp_path)
    expected = np.maximum(float8(X, X_SCALE) @ float8(W, W_SCALE) + B, 0)
    # The order of sums alone: 24 products of magnitude 1 to 10.
    np.testing.assert_allclose(found, expected, atol=2e-5)
    # The effect of FP8 is thousands of times as large, so that an exact product would not pass.
    assert np.abs(np.maximum(X @ W + B, 0) - expected).max() > 0.05
    assert against_reference_evaluator(path, {"x": X}, "y", tmp_path) < 2e-5


@pytest.mark.parametrize(
    ("kind", "dtype"), [(TensorProto.BFLOAT16, ml_dtypes.bfloat16), (TensorProto.FLOAT16, np.float16)]
)
def test_narrow_types_are_rounded_behind_each_node(kind, dtype, tmp_path):
    nodes = [
        make_node("Cast", ["x"], ["xn"], to=kind),
        make_node("Gemm", ["xn", "w", "b"], ["z"]),
        make_node("Mul", ["z", "z"], ["s"]),
        make_node("Relu", ["s"], ["r"]),
        make_node("Cast", ["r"], ["y"], to=TensorProto.FLOAT),
    ]
    path, found = executed(nodes, {"w": W.astype(dtype), "b": B.astype(dtype)}, tmp_path)
    assert narrow_types(onnx.load(path)) == {kind}

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


# ---- on the way to a GPU ---------------------------------------------------------------------------------

WIDTH = 32
SCALE = 0.0123456789
"""No BF16 number: a tool that is not ours takes no care of that."""
RNG = np.random.default_rng(7)
WEIGHTS = {name: RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.2 for name in ("one", "two", "three")}
HEAD = RNG.normal(size=(WIDTH, 1)).astype(np.float32)


def foreign_graph() -> onnx.ModelProto:
    """x → three products with ReLU → a head, as tools write it: `one` with a weight behind Q and DQ, a scale
    a channel; `two` with an FP8 weight, its activation behind a Reshape; `three` with its activation alone.
    """
    two_scale = np.float32(np.abs(WEIGHTS["two"]).max() / 448)
    stored = {
        **{name: WEIGHTS[name] for name in ("one", "three")},
        "head": HEAD,
        "axis": np.array([1], np.int64),
        "scale": np.float32(SCALE),
        "zero": np.zeros((), E4M3FN),
        "one.scale": (np.abs(WEIGHTS["one"]).max(axis=0) / 448).astype(np.float32),
        "one.zero": np.zeros(WIDTH, E4M3FN),
        "two.scale": two_scale,
        "two.fp8": (WEIGHTS["two"] / two_scale).astype(E4M3FN),
        "flat": np.array([-1, WIDTH], np.int64),
    }
    nodes = [
        *pair("one.dq", "x"),
        *pair("one.w", "one", "one.scale", "one.zero", axis=1),
        make_node("MatMul", ["one.dq", "one.w"], ["one.out"], "one"),
        make_node("Relu", ["one.out"], ["one.relu"]),
        *pair("two.dq", "one.relu"),
        make_node("Reshape", ["two.dq", "flat"], ["two.flat"]),
        make_node("DequantizeLinear", ["two.fp8", "two.scale", "zero"], ["two.w"]),
        make_node("MatMul", ["two.flat", "two.w"], ["two.out"], "two"),
        make_node("Relu", ["two.out"], ["two.relu"]),
        *pair("three.dq", "two.relu"),
        make_node("MatMul", ["three.dq", "three"], ["three.out"], "three"),
        make_node("Relu", ["three.out"], ["three.relu"]),
        make_node("MatMul", ["three.relu", "head"], ["wide"], "head"),
        make_node("Squeeze", ["wide", "axis"], ["logit"], "squeeze"),
    ]
    return built(nodes, stored, WIDTH, ("logit", ["batch"]))


def form_of(proto: onnx.ModelProto, directory: Path, base: Precision = Precision.BF16) -> Form:
    onnx.save(proto, directory / "written.onnx")
    return formed(directory / "written.onnx", directory / "form.onnx", "foreign", base)


def test_a_product_is_fp8_where_both_operands_are_dequantized(tmp_path):
    form = form_of(foreign_graph(), tmp_path)
    plan = {decision.site: decision for decision in form.plan.decisions}
    assert {name for name, d in plan.items() if d.precision is Precision.FP8} == {"one", "two"}
    assert {name for name, d in plan.items() if d.precision is Precision.BF16} == {"three", "head"}
    assert plan["three"].reason == "one operand without DequantizeLinear"
    assert len(plan["one"].weight_scale) == WIDTH and len(plan["two"].weight_scale) == 1
    assert plan["one"].activation_scale == float(np.float32(SCALE))
    # The head has one column: it is none that could be FP8.
    assert form.plan.fp8_share == pytest.approx(2 / 3)
    assert [(site.k, site.n) for site in form.model.sites] == [(WIDTH, WIDTH)] * 3 + [(WIDTH, 1)]


def test_scales_stay_to_the_bit_in_a_bf16_graph(tmp_path):
    form_of(foreign_graph(), tmp_path)
    graph = onnx.load(tmp_path / "form.onnx").graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    scales = [stored[node.input[1]] for node in graph.node if node.op_type.endswith("quantizeLinear")]
    assert {tensor.data_type for tensor in scales} == {TensorProto.FLOAT}
    assert np.float32(SCALE) in {float(numpy_helper.to_array(s)) for s in scales if not s.dims}
    weights = [stored[n.input[1]].data_type for n in graph.node if n.name in ("three", "head")]
    assert weights == [TensorProto.BFLOAT16] * 2


@pytest.mark.parametrize(
    ("base", "most"),
    [
        # A product's sums come in another order: a value in many thousands is rounded the other way.
        (Precision.FP32, 0.01),
        # Of values that BF16 has rounded, 1 in 16 lies halfway between two of FP8 and half of those go the
        # other way: 12/32 of the energy that FP8 makes, whose root mean square is .137 here.
        (Precision.BF16, 0.11),
    ],
)
def test_the_lowering_multiplies_fp8_and_gives_what_the_graph_says(base, most, tmp_path):
    import torch
    from onnx.reference import ReferenceEvaluator

    form_of(foreign_graph(), tmp_path, base)
    rows = np.random.default_rng(3).normal(size=(64, WIDTH)).astype(np.float32)
    module = lower(tmp_path / "form.onnx").eval()
    with torch.no_grad():
        (found,) = module(torch.from_numpy(rows))
    engaged = {name: site.engaged for name, site in module.sites.items()}
    assert engaged == {"one": True, "two": True, "three": False, "head": False}
    (wanted,) = ReferenceEvaluator(foreign_graph()).run(None, {"x": rows})
    error = np.sqrt(np.square(found.float().numpy() - wanted).mean()) / np.std(wanted)
    assert error < most


def test_integers_at_an_activation_are_refused(tmp_path):
    proto = foreign_graph()
    zero = next(tensor for tensor in proto.graph.initializer if tensor.name == "zero")
    zero.CopyFrom(numpy_helper.from_array(np.array(0, np.int8), "zero"))
    with pytest.raises(ModelError, match="quantizes to another type than E4M3FN and E5M2"):
        form_of(proto, tmp_path)
