"""NumPy .npz files as data sets, read row by row.

An array that is stored lies in the file as it is: the file is mapped, and rows are read at their offset. A
compressed one is read in sequence. No member of an archive is positioned (`seek`): members that are read in
turns share the archive's file, and CPython 3.12.1 to 3.12.3 then move from where another member left it.
"""

from __future__ import annotations

import math
import mmap
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np

from loka_onnx.data.batch import Array, InputBinding
from loka_onnx.data.checks import RawColumn
from loka_onnx.data.dataset import ColumnInfo, Dataset
from loka_onnx.errors import DataError

Bytes = bytes | memoryview

_SUFFIX = ".npy"
_SKIPPED_AT_ONCE = 1 << 20
_LOCAL_HEADER_BYTES, _LENGTHS_AT = 30, 26
"""APPNOTE 6.3.10, section 4.3.7: a name and an extra field follow; the lengths of both stand at 26 and 28."""
_DAMAGED = (zipfile.BadZipFile, ValueError, OSError, EOFError, zlib.error, struct.error)
_NO_HEADER = (SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError, SystemError)
"""Errors of Python's own parser, to which NumPy gives the header; beside ValueError."""


@dataclass(frozen=True)
class _Header:
    """Header of an array; the first row follows after `bytes`."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[np.generic]
    bytes: int

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])


class NpzDataset(Dataset):
    """Some rows of an .npz file, whose arrays are keyed by input name or by column name.

    An array under the input's own name is that input as a whole, (rows,) or (rows, width); otherwise the
    bound columns are looked up one by one.
    """

    def _describe(self) -> tuple[int, Mapping[str, ColumnInfo]]:
        headers: dict[str, _Header] = {}
        try:
            with zipfile.ZipFile(self.path) as archive:
                for member in archive.namelist():
                    if member.endswith(_SUFFIX):
                        with archive.open(member) as stream:
                            headers[member.removesuffix(_SUFFIX)] = _header(stream)
        except (*_DAMAGED, RuntimeError) as error:  # encrypted, or compressed by an unknown method
            raise self._unreadable(error) from error
        lengths = {name: header.shape[0] if header.shape else 0 for name, header in headers.items()}
        if len(set(lengths.values())) > 1:
            short, long = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
            raise DataError(
                "E0217 the arrays of the file differ in their number of rows",
                where=str(self.path),
                evidence=f"'{short}' has {lengths[short]}, '{long}' has {lengths[long]}",
                remedy="save arrays whose first axis counts the rows",
            )
        for name, header in headers.items():
            if header.fortran or len(header.shape) > 2 or 0 in header.shape[1:]:
                raise DataError(
                    f"E0218 array '{name}' cannot be streamed by rows",
                    where=str(self.path),
                    evidence=f"shape {header.shape}, {'Fortran' if header.fortran else 'C'} order",
                    remedy="save it as (rows,) or (rows, width) through np.ascontiguousarray",
                )
        infos = {
            name: ColumnInfo(
                "?" if header.dtype.kind in "cV" else header.dtype.kind,
                str(header.dtype),
                header.shape[1] if len(header.shape) == 2 else 0,
            )
            for name, header in headers.items()
        }
        return next(iter(lengths.values()), 0), infos

    def _sources(self, binding: InputBinding) -> tuple[str, ...]:
        return (binding.input,) if binding.input in self._known else binding.columns

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(
            "E0219 the file is not a whole .npz file",
            where=str(self.path),
            evidence=str(error) or type(error).__name__,
            remedy="write it again with numpy.savez; a copy that was interrupted leaves such a file",
        )

    def _read(self, columns: Sequence[str], rows: range, size: int) -> Iterator[dict[str, RawColumn]]:
        try:
            with self.path.open("rb") as file, zipfile.ZipFile(file) as archive:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                content = memoryview(mapped)
                arrays = [_rows_of(archive, content, name + _SUFFIX, rows, size) for name in columns]
                for pieces in zip(*arrays, strict=True):
                    # Pages that were read count as memory of this process until they are given back.
                    mapped.madvise(mmap.MADV_DONTNEED)
                    yield {name: RawColumn(piece) for name, piece in zip(columns, pieces, strict=True)}
        except _DAMAGED as error:
            raise self._unreadable(error) from error


def _header(stream: IO[bytes]) -> _Header:
    begin = stream.tell()
    version = np.lib.format.read_magic(stream)
    # Version 3.0 differs from 2.0 only in the encoding of field names, and structured types are refused.
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(stream)
    except _NO_HEADER as error:
        raise ValueError(f"the header of an array cannot be read: {error}") from error
    if min(shape, default=0) < 0:
        raise ValueError(f"the header of an array states the shape {shape}")
    size = stream.tell() - begin
    return _Header(tuple(int(n) for n in shape), bool(fortran) and len(shape) > 1, dtype, size)


def _rows_of(
    archive: zipfile.ZipFile, content: Bytes, member: str, rows: range, size: int
) -> Iterator[Array]:
    """Rows of one array in pieces of at most `size`; `content` is the whole file, mapped."""
    info = archive.getinfo(member)
    with archive.open(info) as stream:
        header = _header(stream)
        pieces: Iterator[Bytes]
        if info.compress_type == zipfile.ZIP_STORED:
            pieces = _stored(content, info, header, rows, size)
        else:
            pieces = _compressed(stream, header, rows, size)
        for data in pieces:
            # A copy, so that nothing of the file is held, and rows can be written to.
            array: Array = np.frombuffer(bytearray(data), dtype=header.dtype)
            yield array.reshape(-1, *header.shape[1:])


def _stored(
    content: Bytes, info: zipfile.ZipInfo, header: _Header, rows: range, size: int
) -> Iterator[Bytes]:
    """Bytes of rows; the checksum is verified where all of them are read."""
    begin = info.header_offset + _LOCAL_HEADER_BYTES
    begin += sum(struct.unpack_from("<HH", content, info.header_offset + _LENGTHS_AT))
    member = content[begin : begin + info.file_size]
    values = member[header.bytes :]
    crc = zlib.crc32(member[: header.bytes])
    for first, stop in _pieces(rows, size):
        data = values[first * header.row_bytes : stop * header.row_bytes]
        if len(data) != (stop - first) * header.row_bytes:
            raise EOFError("an array ends early")
        crc = zlib.crc32(data, crc)
        yield data
    if rows == range(header.shape[0]) and crc != info.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file '{info.filename}'")


def _compressed(stream: IO[bytes], header: _Header, rows: range, size: int) -> Iterator[bytes]:
    """Bytes of rows; what lies before the first of them is read and dropped."""
    before = rows.start * header.row_bytes
    for done in range(0, before, _SKIPPED_AT_ONCE):
        _exactly(stream, min(_SKIPPED_AT_ONCE, before - done))
    for first, stop in _pieces(rows, size):
        yield _exactly(stream, (stop - first) * header.row_bytes)


def _pieces(rows: range, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, rows.stop)) for first in range(rows.start, rows.stop, size))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError("an array ends early")
    return data
