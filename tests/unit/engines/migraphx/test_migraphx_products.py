"""The rules for products: what they leave in the graph, and that the numbers stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import numpy_helper
from planned_graphs import NUMPY, Array, Planned, evaluate

from loka_onnx.core.formats import E4M3FN
from loka_onnx.engines.draft import GraphDraft
from loka_onnx.engines.migraphx.products import (
    Product,
    float32_products,
    gemm_to_matmul,
    scales_behind_products,
)
from loka_onnx.errors import ModelError
from loka_onnx.numerics.rounding import fake_quantize

FP32_SUMS = {"rtol": 2e-6, "atol": 2e-6}
"""Sums of up to 16 FP32 terms of order one that were added, or scaled, in another order."""
SCALE = 0.015625


def under(
    model: onnx.ModelProto, *rules: Callable[[GraphDraft, Sequence[Product]], None]
) -> tuple[onnx.ModelProto, tuple[Product, ...]]:
    """The model with its Gemms as products and under further rules, and these products."""
    draft = GraphDraft(deepcopy(model), Path("nowhere"))
    products = gemm_to_matmul(draft)
    for rule in rules:
        rule(draft, products)
    return draft.finished(), products


def agree(after: onnx.ModelProto, before: onnx.ModelProto, *shape: int) -> None:
    x = rows(*shape)
    np.testing.assert_allclose(evaluate(after, x=x)[0], evaluate(before, x=x)[0], **FP32_SUMS)


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def constant(model: onnx.ModelProto, name: str) -> Array:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))


def producer(model: onnx.ModelProto, tensor: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if tensor in node.output)


def gemm(base: int = T.FLOAT, axis: int | None = None, seed: int = 0, **attributes: Any) -> onnx.ModelProto:
    """``fc``: 8 → 6 columns; with ``transB`` the weight is stored (6, 8)."""
    p = Planned(base, seed)
    shape = (6, 8) if attributes.get("transB") else (8, 6)
    dq = p.pair(p.enter(), "fc/in0", SCALE)
    weight = p.weight("fc/weight", p.normal(*shape), axis)
    bias = p.constant("fc/b", p.normal(6))
    return p.model(p.op("Gemm", [dq, weight, bias], "fc", **attributes))


def rows(*shape: int, seed: int = 7) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class TestGemm:
    @pytest.mark.parametrize(
        "attributes",
        [{}, {"transB": 1}, {"alpha": 0.7, "transB": 1}, {"beta": -1.3}, {"alpha": 2.5, "beta": 0.3}],
        ids=str,
    )
    def test_the_result_stays(self, attributes: dict[str, Any]) -> None:
        before = gemm(**attributes)
        model, (product,) = under(before)
        onnx.checker.check_model(model, full_check=True)
        assert "Gemm" not in ops(model)
        assert (product.node.op_type, product.node.name) == ("MatMul", "fc")
        agree(model, before, 5, 8)

    def test_a_transposed_weight_is_stored_so(self) -> None:
        before = gemm(transB=1)
        model, _ = under(before)
        assert "Transpose" not in ops(model)
        dequantize = producer(model, next(n for n in model.graph.node if n.name == "fc").input[1])
        np.testing.assert_array_equal(
            constant(model, dequantize.input[0]).astype(np.float32),
            constant(before, "fc/weight/fp8").T.astype(np.float32),
        )

    def test_a_transposed_activation_is_transposed_behind_its_dq(self) -> None:
        p = Planned()
        left = p.pair(p.op("Transpose", ["x"], "t", perm=[1, 0]), "fc/in0", SCALE)
        right = p.pair("x", "fc/in1", 2 * SCALE)
        before = p.model(p.op("Gemm", [left, right], "fc", transA=1, transB=1))
        model, products = under(before)
        assert len(products) == 1
        agree(model, before, 8, 8)

    def test_a_bias_that_is_computed_is_multiplied_by_beta(self) -> None:
        p = Planned()
        bias = p.op("Relu", [p.constant("b", p.normal(6))], "computed")
        inputs = [p.pair("x", "fc/in0", SCALE), p.weight("fc/weight", p.normal(8, 6)), bias]
        before = p.model(p.op("Gemm", inputs, "fc", beta=0.25))
        agree(under(before)[0], before, 3, 8)

    def test_other_products_are_left_alone(self) -> None:
        p = Planned()
        w = p.constant("w", p.normal(8, 6))
        half = p.op("Gemm", [p.pair("x", "half/in0", SCALE), w], "half")
        plain = p.op("Gemm", ["x", w], "plain")
        model, products = under(p.model(p.op("Add", [half, plain], "add")))
        assert products == ()
        assert ops(model).count("Gemm") == 2


class TestChannelScales:
    @pytest.mark.parametrize(("transposed", "axis"), [(1, 0), (0, 1)])
    def test_the_scales_of_columns_stand_behind_the_product(self, transposed: int, axis: int) -> None:
        before = gemm(axis=axis, transB=transposed)
        model, _ = under(before, scales_behind_products)
        onnx.checker.check_model(model, full_check=True)
        product = next(n for n in model.graph.node if n.name == "fc")
        dequantize = producer(model, product.input[1])
        assert constant(model, dequantize.input[1]) == 1
        assert constant(model, dequantize.input[1]).shape == constant(model, dequantize.input[2]).shape == ()
        (behind,) = (n for n in model.graph.node if product.output[0] in n.input)
        assert behind.op_type == "Mul"
        np.testing.assert_array_equal(constant(model, behind.input[1]), constant(before, "fc/weight/scale"))
        # The bias is added behind the scales, not scaled.
        assert ops(model)[-3:] == ["Mul", "Add", "Identity"]
        agree(model, before, 5, 8)

    def test_of_a_constant_on_the_left_they_scale_rows(self) -> None:
        p = Planned()
        weight = p.weight("mix/weight", p.normal(6, 8), 0)
        before = p.model(p.op("MatMul", [weight, p.pair("x", "mix/in1", SCALE)], "mix"), x=(8, 4))
        model, _ = under(before, scales_behind_products)
        agree(model, before, 3, 8, 4)
        (behind,) = (n for n in model.graph.node if n.op_type == "Mul")
        assert constant(model, behind.input[1]).shape == (6, 1)

    def test_a_square_weight_with_the_wrong_axis_is_refused(self) -> None:
        """What release 2.15 miscompiles without a word."""
        p = Planned()
        weight = p.weight("fc/weight", p.normal(8, 8), 0)
        model = p.model(p.op("MatMul", [p.pair("x", "fc/in0", SCALE), weight], "fc"))
        with pytest.raises(ModelError, match=r"site 'fc'(?s:.*)scales \(8,\) along axis 0 of input 1"):
            under(model, scales_behind_products)


def expected_site(before: onnx.ModelProto, x: Array, base: Any) -> Array:
    """``fc`` in float64 from the constants of the planned graph; rounded to the base at both ends."""
    weight = constant(before, "fc/weight/fp8").astype(np.float64)
    scale = constant(before, "fc/weight/scale").astype(np.float64)
    weight = weight * (scale if scale.ndim == 0 else scale[:, None])
    entering = x.astype(base).astype(np.float32)
    left = fake_quantize(entering, SCALE, E4M3FN).astype(np.float64)
    return left @ weight.T + constant(before, "fc/b").astype(np.float64)


class TestFloat32:
    @pytest.mark.parametrize("axis", [None, 0])
    @pytest.mark.parametrize(("base", "half_ulp"), [(T.BFLOAT16, 2.0**-8), (T.FLOAT16, 2.0**-11)])
    def test_a_product_is_rounded_to_the_base_once(
        self, base: int, half_ulp: float, axis: int | None
    ) -> None:
        before = gemm(base, axis, transB=1)
        model, _ = under(before, scales_behind_products, float32_products)
        onnx.checker.check_model(model, full_check=True)
        x = rows(16, 8)
        expected = expected_site(before, x, NUMPY[base])
        (got,) = evaluate(model, x=x)
        # Half a unit of the last place of the base, and FP32 sums before it.
        np.testing.assert_allclose(got, expected, rtol=half_ulp * 1.01, atol=1e-6)

    def test_scales_and_what_the_pairs_read_are_fp32(self) -> None:
        model, _ = under(gemm(T.BFLOAT16, 0, transB=1), scales_behind_products, float32_products)
        for node in model.graph.node:
            if node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
                assert constant(model, node.input[1]).dtype == np.float32
        quantize = next(n for n in model.graph.node if n.op_type == "QuantizeLinear")
        assert producer(model, quantize.input[0]).op_type == "Cast"
        # MatMul, scales and bias in FP32, then the cast: factors that were cast to BF16 make MIGraphX throw.
        assert ops(model)[-5:] == ["MatMul", "Mul", "Add", "Cast", "Cast"]

    def test_sums_of_unscaled_weights_do_not_overflow_fp16(self) -> None:
        p = Planned(T.FLOAT16)
        weight = p.weight("fc/weight", np.full((16, 2), 0.5, np.float32), 1)
        product = p.op("MatMul", [p.pair(p.enter(), "fc/in0", 1.0), weight], "fc")
        model, _ = under(p.model(product, x=(16,)), scales_behind_products, float32_products)
        # 16 · 448 · 448 is 49 times the largest FP16 number; 16 · 448 · ½ is well inside.
        (got,) = evaluate(model, x=np.full((1, 16), 448.0, np.float32))
        np.testing.assert_allclose(got, 16 * 448 * 0.5, rtol=2.0**-8)

    def test_other_readers_get_the_type_they_had(self) -> None:
        p = Planned(T.BFLOAT16)
        dq = p.pair(p.enter(), "fc/in0", SCALE)
        product = p.op("MatMul", [dq, p.weight("fc/weight", p.normal(8, 8))], "fc")
        view = p.op("Reshape", [dq, p.constant("to", [-1, 8], np.int64)], "view")
        plain = p.op("MatMul", [view, p.constant("w", p.normal(8, 8))], "plain")
        before = p.model(p.op("Add", [p.op("Add", [product, dq], "beside"), plain], "add"))
        model, _ = under(before, float32_products)
        # The checker infers every type: an Add of FP32 and BF16 would not pass.
        onnx.checker.check_model(model, full_check=True)
        assert len([n for n in model.graph.node if n.op_type == "Cast" and "to_base" in n.name]) == 3

    def test_dequantized_values_that_leave_are_refused(self) -> None:
        p = Planned(T.BFLOAT16)
        dq = p.pair(p.enter(), "fc/in0", SCALE)
        model = p.model(dq)
        model.graph.output.append(onnx.helper.make_tensor_value_info(dq, T.BFLOAT16, None))
        with pytest.raises(ModelError, match="dequantized values leave the graph"):
            under(model, float32_products)


def test_layouts_between_a_dq_and_its_product_stay_in_fp32() -> None:
    p = Planned(T.BFLOAT16)
    left = p.op("Transpose", [p.pair(p.enter(), "mix/in0", SCALE)], "turned", perm=[0, 2, 1])
    before = p.model(p.op("MatMul", [left, p.pair("x/in:0", "mix/in1", 2 * SCALE)], "mix"), x=(8, 4))
    model, products = under(before, float32_products)
    assert [each.node.name for each in products] == ["mix"]
    onnx.checker.check_model(model, full_check=True)
    x = rows(3, 8, 4)
    entering = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    a, b = (fake_quantize(entering, s, E4M3FN).astype(np.float64) for s in (SCALE, 2 * SCALE))
    (got,) = evaluate(model, x=x)
    np.testing.assert_allclose(got, np.swapaxes(a, 1, 2) @ b, rtol=2.0**-8 * 1.01, atol=1e-6)
    dequantized = {n.output[0] for n in model.graph.node if n.op_type == "DequantizeLinear"}
    assert not [n for n in model.graph.node if n.op_type == "Cast" and n.input[0] in dequantized]
