"""Q/DQ insertion: the form of what is written, and its values against a float64 computation."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from qdq_models import INTERACTION, PRODUCTS, Product, quantizing_plan, weight
from rewrite_models import Arrays, artifact, evaluate, initializer, named, op_types, parse, random_rows

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import FLOATS, INT8, UINT8, Precision
from loka_onnx.core.plan import PrecisionPlan, Wide
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Granularity, Recipe
from loka_onnx.errors import TransformError
from loka_onnx.numerics.rounding import fake_quantize
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.precision.apply_plan import PlanForm, PlannedModel, apply_plan
from loka_onnx.transforms.precision.insert_qdq import check_decision

RECIPES = {"per_tensor": PER_TENSOR, "per_channel": PER_CHANNEL_WEIGHT}


@dataclass(frozen=True)
class Quantized:
    source: ModelArtifact
    plan: PrecisionPlan
    planned: PlannedModel
    model: onnx.ModelProto

    @property
    def weight_scale(self) -> Any:
        scales = self.plan.decision("fc").weight_scale
        return np.array(scales, np.float32)


def quantize(proto: onnx.ModelProto, rows: Arrays, recipe: Recipe, folder: Path, **plan: Any) -> Quantized:
    source = artifact(proto, folder / "before.onnx")
    made = quantizing_plan(source, rows, recipe, **plan)
    planned = apply_plan(source, made, PlanForm(Precision.FP32), folder / "after.onnx")
    return Quantized(source, made, planned, onnx.load(planned.path))


def expected_product(product: Product, x: Any, result: Quantized, recipe: Recipe) -> Any:
    """The site on fake-quantized operands, in float64."""
    decision = result.plan.decision("fc")
    assert decision.activation_scale is not None
    left = fake_quantize(x, decision.activation_scale, recipe.format).astype(np.float64)
    if not product.weights:
        right = fake_quantize(x, decision.weight_scale[0], recipe.format).astype(np.float64)
        return left @ right.transpose(0, 2, 1)
    axis = product.channel_axis if recipe.weight is Granularity.PER_CHANNEL else None
    w = fake_quantize(product.weights["w"], result.weight_scale, recipe.format, axis).astype(np.float64)
    if "transB" in product.body:
        w = w.T
    y = w @ left if "MatMul(w" in product.body else left @ w
    return y + product.weights.get("b", 0.0)


def check_stored_weight(model: onnx.ModelProto, product: Product, granularity: str) -> None:
    w, stored = product.weights["w"], initializer(model, "fc/weight/fp8")
    assert (stored.data_type, tuple(stored.dims)) == (TensorProto.FLOAT8E4M3FN, w.shape)
    assert len(stored.raw_data) == w.size
    assert "w" not in {tensor.name for tensor in model.graph.initializer}
    dq = named(model, "fc/weight/dq")
    scale, zero = (initializer(model, name) for name in dq.input[1:])
    assert (zero.data_type, zero.dims) == (TensorProto.FLOAT8E4M3FN, scale.dims)
    assert not numpy_helper.to_array(zero).astype(np.float32).any()
    axis = None if granularity == "per_tensor" else product.channel_axis
    assert {a.name: a.i for a in dq.attribute} == ({} if axis is None else {"axis": axis})
    assert list(scale.dims) == ([] if axis is None else [w.shape[axis]])
    others = None if axis is None else tuple(a for a in range(w.ndim) if a != axis)
    # A scale is amax / 448 rounded up to eight bits.
    ratio = numpy_helper.to_array(scale) * 448 / np.abs(w).max(axis=others)
    assert np.all((ratio >= 1 - 1e-6) & (ratio <= 1 + 2**-7))


@pytest.mark.parametrize("granularity", RECIPES)
@pytest.mark.parametrize("case", PRODUCTS)
def test_values_equal_fake_quantized_operands(case, granularity, tmp_path):
    product, recipe = PRODUCTS[case], RECIPES[granularity]
    x = random_rows(6, *product.shape)
    result = quantize(product.model(), {"x": x}, recipe, tmp_path)
    onnx.checker.check_model(result.model, full_check=True)
    expected = expected_product(product, x, result, recipe)
    # FP32 sums of 24 terms, up to 3.7: 7e-7 seen. The FP8 rounding itself moves them by 0.11 or more.
    np.testing.assert_allclose(evaluate(result.model, {"x": x})["y"], expected, rtol=0, atol=5e-6)
    np.testing.assert_allclose(
        OnnxSession(result.planned.path).run({"x": x})["y"], expected, rtol=0, atol=5e-6
    )
    exact = evaluate(product.model(), {"x": x})["y"]
    assert np.abs(exact - expected).max() > 0.05
    check_stored_weight(result.model, product, granularity)


@pytest.mark.parametrize("format", list(FLOATS))
def test_every_format(format, tmp_path):
    product, recipe = PRODUCTS["gemm_transb"], Recipe.of(format, Granularity.PER_CHANNEL)
    x = random_rows(6, *product.shape)
    result = quantize(product.model(), {"x": x}, recipe, tmp_path)
    expected = expected_product(product, x, result, recipe)
    np.testing.assert_allclose(evaluate(result.model, {"x": x})["y"], expected, rtol=0, atol=5e-6)
    assert initializer(result.model, "fc/weight/fp8").data_type == format.onnx_type


@pytest.mark.parametrize("case", ["gemm_transb", "batched_weight", "weight_on_the_left"])
@pytest.mark.parametrize("format", [INT8, UINT8])
def test_integers_against_int64(format, case, tmp_path):
    """Codes, scales and zero points as stored, and the product that ONNX Runtime makes of them."""
    product, recipe = PRODUCTS[case], Recipe.of(format, Granularity.PER_CHANNEL)
    x = random_rows(6, *product.shape) + np.float32(0.5)
    result = quantize(product.model(), {"x": x}, recipe, tmp_path)
    onnx.checker.check_model(result.model, full_check=True)
    is_left = "MatMul(w" in product.body
    constants = (initializer(result.model, f"fc/in{int(is_left)}/{name}") for name in ("scale", "zero_point"))
    scale, zero = map(numpy_helper.to_array, constants)
    decision = result.plan.decision("fc")
    assert (float(scale), int(zero)) == (decision.activation_scale, decision.activation_zero_point)
    assert (int(zero) > 0, zero.dtype) == (format is UINT8, np.dtype(format.storage))
    low, high = (-128, 127) if format is INT8 else (0, 255)
    code = np.clip(np.rint(x / scale).astype(np.int64) + int(zero), low, high)
    left = (code - int(zero)) * float(scale)
    stored = numpy_helper.to_array(initializer(result.model, "fc/weight/int8"))
    w, axis = product.weights["w"], product.channel_axis
    scales = result.weight_scale.reshape([-1 if i == axis else 1 for i in range(w.ndim)])
    np.testing.assert_array_equal(stored, np.rint(w / scales).astype(np.int64))
    assert stored.dtype == np.int8
    assert np.abs(stored.astype(np.int64)).max() <= 127
    right = stored.astype(np.int64) * scales.astype(np.float64)
    right = right.T if "transB" in product.body else right
    expected = (right @ left if is_left else left @ right) + product.weights.get("b", 0.0)
    # ONNX Runtime 1.31 fuses a stack of weights with scales by column to an operator that refuses it.
    for optimize in (False, True)[: 1 + (w.ndim == 2)]:
        session = OnnxSession(result.planned.path, SessionOptions(optimize=optimize))
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, rtol=0, atol=5e-6)


def test_an_interaction_quantizes_both_operands(tmp_path):
    x = random_rows(6, *INTERACTION.shape)
    rows = {"x": x, "t": 3 * x}  # not a power of two: another scale rounds otherwise
    result = quantize(INTERACTION.model(), rows, PER_TENSOR, tmp_path)
    onnx.checker.check_model(result.model, full_check=True)
    assert op_types(result.model).count("QuantizeLinear") == 2
    decision = result.plan.decision("fc")
    assert decision.weight_scale[0] == pytest.approx(3 * (decision.activation_scale or 0), rel=2**-7)
    np.testing.assert_allclose(
        evaluate(result.model, {"x": x})["y"],
        expected_product(INTERACTION, x, result, PER_TENSOR),
        rtol=0,
        atol=2e-5,  # sums of 24 squares, up to 60
    )


def test_what_reads_one_tensor_shares_its_qdq_and_interface_and_names_of_sites_stay(tmp_path):
    model = parse("[fc] y = MatMul(x, x)", inputs="float[batch,5,5] x", outputs="float[batch,5,5] y")
    result = quantize(model, {"x": random_rows(6, 5, 5)}, PER_TENSOR, tmp_path)
    assert op_types(result.model) == ["QuantizeLinear", "DequantizeLinear", "MatMul"]
    result = two_readers(tmp_path, fp8=("a", "b"))
    assert op_types(result.model).count("QuantizeLinear") == 1
    assert named(result.model, "a").input[0] == named(result.model, "b").input[0]
    # The third site is not planned and reads the exact tensor.
    assert named(result.model, "c").input[0] == "x"
    assert [(a.at, a.what) for a in result.planned.log.records[0].applied] == [
        ("a", "e4m3fn/per_tensor/per_tensor/amax: Q/DQ"),
        ("b", "e4m3fn/per_tensor/per_tensor/amax: shares the Q/DQ of its input"),
    ]
    result = two_readers(tmp_path)
    before = onnx.load(result.source.path)
    assert list(result.model.graph.input) == list(before.graph.input)
    assert list(result.model.graph.output) == list(before.graph.output)
    for site in result.source.sites:
        assert named(result.model, site.name).op_type == site.op_type
    assert result.planned.log.records[0].seconds > 0
    assert len(result.planned.digest) == 64
    result = two_readers(tmp_path, fp8=())
    assert result.planned.log.records == ()
    assert result.planned.digest == result.source.digest


def two_readers(folder: Path, **plan: Any) -> Quantized:
    model = parse(
        "[a] p = MatMul(x, w) [b] q = MatMul(x, v) [c] r = MatMul(x, u) s = Add(p, q) y = Add(s, r)",
        {name: weight(8, 8, seed=i) for i, name in enumerate("wvu")},
    )
    return quantize(model, {"x": random_rows(6, 8)}, PER_TENSOR, folder, **plan)


def test_a_plan_for_another_model_or_a_weight_of_another_shape_is_refused(tmp_path):
    source = artifact(PRODUCTS["gemm"].model(), tmp_path / "before.onnx")
    gone = (Wide("gone", "residual"),)
    for digest, wide, evidence in (("0" * 64, (), source.digest[:12]), (source.digest, gone, "'gone'")):
        plan = PrecisionPlan("fp8-safe", digest, Precision.BF16, (), {}, 0.0, wide=wide)
        with pytest.raises(TransformError) as caught:
            apply_plan(source, plan, PlanForm(Precision.BF16), tmp_path / "after.onnx")
        assert caught.value.code == "E0602"
        assert evidence in caught.value.evidence
    source = artifact(PRODUCTS["gemm"].model(), tmp_path / "before.onnx")
    (site,) = source.sites
    plan = quantizing_plan(source, {"x": random_rows(6, 24)}, PER_CHANNEL_WEIGHT)
    weight = replace(site.operands[1], shape=(1, *site.operands[1].shape), contracting_axis=1)
    altered = replace(source, sites=(replace(site, operands=(site.operands[0], weight)),))
    with pytest.raises(TransformError) as caught:
        apply_plan(altered, plan, PlanForm(Precision.FP32), tmp_path / "after.onnx")
    assert caught.value.code == "E0607"


@pytest.mark.parametrize("recipe", [PER_CHANNEL_WEIGHT, PER_TENSOR], ids=lambda recipe: recipe.id)
def test_scales_are_as_many_as_the_recipe_says(recipe, tmp_path):
    source = artifact(PRODUCTS["gemm"].model(), tmp_path / "before.onnx")
    (decision,) = quantizing_plan(source, {"x": random_rows(6, 24)}, recipe).decisions
    (site,) = source.sites
    check_decision(site, decision)
    for count in {0, 1, site.n - 1, site.n, site.n + 1} - {len(decision.weight_scale)}:
        altered = replace(decision, weight_scale=(decision.weight_scale * site.n * 2)[:count])
        with pytest.raises(TransformError) as caught:
            check_decision(site, altered)
        assert caught.value.code == "E0607"
