"""Large weights of an editable graph: detached from the message on reading, and written from the export."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx.external_data_helper import set_external_data, uses_external_data
from onnx_graphsurgeon.exporters.onnx_exporter import dtype_to_onnx
from onnx_graphsurgeon.importers.onnx_importer import get_onnx_tensor_dtype
from onnx_graphsurgeon.ir.tensor import LazyValues
from onnx_graphsurgeon.logger import G_LOGGER

from loka_onnx.graph.detached import DETACHABLE_TYPES, STRIP_BYTES, Array, fill, hold, number_of
from loka_onnx.graph.parts import mark_branches
from loka_onnx.graph.storage import (
    INLINE_LIMIT_BYTES,
    Stored,
    all_initializers,
    digest_with_weights,
    inline_bytes,
    move_outside,
    place_table,
    read_external,
    replacing,
    stored_bytes,
)
from loka_onnx.sessions.model_files import data_locations


class DetachedValues(LazyValues):  # type: ignore[misc]
    """Present values of a `gs.Constant`; copies of a graph share them, and cannot change them."""

    def __init__(self, header: onnx.TensorProto, array: Array) -> None:
        self.header, self.array = header, array.view()
        self.array.flags.writeable = False
        self.shape, self.nbytes = header.dims, array.nbytes
        # It prints that NumPy has no FP8 types.
        with G_LOGGER.suppress(G_LOGGER.ERROR):
            self.dtype = get_onnx_tensor_dtype(header)

    @property
    def tensor(self) -> onnx.TensorProto:
        """The tensor with its values, which onnx-graphsurgeon hands to ONNX Runtime to fold constants."""
        whole = onnx.TensorProto()
        whole.CopyFrom(self.header)
        whole.raw_data = self.array.tobytes()
        return whole

    def load(self) -> Array:
        """Return the values without a copy."""
        return self.array


def take_weights(proto: onnx.ModelProto, directory: Path, detached: Sequence[Array] = ()) -> list[Array]:
    """Replace large weights of a message by headers; edits it. Return `detached`, then their values."""
    arrays = list(detached)
    for tensor in all_initializers(proto.graph):
        if tensor.data_type not in DETACHABLE_TYPES or stored_bytes(tensor) <= STRIP_BYTES:
            continue
        if uses_external_data(tensor):
            values = map_external(tensor, directory)
            if values is not None:
                # Read whole: the file may be replaced while the model is in use.
                values = np.array(values, order="C")
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
        else:
            raw = tensor.raw_data
            is_whole = not tensor.external_data and len(raw) == stored_bytes(tensor)
            values = _shaped(tensor, np.frombuffer(raw, np.uint8)) if is_whole else None
        if values is not None:
            hold(tensor, len(arrays))
            arrays.append(values)
    return arrays


def map_external(tensor: onnx.TensorProto, directory: Path) -> Array | None:
    """Return a read-only map of a tensor's file; None without values, or for parts of bytes."""
    stored = Stored.of(tensor)
    itemsize = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    if stored.length == 0 or stored.length != itemsize * prod(tensor.dims):
        return None
    path, shape = directory / stored.location, (stored.length,)
    return _shaped(tensor, np.memmap(path, np.uint8, "r", offset=stored.offset, shape=shape))


