"""An editable ONNX graph; `graph.storage` reads and writes files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from onnx.external_data_helper import uses_external_data
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.logger import G_LOGGER

from loka_onnx.core.progress import collector_paused
from loka_onnx.errors import InternalError
from loka_onnx.graph.detached import STRIP_BYTES, Array, add_inferred_shapes, refill
from loka_onnx.graph.naming import unused
from loka_onnx.graph.parts import keep_types, mark_branches, reader, write_types
from loka_onnx.graph.soundness import parsing
from loka_onnx.graph.storage import (
    all_initializers,
    names_in_subgraphs,
    read_external,
    read_proto,
    stored_bytes,
    take_tables,
)
from loka_onnx.graph.weights import Exported, attach, copied, take_weights, weights_detached

OLDEST_IR = 10
"""IR version from which FP8 tensors are complete."""


class Tensor(Protocol):
    """A tensor of onnx-graphsurgeon; `inputs` is its producer, if any, and `outputs` are its consumers."""

    name: str
    dtype: Any
    shape: Sequence[int | str] | None
    inputs: list[Node]
    outputs: list[Node]


class Node(Protocol):
    """A node of onnx-graphsurgeon; an omitted optional input is a tensor without a name."""

    op: str
    name: str
    domain: str | None
    attrs: dict[str, Any]
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass(frozen=True)
class Branch:
    """Nodes that compute one tensor and may read tensors of the main graph."""

    nodes: list[Node]
    output: Tensor


def element_type(dtype: Any) -> int:
    """Value of `onnx.TensorProto.DataType` for a numpy type; an ONNX type passes through."""
    if isinstance(dtype, int):
        return dtype
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


class GraphModel:
    """An ONNX model whose main graph can be edited; `tables` stay in files, at absolute paths, by name."""

    def __init__(self, graph: gs.Graph, tables: Mapping[str, onnx.TensorProto]) -> None:
        self.graph = graph
        self.tables = dict(tables)
        self._names: set[str] = set()
        self._node_names: set[str] | None = None
        self._nodes: dict[str, Node] = {}
        self._collected: list[Node] | None = None

    @classmethod
    def load(cls, path: Path) -> GraphModel:
        """Read a model; types and shapes are inferred. ModelError for missing or invalid files."""
        proto = read_proto(path)
        with parsing(path, "read as a graph"):
            return cls.from_proto(proto, path.parent)

    @classmethod
    def from_proto(
        cls, proto: onnx.ModelProto, directory: Path, detached: Sequence[Array] = ()
    ) -> GraphModel:
        """Return the model of a message, which is consumed. Its external data lies in `directory`; `detached`
        are the values of its headers (`graph.detached`). ModelError if external data is cut short.
        """
        tables = take_tables(proto, directory)
        for tensor in all_initializers(proto.graph):
            if uses_external_data(tensor) and stored_bytes(tensor) <= STRIP_BYTES:
                read_external(tensor, directory)
        # Larger ones decide no shape, and inference copies the contents of branches.
        weights = take_weights(proto, directory, detached)
        # The memory of a message is one piece: parts taken out of it are freed with it.
        light = onnx.ModelProto()
        light.CopyFrom(proto)
        add_inferred_shapes(light)
        for tensor in all_initializers(light.graph):
            if uses_external_data(tensor):
                read_external(tensor, directory)
        # It prints that NumPy has no FP8 types; the tensors keep their ONNX type.
        with collector_paused(), G_LOGGER.suppress(G_LOGGER.ERROR):
            graph = mark_branches(gs.import_onnx(light))
            keep_types(graph, light.graph)
            attach(graph, weights)
        return cls(graph, tables)

    @classmethod
    def read_back(cls, exported: Exported) -> GraphModel:
        """Return the model as `load` would read it from the written file; weights are shared."""
        return cls.from_proto(exported.copy_headers(exported.tables), Path("/"), exported.detached)

    def save(self, path: Path, *, link_tables: bool = True) -> str:
        """Write the model and its external data, and return its `model_digest`; edits this graph as `export`.
        Table files are hard-linked, or copied where `link_tables` is False: an owner may write into them, and
        onnx refuses files that have a second name. OutputError, for tables OSError, if writing fails.
        """
        return self.export().write(path, link_tables=link_tables)

    def export(self) -> Exported:
        """Return the model as written; removes unused nodes from this graph, and sorts the rest."""
        with collector_paused():
            self.graph.cleanup(remove_unused_graph_inputs=False).toposort()
        exported = self._export()
        proto = exported.headers
        proto.producer_name = "loka-onnx"
        infos = (info for info in proto.graph.value_info if info.name not in self.tables)
        refill(proto.graph.value_info, [info for info in infos if info.type.tensor_type.elem_type])
        used = {name for node in proto.graph.node for name in node.input} | names_in_subgraphs(proto.graph)
        tables = [table for name, table in self.tables.items() if name in used]
        return Exported(proto, exported.detached, tables)

    def _export(self) -> Exported:
        """Return the present model, without its tables."""
        with collector_paused(), weights_detached(self.graph) as detached:
            proto = gs.export_onnx(self.graph, do_type_check=False)
        write_types(self.graph, proto.graph)
        # The oldest that the operators allow: ONNX Runtime refuses newer files than itself.
        standard = [entry for entry in proto.opset_import if entry.domain in {"", "ai.onnx"}]
        proto.ir_version = max(onnx.helper.find_min_ir_version_for(standard), OLDEST_IR)
        return Exported(proto, detached, ())

    def shapes_at(self, batch: int) -> dict[str, tuple[int | None, ...]]:
        """Infer shapes by tensor name at a batch size, None if unknown; {} if an input's axis 0 is fixed."""
        graph = (proto := self._export().headers).graph
        for value in (*graph.output, *graph.value_info):
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
        for value in graph.input:
            first = value.type.tensor_type.shape.dim[:1]
            if not first or first[0].HasField("dim_value"):
                return {}
            first[0].dim_value = batch
        add_inferred_shapes(proto)
        infos = (*graph.input, *graph.output, *graph.value_info)
        shapes = {info.name: info.type.tensor_type.shape.dim for info in infos}
        return {name: tuple(d.dim_value or None for d in shape) for name, shape in shapes.items()}

    def copy(self) -> GraphModel:
        """Return a deep copy that shares the weights."""
        with collector_paused():
            return GraphModel(copied(self.graph), self.tables)

    def extract(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> GraphModel:
        """Copy the nodes between tensors of known type, sharing weights; InternalError if more are read."""
        graph = copied(self.graph)
        tensors = graph.tensors()
        graph.inputs = [tensors[tensor.name] for tensor in inputs]
        graph.outputs = [tensors[tensor.name] for tensor in outputs]
        for tensor in graph.inputs:
            tensor.inputs.clear()
        graph.cleanup(remove_unused_graph_inputs=False)
        known = {*self.tables, *(tensor.name for tensor in inputs)}
        for name, tensor in graph.tensors().items():
            if isinstance(tensor, gs.Variable) and not tensor.inputs and name not in known:
                raise InternalError(f"the part of the graph needs '{name}', which it is not given")
        return GraphModel(graph, self.tables)

    def to_proto(self) -> onnx.ModelProto:
        """Return the present model in one message, without its tables; sorts the nodes."""
        self.graph.toposort()
        return self._export().whole()

    def node_proto(self, node: Node) -> onnx.NodeProto:
        """Return a node as a message."""
        proto: onnx.NodeProto = OnnxExporter.export_node(node)
        return proto

    @property
    def opset(self) -> int:
        """Version of the default operator set."""
        return int(self.graph.opset)

    @opset.setter
    def opset(self, version: int) -> None:
        self.graph.opset = version
        # New entries: a copy of the graph shares the old ones.
        self.graph.import_domains = [
            onnx.helper.make_opsetid(e.domain, version if e.domain in {"", "ai.onnx"} else e.version)
            for e in self.graph.import_domains or ()
        ] or None

    @property
    def nodes(self) -> list[Node]:
        """Nodes of the main graph."""
        return list(self.graph.nodes)

    def sorted_nodes(self) -> list[Node]:
        """Nodes of the main graph, producers before consumers; the graph is sorted, too."""
        return list(self.graph.toposort().nodes)

    def node(self, name: str) -> Node:
        """Return the main-graph node of that name, with outputs; InternalError if there is none."""
        node = self._nodes.get(name)
        if node is None or node.name != name or not node.outputs:
            # An emptied node waits for `save` to remove it; its name may live on in another.
            self._nodes = {each.name: each for each in self.graph.nodes if each.outputs}
            node = self._nodes.get(name)
        if node is None:
            raise InternalError(f"the graph has no node named '{name}'")
        return node

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the main graph by name."""
        return dict(self.graph.tensors())

    @property
    def inputs(self) -> list[Tensor]:
        """Graph inputs."""
        return list(self.graph.inputs)

    @property
    def outputs(self) -> list[Tensor]:
        """Graph outputs."""
        return list(self.graph.outputs)

    def is_output(self, tensor: Tensor) -> bool:
        """True if the tensor is a graph output."""
        return any(tensor is output for output in self.graph.outputs)

    def only_reader(self, tensor: Tensor) -> Node | None:
        """Return the only reader of a tensor; None for none, several, or a graph output."""
        return None if self.is_output(tensor) or len(tensor.outputs) != 1 else consumers(tensor)[0]

    def fresh_name(self, base: str) -> str:
        """Return and reserve `base`, with an ordinal if a tensor or node has it."""
        if not self._names:
            # A branch sees the outer names and may not repeat them.
            parts = (self.graph, *self.graph.subgraphs(recursive=True))
            self._names = {name for part in parts for name in part.tensors()}
            self._names |= {node.name for node in self.graph.nodes}
        name = unused(base, self._names)
        self._names.add(name)
        return name

    def rename(self, node: Node, base: str) -> None:
        """Rename a site's node to `base`, with an ordinal if another node has it; a tensor may have it."""
        if self._node_names is None:
            self._node_names = {other.name for other in self.graph.nodes if other.outputs}
        self._node_names.discard(node.name)
        node.name = unused(base, self._node_names)
        self._node_names.add(node.name)
        if self._names:
            self._names.add(node.name)

    def constant(self, base: str, values: npt.NDArray[Any]) -> Tensor:
        """Return a new initializer, named `base`, with an ordinal if that is taken."""
        values = np.ascontiguousarray(values).reshape(np.shape(values))
        return _tensor(gs.Constant(self.fresh_name(base), values))

    def add(
        self,
        op: str,
        inputs: Sequence[Tensor],
        name: str,
        dtype: Any = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Append a node, its name made unique; return its output, of type `dtype` or the first input's."""
        unique = self.fresh_name(name)
        if self._node_names is not None:
            self._node_names.add(unique)
        out_type = dtype if dtype is not None else inputs[0].dtype
        output = _tensor(gs.Variable(self.fresh_name(f"{unique}.out"), dtype=out_type))
        self._append(gs.Node(op, unique, attrs=dict(attrs or {}), inputs=list(inputs), outputs=[output]))
        return output

    def remove(self, nodes: Sequence[Node]) -> None:
        """Remove nodes; nothing may read their outputs, which is not checked."""
        gone = {id(node) for node in nodes}
        for node in nodes:
            node.inputs.clear()
            node.outputs.clear()
        self.graph.nodes[:] = [node for node in self.graph.nodes if id(node) not in gone]

    def add_like(self, node: Node, inputs: Sequence[Tensor], name: str) -> Tensor:
        """Append a copy of a one-output node with other inputs; return its output."""
        return self.add(node.op, inputs, name, node.outputs[0].dtype, node.attrs)

    def split(self, tensor: Tensor, sizes: Sequence[int], axis: int, name: str) -> list[Tensor]:
        """Append a Split into parts of the given sizes along a negative axis; return the parts."""
        lengths = self.constant(f"{name}.sizes", np.array(sizes, np.int64))
        first = self.add("Split", [tensor, lengths], name, attrs={"axis": axis})
        node = first.inputs[0]
        for _ in sizes[1:]:
            node.outputs.append(gs.Variable(self.fresh_name(f"{node.name}.out"), dtype=first.dtype))
        if tensor.shape is not None:
            for part, size in zip(node.outputs, sizes, strict=True):
                part.shape = [*tensor.shape[:axis], size, *tensor.shape[len(tensor.shape) + axis + 1 :]]
        return list(node.outputs)

    def add_output(self, tensor: Tensor, dtype: Any, shape: Sequence[int | str] | None) -> None:
        """Append a tensor, with this type and shape from now on, to the graph outputs."""
        tensor.dtype = dtype
        tensor.shape = shape
        self.graph.outputs.append(tensor)

    def add_input(self, name: str, dtype: Any, shape: Sequence[int | str]) -> Tensor:
        """Append and return a graph input, named `name`, with an ordinal if that is taken."""
        tensor = _tensor(gs.Variable(self.fresh_name(name), dtype=dtype, shape=list(shape)))
        self.graph.inputs.append(tensor)
        return tensor

    def make_output(self, old: Tensor, new: Tensor) -> None:
        """Replace the graph output `old` by `new`, which takes its name, type and shape; `old` is renamed."""
        position = next(i for i, output in enumerate(self.graph.outputs) if output is old)
        new.dtype, new.shape = old.dtype, old.shape
        old.name, new.name = self.fresh_name(f"{old.name}.inner"), old.name
        self.graph.outputs[position] = new

    def replace_uses(self, old: Tensor, new: Tensor, consumers: Sequence[Node] | None = None) -> None:
        """Let consumers (None: all, and a graph output, which keeps its name) read `new` instead of `old`."""
        for node in list(old.outputs) if consumers is None else consumers:
            for index, tensor in enumerate(node.inputs):
                if tensor is old:
                    node.inputs[index] = new
        if consumers is None and self.is_output(old):
            self.make_output(old, new)

    def hand_over(self, old: Tensor, new: Tensor) -> None:
        """Let the node of `new` compute `old`, which keeps name, type, shape and readers. The former node of
        `old` is then without an output and removed on saving. InternalError if it had several outputs, or
        `new` has a reader.
        """
        replaced, maker = old.inputs[0], new.inputs[0]
        if len(replaced.outputs) != 1 or new.outputs:
            raise InternalError(f"'{old.name}' cannot be handed over to '{maker.name}'")
        replaced.outputs.clear()
        if self._node_names is not None:
            self._node_names.discard(replaced.name)
        maker.outputs[next(i for i, tensor in enumerate(maker.outputs) if tensor is new)] = old

    def insert_behind(self, tensor: Tensor, op: str, operands: Sequence[Tensor], name: str) -> Tensor:
        """Put a node behind the maker of a computed tensor. It makes `tensor`, which keeps name, shape and
        readers, graph outputs among them, from the maker's result and `operands`. Returns the maker's result,
        which is a new tensor of unknown shape.
        """
        maker = tensor.inputs[0]
        inner = _tensor(gs.Variable(self.fresh_name(f"{tensor.name}.inner"), dtype=tensor.dtype))
        maker.outputs[next(i for i, output in enumerate(maker.outputs) if output is tensor)] = inner
        self._append(gs.Node(op, self.fresh_name(name), inputs=[inner, *operands], outputs=[tensor]))
        return inner

    def renew_output(self, node: Node) -> Tensor:
        """Give a one-output node a new output of unknown shape; return it. The old one loses its maker."""
        fresh = _tensor(gs.Variable(self.fresh_name(f"{node.name}.out"), dtype=node.outputs[0].dtype))
        node.outputs = [fresh]
        return fresh

    @contextmanager
    def collecting(self) -> Iterator[list[Node]]:
        """Let `add` collect nodes for a branch instead of appending them to the main graph."""
        outer, self._collected = self._collected, []
        try:
            yield self._collected
        finally:
            self._collected = outer

    def choose(self, condition: Tensor, yes: Branch, no: Branch, name: str) -> Tensor:
        """Append an If over two branches with one output each; return its output."""
        attrs = {
            "then_branch": gs.Graph(yes.nodes, outputs=[yes.output], opset=self.opset, name=f"{name}.then"),
            "else_branch": gs.Graph(no.nodes, outputs=[no.output], opset=self.opset, name=f"{name}.else"),
        }
        return self.add("If", [condition], name, yes.output.dtype, attrs)

    def _append(self, node: Node) -> None:
        # Cleaning and sorting replace the list of nodes: a kept reference would be stale.
        nodes = self.graph.nodes if self._collected is None else self._collected
        nodes.append(node)

    def is_table(self, tensor: Tensor) -> bool:
        """True if the tensor is an external embedding table."""
        return tensor.name in self.tables


def _tensor(value: Any) -> Tensor:
    """Type a value of onnx-graphsurgeon, which has no types."""
    tensor: Tensor = value
    return tensor


def is_constant(tensor: Tensor) -> bool:
    """Return whether the tensor is an initializer."""
    return isinstance(tensor, gs.Constant)


def values_of(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the values of an initializer; InternalError for another tensor."""
    if not isinstance(tensor, gs.Constant):
        raise InternalError(f"tensor '{tensor.name}' is not constant")
    return np.asarray(tensor.values)


def shape_of(tensor: Tensor) -> tuple[int | str, ...]:
    """Return the shape of a tensor; InternalError if its rank is unknown."""
    if tensor.shape is None:
        raise InternalError(f"the shape of tensor '{tensor.name}' is not known")
    return tuple(tensor.shape)


def producer(tensor: Tensor) -> Node | None:
    """Return the node that computes a tensor; None for inputs and initializers."""
    return tensor.inputs[0] if tensor.inputs else None


def consumers(tensor: Tensor) -> list[Node]:
    """Return the main-graph nodes that read a tensor, each once; for a branch, the node that holds it."""
    return list({id(node): node for node in map(reader, tensor.outputs)}.values())
