"""Parquet files as data sets, read a few row groups' pages at a time."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from loka_onnx.data.batch import Array
from loka_onnx.data.checks import RawColumn
from loka_onnx.data.dataset import ColumnInfo, Dataset
from loka_onnx.errors import DataError, line_of

# Bytes read ahead for each column; without a limit pyarrow holds the column chunks of a whole row group.
_READ_AHEAD = 1 << 20
ROW_GROUP_ROWS = 65_536
"""Rows of a group that is written: a span of rows is read without decoding many others."""
_OF_THE_HOST = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors of the host, not of the file."""


def write_table(rows: object, path: Path) -> Path:
    """Write rows in memory to a Parquet file, atomically.

    `rows` are a dict of arrays, (rows,) or (rows, width) each; or a table of pandas, polars or pyarrow, or of
    any library with Arrow's protocols. Raises DataError for others, or values that Arrow does not take.
    """
    with DataError(
        "E0232 the rows are no table",
        where=f"{type(rows).__module__}.{type(rows).__name__}",
        remedy="give a dict of arrays of one length, a table of pandas, polars or pyarrow, or a file",
    ).in_place_of(pa.ArrowException, TypeError, ValueError, words=line_of):
        table = _table(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        pq.write_table(table, partial, row_group_size=ROW_GROUP_ROWS, write_page_checksum=True)
        return partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _table(rows: Any) -> pa.Table:
    if isinstance(rows, Mapping):
        return pa.table({str(name): _arrow(np.asarray(values)) for name, values in rows.items()})
    if hasattr(rows, "to_arrow"):
        rows = rows.to_arrow()
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.table(rows)
    if hasattr(rows, "__dataframe__"):
        from pyarrow.interchange import from_dataframe

        return from_dataframe(rows)
    raise TypeError("it has none of Arrow's protocols")


def _arrow(values: Array) -> pa.Array:
    """Return an array of a column; rows of a second axis are lists of one length."""
    if values.ndim == 2 and values.shape[1]:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    return pa.array(values)


class ParquetDataset(Dataset):
    """Some rows of a Parquet file."""

    def _describe(self) -> tuple[int, Mapping[str, ColumnInfo]]:
        with self._open() as file:
            schema: Any = file.schema_arrow
            twice = [name for name, count in Counter(schema.names).items() if count > 1]
            if twice:
                raise DataError(
                    f"E0221 {len(twice)} columns of the file have the name of another",
                    where=str(self.path),
                    evidence=f"'{twice[0]}' stands {schema.names.count(twice[0])} times",
                    remedy="write the file again with a name for each column",
                )
            return int(file.metadata.num_rows), {field.name: _info(field.type) for field in schema}

    def _open(self) -> Any:
        try:
            # Pre-buffering would hold a whole row group; checksums are verified where the writer left them.
            return pq.ParquetFile(
                self.path, buffer_size=_READ_AHEAD, pre_buffer=False, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> DataError:
        # Arrow's own errors of memory and threads are of the types that it has for a broken file.
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in _OF_THE_HOST:
            raise error
        if "Resource temporarily unavailable" in str(error):
            raise OSError(errno.EAGAIN, str(error)) from error
        return DataError(
            "E0222 the file is not a whole Parquet file",
            where=str(self.path),
            evidence=str(error).splitlines()[0] if str(error) else type(error).__name__,
            remedy="write it again; a copy that was interrupted leaves such a file",
        )

    def _read(self, columns: Sequence[str], rows: range, size: int) -> Iterator[dict[str, RawColumn]]:
        with self._open() as file:
            groups, skip = _groups(file.metadata, rows)
            left = len(rows)
            batches = file.iter_batches(batch_size=size, row_groups=groups, columns=list(columns))
            while left > 0:
                try:
                    record = next(batches)
                except (pa.ArrowException, OSError) as error:
                    raise self._unreadable(error) from error
                except StopIteration:
                    raise self._unreadable(EOFError(f"{left} rows are missing")) from None
                if skip >= record.num_rows:
                    skip -= record.num_rows
                    continue
                record = record.slice(skip, left)
                skip, left = 0, left - record.num_rows
                yield {name: self._raw(name, record.column(name)) for name in columns}

    def _raw(self, name: str, column: Any) -> RawColumn:
        if _is_list(column.type):
            if column.null_count:
                return RawColumn(np.zeros(len(column)), np.asarray(column.is_null()))
            lengths = np.asarray(pc.list_value_length(column))
            if lengths.size and (lengths != lengths[0]).any():
                raise DataError(
                    f"E0223 column '{name}' of '{self.path.name}' holds lists of different lengths",
                    evidence=f"lengths {lengths.min()} to {lengths.max()} within {lengths.size} rows",
                    remedy="pad or cut the lists to one length when the data are prepared",
                )
            if not lengths.all():
                raise DataError(
                    f"E0224 column '{name}' of '{self.path.name}' holds empty lists",
                    evidence=f"all {lengths.size} that were read are empty",
                    remedy="write at least one value in each row, or do not bind the column",
                )
            rows, width, column = len(column), int(lengths[0]), column.flatten()
            values, nulls = _to_numpy(column)
            shaped = None if nulls is None else np.asarray(nulls.reshape(rows, width).any(axis=1))
            return RawColumn(values.reshape(rows, width), shaped)
        values, nulls = _to_numpy(column)
        return RawColumn(values, nulls)


def _groups(metadata: Any, rows: range) -> tuple[list[int], int]:
    """Return row groups that hold the rows, and the number of earlier rows in the first of these."""
    groups, skip, first = list[int](), 0, 0
    for group in range(metadata.num_row_groups):
        stop = first + metadata.row_group(group).num_rows
        if first < rows.stop and rows.start < stop:
            skip = skip if groups else rows.start - first
            groups.append(group)
        first = stop
    return groups, skip


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _info(kind: Any) -> ColumnInfo:
    stored = str(kind)
    width: int | None = 0
    if _is_list(kind):
        width = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        # Of width 0 there is nothing to read.
        kind = pa.null() if width == 0 else kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return ColumnInfo("U", stored, width)
    if pa.types.is_decimal(kind):
        return ColumnInfo("f", stored, width)
    try:
        code = np.dtype(kind.to_pandas_dtype()).kind
    except (NotImplementedError, TypeError):
        code = "?"
    return ColumnInfo(code, stored, width)


def _to_numpy(column: Any) -> tuple[Array, Array | None]:
    """Return values and the mask of nulls; null strings become empty strings."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        nulls = np.asarray(column.is_null()) if column.null_count else None
        return np.asarray(column.fill_null("").to_numpy(zero_copy_only=False), dtype=np.str_), nulls
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    if not column.null_count:
        return column.to_numpy(zero_copy_only=False), None
    nulls = np.asarray(column.is_null())
    if pa.types.is_temporal(kind):
        return column.to_numpy(zero_copy_only=False), nulls
    return column.fill_null(False if pa.types.is_boolean(kind) else 0).to_numpy(zero_copy_only=False), nulls
