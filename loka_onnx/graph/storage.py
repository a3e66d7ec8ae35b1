"""Model files and their external weights.

Weights over 2 GB work because large embedding tables are never read: an external initializer that is only
data of Gather stays a reference into its file. Taking a model in copies the file; later copies of the model
link it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import BinaryIO

import onnx
from onnx.external_data_helper import set_external_data, uses_external_data

from loka_onnx.core.digests import digest_file, digest_json
from loka_onnx.errors import InternalError, ModelError, OutputError
from loka_onnx.graph.detached import Array, bytes_of, info_of, number_of, refill
from loka_onnx.sessions.model_files import data_locations, external_tensors

INLINE_LIMIT_BYTES = 1 << 30
"""Larger dense weights are stored beside the model; protobuf ends at 2 GiB."""

_BITS = {
    onnx.TensorProto.INT4: 4,
    onnx.TensorProto.UINT4: 4,
    onnx.TensorProto.FLOAT4E2M1: 4,
    **{kind: 2 for name, kind in onnx.TensorProto.DataType.items() if name in {"INT2", "UINT2"}},
}
"""Types with several elements in a byte."""
_STORED = frozenset(onnx.TensorProto.DataType.values()) - {
    onnx.TensorProto.UNDEFINED,
    onnx.TensorProto.STRING,
}

TABLE_LIMIT_BYTES = 1 << 28
"""Embedding tables below this, together, are read like any other weight: one file is simpler."""


def read_proto(path: Path) -> onnx.ModelProto:
    """Parse a model file without loading external data, and check where that lies. Raises ModelError as
    `parse_proto`; or if external data is no regular file below the directory, missing, or cut short.
    """
    model = parse_proto(path)
    homes = {Path(os.path.realpath(path.parent)), Path(os.path.realpath(path)).parent}
    for tensor in external_tensors(model):
        _check_external(Stored.of(tensor, path), path, homes)
    return model


def _open_negative(graph: onnx.GraphProto) -> None:
    """Make axes of a negative size dynamic, as ONNX Runtime does: some converters write -1 for None."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("dim_value")


