"""A planned graph that fusions edit.

`graph.GraphModel` is for FP32 graphs: what it edits with has no BF16 and no FP8, and would widen them. Here
tensors keep their ONNX types, and constants their bytes.
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
from onnx import helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from loka_onnx.errors import InternalError
from loka_onnx.graph.shapes import add_inferred_shapes
from loka_onnx.graph.storage import (
    all_initializers,
    move_outside,
    names_in_subgraphs,
    read_external,
    read_proto,
)
from loka_onnx.graph.tensor_values import read_array

Array = npt.NDArray[Any]
MOST_READ = 1 << 22
"""Elements of an external constant that is read where the graph is only looked at: tables are not."""


@dataclass(eq=False)
class Tensor:
    """A tensor of the graph.

    Attributes:
        name: Its name.
        kind: Element type, as ONNX numbers it; 0 where it is not known.
        shape: Lengths of its axes, None for one that is not fixed; None where the rank is not known.
        producer: The node that computes it; None for inputs and constants.
        consumers: The nodes that read it, one entry for each of their inputs.
        stored: Its initializer; None for what is computed, and for inputs.
    """

    name: str
    kind: int = 0
    shape: tuple[int | None, ...] | None = None
    producer: Node | None = None
    consumers: list[Node] = field(default_factory=list)
    stored: onnx.TensorProto | None = None

    @property
    def is_constant(self) -> bool:
        """Whether it is an initializer."""
        return self.stored is not None

    @property
    def values(self) -> Array:
        """Values of an initializer, in its own type.

        Raises:
            InternalError: It is none.
        """
        if self.stored is None:
            raise InternalError(f"tensor '{self.name}' is not constant")
        return read_array(self.stored)

    @property
    def is_read(self) -> bool:
        """Whether it is an initializer whose values are here: of a graph that is only looked at, large ones
        are not (`PlannedGraph.load`).
        """
        return self.stored is not None and not uses_external_data(self.stored)

    @property
    def readers(self) -> list[Node]:
        """The nodes that read it, each once."""
        return list({id(node): node for node in self.consumers}.values())


@dataclass(eq=False)
class Node:
    """A node of the graph.

    Attributes:
        op: Operator.
        name: Its name.
        domain: Its domain; empty for ONNX's own.
        attrs: Attributes as Python values.
        inputs: What it reads; None for an optional input that is left out.
        outputs: What it computes; empty once another node computes it.
        source: The node as it was read; None for a new one.
    """

    op: str
    name: str
    domain: str
    attrs: dict[str, Any]
    inputs: list[Tensor | None]
    outputs: list[Tensor]
    source: onnx.NodeProto | None = None

    def reads(self, position: int) -> Tensor:
        """An input that is there.

        Raises:
            InternalError: It is left out.
        """
        tensor = self.inputs[position] if position < len(self.inputs) else None
        if tensor is None:
            raise InternalError(f"node '{self.name}' has no input {position}")
        return tensor

    def has(self, position: int) -> bool:
        """Whether an optional input is there."""
        return position < len(self.inputs) and self.inputs[position] is not None


class PlannedGraph:
    """The main graph of a planned model.

    What the branches and bodies of its nodes read is kept like an output: no fusion takes it away.

    Args:
        proto: The model, with its constants inside; not changed.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._proto = proto
        graph = proto.graph
        self._tensors: dict[str, Tensor] = {}
        for info in (*graph.input, *graph.value_info, *graph.output):
            self._tensor(info.name).kind = info.type.tensor_type.elem_type
            self._tensor(info.name).shape = _shape(info)
        for stored in graph.initializer:
            tensor = self._tensor(stored.name)
            tensor.kind, tensor.shape, tensor.stored = stored.data_type, tuple(stored.dims), stored
        self.nodes: list[Node] = [self._read(node) for node in graph.node]
        captured = names_in_subgraphs(graph) & self._tensors.keys()
        self._outputs = {info.name for info in graph.output} | captured
        self._names = {*self._tensors, *(node.name for node in self.nodes)}
        self._transposed: dict[str, Tensor] = {}

    @classmethod
    def load(cls, path: Path, base: int | None = None) -> PlannedGraph:
        """Read a model; types and shapes are inferred.

        Args:
            path: The model file.
            base: Type that everything in FP32 is taken to have, as if a plan had given it; what is found then
                is true of that plan, and cannot be saved. None to take types as they are.

        Raises:
            ModelError: The file is missing, truncated or not an ONNX model, or its external data are.
        """
        proto = read_proto(path)
        for stored in all_initializers(proto.graph):
            if uses_external_data(stored) and (base is None or prod(stored.dims) <= MOST_READ):
                read_external(stored, path.parent)
        add_inferred_shapes(proto)
        graph = cls(proto)
        if base is not None:
            for tensor in graph._tensors.values():
                tensor.kind = base if tensor.kind == onnx.TensorProto.FLOAT else tensor.kind
        return graph

    def save(self, path: Path) -> None:
        """Write the graph without what nothing reads, producers before consumers."""
        order = self.live_nodes()
        model = onnx.ModelProto()
        model.CopyFrom(onnx.ModelProto(ir_version=self._proto.ir_version, producer_name="loka-onnx"))
        domains = {node.domain for node in order if node.domain}
        known = {entry.domain for entry in self._proto.opset_import}
        model.opset_import.extend(self._proto.opset_import)
        model.opset_import.extend(helper.make_opsetid(domain, 1) for domain in sorted(domains - known))
        model.graph.name = self._proto.graph.name or "main"
        model.graph.input.extend(self._proto.graph.input)
        model.graph.output.extend(self._proto.graph.output)
        model.graph.node.extend(_written(node) for node in order)
        read = {name: self._tensors[name] for name in sorted(self._outputs)}
        read |= {t.name: t for node in order for t in node.inputs if t is not None}
        model.graph.initializer.extend(t.stored for t in read.values() if t.stored is not None)
        path.parent.mkdir(parents=True, exist_ok=True)
        move_outside(model, path)
        path.write_bytes(model.SerializeToString(deterministic=True))

    @property
    def opset(self) -> int:
        """Version of ONNX's own operators."""
        versions = (entry.version for entry in self._proto.opset_import if entry.domain in {"", "ai.onnx"})
        return max(versions, default=1)

    def is_output(self, tensor: Tensor) -> bool:
        """Whether the graph hands a tensor out, or to the branches of a node."""
        return tensor.name in self._outputs

    def fresh_name(self, base: str) -> str:
        """A name that no tensor and no node has."""
        name, count = base, 0
        while name in self._names:
            count += 1
            name = f"{base}_{count}"
        self._names.add(name)
        return name

    def constant(self, base: str, values: Array) -> Tensor:
        """A new initializer."""
        stored = numpy_helper.from_array(np.ascontiguousarray(values), self.fresh_name(base))
        return Tensor(stored.name, stored.data_type, tuple(stored.dims), stored=stored)

    def transposed(self, stored: Tensor) -> Tensor:
        """The transpose of an initializer: one for all products that share the weight."""
        if stored.name not in self._transposed:
            self._transposed[stored.name] = self.constant(f"{stored.name}.transposed", stored.values.T)
        return self._transposed[stored.name]

    def replace(
        self,
        op: str,
        name: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        attrs: Mapping[str, Any],
    ) -> Node:
        """Let one new node compute tensors in place of the nodes that do.

        Args:
            op: ``domain::operator``.
            name: Name of the node.
            inputs: What it reads.
            outputs: What it computes; their names, types and readers stay.
            attrs: Attributes.
        """
        domain, _, kind = op.partition("::")
        node = Node(kind, name, domain, dict(attrs), list(inputs), list(outputs))
        for tensor in inputs:
            if tensor is not None:
                tensor.consumers.append(node)
        for tensor in outputs:
            earlier = tensor.producer
            if earlier is not None:
                earlier.outputs = [each for each in earlier.outputs if each is not tensor]
            tensor.producer = node
        self.nodes.append(node)
        return node

    def live_nodes(self) -> list[Node]:
        """Nodes that outputs depend on, producers first: without those whose place a fusion has taken."""
        order: list[Node] = []
        done: set[int] = set()
        pending = [
            (tensor.producer, False)
            for name in sorted(self._outputs, reverse=True)
            if (tensor := self._tensors[name]).producer is not None
        ]
        while pending:
            node, is_ready = pending.pop()
            if node is None or (id(node) in done):
                continue
            if is_ready:
                done.add(id(node))
                order.append(node)
                continue
            pending.append((node, True))
            pending += [(t.producer, False) for t in node.inputs if t is not None and t.producer is not None]
        return order

    def _tensor(self, name: str) -> Tensor:
        return self._tensors.setdefault(name, Tensor(name))

    def _read(self, proto: onnx.NodeProto) -> Node:
        attrs = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
        inputs = [self._tensor(name) if name else None for name in proto.input]
        outputs = [self._tensor(name) for name in proto.output if name]
        node = Node(proto.op_type, proto.name or proto.output[0], proto.domain, attrs, inputs, outputs, proto)
        for tensor in inputs:
            if tensor is not None:
                tensor.consumers.append(node)
        for tensor in outputs:
            tensor.producer = node
        return node


def _shape(info: onnx.ValueInfoProto) -> tuple[int | None, ...] | None:
    kind = info.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim)


def _written(node: Node) -> onnx.NodeProto:
    if node.source is not None:
        return node.source
    names = [tensor.name if tensor is not None else "" for tensor in node.inputs]
    while names and not names[-1]:
        names.pop()
    return helper.make_node(
        node.op, names, [tensor.name for tensor in node.outputs], node.name, domain=node.domain, **node.attrs
    )
