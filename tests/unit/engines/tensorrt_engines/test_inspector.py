"""The engine inspector's JSON, on samples in the form of TensorRT 10 and 11, and what it claims of a site.

`samples/` transcribes that form: layers of the graph compiler as in NVIDIA/TensorRT issue #4397,
reformatting layers as in #4020, convolutions and their counted weights as in the developer guide, 11's
fields as in NVIDIA's page on migrating uses of `IEngineInspector`, and the types as TREx lists them.
"""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.engines.tensorrt.inspector import EngineLayer, LayerTensor, parse_layers, read_layers
from loka_onnx.engines.tensorrt.site_precision import layer_precisions
from loka_onnx.errors import EngineError

SAMPLES = Path(__file__).parent / "samples"
TEN, ELEVEN = ((SAMPLES / f"inspector_{v}.json").read_text(encoding="utf-8") for v in (10, 11))


def test_layers_of_version_10() -> None:
    quantize, fc0, fc1, reformat = parse_layers(TEN)
    assert [layer.kind for layer in (quantize, fc0, fc1, reformat)] == ["kgen", "gemm", "gemm", "Reformat"]
    assert fc0.inputs == (
        LayerTensor("__mye101", "fp8_e4m3", (8, 64), 512),
        LayerTensor("__mye12_alpha", "float", (), 1),
    )
    assert fc0.constants == (LayerTensor("fc0/w_constantFP8", "fp8_e4m3", (64, 128), 8192),)
    assert fc0.outputs[0].type == "bf16"
    assert fc0.nodes == ("fc0", "fc0/x/dq", "fc0/wdq")
    assert fc1.nodes == ("fc1", "a[0] = {b}")
    assert fc0.tactic.startswith("sm90_xmma_gemm_e4m3")
    assert (reformat.inputs[0].type, reformat.outputs[0].type) == ("bf16", "float")
    assert reformat.nodes == ()
    assert {layer.profile for layer in parse_layers(TEN)} == {0}


