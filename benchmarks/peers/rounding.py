"""A graph in BF16 or FP16 as one in FP32 that rounds: what a device does, on a CPU that has no such kernels.

ONNX Runtime's CPU provider refuses BF16 products, and runs FP16 ones in FP32 without rounding in between.
Here every tensor of a narrow type is FP32 and holds numbers of the narrow type: each node that computes one
is followed by a Cast to the type and a Cast back, to nearest even. Sums inside of a node are in FP32, as on
tensor cores.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NARROW = {TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16), TensorProto.FLOAT16: np.dtype(np.float16)}
EXACT = frozenset(
    {"Concat", "Expand", "Flatten", "Gather", "Identity", "Relu", "Reshape", "Slice", "Split", "Squeeze"}
    | {"Neg", "Tile", "Transpose", "Unsqueeze", "Where"}
)
"""Operators whose results are among their operands, or exact in their type: nothing to round."""


class TypesUnknown(ValueError):
    """The types of a graph cannot be inferred, so that nobody knows where it rounds."""


def narrow_types(model: onnx.ModelProto) -> set[int]:
    """Types below FP32 that tensors of the graph have, FP8 apart."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}
    return (types | {tensor.data_type for tensor in model.graph.initializer}) & NARROW.keys()


def rounded_in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with every tensor below FP32, FP8 apart, as FP32 numbers that were rounded to its type.

    Args:
        model: With all weights in it; not changed.

    Returns:
        A graph with the same results up to the order of sums; inputs and outputs in FP32.

    Raises:
        TypesUnknown: A tensor's type cannot be inferred, or a subgraph computes in a narrow type.
    """
    found = onnx.ModelProto()
    found.CopyFrom(model)
    graph = found.graph
    types = _types_of(model)
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in NARROW:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in graph.initializer:
        if tensor.data_type in NARROW:
            tensor.CopyFrom(_widened(tensor))
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        written = onnx.NodeProto()
        written.CopyFrom(node)
        nodes.append(written)
        _widen_attributes(written)
        if written.op_type in EXACT or written.op_type == "Constant":
            continue
        for index, name in enumerate(node.output):
            if not name:
                continue
            if name not in types:
                raise TypesUnknown(
                    f"tensor '{name}' of node '{node.name}' ({node.op_type}) has no known type"
                )
            if types[name] in NARROW:
                written.output[index] = f"{name}__exact"
                nodes.append(
                    helper.make_node("Cast", [f"{name}__exact"], [f"{name}__narrow"], to=types[name])
                )
                nodes.append(helper.make_node("Cast", [f"{name}__narrow"], [name], to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)
    return found


def _types_of(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    return {value.name: value.type.tensor_type.elem_type for value in values}


def _widen_attributes(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            raise TypesUnknown(f"node '{node.name}' ({node.op_type}) has a subgraph")
        if attribute.t.data_type in NARROW:
            attribute.t.CopyFrom(_widened(attribute.t))
        if attribute.name == "to" and attribute.i in NARROW:
            # Its result is rounded behind it.
            attribute.i = TensorProto.FLOAT
        if attribute.name == "output_dtype" and attribute.i in NARROW:
            attribute.i = TensorProto.FLOAT


def _widened(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
