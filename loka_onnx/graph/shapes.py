"""Shape and type inference without a copy of the weights.

`onnx.shape_inference` serializes the whole model, which fails beyond 2 GiB and is slow before that. Large
initializers decide no shape, so inference runs on a copy of the rest.
"""

from __future__ import annotations

import onnx
from onnx.external_data_helper import uses_external_data

from loka_onnx.graph.detached import number_of

STRIP_BYTES = 4096
"""Larger initializers are weights, never a shape or an axis."""


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model with inputs in place of large initializers, and no external data."""
    light = onnx.ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name or "main"
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    inputs = {i.name for i in model.graph.input}
    for tensor in model.graph.initializer:
        is_large = number_of(tensor) is not None or len(tensor.raw_data) > STRIP_BYTES
        is_large |= uses_external_data(tensor)
        if is_large and tensor.name not in inputs:
            graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
        else:
            graph.initializer.append(tensor)
    return light


def add_inferred_shapes(model: onnx.ModelProto) -> None:
    """Write all inferable types and shapes of inner tensors and outputs into a model."""
    light = without_weights(model)
    inferred = onnx.shape_inference.infer_shapes(light, strict_mode=False, data_prop=True)
    weights = {tensor.name for tensor in model.graph.initializer}
    del model.graph.value_info[:]
    model.graph.value_info.extend(v for v in inferred.graph.value_info if v.name not in weights)
    del model.graph.output[:]
    model.graph.output.extend(inferred.graph.output)
