"""Graphs of other tools: which sites are FP8, told from the graph alone, and what is executed of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx_text import parsed

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


def pair(name: str, source: str, scale: str = "scale", zero: str = "zero", more: str = "") -> str:
    """A Q/DQ pair whose result is ``<name>``."""
    return (
        f"{name}_q = QuantizeLinear{more}({source}, {scale}, {zero})"
        f"{name} = DequantizeLinear{more}({name}_q, {scale}, {zero})"
    )


# ---- which sites are FP8 ---------------------------------------------------------------------------------


def site(name: str, k: int, n: int) -> Site:
    weight = Operand(f"{name}.w", 1, True, 0, (k, n))
    operands = (Operand(f"{name}.x", 0, False, 1, (None, k)), weight)
    return Site(name, SiteKind.LINEAR, "MatMul", operands, f"{name}.y", k, n, 1)


def with_weight(body: str) -> onnx.ModelProto:
    """A graph with ``x`` in FP8 (``x8``), a weight stored in FP8 (``w_dq``), and one that is not."""
    stored = {
        "zero": np.zeros((), E4M3FN),
        "scale": np.float32(1),
        "plain": np.ones((16, 16), np.float32),
        "w": np.ones((16, 16), E4M3FN),
    }
    weight = "w_dq = DequantizeLinear(w, scale, zero)"
    return parsed(pair("x8", "x") + weight + body, stored, inputs="float[batch,16] x")


def test_both_operands_must_come_from_fp8():
    model = with_weight(
        """["both"] a = MatMul(x8, w_dq) ["weight alone"] b = MatMul(x, w_dq)
        ["activation alone"] c = MatMul(x8, plain) ["bias stays wide"] y = Gemm(x8, w_dq, plain)"""
    )
    assert quantized_products(model) == ("both", "bias stays wide")


def test_movement_is_followed_and_arithmetic_is_not():
    model = with_weight(
        """wt = Transpose(w_dq) xx = Concat<axis=0>(x8, x8) ["moved"] a = MatMul(xx, wt)
        mixed = Concat<axis=0>(x8, x) ["one part is wide"] b = MatMul(mixed, wt)
        r = Relu(x8) ["behind a Relu"] y = MatMul(r, wt)"""
    )
    assert quantized_products(model) == ("moved",)


def test_the_share_counts_fp8_able_flops_only():
    # 2·64·64 and 2·64·32 operations can be FP8; K = 8 cannot be, though it is quantized here.
    sites = (site("big", 64, 64), site("small", 64, 32), site("narrow", 8, 64))
    model = with_weight(
        """["big"] a = MatMul(x8, w_dq) ["narrow/MatMulAddFusion"] b = MatMul(x8, w_dq)
        ["made by a tool"] y = MatMul(x8, w_dq)"""
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


def executed(body: str, stored: Mapping[str, Any], directory: Path) -> tuple[Path, np.ndarray]:
    """The graph as a file, and its answer to `X`."""
    path = directory / "model.onnx"
    onnx.save(parsed(body, stored, inputs=f"float[batch,{K}] x", outputs=f"float[batch,{N}] y"), path)
    return path, OnnxSession(as_run(path, directory), ONE_THREAD).run({"x": X})["y"]


def float8(values: np.ndarray, scale: np.float32) -> np.ndarray:
    return np.clip(values / scale, -448, 448).astype(E4M3FN).astype(np.float32) * scale


def test_float8_pairs_are_executed_as_they_are_written(tmp_path):
    """As a tool writes it: a pair at the activation, one at the weight, a bias, a Relu."""
    pairs = pair("xd", "x", "x_scale") + pair("wd", "w", "w_scale")
    stored = {"zero": np.zeros((), E4M3FN), "x_scale": X_SCALE, "w_scale": W_SCALE, "w": W, "b": B}
    path, found = executed(f"{pairs} z = Gemm(xd, wd, b) y = Relu(z)", stored, tmp_path)
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
    nodes = f"xn = Cast<to={kind}>(x) z = Gemm(xn, w, b) s = Mul(z, z) r = Relu(s) y = Cast<to=1>(r)"
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
        "one_scale": (np.abs(WEIGHTS["one"]).max(axis=0) / 448).astype(np.float32),
        "one_zero": np.zeros(WIDTH, E4M3FN),
        "two_scale": two_scale,
        "two_fp8": (WEIGHTS["two"] / two_scale).astype(E4M3FN),
        "flat": np.array([-1, WIDTH], np.int64),
    }
    body = f"""
        {pair("one_dq", "x")} {pair("one_w", "one", "one_scale", "one_zero", "<axis=1>")}
        [one] one_out = MatMul(one_dq, one_w) one_relu = Relu(one_out)
        {pair("two_dq", "one_relu")} two_flat = Reshape(two_dq, flat)
        two_w = DequantizeLinear(two_fp8, two_scale, zero)
        [two] two_out = MatMul(two_flat, two_w) two_relu = Relu(two_out)
        {pair("three_dq", "two_relu")}
        [three] three_out = MatMul(three_dq, three) three_relu = Relu(three_out)
        [head] wide = MatMul(three_relu, head) [squeeze] logit = Squeeze(wide, axis)"""
    return parsed(body, stored, inputs=f"float[batch,{WIDTH}] x", outputs="float[batch] logit")


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
