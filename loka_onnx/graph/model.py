"""An ONNX graph that can be edited, and the way in and out of it.

Weights over 2 GB work because embedding tables are never read: an initializer that is stored outside the
model file and is used only as the data of Gather stays a reference into that file. A model that is taken in
brings a copy of the file, and every later copy of the model links that one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from onnx.external_data_helper import set_external_data, uses_external_data

from loka_onnx.core.digests import digest_file, digest_json
from loka_onnx.errors import InternalError, ModelError
from loka_onnx.graph.shapes import infer_shapes

INLINE_LIMIT_BYTES = 1 << 30
"""Dense weights beyond this are stored beside the model; protobuf ends at 2 GiB."""

OLDEST_IR = 10
"""IR version from which FP8 tensors are complete."""
TABLE_LIMIT_BYTES = 1 << 28
"""Embedding tables that hold less than this together are read like any other weight: one file is simpler."""

FLOAT_TYPES: Mapping[int, Any] = {
    onnx.TensorProto.FLOAT: np.float32,
    onnx.TensorProto.DOUBLE: np.float64,
    onnx.TensorProto.FLOAT16: np.float16,
    onnx.TensorProto.BFLOAT16: ml_dtypes.bfloat16,
}

Node = Any
"""A node: `op`, `name`, `attrs`, `inputs`, `outputs` (lists of tensors), `domain`."""
Tensor = Any
"""A tensor: `name`, `dtype`, `shape`, `inputs` (its producer) and `outputs` (its consumers)."""


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
    """An ONNX model whose main graph can be edited.

    Args:
        graph: The graph.
        tables: Embedding tables that stay outside, by name; their locations are absolute paths.
    """

    def __init__(self, graph: gs.Graph, tables: Mapping[str, onnx.TensorProto]) -> None:
        self.graph = graph
        self.tables = dict(tables)
        self._names: set[str] = set()
        self._sink: list[Node] = graph.nodes

    @classmethod
    def load(cls, path: Path) -> GraphModel:
        """Read a model; element types and shapes are inferred.

        Raises:
            ModelError: The file is missing, truncated or not an ONNX model, or its external data are.
        """
        proto = read_proto(path)
        check_external_files(proto, path)
        return cls.from_proto(proto, path.parent)

    @classmethod
    def from_proto(cls, proto: onnx.ModelProto, directory: Path) -> GraphModel:
        """Take over a parsed model whose external data lies in `directory`; `proto` is consumed."""
        tables = _take_tables(proto, directory)
        for tensor in proto.graph.initializer:
            if uses_external_data(tensor):
                _read_external(tensor, directory)
        inferred = infer_shapes(proto)
        return cls(gs.import_onnx(inferred), tables)

    def save(self, path: Path, *, link_tables: bool = True) -> str:
        """Write the model and whatever it keeps outside; returns the digest of its content.

        The graph is cleaned of unused nodes and sorted.

        Args:
            path: The model file; its directory is created.
            link_tables: Whether the files of tables are hard-linked (copied across file systems all the
                same). False for files that are not ours: their owner may write into them, and onnx refuses
                to load a file that has a second name.
        """
        self.graph.cleanup(remove_unused_graph_inputs=False).toposort()
        proto = gs.export_onnx(self.graph, do_type_check=False)
        self._mend_types(proto.graph)
        # The oldest that the operators allow: ONNX Runtime refuses files newer than itself.
        standard = [entry for entry in proto.opset_import if entry.domain in {"", "ai.onnx"}]
        proto.ir_version = max(onnx.helper.find_min_ir_version_for(standard), OLDEST_IR)
        proto.producer_name = "loka-onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        used = {name for node in proto.graph.node for name in node.input} | _names_in_subgraphs(proto.graph)
        for name, table in self.tables.items():
            if name in used:
                proto.graph.initializer.append(_place_table(table, path.parent, link_tables))
        kept = [
            info
            for info in proto.graph.value_info
            if info.name not in self.tables and info.type.tensor_type.elem_type
        ]
        del proto.graph.value_info[:]
        proto.graph.value_info.extend(kept)
        dense = sum(len(t.raw_data) for t in proto.graph.initializer)
        if dense > INLINE_LIMIT_BYTES:
            _move_outside(proto, path)
        path.write_bytes(proto.SerializeToString(deterministic=True))
        return model_digest(path)

    def _mend_types(self, graph: onnx.GraphProto) -> None:
        """Write the type of E4M3FNUZ tensors, which onnx-graphsurgeon 0.6.1 exports as E4M3FN."""
        fnuz = np.dtype(ml_dtypes.float8_e4m3fnuz)
        names = {name for name, tensor in self.graph.tensors().items() if tensor.dtype == fnuz}
        for tensor in graph.initializer:
            if tensor.name in names:
                tensor.data_type = onnx.TensorProto.FLOAT8E4M3FNUZ
        for info in graph.value_info:
            if info.name in names:
                info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT8E4M3FNUZ

    def copy(self) -> GraphModel:
        """A deep copy that shares the weights."""
        return GraphModel(self.graph.copy(), self.tables)

    # Reading ---------------------------------------------------------------------------------------

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
        """Nodes of the main graph, producers before consumers."""
        return list(self.graph.toposort().nodes)

    def node(self, name: str) -> Node:
        """The node of that name.

        Raises:
            InternalError: There is none: a transform lost a site.
        """
        for node in self.graph.nodes:
            if node.name == name:
                return node
        raise InternalError(f"the graph has no node named '{name}'")

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
        """Whether the tensor is a graph output."""
        return any(tensor is output for output in self.graph.outputs)

    # Editing ---------------------------------------------------------------------------------------

    def fresh_name(self, base: str) -> str:
        """A tensor or node name that is not in use."""
        if not self._names:
            self._names = set(self.graph.tensors()) | {node.name for node in self.graph.nodes}
        name, count = base, 0
        while name in self._names:
            count += 1
            name = f"{base}_{count}"
        self._names.add(name)
        return name

    def constant(self, base: str, values: npt.NDArray[Any]) -> Tensor:
        """A new initializer."""
        return gs.Constant(self.fresh_name(base), np.ascontiguousarray(values).reshape(np.shape(values)))

    def add(
        self,
        op: str,
        inputs: Sequence[Tensor],
        name: str,
        dtype: Any = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Append a node with one output and return that output.

        Args:
            op: Operator of the default domain.
            inputs: Input tensors; an empty optional input is `self.absent()`.
            name: Base of the node's and the output's name.
            dtype: Element type of the output, numpy or ONNX; that of the first input when None.
            attrs: Attributes.
        """
        unique = self.fresh_name(name)
        out_type = dtype if dtype is not None else inputs[0].dtype
        output = gs.Variable(self.fresh_name(f"{unique}.out"), dtype=out_type)
        self._sink.append(gs.Node(op, unique, attrs=dict(attrs or {}), inputs=list(inputs), outputs=[output]))
        return output

    def add_like(self, node: Node, inputs: Sequence[Tensor], name: str) -> Tensor:
        """Append a copy of a one-output node that reads other inputs; returns its output."""
        return self.add(node.op, inputs, name, node.outputs[0].dtype, node.attrs)

    def absent(self) -> Tensor:
        """An optional input that is left out."""
        return gs.Variable.empty()

    def add_output(self, tensor: Tensor, dtype: Any, shape: Sequence[int | str] | None) -> None:
        """Make a tensor a graph output."""
        tensor.dtype = dtype
        tensor.shape = shape
        self.graph.outputs.append(tensor)

    def add_input(self, name: str, dtype: Any, shape: Sequence[int | str]) -> Tensor:
        """Add a graph input."""
        tensor = gs.Variable(self.fresh_name(name), dtype=dtype, shape=list(shape))
        self.graph.inputs.append(tensor)
        return tensor

    def make_output(self, old: Tensor, new: Tensor) -> None:
        """Let `new` leave the graph in the place, and under the name, of the output `old`."""
        position = next(i for i, output in enumerate(self.graph.outputs) if output is old)
        new.dtype, new.shape = old.dtype, old.shape
        old.name, new.name = self.fresh_name(f"{old.name}.inner"), old.name
        self.graph.outputs[position] = new

    def replace_uses(self, old: Tensor, new: Tensor, consumers: Sequence[Node] | None = None) -> None:
        """Let consumers read `new` where they read `old`; all of them when None.

        A graph output keeps its name: if `old` is one, the two tensors trade names.
        """
        for node in list(old.outputs) if consumers is None else consumers:
            for index, tensor in enumerate(node.inputs):
                if tensor is old:
                    node.inputs[index] = new
        if consumers is None and self.is_output(old):
            self.make_output(old, new)

    @contextmanager
    def collecting(self) -> Iterator[list[Node]]:
        """Let `add` collect nodes for a branch instead of appending them to the main graph."""
        outer, self._sink = self._sink, []
        try:
            yield self._sink
        finally:
            self._sink = outer

    def choose(self, condition: Tensor, yes: Branch, no: Branch, name: str) -> Tensor:
        """Append an If over two branches with one output each; returns its output."""
        attrs = {
            "then_branch": gs.Graph(yes.nodes, outputs=[yes.output], opset=self.opset, name=f"{name}.then"),
            "else_branch": gs.Graph(no.nodes, outputs=[no.output], opset=self.opset, name=f"{name}.else"),
        }
        return self.add("If", [condition], name, yes.output.dtype, attrs)

    def is_table(self, tensor: Tensor) -> bool:
        """Whether the tensor is an embedding table that stays outside."""
        return tensor.name in self.tables


