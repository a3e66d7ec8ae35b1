"""Models from graphs in ONNX's text form, with the constants that they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper


def parsed(
    body: str,
    constants: Mapping[str, Any] | None = None,
    *,
    inputs: str = "float[batch,8] x",
    outputs: str = "float[] y",
    opset: int = 21,
    keeps_double: bool = False,
) -> onnx.ModelProto:
    """The model ``g (inputs) => (outputs) { body }``."""
    header = f'<ir_version: {10 if opset < 23 else 11}, opset_import: ["" : {opset}]>'
    model = onnx.parser.parse_model(f"{header} g ({inputs}) => ({outputs}) {{ {body} }}")
    return with_constants(model, constants or {}, keeps_double=keeps_double)


def with_constants(
    model: onnx.ModelProto, constants: Mapping[str, Any], *, keeps_double: bool = False
) -> onnx.ModelProto:
    """The model, edited, with the constants that it reads; those of float64 become FP32."""
    read = {*_read(model.graph), *(output.name for output in model.graph.output)}
    for name, value in constants.items():
        array = np.asarray(value)
        if array.dtype == np.float64 and not keeps_double:
            array = array.astype(np.float32)
        if name in read:
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def in_fp32(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, edited, with FP32 in place of BF16; constants keep their values, which BF16 has rounded."""
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.BFLOAT16:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to":
                attribute.i = onnx.TensorProto.FLOAT
    return model


def _read(graph: onnx.GraphProto) -> Iterator[str]:
    """Names that nodes read and no node makes."""
    made = {name for node in graph.node for name in node.output}
    for node in graph.node:
        yield from (name for name in node.input if name not in made)
        for attribute in node.attribute:
            yield from (name for name in _read(attribute.g) if name not in made)
