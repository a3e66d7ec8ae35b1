"""A planned graph that fusions edit.

`graph.GraphModel` edits FP32 graphs: its library has no BF16 and FP8 and would widen them. Here tensors keep
their ONNX types, and constants their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.inliner
from onnx import helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from loka_onnx.errors import InternalError
from loka_onnx.graph.detached import add_inferred_shapes, read_array
from loka_onnx.graph.naming import unused
from loka_onnx.graph.storage import read_external, read_proto

Array = npt.NDArray[Any]
Attrs = Mapping[str, Any]
MOST_READ = 1 << 22
"""Most elements of an external constant that is loaded for analysis; tables are larger."""


@dataclass(eq=False)
class Tensor:
    """A tensor of the graph, with its ONNX element type `kind` (0: unknown), the lengths of its axes (None
    for a dynamic one, or for an unknown rank), one entry in `consumers` for each input that reads it, and its
    initializer (`stored`), if it is one.
    """

    name: str
    kind: int = 0
    shape: tuple[int | None, ...] | None = None
    producer: Node | None = None
    consumers: list[Node] = field(default_factory=list)
    stored: onnx.TensorProto | None = None

    @property
    def is_constant(self) -> bool:
        """True if it is an initializer."""
        return self.stored is not None

    @property
    def values(self) -> Array:
        """Values of an initializer, in its own type."""
        if self.stored is None:
            raise InternalError(f"tensor '{self.name}' is not constant")
        return read_array(self.stored)

    @property
    def is_read(self) -> bool:
        """True if it is an initializer with loaded values (`PlannedGraph.load`)."""
        return self.stored is not None and not uses_external_data(self.stored)

    @property
    def readers(self) -> list[Node]:
        """Its distinct readers, without those that another node has replaced."""
        return list({id(node): node for node in self.consumers if node.outputs}.values())


@dataclass(eq=False)
class Node:
    """A node of the graph. `op` has its domain unless that is ONNX's own: ``MatMul``, ``loka::Attention``. An
    omitted input is None; `outputs` are empty once another node computes them; a new node has no `source`.
    """

    op: str
    name: str
    attrs: dict[str, Any]
    inputs: list[Tensor | None]
    outputs: list[Tensor]
    source: onnx.NodeProto | None = None

    def reads(self, position: int) -> Tensor:
        """Return a required input."""
        tensor = self.inputs[position] if position < len(self.inputs) else None
        if tensor is None:
            raise InternalError(f"node '{self.name}' has no input {position}")
        return tensor

    def has(self, position: int) -> bool:
        """True if an optional input is given."""
        return position < len(self.inputs) and self.inputs[position] is not None


class PlannedGraph:
    """The graph of a planned model, which is not changed; operators with subgraphs are not lowered."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.source = graph = proto.graph
        self._tensors: dict[str, Tensor] = {}
        for info in (*graph.input, *graph.value_info, *graph.output):
            self.tensor(info.name).kind = info.type.tensor_type.elem_type
            self.tensor(info.name).shape = _shape(info)
        for stored in graph.initializer:
            tensor = self.tensor(stored.name)
            tensor.kind, tensor.shape, tensor.stored = stored.data_type, tuple(stored.dims), stored
        self.nodes: list[Node] = [self._read(node) for node in graph.node]
        self._outputs = {info.name for info in graph.output}
        self._names = {*self._tensors, *(node.name for node in self.nodes)}
        self._transposed: dict[str, Tensor] = {}

    @classmethod
    def load(cls, path: Path, base: int | None = None, *, infers: bool = True) -> PlannedGraph:
        """Read a model and, for fusions, infer types and shapes; ModelError if the file or its external data
        are missing, truncated or invalid. With `base`, the ONNX type that every FP32 tensor is assumed to
        have, the graph is for analysis only: large weights are not read, and it cannot be lowered.
        """
        proto = read_proto(path)
        if proto.functions:
            proto = onnx.inliner.inline_local_functions(proto)
        for stored in proto.graph.initializer:
            if uses_external_data(stored) and (base is None or prod(stored.dims) <= MOST_READ):
                read_external(stored, path.parent)
        if infers:
            add_inferred_shapes(proto)
        graph = cls(proto)
        if base is not None:
            for tensor in graph._tensors.values():
                tensor.kind = base if tensor.kind == onnx.TensorProto.FLOAT else tensor.kind
        return graph

    def is_output(self, tensor: Tensor) -> bool:
        """True if a tensor is an output of the graph."""
        return tensor.name in self._outputs

    def fresh_name(self, base: str) -> str:
        """Return an unused name."""
        name = unused(base, self._names)
        self._names.add(name)
        return name

    def constant(self, base: str, values: Array) -> Tensor:
        """Create an initializer."""
        stored = numpy_helper.from_array(np.ascontiguousarray(values), self.fresh_name(base))
        return Tensor(stored.name, stored.data_type, tuple(stored.dims), stored=stored)

    def transposed(self, stored: Tensor) -> Tensor:
        """Transpose an initializer, once for all products that share the weight."""
        if stored.name not in self._transposed:
            self._transposed[stored.name] = self.constant(f"{stored.name}.transposed", stored.values.T)
        return self._transposed[stored.name]

    def replace(
        self, op: str, name: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor], attrs: Attrs
    ) -> None:
        """Add a node that becomes the producer of existing `outputs`, whose names, types and readers stay."""
        for tensor in outputs:
            earlier = tensor.producer
            if earlier is not None:
                earlier.outputs = [each for each in earlier.outputs if each is not tensor]
        self.nodes.append(_linked(Node(op, name, dict(attrs), list(inputs), list(outputs))))

    def live_nodes(self) -> list[Node]:
        """Nodes that outputs depend on, producers first; fused nodes are gone."""
        order: list[Node] = []
        done: set[int] = set()
        roots = (self._tensors[name].producer for name in sorted(self._outputs, reverse=True))
        pending = [(node, False) for node in roots if node is not None]
        while pending:
            node, is_ready = pending.pop()
            if id(node) in done:
                continue
            if is_ready:
                done.add(id(node))
                order.append(node)
                continue
            pending.append((node, True))
            pending += [(t.producer, False) for t in node.inputs if t is not None and t.producer is not None]
        return order

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name."""
        return self._tensors.setdefault(name, Tensor(name))

    def _read(self, proto: onnx.NodeProto) -> Node:
        attrs = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
        inputs = [self.tensor(name) if name else None for name in proto.input]
        outputs = [self.tensor(name) for name in proto.output if name]
        name = proto.name or proto.output[0]
        is_onnx = proto.domain in {"", "ai.onnx"}
        op = proto.op_type if is_onnx else f"{proto.domain}::{proto.op_type}"
        return _linked(Node(op, name, attrs, inputs, outputs, proto))


def _linked(node: Node) -> Node:
    for tensor in node.inputs:
        if tensor is not None:
            tensor.consumers.append(node)
    for tensor in node.outputs:
        tensor.producer = node
    return node


def _shape(info: onnx.ValueInfoProto) -> tuple[int | None, ...] | None:
    kind = info.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim)
