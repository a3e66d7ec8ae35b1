"""What is claimed of a site, from the layers of an engine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from test_inspector import ELEVEN, TEN

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.engines.tensorrt.inspector import EngineLayer, LayerTensor, parse_layers
from loka_onnx.engines.tensorrt.site_precision import layer_precisions

LAYERS = (*parse_layers(TEN), *parse_layers(ELEVEN))
WEIGHT, ACTIVATION = Operand("w", 1, True, 0, ()), Operand("x", 0, False, 1, ())
FP8, BF16 = "fp8_e4m3", "bf16"


def linear(name: str, k: int = 64, n: int = 128) -> Site:
    return Site(name, SiteKind.LINEAR, "MatMul", (ACTIVATION, WEIGHT), f"{name}:0", k, n, 1)


def interaction(name: str) -> Site:
    return Site(name, SiteKind.INTERACTION, "MatMul", (ACTIVATION, ACTIVATION), f"{name}:0", 64, 10, 10)


def tensor(kind: str, *shape: int) -> LayerTensor:
    return LayerTensor("t", kind, shape, math.prod(shape))


def gemm(*inputs: LayerTensor, constants: tuple[LayerTensor, ...] = ()) -> EngineLayer:
    outputs = (tensor(BF16, 8, 128),)
    return EngineLayer("fc_myl0_1", "gemm", "sm90_xmma_gemm", inputs, constants, outputs, ("fc",))


def one(layers: tuple[EngineLayer, ...], site: Site, planned: Precision = Precision.FP8) -> SitePrecision:
    return layer_precisions(layers, [(site, planned)])[0]


def test_fp8_factors_engage_and_a_fallback_is_told() -> None:
    found = one(LAYERS, linear("fc0"))
    assert (found.engaged, found.operands) == (True, (FP8, FP8))
    assert found.evidence == "engine inspector: gemm 'fc0_myl0_1'"
    found = one(LAYERS, linear("fc1", 128, 32))
    assert (found.engaged, found.operands) == (False, (BF16,))
    assert "gemm 'fc1_myl0_2' multiplies bf16 where the plan says fp8_e4m3" in found.evidence
    kept = one(LAYERS, linear("fc1", 128, 32), Precision.BF16)
    assert kept.engaged
    assert kept.evidence.endswith("its weight is not listed and has the type of the activation")
    assert not one(LAYERS, linear("fc1", 128, 32), Precision.FP16).engaged


@pytest.mark.parametrize(
    ("layer", "operands"),
    [
        (gemm(tensor(FP8, 8, 64), tensor(FP8, 64, 128)), (FP8, FP8)),
        (gemm(tensor(FP8, 8, 64), tensor("float", 1), tensor(BF16, 128)), (FP8,)),
        # A residual as large as the output is added, not multiplied.
        (gemm(tensor(FP8, 8, 64), tensor(FP8, 64, 128), tensor(BF16, 8, 128)), (FP8, FP8)),
        (gemm(tensor(FP8, 8, 64), tensor(BF16, 8, 128)), (FP8,)),
        # Merged with another site of the same input: the weight of both.
        (gemm(tensor(FP8, 8, 64), constants=(tensor(FP8, 64, 256), tensor("float", 256))), (FP8, FP8)),
    ],
)
def test_which_tensors_are_multiplied(layer: EngineLayer, operands: tuple[str, ...]) -> None:
    found = one((layer,), linear("fc"))
    assert (found.engaged, found.operands) == (True, operands), found.evidence


@pytest.mark.parametrize(
    "layer",
    [
        gemm(tensor(FP8, 8, 64), tensor(BF16, 64, 128)),
        gemm(tensor(BF16, 8, 64), tensor(FP8, 64, 128)),
        gemm(tensor(FP8, 8, 64), constants=(tensor(BF16, 64, 128),)),
        gemm(tensor("int8", 8, 64)),
        gemm(),
    ],
)
def test_one_factor_of_another_type_is_a_fallback(layer: EngineLayer) -> None:
    assert not one((layer,), linear("fc")).engaged


def test_both_operands_of_an_interaction_count() -> None:
    assert one((gemm(tensor(FP8, 8, 10, 64), tensor(FP8, 8, 64, 10)),), interaction("fc")).engaged
    assert not one((gemm(tensor(FP8, 8, 10, 64), tensor(BF16, 8, 64, 10)),), interaction("fc")).engaged


def test_library_products_count_and_generated_kernels_hide() -> None:
    name = "__myl_CastMulFc"
    kernel = replace(gemm(tensor(FP8, 8, 64)), kind="kgen", name=name, tactic=f"{name}_0x1")
    found = one((kernel,), linear("fc"))
    assert (found.engaged, found.operands) == (False, (FP8,))
    assert "which has kgen '__myl_CastMulFc' of fp8_e4m3" in found.evidence
    attention = replace(kernel, inputs=(tensor(BF16, 8, 64),), name="_gemm_mha_v2")
    assert one((attention,), linear("fc"), Precision.BF16).engaged
    assert not one((attention,), linear("fc"), Precision.FP16).engaged
    fusion = replace(gemm(tensor(FP8, 8, 64)), kind="fusion", tactic="sm90_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn")
    assert one((fusion,), linear("fc")).engaged
    assert not one((replace(fusion, tactic="pointwise_vectorized"),), linear("fc")).engaged


def test_tf32_is_not_fp32() -> None:
    exact = gemm(tensor("float", 8, 64))
    assert one((exact,), linear("fc"), Precision.FP32).engaged
    rounded = replace(exact, tactic="sm80_xmma_gemm_tf32f32_tf32f32_f32_tn_n")
    found = one((rounded,), linear("fc"), Precision.FP32)
    assert not found.engaged
    assert "which rounds to TF32" in found.evidence
