"""What the fusions take, what they leave, and that the fused graph computes the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

import torch

from loka_onnx.engines.inductor.fusions import DOMAIN, FusionReport, fuse
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.inductor.kernels import operators as _registered
from loka_onnx.engines.inductor.lowering.model import lower

assert _registered
BATCH, N, D, K, NF = 5, 12, 16, 8, 7
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
RANDOM = np.random.default_rng(11)
ULP = 2.0**-8
"""Half a unit in the last place of BF16, relative."""


@dataclass
class Model:
    """Nodes and constants of a BF16 graph over one FP32 input."""

    width: tuple[int, ...]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)

    def add(self, op: str, inputs: list[str], output: str, /, name: str = "", **attributes: object) -> Model:
        self.nodes.append(helper.make_node(op, inputs, output.split(), name=name or output, **attributes))
        return self

    def constant(self, name: str, values: np.ndarray) -> Model:
        self.constants[name] = values
        return self

    def save(self, path: Path) -> Path:
        """Outputs are cast to FP32."""
        nodes = [helper.make_node("Cast", ["x32"], ["x"], name="enter", to=TensorProto.BFLOAT16)]
        nodes += self.nodes
        nodes += [helper.make_node("Cast", [o], [f"{o}32"], name=f"leave {o}", to=1) for o in self.outputs]
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x32", 1, ["batch", *self.width])],
            [helper.make_tensor_value_info(f"{o}32", 1, None) for o in self.outputs],
            [numpy_helper.from_array(v, n) for n, v in self.constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        onnx.save(model, path)
        return path


def bf16(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (RANDOM.standard_normal(shape) * scale).astype(BF16)


def fused(model: Model, folder: Path) -> tuple[PlannedGraph, FusionReport]:
    graph = PlannedGraph.load(model.save(folder / "planned.onnx"))
    return graph, fuse(graph)


def ops(graph: PlannedGraph, folder: Path) -> list[str]:
    graph.save(folder / "fused.onnx")
    proto = onnx.load(folder / "fused.onnx")
    return sorted(f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in proto.graph.node)


def run(path: Path, *inputs: np.ndarray) -> list[np.ndarray]:
    module = lower(path).eval()
    with torch.no_grad():
        return [np.asarray(value) for value in module(*map(torch.from_numpy, inputs))]


def normalized(z: np.ndarray, gamma: np.ndarray, beta: np.ndarray, epsilon: float = 1e-5) -> np.ndarray:
    """Layer normalization over the last axis, in float64."""
    z = z.astype(np.float64)
    centred = z - z.mean(-1, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(-1, keepdims=True) + epsilon)
    return centred / deviation * gamma.astype(np.float64) + beta.astype(np.float64)


def factorization(quantized: bool = False, merged: bool = False, flat: str = "Reshape") -> Model:
    """The interaction half of a Wukong block as exporters and mods write it."""
    model = Model((N, D)).constant("gamma", bf16(N * K)).constant("beta", bf16(N * K))
    model.add("Transpose", ["x"], "xt", perm=[0, 2, 1])
    if merged:
        model.constant("w", bf16(N, K + 3, scale=0.3)).constant("sizes", np.array([K, 3]))
        model.add("MatMul", ["xt", "w"], "both", name="project+mix")
        model.add("Split", ["both", "sizes"], "p other", axis=-1)
        model.outputs = ("y", "other")
    else:
        model.constant("w", bf16(N, K, scale=0.3)).add("MatMul", ["xt", "w"], "p", name="project")
    model.add("MatMul", ["x", "p"], "s", name="interact")
    if flat == "Reshape":
        model.constant("to", np.array([-1, N * K])).add("Reshape", ["s", "to"], "f")
    else:
        model.add("Flatten", ["s"], "f", axis=1)
    norm = "n" if quantized else "y"
    model.add("LayerNormalization", ["f", "gamma", "beta"], norm, name="norm", epsilon=1e-5)
    if quantized:
        model.constant("scale", np.array(0.0078125, BF16)).constant("zero", np.array(0, FP8))
        model.add("QuantizeLinear", ["n", "scale", "zero"], "q").add(
            "DequantizeLinear", ["q", "scale", "zero"], "y"
        )
    return model


def expected_factorization(model: Model, x: np.ndarray) -> np.ndarray:
    c = model.constants
    tokens = x.astype(BF16).astype(np.float64)
    y = c["w"].astype(np.float64)[:, :K]
    p = np.einsum("bnd,nk->bdk", tokens, y).astype(np.float32).astype(BF16).astype(np.float64)
    s = np.einsum("bnd,bdk->bnk", tokens, p).reshape(len(x), -1)
    return normalized(s, c["gamma"], c["beta"])


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("flat", ["Reshape", "Flatten"])
def test_the_interaction_and_its_norm_become_one_node(merged, flat, tmp_path):
    model = factorization(merged=merged, flat=flat)
    graph, report = fused(model, tmp_path)
    (found,) = report.fused["factorization-norm"]
    assert found.sites == ("project+mix" if merged else "project", "interact", "norm")
    rest = ["MatMul", "Split", "Transpose"] if merged else []
    assert ops(graph, tmp_path) == sorted(
        ["Cast"] * (3 if merged else 2) + rest + [f"{DOMAIN}::FactorizationNorm"]
    )
    x = RANDOM.standard_normal((BATCH, N, D)).astype(np.float32)
    got, expected = run(tmp_path / "fused.onnx", x)[0], expected_factorization(model, x)
    # On the CPU S is rounded to BF16 before the norm; the rest is the rounding of the output.
    np.testing.assert_allclose(got, expected, rtol=2 * ULP, atol=8 * ULP)
    # Dropping the gain or the shift would be seen.
    assert np.abs(got - normalized(expected, np.ones(1), np.zeros(1))).max() > 0.5


def test_the_q_behind_the_norm_is_taken_along(tmp_path):
    model = factorization(quantized=True)
    graph, _ = fused(model, tmp_path)
    assert ops(graph, tmp_path) == ["Cast", "Cast", "DequantizeLinear", f"{DOMAIN}::FactorizationNorm"]
    x = RANDOM.standard_normal((BATCH, N, D)).astype(np.float32)
    expected = expected_factorization(model, x)
    scale = float(model.constants["scale"])
    steps = np.clip(expected / scale, -448, 448)
    got = run(tmp_path / "fused.onnx", x)[0] / scale
    # A value may fall to either side where S was rounded: one step of E4M3, 2⁻³ of its magnitude.
    np.testing.assert_allclose(got, steps, rtol=2.0**-4 + 8 * ULP, atol=8 * ULP / scale * 2)
    exact = steps.astype(np.float32).astype(FP8).astype(np.float32)
    assert (got == exact).mean() > 0.9


def residual(mixed: bool = True, order: int = 0) -> Model:
    """The second half: F comes from a product so that its shape is known."""
    model = Model((N, D)).constant("gamma", bf16(D)).constant("beta", bf16(D))
    model.constant("wf", bf16(N * D, NF * D, scale=0.05)).constant("flat", np.array([-1, N * D]))
    model.constant("tokens", np.array([-1, NF, D])).constant("w", bf16(N, N - NF, scale=0.3))
    model.add("Reshape", ["x", "flat"], "xf").add("MatMul", ["xf", "wf"], "ff", name="mlp")
    model.add("Reshape", ["ff", "tokens"], "f").add("Transpose", ["x"], "xt", perm=[0, 2, 1])
    model.add("MatMul", ["xt", "w"], "lt", name="mix").add("Transpose", ["lt"], "l", perm=[0, 2, 1])
    model.add("Concat", ["f", "l"] if mixed else ["l", "f"], "c", axis=1)
    model.add("Add", ["c", "x"] if order == 0 else ["x", "c"], "z")
    return model.add("LayerNormalization", ["z", "gamma", "beta"], "y", name="norm", epsilon=1e-5)


@pytest.mark.parametrize("order", [0, 1])
def test_the_residual_block_becomes_one_node(order, tmp_path):
    model = residual(order=order)
    graph, report = fused(model, tmp_path)
    (found,) = report.fused["token-residual-norm"]
    assert found.sites == ("mix", "norm")
    assert f"{DOMAIN}::TokenResidualNorm" in ops(graph, tmp_path)
    c = model.constants
    x = RANDOM.standard_normal((BATCH, N, D)).astype(np.float32)
    tokens = x.astype(BF16).astype(np.float64)
    wide = {name: value.astype(np.float64) for name, value in c.items()}
    own = (tokens.reshape(BATCH, -1) @ wide["wf"]).astype(np.float32).astype(BF16).astype(np.float64)
    mix = np.einsum("bnd,nm->bmd", tokens, wide["w"])
    z = np.concatenate([own.reshape(BATCH, NF, D), mix], axis=1) + tokens
    expected = normalized(z, c["gamma"], c["beta"])
    np.testing.assert_allclose(run(tmp_path / "fused.onnx", x)[0], expected, rtol=4 * ULP, atol=8 * ULP)


def product(bias: bool, behind: str, outputs: str) -> Model:
    """An FP8 Gemm with what follows it."""
    k, n = 32, 48
    scale = np.array(0.0078125, BF16)
    model = Model((k,)).constant("s", scale).constant("zero", np.array(0, FP8))
    model.constant("w", (RANDOM.standard_normal((n, k)) * 40).astype(FP8))
    model.constant("ws", np.abs(bf16(n)) * BF16(0.01) + BF16(0.005)).constant("wz", np.zeros(n, FP8))
    model.constant("b", bf16(n)).constant("m", bf16(k, n, scale=0.2))
    model.add("QuantizeLinear", ["x", "s", "zero"], "q").add("DequantizeLinear", ["q", "s", "zero"], "dq")
    model.add("DequantizeLinear", ["w", "ws", "wz"], "dw", axis=0)
    model.add("Gemm", ["dq", "dw", "b"] if bias else ["dq", "dw"], "g", name="fc", transB=1)
    last = "g"
    if behind == "relu":
        model.add("Relu", ["g"], "r")
        last = "r"
    if behind == "cross":
        model.add("MatMul", ["x", "m"], "x0", name="other").add("Mul", ["x0", "g"], "gm")
        model.add("Add", ["gm", "x0"], "r")
        last = "r"
    if "quantized" in outputs:
        model.constant("s2", np.array(0.03125, BF16)).add("QuantizeLinear", [last, "s2", "zero"], "q2")
        model.add("DequantizeLinear", ["q2", "s2", "zero"], "y")
    if "wide" in outputs:
        model.add("Identity", [last], "wide")
    model.outputs = (("y",) if "quantized" in outputs else ()) + (("wide",) if "wide" in outputs else ())
    return model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("behind", ["", "relu", "cross"])
@pytest.mark.parametrize("outputs", ["wide", "quantized", "quantized and wide"])
def test_a_product_takes_along_what_follows(bias, behind, outputs, tmp_path):
    model = product(bias, behind, outputs)
    graph, report = fused(model, tmp_path)
    assert [found.sites for found in report.fused["float8-product"]] == [("fc",)]
    left = ops(graph, tmp_path)
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
    got = dict(zip(model.outputs, run(tmp_path / "fused.onnx", x), strict=True))
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


def half(behind: str, width: int = 32, transposed: bool = True) -> Model:
    """A BF16 Gemm with what follows it."""
    n = 48
    model = Model((width,)).constant(
        "w", bf16(n, width, scale=0.2) if transposed else bf16(width, n, scale=0.2)
    )
    model.constant("b", bf16(n)).add("Gemm", ["x", "w", "b"], "g", name="fc", transB=int(transposed))
    last = "g"
    if "relu" in behind:
        last = "r"
        model.add("Relu", ["g"], "r")
    if "cross" in behind:
        model.constant("m", bf16(width, n, scale=0.2)).add("MatMul", ["x", "m"], "x0", name="other")
        model.add("Mul", ["g", "x0"], "gm").add("Add", ["x0", "gm"], "r")
        last = "r"
    if "quantized" in behind:
        model.constant("s2", np.array(0.03125, BF16)).constant("zero", np.array(0, FP8))
        model.add("QuantizeLinear", [last, "s2", "zero"], "q2").add(
            "DequantizeLinear", ["q2", "s2", "zero"], "y"
        )
    model.outputs = ("y",) if "quantized" in behind else (last,)
    return model


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("behind", ["relu", "cross", "quantized", "relu, quantized"])
def test_a_product_in_bf16_takes_along_what_follows(behind, transposed, tmp_path):
    model = half(behind, transposed=transposed)
    graph, report = fused(model, tmp_path)
    assert [found.sites for found in report.fused["half-product"]] == [("fc",)]
    assert not {"Gemm", "Relu", "Add", "Mul", "QuantizeLinear"} & set(ops(graph, tmp_path))
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
    (got,) = run(tmp_path / "fused.onnx", x)
    magnitude = np.abs(z).max()
    if "quantized" in behind:
        z = np.clip(z, -448 * c["s2"], 448 * c["s2"])
        np.testing.assert_allclose(got, z, rtol=2.0**-4 + 4 * ULP, atol=4 * ULP * magnitude + 2.0**-9)
    else:
        np.testing.assert_allclose(got, z, rtol=4 * ULP, atol=4 * ULP * magnitude)


def test_a_product_in_bf16_is_left_to_the_library_where_nothing_is_gained(tmp_path):
    assert fused(half(""), tmp_path)[1].fused == {}
    # The kernel takes multiples of 16.
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
    left = ops(graph, tmp_path)
    assert f"{DOMAIN}::ConcatQuantize" in left and not {"Concat", "QuantizeLinear"} & set(left)
    (made,) = [node for node in graph.nodes if node.op == "ConcatQuantize"]
    # The columns that come from the model's FP32 input are read before they are rounded.
    assert [made.reads(0).kind, made.reads(1).kind] == [onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT]
    x = RANDOM.standard_normal((BATCH, 4, 8)).astype(np.float32)
    rows = x.reshape(BATCH, 32).astype(BF16).astype(np.float64)
    c = {name: value.astype(np.float64) for name, value in model.constants.items()}
    whole = np.concatenate([(rows @ c["m"]).astype(np.float32).astype(BF16).astype(np.float64), rows], axis=1)
    got = dict(zip(model.outputs, run(tmp_path / "fused.onnx", x), strict=True))
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
    gemm = next(node for node in model.nodes if node.op_type == "Gemm")
    plain = onnx.NodeProto()
    plain.CopyFrom(gemm)
    del plain.attribute[:]
    model.nodes[model.nodes.index(gemm)] = plain
    straight = np.ascontiguousarray(model.constants["w"].T)
    reference = run(
        product_path(model, tmp_path / "a", gemm), x := RANDOM.standard_normal((3, 32), np.float32)
    )
    model.constants["w"] = straight
    next(n for n in model.nodes if n.output[0] == "dw").attribute[0].i = 1
    graph, _ = fused(model, tmp_path)
    graph.save(tmp_path / "fused.onnx")
    np.testing.assert_array_equal(run(tmp_path / "fused.onnx", x)[0], reference[0])
    stored = [t for t in onnx.load(tmp_path / "fused.onnx").graph.initializer if t.data_type == 17 and t.dims]
    assert [tuple(t.dims) for t in stored if len(t.dims) == 2] == [(48, 32)]


def product_path(model: Model, folder: Path, gemm: onnx.NodeProto) -> Path:
    """The fused form of the model with its transposed Gemm."""
    folder.mkdir()
    original = Model(model.width, [gemm if n.op_type == "Gemm" else n for n in model.nodes])
    original.constants, original.outputs = dict(model.constants), model.outputs
    graph, _ = fused(original, folder)
    graph.save(folder / "fused.onnx")
    return folder / "fused.onnx"


def test_what_looks_alike_is_left_alone(tmp_path):
    other = factorization()
    # The product reads other tokens than those it was projected from.
    other.add("Relu", ["x"], "xr")
    other.nodes.insert(0, other.nodes.pop())
    next(node for node in other.nodes if node.name == "interact").input[0] = "xr"
    assert fused(other, tmp_path)[1].fused == {}
    swapped = residual(mixed=False)
    assert "token-residual-norm" not in fused(swapped, tmp_path)[1].fused
    twice = product(bias=False, behind="relu", outputs="wide")
    # What the ReLU reads leaves the graph as well: the product ends there.
    twice.add("Identity", ["g"], "before")
    twice.outputs = ("wide", "before")
    graph, report = fused(twice, tmp_path)
    assert [found.sites for found in report.fused["float8-product"]] == [("fc",)]
    assert "Relu" in ops(graph, tmp_path)


def test_an_fp32_graph_declines_with_a_reason(tmp_path):
    model = factorization()
    model.constants = {
        name: value.astype(np.float32) if value.dtype == BF16 else value
        for name, value in model.constants.items()
    }
    path = model.save(tmp_path / "planned.onnx")
    proto = onnx.load(path)
    proto.graph.node[0].attribute[0].i = TensorProto.FLOAT
    onnx.save(proto, path)
    report = fuse(PlannedGraph.load(path))
    assert report.fused == {}
    assert report.declined == {"factorization-norm": ("norm: the kernel multiplies BF16 and FP16",)}


def test_the_backend_names_what_it_would_fuse_before_there_is_a_plan(tmp_path):
    """Plans are made for the FP32 model: the same places are found there, as of BF16."""
    from loka_onnx.core.formats import Precision
    from loka_onnx.engines.inductor.backend import InductorBackend

    model = factorization()
    model.constants = {
        name: value.astype(np.float32) if value.dtype == BF16 else value
        for name, value in model.constants.items()
    }
    path = model.save(tmp_path / "model.onnx")
    proto = onnx.load(path)
    proto.graph.node[0].attribute[0].i = TensorProto.FLOAT
    onnx.save(proto, path)
    found = InductorBackend().fused_sites(path, Precision.BF16)
    assert found == dict.fromkeys(["project", "interact", "norm"], "factorization-norm")
    assert InductorBackend().fused_sites(path, Precision.FP32) == {}


def test_the_backend_looks_at_a_model_whose_weights_it_does_not_read(tmp_path, monkeypatch):
    """Large weights stay outside; products that are not stored transposed are among them."""
    from loka_onnx.core.formats import Precision
    from loka_onnx.engines.inductor.backend import InductorBackend
    from loka_onnx.engines.inductor.fusions import planned

    model = half("relu", transposed=False)
    model.constants = {name: value.astype(np.float32) for name, value in model.constants.items()}
    path = model.save(tmp_path / "model.onnx")
    proto = onnx.load(path)
    proto.graph.node[0].attribute[0].i = TensorProto.FLOAT
    onnx.save(proto, path, save_as_external_data=True, location="model.data", size_threshold=0)
    monkeypatch.setattr(planned, "MOST_READ", 100)
    graph = PlannedGraph.load(path, TensorProto.BFLOAT16)
    assert [found.sites for found in fuse(graph).fused["half-product"]] == [("fc",)]
    # It computes no other site along: FP8 there parts nothing.
    assert InductorBackend().fused_sites(path, Precision.BF16) == {}


def unchanged(model: Model, folder: Path, *inputs: np.ndarray) -> FusionReport:
    """The fused form computes what the planned one does, whatever was fused."""
    graph, report = fused(model, folder)
    graph.save(folder / "fused.onnx")
    for found, expected in zip(
        run(folder / "fused.onnx", *inputs), run(folder / "planned.onnx", *inputs), strict=True
    ):
        assert found.shape == expected.shape
        np.testing.assert_allclose(
            found, expected, rtol=4 * ULP, atol=8 * ULP * max(1, np.abs(expected).max())
        )
    return report


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
    assert "Mul" in ops(fused(model, tmp_path)[0], tmp_path)


@pytest.mark.parametrize("axis", [0, -1])
def test_a_norm_over_something_else_is_left_alone(axis, tmp_path):
    """The gain has as many elements either way."""
    model = factorization()
    model.constants["to"] = np.array([-1, N * K] if axis == 0 else [-1, N, K])
    norm = next(node for node in model.nodes if node.op_type == "LayerNormalization")
    norm.attribute.append(helper.make_attribute("axis", 0 if axis == 0 else 1))
    for name in ("gamma", "beta"):
        values = model.constants[name]
        model.constants[name] = values if axis == 0 else values.reshape(N, K)
    _, report = fused(model, tmp_path)
    assert "factorization-norm" not in report.fused
    assert report.declined["factorization-norm"] == (
        "norm: it does not normalize over all of the flattened product, and that alone",
    )


def test_a_q_to_another_type_is_not_taken_along(tmp_path):
    model = factorization(quantized=True)
    model.constants["zero"] = np.array(0, np.int8)
    graph, report = fused(model, tmp_path)
    assert "factorization-norm" in report.fused
    assert "QuantizeLinear" in ops(graph, tmp_path)


def test_products_that_the_plan_keeps_in_fp32_stay_there(tmp_path):
    model = factorization()
    interact = next(node for node in model.nodes if node.name == "interact")
    place = model.nodes.index(interact)
    model.add("Cast", ["x"], "xw", to=1).add("Cast", ["p"], "pw", to=1)
    model.nodes[place:place] = [model.nodes.pop(), model.nodes.pop()][::-1]
    interact.input[:] = ["xw", "pw"]
    for name in ("gamma", "beta"):
        model.constants[name] = model.constants[name].astype(np.float32)
    norm = next(node for node in model.nodes if node.op_type == "LayerNormalization")
    norm.output[0] = "n32"
    model.add("Cast", ["n32"], "y", to=TensorProto.BFLOAT16)
    report = unchanged(model, tmp_path, RANDOM.standard_normal((BATCH, N, D)).astype(np.float32))
    assert report.declined["factorization-norm"] == ("norm: the plan keeps the product in FP32",)
