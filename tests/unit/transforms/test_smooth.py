"""Smoothing moves factors between what makes an activation and the weights that read it, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from norm_models import assert_folded_equally
from rewrite_models import artifact, evaluate, parse, random_rows

from loka_onnx.core.rewrite import RewriteRecord
from loka_onnx.errors import TransformError
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.smoothing import smoothing_factors, to_powers_of_two
from loka_onnx.transforms.sequence import apply_mods
from loka_onnx.transforms.smooth import Smooth

GAIN = np.linspace(0.5, 30, 8, dtype=np.float32)
SHIFT = np.linspace(1.5, -1, 8, dtype=np.float32)
LAYER = "[norm] n = LayerNormalization<axis=-1, epsilon=0.001>(x, gain, shift)"
S = np.linspace(0.1, 5, 8)


def weight(*shape: int) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(shape).normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A model as text, and factors by site."""

    body: str
    factors: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "float[batch,8] x"
    outputs: str = "float[batch,4] y"
    opset: int = 21

    def model(self) -> onnx.ModelProto:
        values = {"gain": GAIN, "shift": SHIFT} | dict(self.constants)
        used = {name: value for name, value in values.items() if name in self.body}
        return parse(self.body, used, inputs=self.inputs, outputs=self.outputs, opset=self.opset)


W, B, V = weight(8, 4), weight(4), weight(8, 8)
SMOOTHED = {
    "behind_a_norm": Case(f"{LAYER} [fc] y = Gemm(n, w, b)", {"fc": S}, {"w": W, "b": B}),
    "behind_an_rms_norm": Case(
        "[norm] n = RMSNormalization<axis=-1>(x, gain) [fc] y = MatMul(n, w)", {"fc": S}, {"w": W}, opset=23
    ),
    "two_linears_behind_a_norm": Case(
        f"{LAYER} [fc] h = MatMul(n, w) [gate] g = Gemm<transB=1>(n, v, b) y = Mul(h, g)",
        {"fc": S, "gate": S},
        {"w": W, "v": W.T.copy(), "b": B},
    ),
    "behind_a_gemm": Case(
        "[fc1] h = Gemm<transB=1>(x, v, c) [fc2] y = MatMul(h, w)", {"fc2": S}, {"v": V, "c": SHIFT, "w": W}
    ),
    "behind_a_matmul": Case("[fc1] h = MatMul(x, v) [fc2] y = MatMul(h, w)", {"fc2": S}, {"v": V, "w": W}),
    "through_relu": Case(
        "[fc1] g = MatMul(x, v) h = Add(g, c) r = Relu(h) [fc2] y = Gemm(r, w, b)",
        {"fc2": S},
        {"v": V, "c": SHIFT, "w": W, "b": B},
    ),
    "through_leaky_relu_and_layout": Case(
        "[fc1] g = MatMul(x, v) r = LeakyRelu<alpha=0.1>(g) f = Reshape(r, rows) [fc2] y = MatMul(f, w)",
        {"fc2": S},
        {"v": V, "w": W, "rows": np.array([-1, 8])},
        "float[batch,3,8] x",
        "float[rows,4] y",
    ),
    "chain": Case(
        "[fc1] h = MatMul(x, v) a = Relu(h) [fc2] g = MatMul(a, u) r = Relu(g) [fc3] y = MatMul(r, w)",
        {"fc2": S, "fc3": S[::-1]},
        {"v": V, "u": weight(8, 8) + 1, "w": W},
    ),
    "weight_on_the_left": Case(
        "[fc1] h = MatMul(v, x) r = Relu(h) [fc2] y = MatMul(w, r)",
        {"fc2": S},
        {"v": V, "w": W.T.copy()},
        "float[batch,8,3] x",
        "float[batch,4,3] y",
    ),
    "flattened_alike": Case(
        f"{LAYER} f = Flatten<axis=1>(n) [fc] y = MatMul(f, w)",
        {"fc": np.tile(S, 3)},
        {"w": weight(24, 4)},
        "float[batch,3,8] x",
    ),
    "norm_over_two_axes": Case(
        "[norm] n = LayerNormalization<axis=-2>(x, wide, shift) f = Flatten<axis=1>(n) [fc] y = MatMul(f, w)",
        {"fc": np.linspace(0.1, 5, 24)},
        {"w": weight(24, 4), "wide": weight(3, 8)},
        "float[batch,3,8] x",
    ),
}


