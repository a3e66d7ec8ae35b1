"""Mixes of tokens that no norm follows: what is fused, what is left, and that it computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from fusion_models import BATCH, BF16, FP8, RANDOM, ULP, D, Model, N, bf16, fused, ops, run

from loka_onnx.engines.inductor.fusions import DOMAIN

MIXED, OTHERS = 9, 2
"""Tokens that the mix makes, and those beside it."""


def model(beside: str = "first", flat: str = "Reshape", quantized: str = "and wide") -> Model:
    """W · X as exporters write it: `beside` says where the other tokens stand, if there are any."""
    made = Model((N, D)).constant("w", bf16(N, MIXED, scale=0.3))
    made.add("Transpose", ["x"], "xt", perm=[0, 2, 1]).add("MatMul", ["xt", "w"], "mt", name="mix")
    made.add("Transpose", ["mt"], "m", perm=[0, 2, 1])
    last, tokens = "m", MIXED
    if beside:
        made.constant("v", bf16(N, OTHERS, scale=0.3)).add("MatMul", ["xt", "v"], "ot", name="other")
        # Not a mix: something stands between.
        made.add("Relu", ["ot"], "or").add("Transpose", ["or"], "f", perm=[0, 2, 1])
        made.add("Concat", ["f", "m"] if beside == "first" else ["m", "f"], "c", axis=1)
        last, tokens = "c", MIXED + OTHERS
    if flat == "Reshape":
        made.constant("to", np.array([-1, tokens * D])).add("Reshape", [last, "to"], "z")
        last = "z"
    elif flat == "Flatten":
        made.add("Flatten", [last], "z", axis=1)
        last = "z"
    if not quantized:
        made.add("Identity", [last], "y")
        return made
    made.constant("s", np.array(0.03125, BF16)).constant("zero", np.array(0, FP8))
    made.add("QuantizeLinear", [last, "s", "zero"], "q").add("DequantizeLinear", ["q", "s", "zero"], "y")
    if quantized == "and wide":
        made.add("Identity", [last], "wide")
        made.outputs = ("y", "wide")
    return made


def expected(made: Model, x: np.ndarray, beside: str) -> np.ndarray:
    """In float64, rounded to BF16 where the graph rounds."""
    tokens = x.astype(BF16).astype(np.float64)

    def mixed(name: str) -> np.ndarray:
        product = np.einsum("bnd,nm->bmd", tokens, made.constants[name].astype(np.float64))
        return product.astype(np.float32).astype(BF16).astype(np.float64)

    if not beside:
        return mixed("w")
    parts = [np.maximum(mixed("v"), 0), mixed("w")]
    return np.concatenate(parts if beside == "first" else parts[::-1], axis=1)


@pytest.mark.parametrize("beside", ["", "first", "second"])
@pytest.mark.parametrize("flat", ["", "Reshape", "Flatten"])
@pytest.mark.parametrize("quantized", ["", "alone", "and wide"])
def test_a_mix_is_joined_flattened_and_quantized_as_it_is_made(
    beside: str, flat: str, quantized: str, tmp_path: Path
) -> None:
    made = model(beside, flat, quantized)
    graph, report = fused(made, tmp_path)
    assert [place.sites for place in report.fused["token-concat"]] == [("mix",)]
    left = ops(graph)
    assert f"{DOMAIN}::TokenConcat" in left and not {"Concat", "QuantizeLinear", "Reshape"} & set(left)
    (node,) = [each for each in graph.nodes if each.op == "TokenConcat"]
    # The model's FP32 input is rounded as it is read.
    assert node.reads(0).kind == onnx.TensorProto.FLOAT
    x = RANDOM.standard_normal((BATCH, N, D)).astype(np.float32)
    exact = expected(made, x, beside)
    exact = exact.reshape(BATCH, -1) if flat else exact
    got = dict(zip(made.outputs, run(graph, x), strict=True))
    scale = 0.03125 if quantized else 1.0
    relative, absolute = (2.0**-4, 2.0**-9) if quantized else (0.0, 0.0)
    assert got["y"].shape == exact.shape
    np.testing.assert_allclose(
        got["y"] / scale, exact / scale, rtol=relative + 4 * ULP, atol=absolute + 4 * ULP / scale
    )
    if "wide" in got:
        np.testing.assert_allclose(got["wide"], exact, rtol=4 * ULP, atol=4 * ULP)


def without(made: Model, output: str) -> Model:
    made.nodes = [node for node in made.nodes if output not in node.output]
    return made


def replaced(made: Model, output: str, **attributes: Any) -> Model:
    """With other attributes at the node that makes a tensor."""
    (node,) = [node for node in made.nodes if output in node.output]
    del node.attribute[:]
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    return made


@pytest.mark.parametrize("case", ["another axis", "read elsewhere", "three parts"])
def test_the_mix_alone_is_fused_where_the_rest_is_not_its_own(case: str, tmp_path: Path) -> None:
    made = model("first", "", "")
    if case == "read elsewhere":
        made.add("Identity", ["m"], "again")
        made.outputs = ("y", "again")
    if case == "three parts":
        (concat,) = [node for node in made.nodes if node.op_type == "Concat"]
        concat.input.append("f")
    if case == "another axis":
        # Along the length of tokens, of which there must be as many.
        made.constants["v"] = bf16(N, MIXED, scale=0.3)
        made = replaced(made, "c", axis=2)
    graph, report = fused(made, tmp_path)
    assert [place.sites for place in report.fused["token-concat"]] == [("mix",)]
    assert {"Concat", f"{DOMAIN}::TokenConcat"} <= set(ops(graph))
    x = RANDOM.standard_normal((BATCH, N, D)).astype(np.float32)
    found = run(graph, x)
    plain = run(tmp_path / "planned.onnx", x)
    for got, exact in zip(found, plain, strict=True):
        np.testing.assert_allclose(got, exact, rtol=4 * ULP, atol=4 * ULP)


@pytest.mark.parametrize("case", ["not transposed back", "other transpose", "relu between"])
def test_what_is_no_mix_stays(case: str, tmp_path: Path) -> None:
    made = model("", "", "")
    if case == "not transposed back":
        made = without(without(made, "m"), "y")
        made.add("Identity", ["mt"], "y")
    if case == "other transpose":
        made = replaced(made, "m", perm=[2, 0, 1])
    if case == "relu between":
        made = without(made, "m")
        made.nodes.insert(2, onnx.helper.make_node("Relu", ["mt"], ["rt"], name="relu"))
        made.nodes.insert(3, onnx.helper.make_node("Transpose", ["rt"], ["m"], name="m", perm=[0, 2, 1]))
    _, report = fused(made, tmp_path)
    assert "token-concat" not in {**report.fused, **report.declined}


def test_tokens_that_fill_no_program_are_declined_with_the_reason(tmp_path: Path) -> None:
    many = 4096
    made = Model((many, D)).constant("w", bf16(many, MIXED, scale=0.1))
    made.add("Transpose", ["x"], "xt", perm=[0, 2, 1]).add("MatMul", ["xt", "w"], "mt", name="mix")
    made.add("Transpose", ["mt"], "y", perm=[0, 2, 1])
    _, report = fused(made, tmp_path)
    (reason,) = report.declined["token-concat"]
    assert reason == f"mix: {many}×{D} tokens are too large for one program"


@pytest.mark.parametrize("reads_both", [True, False])
def test_parts_of_a_merged_mix_are_fused_together_or_not_at_all(reads_both: bool, tmp_path: Path) -> None:
    """Where something else reads a part, the product would be computed twice."""
    made = Model((N, D)).constant("w", bf16(N, MIXED, scale=0.3)).constant("sizes", np.array([4, MIXED - 4]))
    made.add("Transpose", ["x"], "xt", perm=[0, 2, 1]).add("MatMul", ["xt", "w"], "mt", name="mix")
    made.add("Split", ["mt", "sizes"], "a b", axis=-1).add("Transpose", ["a"], "y", perm=[0, 2, 1])
    if reads_both:
        made.add("Transpose", ["b"], "z", perm=[0, 2, 1])
    else:
        made.add("Relu", ["b"], "z")
    made.outputs = ("y", "z")
    graph, report = fused(made, tmp_path)
    if not reads_both:
        (reason,) = report.declined["token-concat"]
        assert reason == "mix: something else reads the product, which would be computed twice"
        assert "token-concat" not in report.fused
        return
    assert len(report.fused["token-concat"]) == 2
    assert "MatMul" not in ops(graph)
    x = RANDOM.standard_normal((BATCH, N, D)).astype(np.float32)
    for got, exact in zip(run(graph, x), run(tmp_path / "planned.onnx", x), strict=True):
        np.testing.assert_allclose(got, exact, rtol=4 * ULP, atol=4 * ULP)
