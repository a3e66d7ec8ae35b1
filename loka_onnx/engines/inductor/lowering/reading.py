"""Contents of a planned graph: constants, nodes, the names of inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.inductor.lowering.node import REMEDY, Node, Scope
from loka_onnx.engines.inductor.lowering.types import TORCH_TYPES, type_name
from loka_onnx.engines.inductor.lowering.values import Constant
from loka_onnx.errors import EngineError
from loka_onnx.graph.detached import read_array


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


def read_graph(graph: PlannedGraph, scope: Scope) -> SourceGraph:
    """Read what the outputs of a graph depend on; an `EngineError` for a type without a lowering."""
    stored = {tensor.name for tensor in graph.source.initializer}
    inputs = [info for info in graph.source.input if info.name not in stored]
    for info in inputs:
        _check_type(info.name, info.type.tensor_type.elem_type)
    nodes, names = [], set[str]()
    read = {info.name: graph.tensor(info.name) for info in graph.source.output}
    for node in graph.live_nodes():
        read |= {tensor.name: tensor for tensor in node.inputs if tensor is not None}
        outputs = [tensor.name for tensor in node.outputs] if node.source is None else node.source.output
        # Two nodes may have the same name, but products are recorded by name.
        name = node.name if node.name not in names else outputs[0]
        names.add(name)
        domain = "" if node.domain == "ai.onnx" else node.domain
        attributes = {key: _attribute(value) for key, value in node.attrs.items()}
        given = tuple("" if tensor is None else tensor.name for tensor in node.inputs)
        nodes.append(Node(node.op, domain, name, attributes, given, tuple(outputs), scope))
    return SourceGraph(
        tuple(info.name for info in inputs),
        frozenset(info.name for info in inputs if _is_batched(info)),
        tuple(info.name for info in graph.source.output),
        {name: _constant(tensor.stored) for name, tensor in read.items() if tensor.stored is not None},
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


def _attribute(value: Any) -> Any:
    if isinstance(value, list):
        return [_attribute(each) for each in value]
    if isinstance(value, onnx.TensorProto):
        return _constant(value)
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _constant(tensor: onnx.TensorProto) -> Constant:
    _check_type(tensor.name, tensor.data_type)
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