def run(
    case: Case, factors: Mapping[str, Any], folder: Path
) -> tuple[RewriteRecord, onnx.ModelProto, onnx.ModelProto]:
    before = case.model()
    shape = [d.dim_value or 5 for d in before.graph.input[0].type.tensor_type.shape.dim]
    source = artifact(before, folder / "before.onnx")
    result = apply_mods(source, [{"x": random_rows(*shape)}], folder / "after.onnx", [Smooth(factors)])
    return result.log.records[0], onnx.load(source.path), onnx.load(result.model.path)


@pytest.mark.parametrize("name", SMOOTHED)
def test_factors_move_and_the_model_stays_equal(name: str, tmp_path: Path) -> None:
    case = SMOOTHED[name]
    record, before, after = run(case, case.factors, tmp_path)
    assert not record.rolled_back
    assert record.declined == ()
    assert len(record.applied) == (2 if name == "chain" else 1)
    assert_folded_equally(case.model(), Smooth(case.factors), tmp_path)
    # Nothing is computed for it.
    assert [node.op_type for node in after.graph.node] == [node.op_type for node in before.graph.node]
    onnx.checker.check_model(after, full_check=True)


@pytest.mark.parametrize("name", ["behind_a_norm", "through_relu", "chain"])
def test_what_is_quantized_has_the_range_that_was_asked_for(name: str, tmp_path: Path) -> None:
    """At strength 1 every channel of the activation reaches the same magnitude."""
    case = SMOOTHED[name]
    before = case.model()
    site = {"behind_a_norm": "fc", "through_relu": "fc2", "chain": "fc3"}[name]
    tensor = next(node.input[0] for node in before.graph.node if node.name == site)
    x = {"x": random_rows(500, 8)}

    def reached(model: onnx.ModelProto) -> np.ndarray[Any, Any]:
        watched = onnx.ModelProto()
        watched.CopyFrom(model)
        watched.graph.output.append(onnx.helper.make_tensor_value_info(tensor, 1, ["batch", 8]))
        return np.abs(evaluate(watched, x)[tensor]).max(axis=0)

    factors = smoothing_factors(reached(before), np.ones(8), 1.0)
    _, _, after = run(case, {site: factors}, tmp_path)
    assert np.ptp(reached(before)) > 0.5
    np.testing.assert_allclose(reached(after)[reached(before) > 0], 1.0, rtol=1e-5)


@pytest.mark.parametrize("name", ["behind_a_norm", "through_relu", "two_linears_behind_a_norm"])
def test_powers_of_two_change_no_bit_of_the_model_in_fp32(name: str, tmp_path: Path) -> None:
    case = SMOOTHED[name]
    factors = {site: to_powers_of_two(values) for site, values in case.factors.items()}
    _, before, after = run(case, factors, tmp_path)
    x = {"x": random_rows(200, 8, seed=3)}
    np.testing.assert_array_equal(evaluate(after, x)["y"], evaluate(before, x)["y"])


def test_factors_of_one_and_no_factors_change_nothing(tmp_path: Path) -> None:
    case = SMOOTHED["behind_a_norm"]
    for factors in ({}, {"fc": np.ones(8)}):
        record, before, after = run(case, factors, tmp_path / str(len(factors)))
        assert (record.applied, record.declined) == ((), ())
        assert after.graph.initializer == before.graph.initializer


