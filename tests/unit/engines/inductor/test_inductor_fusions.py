"""What the fusions of tokens and norms take, what they leave, and that the fused graph computes the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from fusion_models import (
    BATCH,
    BF16,
    FP8,
    NF,
    RANDOM,
    ULP,
    D,
    K,
    Model,
    N,
    bf16,
    fused,
    half,
    in_fp32,
    ops,
    product,
    run,
    unchanged,
)

from loka_onnx.core.formats import Precision
from loka_onnx.engines.inductor.backend import InductorBackend
from loka_onnx.engines.inductor.fusions import DOMAIN, fuse, planned
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph


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
    assert ops(graph) == sorted(["Cast"] * (3 if merged else 2) + rest + [f"{DOMAIN}::FactorizationNorm"])
    x = RANDOM.standard_normal((BATCH, N, D)).astype(np.float32)
    got, expected = run(graph, x)[0], expected_factorization(model, x)
    # On the CPU S is rounded to BF16 before the norm; the rest is the rounding of the output.
    np.testing.assert_allclose(got, expected, rtol=2 * ULP, atol=8 * ULP)
    # Dropping the gain or the shift would be seen.
    assert np.abs(got - normalized(expected, np.ones(1), np.zeros(1))).max() > 0.5


def test_the_q_behind_the_norm_is_taken_along(tmp_path):
    model = factorization(quantized=True)
    graph, _ = fused(model, tmp_path)
    assert ops(graph) == ["Cast", "Cast", "DequantizeLinear", f"{DOMAIN}::FactorizationNorm"]
    x = RANDOM.standard_normal((BATCH, N, D)).astype(np.float32)
    expected = expected_factorization(model, x)
    scale = float(model.constants["scale"])
    steps = np.clip(expected / scale, -448, 448)
    got = run(graph, x)[0] / scale
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
    assert f"{DOMAIN}::TokenResidualNorm" in ops(graph)
    c = model.constants
    x = RANDOM.standard_normal((BATCH, N, D)).astype(np.float32)
    tokens = x.astype(BF16).astype(np.float64)
    wide = {name: value.astype(np.float64) for name, value in c.items()}
    own = (tokens.reshape(BATCH, -1) @ wide["wf"]).astype(np.float32).astype(BF16).astype(np.float64)
    mix = np.einsum("bnd,nm->bmd", tokens, wide["w"])
    z = np.concatenate([own.reshape(BATCH, NF, D), mix], axis=1) + tokens
    expected = normalized(z, c["gamma"], c["beta"])
    np.testing.assert_allclose(run(graph, x)[0], expected, rtol=4 * ULP, atol=8 * ULP)


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
    assert "Relu" in ops(graph)


def test_an_fp32_graph_declines_and_the_backend_names_what_it_would_fuse_in_bf16(tmp_path):
    """Plans are made for the FP32 model: the same places are found there, as of BF16."""
    path = tmp_path / "model.onnx"
    in_fp32(factorization(), path)
    report = fuse(PlannedGraph.load(path))
    assert report.fused == {}
    assert report.declined == {"factorization-norm": ("norm: the kernel multiplies BF16 and FP16",)}
    joined = InductorBackend().fused_sites(path, Precision.BF16)
    assert joined == dict.fromkeys(["project", "interact", "norm"], "factorization-norm")
    assert InductorBackend().fused_sites(path, Precision.FP32) == {}


def test_the_backend_looks_at_a_model_whose_weights_it_does_not_read(tmp_path, monkeypatch):
    """Large weights stay outside; products that are not stored transposed are among them."""
    path = tmp_path / "model.onnx"
    proto = in_fp32(half("relu", transposed=False), path)
    onnx.save(proto, path, save_as_external_data=True, location="model.data", size_threshold=0)
    monkeypatch.setattr(planned, "MOST_READ", 100)
    graph = PlannedGraph.load(path, TensorProto.BFLOAT16)
    assert [found.sites for found in fuse(graph).fused["half-product"]] == [("fc",)]
    # It computes no other site along: FP8 there parts nothing.
    assert InductorBackend().fused_sites(path, Precision.BF16) == {}


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
    assert "QuantizeLinear" in ops(graph)


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