def test_layers_of_version_11_and_unknown_dimensions() -> None:
    fc0, conv = parse_layers(ELEVEN)
    assert fc0.inputs == (LayerTensor("__mye101", "fp8_e4m3", (8, 64), 512),)
    assert fc0.constants == (LayerTensor("fc0/w_constantFP8", "fp8_e4m3", (64, 128), 8192),)
    assert conv.inputs[0].type == "half"
    assert conv.constants == (LayerTensor("", "half", (), 131072),)
    assert (fc0.profile, conv.profile) == (1, 1)
    tensor = parse_layers(TEN.replace("[8,64]", "[-1,64]", 1))[0].inputs[0]
    assert (tensor.shape, tensor.elements) == ((-1, 64), None)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("FP8", "fp8_e4m3"),
        ("Row major linear FP8 format", "fp8_e4m3"),
        ("Half", "half"),
        ("Two wide channel vectorized row major FP16 format.", "half"),
        ("Channel major BFloat16 format where channel % 8 == 0", "bf16"),
        ("Float", "float"),
        ("Row major linear FP32", "float"),
        ("Thirty-two wide channel vectorized row major Int8 format.", "int8"),
        ("N/A due to dynamic shapes", "n/a due to dynamic shapes"),
        ("", "unknown"),
    ],
)
def test_types(said: str, kind: str) -> None:
    text = TEN.replace('"Format/Datatype": "BFloat16"', f'"Format/Datatype": "{said}"', 1)
    assert parse_layers(text)[0].inputs[0].type == kind


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Layers: none", "does not speak JSON"),
        ('{"Bindings": []}', r"lists no layers(?s:.*)Bindings"),
        ("[]", "lists no layers"),
        ('{"Layers": ["fc0", "fc1"]}', r"names of layers only(?s:.*)'fc0'(?s:.*)ProfilingVerbosity.DETAILED"),
    ],
)
def test_what_cannot_be_read_is_an_error(text: str, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        parse_layers(text)


class FakeContext:
    def __init__(self) -> None:
        self.profile, self.shape = 0, ()

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream == 7
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name == "x"
        self.shape = shape
        return True


class FakeEngine:
    """Two profiles; says of each what it says only when asked with a context that is set to it."""

    num_io_tensors, num_optimization_profiles = 2, 2

    def get_tensor_name(self, index: int) -> str:
        return ("x", "out")[index]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name == "x" else "out"

    def get_tensor_profile_shape(self, name: str, profile: int) -> Any:
        return ((1, 64), (8 + profile, 64), (16, 64))

    def create_execution_context(self) -> FakeContext:
        return FakeContext()

    def create_engine_inspector(self) -> SimpleNamespace:
        inspector = SimpleNamespace()

        def tell(form: str) -> str:
            assert form == "json"
            context = inspector.execution_context
            assert context.shape == (8 + context.profile, 64)
            return (TEN, ELEVEN)[context.profile]

        inspector.get_engine_information = tell
        return inspector


def test_every_profile_is_asked_with_its_own_shapes() -> None:
    trt = SimpleNamespace(
        TensorIOMode=SimpleNamespace(INPUT="in"), LayerInformationFormat=SimpleNamespace(JSON="json")
    )
    assert read_layers(trt, FakeEngine(), 7) == (*parse_layers(TEN), *parse_layers(ELEVEN))


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


INT8, WIDE = "int8", tensor("float", 1)
FACTORS = [
    (gemm(tensor(FP8, 8, 64), tensor(FP8, 64, 128)), (FP8, FP8)),
    (gemm(tensor(FP8, 8, 64), WIDE, tensor(BF16, 128)), (FP8,)),
    # A residual as large as the output is added, not multiplied.
    (gemm(tensor(FP8, 8, 64), tensor(FP8, 64, 128), tensor(BF16, 8, 128)), (FP8, FP8)),
    (gemm(tensor(FP8, 8, 64), tensor(BF16, 8, 128)), (FP8,)),
    # Merged with another site of the same input: the weight of both.
    (gemm(tensor(FP8, 8, 64), constants=(tensor(FP8, 64, 256), tensor("float", 256))), (FP8, FP8)),
    # One factor of another type is a fallback.
    (gemm(tensor(FP8, 8, 64), tensor(BF16, 64, 128)), None),
    (gemm(tensor(BF16, 8, 64), tensor(FP8, 64, 128)), None),
    (gemm(tensor(FP8, 8, 64), constants=(tensor(BF16, 64, 128),)), None),
    (gemm(tensor(FP8, 8, 64), constants=(tensor(INT8, 64, 128),)), None),
    (gemm(), None),
    # In INT8.
    (gemm(tensor(INT8, 8, 64)), (INT8,)),
    (gemm(tensor(INT8, 8, 64), constants=(tensor(INT8, 64, 128), tensor("float", 128))), (INT8, INT8)),
    (gemm(tensor(BF16, 8, 64), constants=(tensor(INT8, 64, 128),)), None),
    (replace(gemm(tensor(INT8, 8, 64), tensor(INT8, 64, 128)), kind="kgen", tactic=""), None),
    # Of an interaction.
    (gemm(tensor(FP8, 8, 10, 64), tensor(FP8, 8, 64, 10)), (FP8, FP8)),
    (gemm(tensor(FP8, 8, 10, 64), tensor(BF16, 8, 64, 10)), None),
]


@pytest.mark.parametrize(("layer", "operands"), FACTORS)
def test_a_site_is_engaged_where_all_factors_are_of_its_type(layer, operands):
    has_rows = any(len(each.shape) == 3 for each in layer.inputs)
    site = interaction("fc") if has_rows else linear("fc")
    for precision in (Precision.FP8, Precision.INT8):
        found = one((layer,), site, precision)
        expected = operands is not None and operands[0][:3] == precision.value[:3]
        assert found.engaged is expected, found.evidence
        assert not expected or found.operands == operands


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
