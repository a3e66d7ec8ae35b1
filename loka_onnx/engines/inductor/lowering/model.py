"""A model file as a PyTorch module.

`forward` interprets the graph, one function per node. `torch.export` traces it, which leaves the operations
of those functions, with a symbolic batch where it is dynamic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
import torch
from torch import nn

from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.inductor.kernels import operators
from loka_onnx.engines.inductor.lowering import elementwise, movement, products, recurrent, reductions
from loka_onnx.engines.inductor.lowering.node import OPERATORS, REMEDY, Node, Operator, Scope, load_directly
from loka_onnx.engines.inductor.lowering.steps import LoweredNode, Stored, evaluate, fold, store
from loka_onnx.engines.inductor.lowering.strategies import ProductStrategy, ScaledMatMul
from loka_onnx.engines.inductor.lowering.values import MOST_NUMBERS, TORCH_TYPES, Constant, Value
from loka_onnx.engines.inductor.package import CompiledSite
from loka_onnx.errors import EngineError
from loka_onnx.graph.detached import read_array

REGISTERED = (elementwise, movement, operators, products, recurrent, reductions)
"""Modules that fill `OPERATORS` on import."""


class LoweredModel(nn.Module):
    """A graph that runs in torch, made by `lower`: names of inputs and outputs in the order of `forward`, and
    the inputs with a dynamic batch on axis 0 (`batched`).
    """

    def __init__(
        self,
        graph: onnx.GraphProto,
        steps: tuple[LoweredNode, ...],
        constants: Mapping[str, Constant],
        stored: Mapping[str, Stored],
        scope: Scope,
    ) -> None:
        super().__init__()
        inputs = _inputs(graph)
        self.input_names = tuple(info.name for info in inputs)
        self.output_names = tuple(info.name for info in graph.output)
        self.batched = frozenset(info.name for info in inputs if _is_batched(info))
        self.weights = nn.Module()
        self._steps, self._scope = steps, scope
        self.sites: Mapping[str, CompiledSite] = MappingProxyType(scope.sites)
        """Lowered products by node name; filled when the module runs or is traced."""
        self._buffer_of: dict[str, tuple[str, bool]] = {}
        for name, (tensor, columns) in stored.items():
            buffer = _attribute_name(self.weights, name)
            self.weights.register_buffer(buffer, tensor)
            self._buffer_of[name] = (buffer, columns)
        self._constants: dict[str, Value] = {
            name: _without_array(constant) if constant.name in stored else constant
            for name, constant in constants.items()
        }
        self._scope.load = self._load

    def dynamic_shapes(self, batch: Any) -> tuple[tuple[dict[int, Any], ...]]:
        """Argument of `torch.export.export` for a dynamic batch (a `torch.export.Dim`)."""
        return (tuple({0: batch} if name in self.batched else {} for name in self.input_names),)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the graph on one tensor per input, in the order of `input_names`. Raises EngineError if their
        number is wrong, a node cannot be lowered, or torch refuses it.
        """
        if len(inputs) != len(self.input_names):
            raise EngineError(
                f"E0818 the graph has {len(self.input_names)} inputs",
                evidence=f"it was given {len(inputs)}",
                remedy=f"pass {', '.join(self.input_names)}, in this order",
            )
        scope = self._scope
        scope.device = inputs[0].device if inputs else next(self.buffers(), torch.empty(0)).device
        values: dict[str, Value] = self._constants | dict(zip(self.input_names, inputs, strict=True))
        for step in self._steps:
            read = [values[name] if name else None for name in step.node.inputs]
            values |= zip(step.node.outputs, evaluate(step, read), strict=False)
            for name in step.last_uses:
                del values[name]
        return tuple(scope.tensor(values[name]) for name in self.output_names)

    def _load(self, constant: Constant) -> torch.Tensor:
        if constant.name not in self._buffer_of:
            return load_directly(constant).to(self._scope.device)
        buffer, columns = self._buffer_of[constant.name]
        tensor = self.weights.get_buffer(buffer)
        return tensor.t() if columns else tensor