def parse_proto(path: Path) -> onnx.ModelProto:
    """Parse a model file without its external data; ModelError if missing, truncated or no ONNX model."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        model = onnx.load(os.fspath(path), load_external_data=False)
        if not model.graph.node:
            raise ValueError("a graph without nodes")
        _open_negative(model.graph)
    except OSError as error:
        raise ModelError(f"E0311 cannot read the model '{path}'", evidence=str(error)) from error
    except Exception as error:
        # protobuf's DecodeError is not importable under one name across its implementations.
        raise ModelError(
            f"E0312 '{path}' is not an ONNX model, or is truncated",
            evidence=f"{path.stat().st_size} bytes; {str(error)[:200]}",
            remedy="export or copy the file again",
        ) from error
    return model


@dataclass(frozen=True)
class Stored:
    """Position of a tensor's values in another file, whose location is relative to the model."""

    tensor: str
    location: str
    offset: int
    length: int

    @classmethod
    def of(cls, tensor: onnx.TensorProto, path: Path | None = None) -> Stored:
        """Return the position that a tensor states; ModelError for an invalid one."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        needed, offset = stored_bytes(tensor), entries.get("offset", "0")
        length = entries.get("length", str(needed))
        # Protobuf returns bytes for a text that is not UTF-8.
        if not all(isinstance(text, str) for text in entries.values()):
            raise _unreadable(path, tensor.name, f"{entries}")
        for text in (offset, length):
            if not text.isdecimal() or len(text) > _MOST_DIGITS:
                raise _unreadable(path, tensor.name, f"offset '{offset[:40]}', length '{length[:40]}'")
        if int(length) != needed:
            evidence = f"its type and shape need {needed} bytes, and {int(length)} are stored"
            raise _unreadable(path, tensor.name, evidence)
        return cls(tensor.name, entries.get("location", ""), int(offset), needed)


_MOST_DIGITS = 18


def _unreadable(path: Path | None, tensor: str, evidence: str) -> ModelError:
    of = "a model" if path is None else f"'{path}'"
    return ModelError(
        f"E0317 the weights of {of} cannot be read",
        where=f"tensor '{tensor}'",
        evidence=evidence,
        remedy="save the model again with its weights beside it",
    )


def _check_external(stored: Stored, path: Path, homes: Collection[Path]) -> None:
    name, file = stored.location, path.parent / stored.location
    try:
        resolved = Path(os.path.realpath(file))
        status = resolved.stat()
    except (OSError, ValueError):
        # ValueError for an impossible file name.
        resolved, status = file, None
    is_relative = not Path(name).is_absolute() and ".." not in Path(name).parts
    if not is_relative or (status and not any(resolved.is_relative_to(home) for home in homes)):
        raise ModelError(
            f"E0313 '{path}' refers to weights outside its directory",
            evidence=f"location '{name[:200]}' of tensor '{stored.tensor}'",
            remedy="save the model again with its weights beside it",
        )
    if status is None or not stat.S_ISREG(status.st_mode):
        raise ModelError(
            f"E0314 the weights of '{path}' are missing",
            evidence=f"it stores tensors in '{name[:200]}', which is "
            + ("not beside it" if status is None else "no regular file"),
            remedy="copy the external data file next to the model",
        )
    end = stored.offset + stored.length
    if end > status.st_size:
        raise ModelError(
            f"E0315 the weights of '{path}' are truncated",
            evidence=f"tensor '{stored.tensor}' ends at byte {end} of '{name}', which has {status.st_size}",
            remedy="copy the external data file again",
        )


def model_files(path: Path) -> tuple[Path, ...]:
    """Return the model file and every file that holds its external data; ModelError as `read_proto`."""
    return (path, *(path.parent / name for name in data_locations(read_proto(path))))


def read_external(tensor: onnx.TensorProto, directory: Path) -> None:
    """Load external data into a tensor, also of linked files, which onnx refuses; ModelError if cut short."""
    stored = Stored.of(tensor)
    with (directory / stored.location).open("rb") as stream:
        stream.seek(stored.offset)
        tensor.raw_data = stream.read(stored.length)
    if len(tensor.raw_data) != stored.length:
        raise _unreadable(
            None, tensor.name, f"its file holds {len(tensor.raw_data)} of {stored.length} bytes"
        )
    tensor.data_location = onnx.TensorProto.DEFAULT
    del tensor.external_data[:]


def model_digest(path: Path) -> str:
    """Return the SHA-256 over the digests of a model file and its external files; raises as `read_proto`."""
    weights = data_locations(read_proto(path))
    return digest_with_weights(digest_file(path), path.parent, weights)


def digest_with_weights(model: str, directory: Path, weights: Sequence[str]) -> str:
    """Return the SHA-256 over the digest of a model file and the named files in its directory."""
    return digest_json([model, *(_digest_weights(directory / name) for name in weights)])


def _digest_weights(path: Path) -> str:
    """Return the SHA-256 of a weight file: one that many models link is read once, one of our own never."""
    key = _identity(path)
    if key not in _DIGESTS:
        _DIGESTS[key] = digest_file(path)
    return _DIGESTS[key]


def _identity(path: Path) -> tuple[int, int, int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


_DIGESTS: dict[tuple[int, int, int, int], str] = {}


def with_subgraphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph, and the branches and bodies of its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from with_subgraphs(attribute.g)


def all_attributes(graph: onnx.GraphProto) -> Iterator[onnx.AttributeProto]:
    """Yield attributes of a graph's nodes, and of those in their branches and bodies."""
    return (each for part in with_subgraphs(graph) for node in part.node for each in node.attribute)


def all_initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield initializers of a graph, and of the branches and bodies of its nodes."""
    return (tensor for part in with_subgraphs(graph) for tensor in part.initializer)


def names_in_subgraphs(graph: onnx.GraphProto) -> set[str]:
    """Return names that the branches and bodies of a graph's nodes read."""
    inner = islice(with_subgraphs(graph), 1, None)
    return {name for part in inner for node in part.node for name in node.input}


def looked_up(graph: onnx.GraphProto) -> set[str]:
    """Return names that nothing but Gather of the main graph reads, as its data."""
    tables, others = set[str](), names_in_subgraphs(graph)
    for node in graph.node:
        for index, name in enumerate(node.input):
            (tables if node.op_type == "Gather" and index == 0 else others).add(name)
    return tables - others


