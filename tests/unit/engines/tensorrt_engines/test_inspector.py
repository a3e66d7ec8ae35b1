"""The reader of the engine inspector's JSON, on samples in the form of TensorRT 10 and 11.

`samples/` transcribes that form: layers of the graph compiler as in NVIDIA/TensorRT issue #4397,
reformatting layers as in #4020, convolutions and their counted weights as in the developer guide, 11's
fields as in NVIDIA's page on migrating uses of `IEngineInspector`, and the types as TREx lists them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loka_onnx.engines.tensorrt.inspector import LayerTensor, parse_layers, read_layers
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
