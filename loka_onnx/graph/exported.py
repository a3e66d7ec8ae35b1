"""A model exported from the editable graph: to a file, a session, or back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx.external_data_helper import set_external_data, uses_external_data

from loka_onnx.graph.detached import Array, fill, number_of
from loka_onnx.graph.storage import (
    INLINE_LIMIT_BYTES,
    all_initializers,
    digest_with_weights,
    inline_bytes,
    move_outside,
    place_table,
    read_external,
    replacing,
)
from loka_onnx.graph.weights import map_external
from loka_onnx.sessions.model_files import data_locations


@dataclass(frozen=True)
class InMemory:
    """A model whose weights are external data with a meaningless location, and their values by name."""

    proto: onnx.ModelProto
    weights: Mapping[str, Array]


@dataclass(frozen=True)
class Exported:
    """A model as it is written: headers for its large weights, their values, and tables with absolute
    locations.
    """

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
        """Return the model for a session with weights in memory; None where they do not fit.

        ONNX Runtime 1.31 takes only those of the main graph: weights of branches stay in the message, which
        ends at 2 GiB.
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