def take_tables(proto: onnx.ModelProto, directory: Path) -> dict[str, onnx.TensorProto]:
    """Take external tables (`looked_up`) out of a message, by name; {} if under `TABLE_LIMIT_BYTES`."""
    names = looked_up(proto.graph)
    outside = [t for t in proto.graph.initializer if uses_external_data(t) and t.name in names]
    if not outside or sum(map(stored_bytes, outside)) < TABLE_LIMIT_BYTES:
        return {}
    tables: dict[str, onnx.TensorProto] = {}
    for tensor in outside:
        table = onnx.TensorProto()
        table.CopyFrom(tensor)
        for entry in table.external_data:
            if entry.key == "location":
                entry.value = os.path.realpath(directory / entry.value)
        tables[tensor.name] = table
    refill(proto.graph.initializer, [t for t in proto.graph.initializer if t.name not in tables])
    known = {info.name for info in proto.graph.value_info}
    proto.graph.value_info.extend(info_of(table) for name, table in tables.items() if name not in known)
    return tables


def stored_bytes(tensor: onnx.TensorProto) -> int:
    """Return the bytes of a tensor by its type and dimensions; ModelError for invalid ones."""
    kind = tensor.data_type
    if kind not in _STORED or any(dim < 0 for dim in tensor.dims):
        evidence = f"its element type is {kind}, its shape {[*tensor.dims][:16]}"
        raise _unreadable(None, tensor.name, evidence)
    bits = _BITS.get(kind) or 8 * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
    return int(-(-prod(tensor.dims) * bits // 8))


def place_table(table: onnx.TensorProto, directory: Path, link: bool) -> onnx.TensorProto:
    """Return a copy of a table whose file is in `directory`: linked or, if not `link`, copied, if needed."""
    placed = onnx.TensorProto()
    placed.CopyFrom(table)
    for entry in placed.external_data:
        if entry.key == "location":
            entry.value = _place_file(Path(entry.value), directory, link)
    return placed


def _place_file(source: Path, directory: Path, link: bool) -> str:
    """Link or copy a table file into a directory if needed, and return its name there: that of the source or,
    if another file has it, perhaps in use by other models, with the digest of its content.
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


def move_outside(proto: onnx.ModelProto, path: Path, detached: Sequence[Array] = ()) -> None:
    """Move dense weights that are too large together for a message to ``<name>.data`` beside the model; edits
    the message. That file may be a link to the source of the tables: it is replaced, never written into, and
    has another name where the tables of this model are in it.
    """
    # Branches hold weights as well: all those of a switchable model, each twice.
    weights = [*all_initializers(proto.graph)]
    if sum(inline_bytes(tensor, detached) for tensor in weights) <= INLINE_LIMIT_BYTES:
        return
    linked = set(data_locations(proto))
    location = f"{path.name}.data"
    while location in linked:
        location = f"{location}.dense"
    offset, state = 0, hashlib.sha256()
    with replacing(path.parent / location) as stream:
        for tensor in weights:
            if uses_external_data(tensor) or inline_bytes(tensor, detached) < 1024:
                continue
            number = number_of(tensor)
            data = tensor.raw_data if number is None else bytes_of(detached[number])
            padding = b"\0" * (-offset % 4096)
            for part in (padding, data):
                stream.write(part)
                state.update(part)
            offset += len(padding)
            set_external_data(tensor, location, offset, len(data))
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            offset += len(data)
    _DIGESTS[_identity(path.parent / location)] = state.hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream that replaces a file when the block ends without an error; the earlier one stays under
    its other names. Raises OutputError for an OSError.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    full = OutputError(f"E0316 cannot write '{path}'", remedy="make room, or choose another --output")
    try:
        with full.in_place_of(OSError):
            with unfinished.open("wb") as stream:
                yield stream
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def inline_bytes(tensor: onnx.TensorProto, detached: Sequence[Array]) -> int:
    """Return the bytes of a tensor in its message, once filled."""
    number = number_of(tensor)
    return len(tensor.raw_data) if number is None else detached[number].nbytes
