r"""Parser of TensorRT's engine inspector.

An engine built with `ProfilingVerbosity.DETAILED` describes its layers as JSON. Dimensions and formats depend
on the batch, so that they are read from an execution context with shapes for each optimization profile
(NVIDIA's developer guide, "Engine Inspector").

TensorRT 10 writes (a layer of the issues NVIDIA/TensorRT #4397 and #4020)::

    {"Layers": [{"Name": "…_myl0_7", "LayerType": "gemm",
                 "Inputs": [{"Name": "…", "Dimensions": [1,40,1024], "Format/Datatype": "Half"}],
                 "Outputs": […], "TacticName": "sm80_xmma_gemm_f16f16_f16f16_f16_nn_n_…",
                 "Metadata": "[ONNX Layer: /pos_ff/output/MatMul]\u001f[ONNX Layer: /pos_ff/output/Add]"}],
     "Bindings": ["input_0", "output_0"]}

TensorRT 11 has `I/O Tensors` with objects in place of the names in `Bindings`, and `Format` and `Datatype` in
place of `Format/Datatype` (its page "Migrating IEngineInspector Usage from TensorRT 10.x to 11.x"). Both may
list the weights of a layer as `Constants`, in the form of its inputs; layers outside the graph compiler have
``"Weights": {"Type": "Half", "Count": 131072}`` instead.

Types of the graph compiler are single words (``Half``, ``FP8``); those of other layers are part of a layout's
description (``Row major linear FP8 format``). TREx
(`tools/experimental/trt-engine-explorer/trex/activations.py`) lists both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loka_onnx.errors import EngineError

TYPES = {
    **dict.fromkeys(("fp8", "fp8e4m3", "e4m3", "e4m3fn"), "fp8_e4m3"),
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("half", "fp16"), "half"),
    **dict.fromkeys(("float", "fp32"), "float"),
    **{word: word for word in ("tf32", "int8", "int32", "int64", "uint8", "bool", "fp4")},
}
"""Words for element types, in lower case, and the names of TensorRT for RTX's compiler. TensorRT has one FP8
type, E4M3 (`DataType.FP8`)."""
PROFILE = re.compile(r"\[profile +(\d+)\]")
ONNX_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1e\x1f]|$|\[ONNX Layer: )", re.DOTALL)


@dataclass(frozen=True)
class LayerTensor:
    """An input, output or constant of a layer; `type` is a value of `TYPES` or the inspector's text. Weights
    may have no name, `shape` is empty where it is missing, `elements` is None where one is unknown.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    elements: int | None


@dataclass(frozen=True)
class EngineLayer:
    """A layer of an engine (``gemm``, ``kgen``, ``CaskConvolution``, …): one kernel, or a call of a library.
    `tactic` names its kernel and may be missing; `nodes` are its ONNX nodes.
    """

    name: str
    kind: str
    tactic: str
    inputs: tuple[LayerTensor, ...]
    constants: tuple[LayerTensor, ...]
    outputs: tuple[LayerTensor, ...]
    nodes: tuple[str, ...]

    @property
    def profile(self) -> int:
        """Number of its optimization profile, from its name (the first profile's is not named)."""
        match = PROFILE.search(self.name)
        return int(match.group(1)) if match is not None else 0


def read_layers(trt: Any, engine: Any, stream: int) -> tuple[EngineLayer, ...]:
    """Read the layers of an engine on a CUDA stream, for each optimization profile at its tuned batch."""
    layers: list[EngineLayer] = []
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    for profile in range(engine.num_optimization_profiles):
        context = engine.create_execution_context()
        if context is None or (profile and not context.set_optimization_profile_async(profile, stream)):
            raise EngineError(
                f"E0898 {trt.__name__} makes no execution context to inspect",
                where=f"optimization profile {profile}",
                evidence="the device may lack memory",
            )
        for name in inputs:
            _, tuned, _ = engine.get_tensor_profile_shape(name, profile)
            context.set_input_shape(name, tuned)
        inspector = engine.create_engine_inspector()
        inspector.execution_context = context
        parsed = parse_layers(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
        # The inspector refers to the context, so that it is deleted first.
        del inspector, context
        layers += [layer for layer in parsed if layer.profile == profile] or parsed
    return tuple(dict.fromkeys(layers))


def parse_layers(text: str) -> tuple[EngineLayer, ...]:
    """Parse the inspector's JSON; `EngineError` unless it lists objects. A missing field is empty."""
    with EngineError("E0899 the engine inspector does not speak JSON").in_place_of(json.JSONDecodeError):
        document = json.loads(text, strict=False)
    layers = document.get("Layers") if isinstance(document, dict) else None
    if not isinstance(layers, list):
        raise EngineError(
            "E2800 the engine inspector lists no layers",
            evidence=f"its answer begins {text[:80]!r}",
            remedy="this version of TensorRT writes another form; its precision cannot be verified",
        )
    if any(not isinstance(layer, dict) for layer in layers):
        raise EngineError(
            "E2801 the engine inspector tells names of layers only",
            evidence=f"the first is {str(layers[0])[:80]!r}",
            remedy="build the engine with ProfilingVerbosity.DETAILED",
        )
    return tuple(_layer(layer) for layer in layers)


def _layer(value: Mapping[str, Any]) -> EngineLayer:
    weights = value.get("Weights")
    constants = [*_tensors(value.get("Constants"))]
    if isinstance(weights, dict) and weights.get("Count"):
        constants.append(LayerTensor("", _word(str(weights.get("Type", ""))), (), int(weights["Count"])))
    return EngineLayer(
        name=str(value.get("Name", "")),
        kind=str(value.get("LayerType", "")),
        tactic=str(value.get("TacticName", "")),
        inputs=tuple(_tensors(value.get("Inputs"))),
        constants=tuple(constants),
        outputs=tuple(_tensors(value.get("Outputs"))),
        nodes=tuple(ONNX_NODE.findall(str(value.get("Metadata", "")))),
    )


def _tensors(values: object) -> Iterator[LayerTensor]:
    for value in values if isinstance(values, list) else ():
        if isinstance(value, dict):
            shape = tuple(int(size) for size in value.get("Dimensions", ()))
            known = all(size >= 0 for size in shape) and "Dimensions" in value
            fields = {key.lower(): str(text) for key, text in value.items() if isinstance(text, str)}
            kind = fields.get("datatype") or fields.get("format/datatype") or fields.get("format") or ""
            elements = math.prod(shape) if known else None
            yield LayerTensor(str(value.get("Name", "")), _word(kind), shape, elements)


def _word(text: str) -> str:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return next((TYPES[word] for word in words if word in TYPES), text.strip().lower() or "unknown")
