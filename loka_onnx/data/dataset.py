"""A data set: rows of a file, read in batches, repeatedly, without holding all of them."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loka_onnx.data.batch import Array, Batch, InputBinding
from loka_onnx.data.checks import ColumnRule, RawColumn, RowFault, find_fault
from loka_onnx.data.selection import HashRows, RowRange, RowSelection
from loka_onnx.errors import Collected, ConfigError, DataError

# Least rows per read: enough to make per-chunk work vanish.
_CHUNK_ROWS = 8192
_KEPT_BYTES = 128 << 20
"""Rows selected by a hash are kept in memory up to here: finding them again reads the whole file."""
_IF_NO_GROUP = "give every row its group, or take each that has none as its own: `data.null_groups: ungroup`"
_KIND_NAMES = {
    "U": "strings",
    "S": "byte strings",
    "O": "Python objects",
    "M": "timestamps",
    "m": "durations",
    "?": "values of a type that cannot be read",
}


@dataclass(frozen=True)
class Layout:
    """Content to read from a file; `columns` (labels, weights, group, slices) are returned as stored.

    In `nullable` columns (slices) a null is a value, returned as None. `keys` are run-file keys of columns
    that are no input, for messages (``outputs[0].label``).
    """

    bindings: tuple[InputBinding, ...]
    columns: tuple[str, ...] = ()
    nullable: frozenset[str] = frozenset()
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ColumnInfo:
    """Metadata of a column; `kind` is NumPy's character of the stored type, "?" if it cannot be read.

    `width` is the number of values in a row of lists, None if the file does not state it; 0 for a scalar
    column.
    """

    kind: str
    stored: str
    width: int | None = 0


@dataclass(frozen=True)
class _Chunk:
    """Rows as stored: columns by name, and the file index of each row, (rows,)."""

    columns: Mapping[str, RawColumn]
    file_rows: Array

    @property
    def bytes(self) -> int:
        """Bytes of its values; of strings and lists their pointers."""
        return sum(raw.values.nbytes for raw in self.columns.values())

    def take(self, rows: slice | Array) -> _Chunk:
        """Some of its rows."""
        columns = {
            name: RawColumn(raw.values[rows], None if raw.nulls is None else raw.nulls[rows])
            for name, raw in self.columns.items()
        }
        return _Chunk(columns, self.file_rows[rows])


class Dataset(ABC):
    """Some rows of a file, in file order; all rows without a `selection`.

    The base owns selection, checks, conversion and re-batching; a format implements `_describe` and `_read`.
    Raises DataError if the file is missing, unreadable or empty, lacks a column, or has one of a type that
    the input cannot take; ConfigError if there is nothing to read.
    """

    def __init__(self, path: Path, layout: Layout, selection: RowSelection | None = None) -> None:
        if not path.is_file():
            raise DataError(
                "E0206 the data file does not exist",
                where=str(path),
                evidence="it is a directory" if path.is_dir() else f"looked in {path.absolute().parent}",
                remedy="correct the path, or create the file",
            )
        self.path, self.layout = path, layout
        self.selection: RowSelection = RowRange() if selection is None else selection
        self.file_rows, self._known = self._describe()
        if self.file_rows == 0:
            raise DataError(
                "E0207 the data file holds no rows",
                where=str(path),
                evidence="its row count is 0",
                remedy="point at a file with rows",
            )
        self._rules = self._plan()
        self._start, self._stop = self._resolve()
        # Rows of the file, and the number of selected rows before each.
        self._marks: list[tuple[int, int]] = []
        self._kept: tuple[_Chunk, ...] = ()
        self.rows = self._count()

    @property
    def name(self) -> str:
        """File name and, unless it is the whole file, the selection."""
        return self.path.name if self.selection == RowRange() else f"{self.path.name} {self.selection.id}"

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256, as hex, of the rows and of the columns of each model input, on which results depend."""
        columns = {binding.input: binding.columns for binding in self.layout.bindings}
        text = f"{self.rows_digest}:{json.dumps(columns, sort_keys=True)}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def rows_digest(self) -> str:
        """SHA-256, as hex, of the content of the file and of the selection."""
        text = f"{self.file_digest}:{self.selection.id}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def file_digest(self) -> str:
        """SHA-256, as hex, of the content of the whole file."""
        stat = self.path.stat()
        return _file_digest(os.path.realpath(self.path), stat.st_size, stat.st_mtime_ns)

    def batches(self, size: int, *, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Read rows [start, stop) in order, `size` in each batch but the last; every call starts anew.

        Memory is bounded by the batch size and, for rows selected by a hash, 128 MiB. Raises ConfigError for
        a `size` below 1 or rows outside the data set; DataError if a value breaks the rules of its column, or
        the file breaks off.
        """
        end = self.rows if stop is None else stop
        if size < 1 or not 0 <= start <= end <= self.rows:
            raise ConfigError(
                "E0208 batches need a size of at least 1 and rows inside the data set",
                where=self.name,
                evidence=f"size {size}, rows {start} to {end} of {self.rows}",
                remedy="correct the batch size or the row range",
            )
        return self._batches(size, start, end)

    def check(self, most: int | None = None) -> None:
        """Read every row, or `most` of them, and raise the first fault of each column, counted over these."""
        rows, faults = self.rows if most is None else min(most, self.rows), dict[str, RowFault]()
        for chunk in self._chunks(0, rows, 8 * _CHUNK_ROWS):
            for name, rule in self._rules.items():
                fault = find_fault(rule, chunk.columns[name], chunk.file_rows)
                if name in faults:
                    faults[name] = faults[name].plus(fault)
                elif fault is not None:
                    faults[name] = fault
        wrong = Collected()
        for fault in faults.values():
            with wrong.check():
                raise fault.error(self.path.name, rows)
        wrong.raise_any()

    def widths(self) -> dict[str, int]:
        """Values in a row, by input of rank 2, where all rows have as many; unstated lengths are read."""
        widths = {}
        for binding in self.layout.bindings:
            sources = self._sources(binding)
            stated = self._known[sources[0]].width
            seen = {len(sources) if stated == 0 else stated}
            if stated is None:
                try:
                    pieces = self._read(sources, range(self.file_rows), 8 * _CHUNK_ROWS)
                    seen = {raw.values.shape[1] for piece in pieces for raw in piece.values()}
                except (DataError, IndexError):
                    # Lists of several lengths, empty ones, or nulls.
                    continue
            if binding.rank == 2 and len(seen) == 1 and (width := seen.pop()):
                widths[binding.input] = width
        return widths

    @abstractmethod
    def _describe(self) -> tuple[int, Mapping[str, ColumnInfo]]:
        """Return the rows of the file, and its columns, without reading rows."""

    @abstractmethod
    def _read(self, columns: Sequence[str], rows: range, size: int) -> Iterator[dict[str, RawColumn]]:
        """Read file rows in order, in pieces of at most `size` rows."""

    def _sources(self, binding: InputBinding) -> tuple[str, ...]:
        """Return the columns of the file for an input."""
        return binding.columns

    def _plan(self) -> dict[str, ColumnRule]:
        """Return the rule of each column that is read; checks names and types."""
        nullable = self.layout.nullable
        rules, wrong = dict[str, ColumnRule](), Collected()
        for name in self.layout.columns:
            key = self.layout.keys.get(name, "data.slices")
            if_null = _IF_NO_GROUP if key == "data.group" else ""
            with wrong.check():
                rules[name] = self._typed(ColumnRule(name, nullable=name in nullable, if_null=if_null))
                if name in nullable and self._known[name].width != 0:
                    raise DataError(
                        f"E0212 column '{name}' of '{self.path.name}' holds lists, where one value a row is "
                        "wanted",
                        evidence=f"its stored type is {self._known[name].stored}",
                        remedy=f"name a column of numbers, strings or timestamps under `{key}`",
                    )
        for binding in self.layout.bindings:
            sources = self._sources(binding)
            for position, name in enumerate(sources):
                ids = binding.ids or (None,) * len(binding.columns)
                own = ids if len(sources) == 1 else ids[position : position + 1]
                with wrong.check():
                    rules[name] = self._typed(ColumnRule(name, binding.dtype, own))
                    self._fits(binding, name, len(sources))
        if isinstance(self.selection, HashRows):
            with wrong.check():
                self._typed(ColumnRule(self.selection.column))
        wrong.raise_any()
        if not rules:
            raise ConfigError(
                "E0209 nothing is read from the data file",
                where=str(self.path),
                evidence="no input is bound to it and no column is named",
                remedy="bind the model's inputs, or name columns",
            )
        return rules

    def _typed(self, rule: ColumnRule) -> ColumnRule:
        info = self._known.get(rule.column)
        where = f"column '{rule.column}' of '{self.path.name}'"
        if info is None:
            raise self._missing(rule, where)
        kind_name = _KIND_NAMES.get(info.kind)
        if info.kind in "O?" or (rule.dtype is not None and kind_name is not None):
            wanted = f"the model takes {rule.dtype}" if rule.dtype else "a number or a string is wanted"
            raise DataError(
                f"E0210 {where} holds {kind_name}, where {wanted}",
                evidence=f"its stored type is {info.stored}",
                remedy="encode it as numbers when the data are prepared, or bind another column",
            )
        return rule

    def _missing(self, rule: ColumnRule, where: str) -> DataError:
        near = difflib.get_close_matches(rule.column, self._known)
        near = near or difflib.get_close_matches(rule.column, self._known, n=1, cutoff=0.0)
        names = ", ".join(f"'{name}'" for name in near)
        count = f"the nearest of its {len(self._known)} columns {'are' if len(near) > 1 else 'is'}"
        key = self.layout.keys.get(rule.column)
        remedy = "correct the name"
        if rule.dtype is not None:
            remedy = "correct the name, or map the model input to existing columns under `inputs:`"
        elif key is not None:
            remedy = f"name an existing column in `{key}`"
        evidence = f"{count} {names}" if near else "the file has no columns"
        return DataError(f"E0211 {where} does not exist", evidence=evidence, remedy=remedy)

    def _fits(self, binding: InputBinding, name: str, sources: int) -> None:
        """Check that a column can be one of the sources of an input, by its width."""
        width = self._known[name].width
        where = f"column '{name}' of '{self.path.name}'"
        if width != 0 and (sources > 1 or binding.rank == 1):
            raise DataError(
                f"E0213 {where} holds lists, where input '{binding.input}' takes one number a row",
                evidence=f"its stored type is {self._known[name].stored}, {width or 'several'} values a row",
                remedy="bind the list column alone to an input of rank 2",
            )
        if sources < len(binding.columns) != width:
            raise DataError(
                f"E0214 {where} does not fit the binding of input '{binding.input}'",
                evidence=f"a row holds {width or 1} values, and {len(binding.columns)} columns are bound",
                remedy="bind as many columns as the array is wide",
            )

    def _resolve(self) -> tuple[int, int]:
        """Return the file rows [start, stop) to read."""
        if isinstance(self.selection, HashRows):
            return 0, self.file_rows
        stop = self.file_rows if self.selection.stop is None else self.selection.stop
        if not self.selection.start < stop <= self.file_rows:
            raise DataError(
                "E0215 the row range is not inside the file",
                where=str(self.path),
                evidence=f"{self.selection.id}, and the file has {self.file_rows} rows",
                remedy="correct the row range",
            )
        return self.selection.start, stop

    def _count(self) -> int:
        if not isinstance(self.selection, HashRows):
            return self._stop - self._start
        column, rows, file_row = self.selection.column, 0, self._start
        for piece in self._read((column,), range(self._start, self._stop), 8 * _CHUNK_ROWS):
            self._marks.append((file_row, rows))
            rows += int(self.selection.mask(piece[column].values).sum())
            file_row += _rows(piece)
        if rows == 0:
            raise DataError(
                "E0216 no row was selected",
                where=str(self.path),
                evidence=f"{self.selection.id} selects none of {self.file_rows} rows",
                remedy="split by a column with more distinct values, or give the split a larger fraction",
            )
        return rows

    def _chunks(self, start: int, stop: int, size: int) -> Iterator[_Chunk]:
        """Yield rows [start, stop) of the data set as stored."""
        if isinstance(self.selection, HashRows):
            yield from self._found(self.selection, start, stop, size)
            return
        row = self._start + start
        for piece in self._read(tuple(self._rules), range(row, self._start + stop), size):
            rows = _rows(piece)
            yield _Chunk(piece, np.arange(row, row + rows))
            row += rows

    def _found(self, selection: HashRows, start: int, stop: int, size: int) -> Iterator[_Chunk]:
        if self._kept:
            first = 0
            for chunk in self._kept:
                part = chunk.take(slice(max(start - first, 0), max(stop - first, 0)))
                if part.file_rows.size:
                    yield part
                first += chunk.file_rows.size
            return
        kept, held = list[_Chunk](), 0
        for chunk in self._filtered(selection, start, stop, size):
            held += chunk.bytes
            if held <= _KEPT_BYTES:
                # Views are returned.
                for raw in chunk.columns.values():
                    raw.values.flags.writeable = False
                kept.append(chunk)
            yield chunk
        if stop - start == self.rows and held <= _KEPT_BYTES:
            self._kept = tuple(kept)

    def _filtered(self, selection: HashRows, start: int, stop: int, size: int) -> Iterator[_Chunk]:
        names = tuple(dict.fromkeys((*self._rules, selection.column)))
        # Rows before the last mark up to `start` can be skipped.
        row, taken = self._marks[bisect_right(self._marks, start, key=lambda mark: mark[1]) - 1]
        for piece in self._read(names, range(row, self.file_rows), size):
            indices = np.flatnonzero(selection.mask(piece[selection.column].values))
            keep = indices[max(start - taken, 0) : max(stop - taken, 0)]
            if keep.size:
                yield _Chunk(piece, np.arange(row, row + _rows(piece))).take(keep)
            row += _rows(piece)
            taken += indices.size
            if taken >= stop:
                return

    def _first_fault(self, chunk: _Chunk) -> RowFault | None:
        for name, rule in self._rules.items():
            fault = find_fault(rule, chunk.columns[name], chunk.file_rows)
            if fault is not None:
                return fault
        return None

    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        row, waiting, held = start, list[Batch](), 0
        for chunk in self._chunks(start, stop, size * max(1, _CHUNK_ROWS // size)):
            fault = self._first_fault(chunk)
            if fault is not None:
                raise fault.error(self.path.name, chunk.file_rows.size)
            waiting.append(self._convert(chunk))
            held += chunk.file_rows.size
            if held < size:
                continue
            whole = _joined(waiting)
            for offset in range(0, held - held % size, size):
                yield _part(whole, offset, offset + size, row)
                row += size
            rest = held % size
            waiting = [_part(whole, held - rest, held, 0)] if rest else []
            held = rest
        if held:
            yield _part(_joined(waiting), 0, held, row)

    def _convert(self, chunk: _Chunk) -> Batch:
        inputs = {binding.input: self._input(binding, chunk) for binding in self.layout.bindings}
        nullable = self.layout.nullable
        columns = {
            name: _with_none(chunk.columns[name]) if name in nullable else chunk.columns[name].values
            for name in self.layout.columns
        }
        return Batch(inputs, columns, 0)

    def _input(self, binding: InputBinding, chunk: _Chunk) -> Array:
        stored = [chunk.columns[name].values for name in self._sources(binding)]
        if binding.rank == 1 or stored[0].ndim == 2:
            return np.ascontiguousarray(stored[0], dtype=binding.dtype)
        stacked: Array = np.empty((chunk.file_rows.size, len(stored)), dtype=binding.dtype)
        for position, values in enumerate(stored):
            stacked[:, position] = values
        return stacked


@functools.lru_cache(maxsize=256)
def _file_digest(path: str, size: int, mtime_ns: int) -> str:
    """Return a file's digest; size and time in the key make a rewritten file hashed again."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _rows(piece: Mapping[str, RawColumn]) -> int:
    return int(next(iter(piece.values())).values.shape[0])


def _with_none(raw: RawColumn) -> Array:
    """Return (rows,) as stored, or as Python objects with None for nulls."""
    if raw.nulls is None or not raw.nulls.any() or raw.values.dtype.kind in "mM":
        return raw.values
    values = raw.values.astype(object)
    values[raw.nulls] = None
    return values


def _joined(batches: Sequence[Batch]) -> Batch:
    first = batches[0]
    if len(batches) == 1:
        return first
    return Batch(
        {name: np.concatenate([b.inputs[name] for b in batches]) for name in first.inputs},
        {name: np.concatenate([b.columns[name] for b in batches]) for name in first.columns},
        first.first_row,
    )


def _part(batch: Batch, start: int, stop: int, first_row: int) -> Batch:
    return Batch(
        {name: array[start:stop] for name, array in batch.inputs.items()},
        {name: array[start:stop] for name, array in batch.columns.items()},
        first_row,
    )