def _shaped(tensor: onnx.TensorProto, data: Array) -> Array:
    values: Array = data.view(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    return values.reshape(tuple(tensor.dims))


def attach(graph: gs.Graph, detached: Sequence[Array]) -> None:
    """Give constants imported from headers their values; edits the graph."""
    for tensor in _constants(graph):
        header = getattr(tensor._values, "tensor", None)
        if not isinstance(header, onnx.TensorProto):
            continue
        number = number_of(header)
        if number is not None:
            header.ClearField("raw_data")
            tensor._values = DetachedValues(header, detached[number])


@contextmanager
def weights_detached(graph: gs.Graph) -> Iterator[list[Array]]:
    """Let large weights of a graph be headers inside the block, to export it; yields their values."""
    detached: list[Array] = []
    kept: list[tuple[Any, Any]] = []
    try:
        for tensor in _constants(graph):
            values, header = tensor._values, _header(tensor)
            if header is None:
                continue
            array = np.ascontiguousarray(values.array if isinstance(values, DetachedValues) else values)
            hold(header, len(detached))
            detached.append(array)
            kept.append((tensor, values))
            with G_LOGGER.suppress(G_LOGGER.ERROR):
                tensor._values = LazyValues(header)
        yield detached
    finally:
        for tensor, values in kept:
            tensor._values = values


def copied(graph: gs.Graph) -> gs.Graph:
    """Return a deep copy of a graph that shares the weights. In copies of onnx-graphsurgeon 0.6.1 a constant
    has an export type, which E4M3FNUZ does not survive.
    """
    copy = mark_branches(graph.copy())
    for tensor in _constants(copy):
        tensor._export_dtype = None
    return copy


def _constants(graph: gs.Graph) -> list[gs.Constant]:
    """Return the constants of a graph and of the branches and bodies of its nodes, each once."""
    constants: dict[int, gs.Constant] = {}
    for part in (graph, *graph.subgraphs(recursive=True)):
        ends = [part.inputs, part.outputs]
        for node in part.nodes:
            ends += [node.inputs, node.outputs]
        constants.update((id(t), t) for end in ends for t in end if isinstance(t, gs.Constant))
    return list(constants.values())


def _header(tensor: gs.Constant) -> onnx.TensorProto | None:
    """Return onnx-graphsurgeon's tensor without values; None when they are small or not detached."""
    values = tensor._values
    header = onnx.TensorProto()
    if isinstance(values, DetachedValues):
        header.CopyFrom(values.header)
        return header
    if not isinstance(values, np.ndarray) or values.nbytes <= STRIP_BYTES or not values.dtype.isnative:
        return None
    if tensor._export_dtype is not None or dtype_to_onnx(values.dtype) not in DETACHABLE_TYPES:
        return None
    header.data_type = dtype_to_onnx(values.dtype)
    header.dims.extend(values.shape)
    if tensor.data_location is not None:
        header.data_location = tensor.data_location
    return header


@dataclass(frozen=True)
class InMemory:
    """A model whose weights are external data with a meaningless location, and their values by name."""

    proto: onnx.ModelProto
    weights: Mapping[str, Array]


@dataclass(frozen=True)
class Exported:
    """A model as it is written: headers for its large weights, their values, located tables."""

    headers: onnx.ModelProto
    detached: Sequence[Array]
    tables: Sequence[onnx.TensorProto]

    def write(self, path: Path, *, link_tables: bool = True) -> str:
        """Write the model and its external data; see `GraphModel.save`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        proto = self.copy_headers(place_table(table, path.parent, link_tables) for table in self.tables)
        move_outside(proto, path, self.detached)
        with replacing(path) as stream:
            for tensor in all_initializers(proto.graph):
                fill(tensor, self.detached)
            content = proto.SerializeToString(deterministic=True)
            stream.write(content)
        return digest_with_weights(hashlib.sha256(content).hexdigest(), path.parent, data_locations(proto))

    def copy_headers(self, tables: Iterable[onnx.TensorProto] = ()) -> onnx.ModelProto:
        """Return a copy of the headers, with some tables."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.headers)
        proto.graph.initializer.extend(tables)
        return proto

    def whole(self) -> onnx.ModelProto:
        """Return the model in one message, without its tables."""
        proto = self.copy_headers()
        for tensor in all_initializers(proto.graph):
            fill(tensor, self.detached)
        return proto

    def in_memory(self) -> InMemory | None:
        """Return the model for a session with weights in memory; None where the rest of the message exceeds
        `INLINE_LIMIT_BYTES`: ONNX Runtime 1.31 takes weights of the main graph only, not of branches.
        """
        proto = self.copy_headers(self.tables)
        weights: dict[str, Array] = {}
        for tensor in proto.graph.initializer:
            number = number_of(tensor)
            if number is None and not uses_external_data(tensor):
                continue
            values = map_external(tensor, Path("/")) if number is None else self.detached[number]
            if values is None:
                # Another type, or a part.
                read_external(tensor, Path("/"))
                continue
            weights[tensor.name] = values
            # `set_external_data` requires the field.
            tensor.raw_data = b""
            set_external_data(tensor, "memory", 0, values.nbytes)
            tensor.ClearField("raw_data")
        inside = [*all_initializers(proto.graph)]
        if sum(inline_bytes(tensor, self.detached) for tensor in inside) > INLINE_LIMIT_BYTES:
            return None
        for tensor in inside:
            fill(tensor, self.detached)
        return InMemory(proto, weights)