TWO = f"{LAYER} [fc] h = MatMul(n, w) [gate] g = MatMul(n, v) y = Mul(h, g)"
OUT = "its output is not smoothed: "
DECLINED = {
    "another_reader_has_other_factors": (
        Case(TWO, {"fc": S, "gate": S + 1}, {"w": W, "v": weight(8, 4)}),
        ("norm", f"{OUT}'gate' has other factors than another linear that reads it"),
    ),
    "another_reader_has_none": (
        Case(TWO, {"fc": S}, {"w": W, "v": weight(8, 4)}),
        ("norm", f"{OUT}'gate' has other factors than another linear that reads it"),
    ),
    "read_by_a_sum": (
        Case(f"{LAYER} [fc] h = MatMul(n, v) y = Add(h, n)", {"fc": S}, {"v": V}, outputs="float[batch,8] y"),
        ("norm", f"{OUT}'block/y' reads it, a Add"),
    ),
    "an_output": (
        Case(
            f"{LAYER} [fc] y = MatMul(n, w)",
            {"fc": S},
            {"w": W},
            outputs="float[batch,4] y, float[batch,8] n",
        ),
        ("norm", f"{OUT}'n' is an output of the model"),
    ),
    "made_by_an_input": (
        Case("[fc] y = MatMul(x, w)", {"fc": S}, {"w": W}),
        ("fc", "its activation comes from the input 'x'"),
    ),
    "made_by_another_function": (
        Case("[a] h = MatMul(x, v) g = Sigmoid(h) [fc] y = MatMul(g, w)", {"fc": S}, {"v": V, "w": W}),
        ("fc", "its activation is made by 'block/g', a Sigmoid, which takes no factors"),
    ),
    "made_by_a_sum": (
        Case("[a] h = MatMul(x, v) g = Add(h, x) [fc] y = MatMul(g, w)", {"fc": S}, {"v": V, "w": W}),
        ("fc", "its activation is made by 'block/g', a Add, which takes no factors"),
    ),
    "scale_not_constant": (
        Case(
            "[norm] n = LayerNormalization(x, g) [fc] y = MatMul(n, w)",
            {"fc": S},
            {"w": W},
            "float[batch,8] x, float[8] g",
        ),
        ("fc", "the scale of 'norm' is not constant"),
    ),
    "wrong_length": (
        Case(f"{LAYER} [fc] y = MatMul(n, w)", {"fc": S[:4]}, {"w": W}),
        ("norm", f"{OUT}'fc' has 8 channels, not 4"),
    ),
    "a_channel_repeated_with_different_factors": (
        Case(
            f"{LAYER} f = Flatten<axis=1>(n) [fc] y = MatMul(f, w)",
            {"fc": np.linspace(1, 2, 24)},
            {"w": weight(24, 4)},
            "float[batch,3,8] x",
        ),
        ("norm", f"{OUT}'fc' reads a channel several times, with different factors"),
    ),
    "contraction_over_another_axis": (
        Case(
            f"{LAYER} t = Transpose<perm=[0,2,1]>(n) [fc] y = MatMul(t, w)",
            {"fc": S[:3]},
            {"w": weight(3, 4)},
            "float[batch,3,8] x",
            "float[batch,8,4] y",
        ),
        ("norm", f"{OUT}a row of a weight meets several channels"),
    ),
    "no_such_site": (
        Case(f"{LAYER} [fc] y = MatMul(n, w)", {"fc9": S}, {"w": W}),
        ("fc9", "there is no node of that name"),
    ),
    "no_linear": (
        Case(f"{LAYER} [fc] y = MatMul(n, w)", {"norm": S}, {"w": W}),
        ("norm", "it is no product with one constant operand"),
    ),
    "batched_weight_in_front": (
        Case(
            "[a] h = MatMul(x, v) [fc] y = MatMul(h, w)",
            {"fc": S},
            {"v": weight(3, 8, 8), "w": W},
            "float[batch,3,5,8] x",
            "float[batch,3,5,4] y",
        ),
        ("fc", "its activation is made by 'a': its weight has rank 3, not 2"),
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_cannot_take_the_factors_is_told_of(name: str, tmp_path: Path) -> None:
    case, told = DECLINED[name]
    onnx.save(case.model(), tmp_path / "m.onnx")
    found = Smooth(case.factors).match(GraphModel.load(tmp_path / "m.onnx"))
    assert found.matches == ()
    assert [(d.at, d.reason) for d in found.declined] == [told]


@pytest.mark.parametrize("values", [[1.0, 0.0], [1.0, -2.0], [np.nan], [[1.0, 1.0]], [np.inf]])
def test_a_factor_must_be_positive(values: Any) -> None:
    with pytest.raises(TransformError, match="site 'fc': a smoothing factor is not a positive number"):
        Smooth({"fc": values})