def is_constant(tensor: Tensor) -> bool:
    """Whether the tensor is an initializer."""
    return isinstance(tensor, gs.Constant)


def values_of(tensor: Tensor) -> npt.NDArray[Any]:
    """Values of an initializer.

    Raises:
        InternalError: The tensor is not an initializer.
    """
    if not isinstance(tensor, gs.Constant):
        raise InternalError(f"tensor '{tensor.name}' is not constant")
    return np.asarray(tensor.values)


def producer(tensor: Tensor) -> Node | None:
    """The node that computes a tensor, None for inputs and initializers."""
    return tensor.inputs[0] if tensor.inputs else None


def consumers(tensor: Tensor) -> list[Node]:
    """The nodes that read a tensor, each once."""
    seen: list[Node] = []
    for node in tensor.outputs:
        if not any(node is other for other in seen):
            seen.append(node)
    return seen


def read_proto(path: Path) -> onnx.ModelProto:
    """Parse a model file without loading what it keeps outside.

    Raises:
        ModelError: The file is missing, truncated or not an ONNX model.
    """
    try:
        model = onnx.load(os.fspath(path), load_external_data=False)
    except OSError as error:
        raise ModelError(f"cannot read the model '{path}'", evidence=str(error)) from error
    except Exception as error:
        # protobuf's DecodeError is not importable under one name across its implementations.
        raise ModelError(
            f"'{path}' is not an ONNX model, or is truncated",
            evidence=f"{path.stat().st_size} bytes; {error}",
            remedy="export or copy the file again",
        ) from error
    if not model.graph.node:
        raise ModelError(
            f"'{path}' is not an ONNX model, or is truncated",
            evidence=f"{path.stat().st_size} bytes hold a graph without nodes",
            remedy="export or copy the file again",
        )
    return model


