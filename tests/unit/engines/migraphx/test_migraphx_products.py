"""Products in MIGraphX's form: the numbers of the planned graph stay, and nothing is left that it drops."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from planned_graphs import FN, NUMPY, Array, Planned, constants, evaluate, quantizers

from loka_onnx.core.formats import E4M3FN
from loka_onnx.engines.migraphx.dialect import Float8Form, write_dialect
from loka_onnx.errors import ModelError
from loka_onnx.numerics.rounding import fake_quantize

SCALE = 0.015625


def written(model: onnx.ModelProto) -> onnx.ModelProto:
    after = write_dialect(model, Path("nowhere"), Float8Form.FNUZ)
    # The checker infers every type: an Add of FP32 and BF16 would not pass.
    onnx.checker.check_model(after, full_check=True)
    return after


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def rows(*shape: int) -> Array:
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def gemm(p: Planned, axis: int | None = None, **attributes: Any) -> str:
    """``fc``: 8 → 6 columns; with ``transB`` the weight is stored (6, 8)."""
    shape = (6, 8) if attributes.get("transB") else (8, 6)
    dq = p.pair(p.enter(), "fc/in0", SCALE)
    weight = p.weight("fc/weight", p.normal(*shape), axis)
    return p.op("Gemm", [dq, weight, p.constant("fc/b", p.normal(6))], "fc", **attributes)


def transposed_activation(p: Planned) -> str:
    left = p.pair(p.op("Transpose", ["x"], "t", perm=[1, 0]), "fc/in0", SCALE)
    return p.op("Gemm", [left, p.pair("x", "fc/in1", 2 * SCALE)], "fc", transA=1, transB=1)


def computed_bias(p: Planned) -> str:
    bias = p.op("Relu", [p.constant("b", p.normal(6))], "computed")
    inputs = [p.pair("x", "fc/in0", SCALE), p.weight("fc/weight", p.normal(8, 6)), bias]
    return p.op("Gemm", inputs, "fc", beta=0.25)


def left_weight(p: Planned) -> str:
    weight = p.weight("mix/weight", p.normal(6, 8), 0)
    return p.op("MatMul", [weight, p.op("Transpose", [p.pair("x", "mix/in1", SCALE)], "t")], "fc")


def other_readers(p: Planned) -> str:
    """Of a DQ: a sum, and behind a view a product that is not planned."""
    dq = p.pair(p.enter(), "fc/in0", SCALE)
    product = p.op("MatMul", [dq, p.weight("fc/weight", p.normal(8, 8))], "fc")
    view = p.op("Reshape", [dq, p.constant("to", [-1, 8], np.int64)], "view")
    plain = p.op("MatMul", [view, p.constant("w", p.normal(8, 8))], "plain")
    return p.op("Add", [p.op("Add", [product, dq], "beside"), plain], "add")


GEMMS = [{}, {"transB": 1}, {"alpha": 0.7, "transB": 1}, {"beta": -1.3}, {"alpha": 2.5, "beta": 0.3}]
GRAPHS = {f"gemm {how}": lambda p, how=how: gemm(p, **how) for how in GEMMS} | {
    "rows with scales": lambda p: gemm(p, 0, transB=1),
    "columns with scales": lambda p: gemm(p, 1),
    "a transposed activation": transposed_activation,
    "a computed bias": computed_bias,
    "a weight on the left, its rows with scales": left_weight,
    "other readers": other_readers,
}


@pytest.mark.parametrize("case", GRAPHS)
def test_the_numbers_of_fp32_products_stay(case):
    p = Planned()
    before = p.model(GRAPHS[case](p))
    after = written(before)
    assert "Gemm" not in ops(after)
    # A weight is stored as the product takes it, with the scale 1 where its channels have scales.
    assert ops(after).count("Transpose") == ops(before).count("Transpose") + 2 * (
        case == "a transposed activation"
    )
    assert all(
        np.shape(constants(after)[name]) == () for node in quantizers(after) for name in node.input[1:]
    )
    x = rows(8, 8)
    # Sums of up to 16 FP32 terms of order one that were added, or scaled, in another order.
    np.testing.assert_allclose(evaluate(after, x=x)[0], evaluate(before, x=x)[0], rtol=2e-6, atol=2e-6)


def test_other_products_are_left_alone():
    p = Planned()
    w = p.constant("w", p.normal(8, 6))
    half = p.op("Gemm", [p.pair("x", "half/in0", SCALE), w], "half")
    model = p.model(p.op("Add", [half, p.op("Gemm", ["x", w], "plain")], "add"))
    assert ops(written(model)).count("Gemm") == 2


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize(("base", "half_ulp"), [(T.BFLOAT16, 2.0**-8), (T.FLOAT16, 2.0**-11)])
def test_a_product_is_computed_in_fp32_and_rounded_to_the_base_once(base, half_ulp, axis):
    p = Planned(base)
    before = p.model(gemm(p, axis, transB=1))
    model = written(before)
    # Scales and bias in FP32, then the cast: factors that were cast to BF16 make MIGraphX throw.
    behind = ["MatMul", *["Mul"] * (axis is not None), "Add", "Cast", "Cast"]
    assert ops(model)[-len(behind) :] == behind
    read, x = constants(before), rows(16, 8)
    weight, scale = (read[f"fc/weight/{part}"].astype(np.float64) for part in ("fp8", "scale"))
    left = fake_quantize(x.astype(NUMPY[base]).astype(np.float32), SCALE, E4M3FN).astype(np.float64)
    expected = left @ (weight * (scale[:, None] if scale.ndim else scale)).T + read["fc/b"].astype(np.float64)
    # Half a unit of the last place of the base, and FP32 sums before it.
    np.testing.assert_allclose(evaluate(model, x=x)[0], expected, rtol=half_ulp * 1.01, atol=1e-6)


def test_sums_of_unscaled_weights_do_not_overflow_fp16():
    p = Planned(T.FLOAT16)
    weight = p.weight("fc/weight", np.full((16, 2), 0.5, np.float32), 1)
    model = written(p.model(p.op("MatMul", [p.pair(p.enter(), "fc/in0", 1.0), weight], "fc"), x=(16,)))
    # 16 · 448 · 448 is 49 times the largest FP16 number; 16 · 448 · ½ is well inside.
    (got,) = evaluate(model, x=np.full((1, 16), 448.0, np.float32))
    np.testing.assert_allclose(got, 16 * 448 * 0.5, rtol=2.0**-8)


def test_other_readers_of_a_dq_get_the_type_they_had():
    p = Planned(T.BFLOAT16)
    model = written(p.model(other_readers(p)))
    assert len([n for n in model.graph.node if n.op_type == "Cast" and "to_base" in n.name]) == 3


def test_layouts_between_a_dq_and_its_product_stay_in_fp32():
    p = Planned(T.BFLOAT16)
    left = p.op("Transpose", [p.pair(p.enter(), "mix/in0", SCALE)], "turned", perm=[0, 2, 1])
    model = written(p.model(p.op("MatMul", [left, p.pair("x/in:0", "mix/in1", 2 * SCALE)], "mix"), x=(8, 4)))
    x = rows(3, 8, 4)
    a, b = (
        fake_quantize(x.astype(NUMPY[T.BFLOAT16]).astype(np.float32), s, E4M3FN) for s in (SCALE, 2 * SCALE)
    )
    expected = np.swapaxes(a, 1, 2).astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(evaluate(model, x=x)[0], expected, rtol=2.0**-8 * 1.01, atol=1e-6)
    dequantized = {n.output[0] for n in model.graph.node if n.op_type == "DequantizeLinear"}
    assert not [n for n in model.graph.node if n.op_type == "Cast" and n.input[0] in dequantized]


def leaves(p: Planned) -> onnx.ModelProto:
    dq = p.pair(p.enter(), "fc/in0", SCALE)
    model = p.model(dq)
    model.graph.output.append(onnx.helper.make_tensor_value_info(dq, T.BFLOAT16, None))
    return model


def wrong_axis(p: Planned) -> onnx.ModelProto:
    """What release 2.15 miscompiles without a word."""
    weight = p.weight("fc/weight", p.normal(8, 8), 0)
    return p.model(p.op("MatMul", [p.pair("x", "fc/in0", SCALE), weight], "fc"))


def shifted(p: Planned) -> onnx.ModelProto:
    p.op("QuantizeLinear", ["x", p.constant("s", 1.0), p.constant("z", 1.0, FN)], "fc.q")
    return p.model(p.op("Relu", ["x"], "r"))


def computed_scale(p: Planned) -> onnx.ModelProto:
    scale = p.op("Abs", [p.constant("s", 1.0)], "computed")
    q = p.op("QuantizeLinear", ["x", scale, p.constant("z", 0.0, FN)], "fc.q")
    return p.model(p.op("DequantizeLinear", [q, scale, "z"], "fc.dq"))


def huge_scale(p: Planned) -> onnx.ModelProto:
    return p.model(p.pair("x", "fc", 2.0**127))


@pytest.mark.parametrize(
    ("graph", "base", "said"),
    [
        (leaves, T.BFLOAT16, "dequantized values leave the graph"),
        (wrong_axis, T.FLOAT, r"site 'fc'(?s:.*)scales \(8,\) along axis 0 of input 1"),
        (shifted, T.FLOAT, r"'fc.q': an FP8 zero point must be zero(?s:.*)'z' is not"),
        (computed_scale, T.FLOAT, r"'fc.q': MIGraphX drops Q/DQ pairs"),
        (huge_scale, T.FLOAT, r"'fc/q': (?s:.*)its double overflows float32"),
    ],
)
def test_what_has_no_such_form_is_refused(graph, base, said):
    with pytest.raises(ModelError, match=said):
        written(graph(Planned(base)))
