"""NumPy .npz files as data sets, streamed member by member."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

import numpy as np

from loka_onnx.data.batch import Array
from loka_onnx.data.binding import InputBinding
from loka_onnx.data.checks import RawColumn
from loka_onnx.data.dataset import ColumnInfo, Dataset
from loka_onnx.errors import DataError

_SUFFIX = ".npy"
_SKIPPED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class _Header:
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[np.generic]


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
        except (zipfile.BadZipFile, ValueError, OSError, EOFError, zlib.error) as error:
            raise self._unreadable(error) from error
        lengths = {name: header.shape[0] if header.shape else 0 for name, header in headers.items()}
        if len(set(lengths.values())) > 1:
            short, long = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
            raise DataError(
                "the arrays of the file differ in their number of rows",
                where=str(self.path),
                evidence=f"'{short}' has {lengths[short]}, '{long}' has {lengths[long]}",
                remedy="save arrays whose first axis counts the rows",
            )
        for name, header in headers.items():
            if header.fortran or len(header.shape) > 2:
                raise DataError(
                    f"array '{name}' cannot be streamed by rows",
                    where=str(self.path),
                    evidence=f"shape {header.shape}, {'Fortran' if header.fortran else 'C'} order",
                    remedy="save it as (rows,) or (rows, width) through np.ascontiguousarray",
                )
        infos = {
            name: ColumnInfo(
                header.dtype.kind, str(header.dtype), header.shape[1] if len(header.shape) == 2 else 0
            )
            for name, header in headers.items()
        }
        return next(iter(lengths.values()), 0), infos

    def _sources(self, binding: InputBinding) -> tuple[str, ...]:
        return (binding.input,) if binding.input in self._known else binding.columns

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(
            "the file is not a whole .npz file",
            where=str(self.path),
            evidence=str(error) or type(error).__name__,
            remedy="write it again with numpy.savez; a copy that was interrupted leaves such a file",
        )

    def _read(self, columns: Sequence[str], rows: range, size: int) -> Iterator[dict[str, RawColumn]]:
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(self.path))
            streams = {name: stack.enter_context(archive.open(name + _SUFFIX)) for name in columns}
            try:
                headers = {name: _header(stream) for name, stream in streams.items()}
                for name, stream in streams.items():
                    _skip(stream, rows.start * _row_bytes(headers[name]))
                for first in range(rows.start, rows.stop, size):
                    count = min(size, rows.stop - first)
                    arrays = {name: _take(stream, headers[name], count) for name, stream in streams.items()}
                    yield {name: RawColumn(array) for name, array in arrays.items()}
            except (zipfile.BadZipFile, ValueError, OSError, EOFError, zlib.error) as error:
                raise self._unreadable(error) from error


def _header(stream: IO[bytes]) -> _Header:
    version = np.lib.format.read_magic(stream)
    # Version 3.0 differs from 2.0 only in the encoding of field names, and structured types are refused.
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    return _Header(tuple(int(n) for n in shape), bool(fortran) and len(shape) > 1, dtype)


def _row_bytes(header: _Header) -> int:
    return header.dtype.itemsize * math.prod(header.shape[1:])


def _skip(stream: IO[bytes], size: int) -> None:
    """Move on by that many bytes; a zip member reads what it skips, up to 16 MiB at once if it is let."""
    for done in range(0, size, _SKIPPED_AT_ONCE):
        stream.seek(min(_SKIPPED_AT_ONCE, size - done), 1)


def _take(stream: IO[bytes], header: _Header, rows: int) -> Array:
    data = stream.read(rows * _row_bytes(header))
    if len(data) != rows * _row_bytes(header):
        raise EOFError("an array ends early")
    values: Array = np.frombuffer(bytearray(data), dtype=header.dtype).reshape(rows, *header.shape[1:])
    return values