def external_files(model: onnx.ModelProto) -> tuple[str, ...]:
    """Names of the files that hold external data, relative to the model."""
    locations = {
        entry.value
        for tensor in _all_initializers(model.graph)
        if uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return tuple(sorted(locations))


def model_files(path: Path) -> tuple[Path, ...]:
    """The model file and every file that holds its external data."""
    return (path, *(path.parent / name for name in external_files(read_proto(path))))


def _read_external(tensor: onnx.TensorProto, directory: Path) -> None:
    """Load a tensor; edits it.

    onnx's own helper refuses files with more than one hard link, which linked tables have.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    with (directory / entries["location"]).open("rb") as stream:
        stream.seek(int(entries.get("offset", 0)))
        tensor.raw_data = stream.read(int(entries["length"]) if "length" in entries else -1)
    tensor.data_location = onnx.TensorProto.DEFAULT
    del tensor.external_data[:]


def check_external_files(model: onnx.ModelProto, path: Path) -> None:
    """Make sure that what a model keeps outside is beside it, and whole.

    Raises:
        ModelError: A file lies outside the model's directory, is missing, or ends before its tensor.
    """
    homes = {path.parent.resolve(), path.resolve().parent}
    for tensor in _all_initializers(model.graph):
        if not uses_external_data(tensor):
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        name = entries.get("location", "")
        resolved = (path.parent / name).resolve()
        if (
            Path(name).is_absolute()
            or ".." in Path(name).parts
            or not any(resolved.is_relative_to(home) for home in homes)
        ):
            raise ModelError(
                f"'{path}' refers to weights outside its directory",
                evidence=f"location '{name}' of tensor '{tensor.name}'",
                remedy="save the model again with its weights beside it",
            )
        file = path.parent / name
        if not file.is_file():
            raise ModelError(
                f"the weights of '{path}' are missing",
                evidence=f"it stores tensors in '{name}', which is not beside it",
                remedy="copy the external data file next to the model",
            )
        end = int(entries.get("offset", 0)) + int(entries.get("length", 0))
        if end > file.stat().st_size:
            raise ModelError(
                f"the weights of '{path}' are truncated",
                evidence=f"tensor '{tensor.name}' ends at byte {end} of '{name}', which has "
                f"{file.stat().st_size}",
                remedy="copy the external data file again",
            )


def model_digest(path: Path) -> str:
    """SHA-256 over the model file and the files it refers to."""
    model, *weights = model_files(path)
    return digest_json([digest_file(model), *(_digest_weights(file) for file in weights)])


def _digest_weights(path: Path) -> str:
    """SHA-256 of a file of weights; one that many models link is read once."""
    stat = path.stat()
    key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if key not in _DIGESTS:
        _DIGESTS[key] = digest_file(path)
    return _DIGESTS[key]


_DIGESTS: dict[tuple[int, int, int, int], str] = {}


def _all_initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _all_initializers(attribute.g)


def _names_in_subgraphs(graph: onnx.GraphProto) -> set[str]:
    names: set[str] = set()
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                names |= {name for inner in attribute.g.node for name in inner.input}
                names |= _names_in_subgraphs(attribute.g)
    return names


def _take_tables(proto: onnx.ModelProto, directory: Path) -> dict[str, onnx.TensorProto]:
    """Move external initializers that only Gather reads out of the graph, as references."""
    uses: dict[str, set[str]] = {}
    for node in proto.graph.node:
        for index, name in enumerate(node.input):
            uses.setdefault(name, set()).add("table" if node.op_type == "Gather" and index == 0 else "value")
    for name in _names_in_subgraphs(proto.graph):
        uses.setdefault(name, set()).add("value")
    found = [
        tensor
        for tensor in proto.graph.initializer
        if uses_external_data(tensor) and uses.get(tensor.name) == {"table"}
    ]
    if sum(_stored_bytes(tensor) for tensor in found) < TABLE_LIMIT_BYTES:
        return {}
    tables: dict[str, onnx.TensorProto] = {}
    for tensor in found:
        table = onnx.TensorProto()
        table.CopyFrom(tensor)
        for entry in table.external_data:
            if entry.key == "location":
                entry.value = os.fspath((directory / entry.value).resolve())
        tables[tensor.name] = table
    kept = [tensor for tensor in proto.graph.initializer if tensor.name not in tables]
    if len(kept) != len(proto.graph.initializer):
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(kept)
        known = {info.name for info in proto.graph.value_info}
        for name, table in tables.items():
            if name not in known:
                proto.graph.value_info.append(
                    onnx.helper.make_tensor_value_info(name, table.data_type, list(table.dims))
                )
    return tables


def _stored_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of a tensor, from its type and dimensions."""
    return int(prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _place_table(table: onnx.TensorProto, directory: Path, link: bool) -> onnx.TensorProto:
    placed = onnx.TensorProto()
    placed.CopyFrom(table)
    for entry in placed.external_data:
        if entry.key == "location":
            entry.value = _place_file(Path(entry.value), directory, link)
    return placed


def _place_file(source: Path, directory: Path, link: bool) -> str:
    """Name under which a directory holds the content of a table file, which is brought there if need be.

    Where another file has that name already (an earlier version of the table, which other models in the
    directory may use), the name takes the digest of its content.
    """
    name = source.name
    if (directory / name).exists() and not _is_same_content(source, directory / name):
        name = f"{_digest_weights(source)[:16]}-{name}"
    if not (directory / name).exists():
        (link_or_copy if link else shutil.copyfile)(source, directory / name)
    elif not _is_same_content(source, directory / name):
        raise InternalError(f"'{directory / name}' is not the table file '{source}' that it is named after")
    return name


def _is_same_content(one: Path, other: Path) -> bool:
    return one.samefile(other) or (
        one.stat().st_size == other.stat().st_size and _digest_weights(one) == _digest_weights(other)
    )


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name; copy it where the file system cannot."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _move_outside(proto: onnx.ModelProto, path: Path) -> None:
    """Write dense weights over 1 KiB to ``<name>.data`` beside the model.

    That file may be a link to the source of the tables: it is replaced, never written into, and has another
    name where the tables of this model are in it.
    """
    linked = set(external_files(proto))
    location = f"{path.name}.data"
    while location in linked:
        location = f"{location}.dense"
    (path.parent / location).unlink(missing_ok=True)
    offset = 0
    with (path.parent / location).open("wb") as stream:
        for tensor in proto.graph.initializer:
            if uses_external_data(tensor) or len(tensor.raw_data) < 1024:
                continue
            padding = -offset % 4096
            stream.write(b"\0" * padding)
            offset += padding
            length = stream.write(tensor.raw_data)
            set_external_data(tensor, location, offset, length)
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            offset += length