def lower(model: Path | PlannedGraph, products: ProductStrategy | None = None) -> LoweredModel:
    """Lower a model to a module, on the CPU; `products` multiplies eight bits, by default `ScaledMatMul`.
    Raises as `PlannedGraph.load`, and EngineError for an operator or a type without a lowering.
    """
    scope = Scope(products or ScaledMatMul())
    planned = model if isinstance(model, PlannedGraph) else PlannedGraph.load(model, infers=False)
    nodes, constants = _read(planned, scope)
    outputs = [info.name for info in planned.source.output]
    with torch.no_grad():
        steps = fold([LoweredNode(node, _operator(node)) for node in nodes], constants)
        stored = store(steps, constants, outputs)
    scope.sites.clear()
    read = {name for step in steps for name in step.node.inputs} | {*outputs}
    kept = {name: constant for name, constant in constants.items() if name in read}
    timed = _with_last_uses(steps, {*outputs, *kept})
    return LoweredModel(planned.source, timed, kept, stored, scope)


def _inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    stored = {tensor.name for tensor in graph.initializer}
    return [info for info in graph.input if info.name not in stored]


def _read(graph: PlannedGraph, scope: Scope) -> tuple[list[Node], dict[str, Constant]]:
    """Nodes, producers first, and initializers that outputs depend on; refuses a type without a lowering."""
    for info in _inputs(graph.source):
        _check_type(info.name, info.type.tensor_type.elem_type)
    nodes, names = [], set[str]()
    read = {info.name: graph.tensor(info.name) for info in graph.source.output}
    for node in graph.live_nodes():
        read |= {tensor.name: tensor for tensor in node.inputs if tensor is not None}
        outputs = [tensor.name for tensor in node.outputs] if node.source is None else node.source.output
        # Two nodes may have the same name, but products are recorded by name.
        name = node.name if node.name not in names else outputs[0]
        names.add(name)
        domain, _, op_type = node.op.rpartition("::")
        attributes = {key: _attribute(value) for key, value in node.attrs.items()}
        inputs = tuple("" if tensor is None else tensor.name for tensor in node.inputs)
        nodes.append(Node(op_type, domain, name, attributes, inputs, tuple(outputs), scope))
    return nodes, {
        name: _constant(tensor.stored) for name, tensor in read.items() if tensor.stored is not None
    }


def _is_batched(info: onnx.ValueInfoProto) -> bool:
    kind = info.type.tensor_type
    first = kind.shape.dim[:1]
    return not kind.HasField("shape") or (bool(first) and not first[0].HasField("dim_value"))


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
            f"E0819 values of type {onnx.TensorProto.DataType.Name(onnx_type)} are not lowered",
            where=f"tensor '{name}'",
            evidence="of the FP8 types, torch multiplies E4M3FN and E5M2",
            remedy=REMEDY,
        )


def _operator(node: Node) -> Operator:
    known = OPERATORS.get((node.domain, node.op_type))
    if known is not None:
        return known
    domain = node.domain or "ai.onnx"
    count = sum(where == node.domain for where, _ in OPERATORS)
    raise node.error(
        f"operator {node.op_type} of domain '{domain}' is not lowered",
        f"{count} operators of domain '{domain}' are",
    )


def _with_last_uses(steps: list[LoweredNode], kept: set[str]) -> tuple[LoweredNode, ...]:
    """Add to each step the tensors, except those to keep, that it is the last to read."""
    seen, timed = set(kept), []
    for step in reversed(steps):
        touched = dict.fromkeys(name for name in (*step.node.inputs, *step.node.outputs) if name)
        timed.append(replace(step, last_uses=tuple(name for name in touched if name not in seen)))
        seen |= touched.keys()
    return tuple(reversed(timed))


def _attribute_name(holder: nn.Module, name: str) -> str:
    """Turn a tensor's name into a buffer's, which must be a unique attribute without dots."""
    readable = re.sub(r"\W+", "_", name).strip("_") or "constant"
    unique, count = readable, 0
    while hasattr(holder, unique):
        count += 1
        unique = f"{readable}_{count}"
    return unique


def _without_array(constant: Constant) -> Constant:
    """Drop the values of a long constant: its buffer holds them."""
    is_long = constant.array is not None and constant.array.size > MOST_NUMBERS
    return replace(constant, array=None) if is_long else constant
