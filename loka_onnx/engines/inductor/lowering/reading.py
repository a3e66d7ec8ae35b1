"""Contents of a model file: constants, nodes, the names of inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx.external_data_helper import uses_external_data

from loka_onnx.engines.inductor.lowering.node import REMEDY, Node, Scope
from loka_onnx.engines.inductor.lowering.types import TORCH_TYPES, type_name
from loka_onnx.engines.inductor.lowering.values import Constant
from loka_onnx.errors import EngineError
from loka_onnx.graph.storage import read_external, read_proto
from loka_onnx.graph.tensor_values import read_array


@dataclass(frozen=True)
class SourceGraph:
    """The main graph of a model.

    Attributes:
        batched: Inputs with a dynamic first axis.
        constants: Its initializers, by name.
        nodes: Its nodes, producers before consumers.
    """

    inputs: tuple[str, ...]
    batched: frozenset[str]
    outputs: tuple[str, ...]
    constants: dict[str, Constant]
    nodes: tuple[Node, ...]


def read_graph(model: Path, scope: Scope) -> SourceGraph:
    """Read a model with its external data.

    Raises:
        ModelError: The file or its external data are missing, truncated or invalid.
        EngineError: A tensor has a type without a lowering.
    """
    proto = read_proto(model)
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    graph = proto.graph
    constants = {tensor.name: _constant(tensor, model.parent) for tensor in graph.initializer}
    inputs = [info for info in graph.input if info.name not in constants]
    for info in inputs:
        _check_type(info.name, info.type.tensor_type.elem_type)
    nodes, names = [], set[str]()
    for node in graph.node:
        # Two nodes may have the same name, but products are recorded by name.
        name = node.name if node.name and node.name not in names else node.output[0]
        names.add(name)
        domain = "" if node.domain == "ai.onnx" else node.domain
        attributes = {attribute.name: _attribute(attribute) for attribute in node.attribute}
        tensors = (tuple(node.input), tuple(node.output))
        nodes.append(Node(node.op_type, domain, name, attributes, *tensors, scope))
    return SourceGraph(
        tuple(info.name for info in inputs),
        frozenset(info.name for info in inputs if _is_batched(info)),
        tuple(info.name for info in graph.output),
        constants,
        tuple(nodes),
    )


def _is_batched(info: onnx.ValueInfoProto) -> bool:
    kind = info.type.tensor_type
    first = kind.shape.dim[:1]
    return not kind.HasField("shape") or (bool(first) and not first[0].HasField("dim_value"))


def constant_of(node: Node) -> Constant | None:
    """Value of a Constant node; None for text and sparse tensors."""
    name = node.outputs[0]
    for key, value in node.attributes.items():
        if isinstance(value, Constant):
            return Constant(name, value.dtype, value.shape, value.array)
        if key in {"value_float", "value_floats", "value_int", "value_ints"}:
            array = np.array(value, np.float32 if "float" in key else np.int64)
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            return Constant(name, TORCH_TYPES[kind], array.shape, array)
    return None


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, onnx.TensorProto):
        return _constant(value, Path())
    if attribute.type == onnx.AttributeProto.STRINGS:
        return [each.decode("utf-8") for each in value]
    return list(value) if attribute.type in {attribute.INTS, attribute.FLOATS} else value


def _constant(tensor: onnx.TensorProto, directory: Path) -> Constant:
    _check_type(tensor.name, tensor.data_type)
    if uses_external_data(tensor):
        read_external(tensor, directory)
    array = read_array(tensor)
    return Constant(tensor.name, TORCH_TYPES[tensor.data_type], array.shape, array)


def _check_type(name: str, onnx_type: int) -> None:
    if onnx_type not in TORCH_TYPES:
        raise EngineError(
            f"E0819 values of type {type_name(onnx_type)} are not lowered",
            where=f"tensor '{name}'",
            evidence="of the FP8 types, torch multiplies E4M3FN and E5M2",
            remedy=REMEDY,
        )
