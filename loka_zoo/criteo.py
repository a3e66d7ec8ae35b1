"""The Criteo display-advertising text format, streamed to Parquet.

A line is a label, 13 integers and 26 categorical values of hexadecimal digits, separated by tabs; a value
may be blank (Kaggle Display Advertising Challenge; the Terabyte logs share the format).

Integers become log(1 + max(x, 0)) as in the DLRM reference implementation (arXiv 1906.00091); a blank
becomes 0, as there. Categorical values are hashed into tables of one size; a blank has id 0 of its own.
"""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from loka_onnx.data.batch import Array
from loka_onnx.data.selection import RowRange, stable_hash
from loka_onnx.errors import ConfigError, DataError
from loka_zoo.prepared import Part, PreparedData, make_directory

NUMERIC = tuple(f"i{n}" for n in range(1, 14))
CATEGORICAL = tuple(f"c{n}" for n in range(1, 27))
LABEL = "label"
_FIELDS = 1 + len(NUMERIC) + len(CATEGORICAL)
# Train, calibration, selection, certification, in file order, which is the order of time.
_FRACTIONS = {"train": 0.70, "calibration": 0.05, "selection": 0.10, "certification": 0.15}
# The smallest fraction is then two rows, so that rounding empties no split.
_FEWEST_ROWS = 40


@dataclass(frozen=True)
class CriteoOptions:
    """Encoding of the text: rows of every embedding table, blank included, and lines held in memory
    at once.
    """

    table_size: int = 100_000
    chunk_rows: int = 50_000

    def __post_init__(self) -> None:
        if self.table_size < 2 or self.chunk_rows < 1:
            raise ConfigError(
                "Criteo options are out of range",
                evidence=f"table_size {self.table_size}, chunk_rows {self.chunk_rows}",
                remedy="use a table size of at least 2 and chunks of at least 1 row",
            )


def prepare_criteo(
    source: str | Path, directory: str | Path, options: CriteoOptions | None = None
) -> PreparedData:
    """Encode a text file, plain or .gz, as `<directory>/criteo.parquet`, whole or not at all.

    The four splits are contiguous ranges in file order: 70 : 5 : 10 : 15. A malformed line raises `DataError`
    with its number.
    """
    options, source = options or CriteoOptions(), Path(source)
    target = make_directory(directory) / "criteo.parquet"
    temporary = target.with_name(f".{target.name}.partial")
    rows = 0
    try:
        with (
            _open(source) as stream,
            pq.ParquetWriter(temporary, _schema(), write_page_checksum=True) as writer,
        ):
            for labels, numbers, ids in _chunks(stream, source, options):
                arrays: list[Array] = [labels, *np.ascontiguousarray(numbers.T), *np.ascontiguousarray(ids.T)]
                writer.write_table(pa.Table.from_arrays([pa.array(a) for a in arrays], schema=_schema()))
                rows += labels.size
        _require(source, rows)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    edges = [0, *(round(end * rows) for end in np.cumsum(list(_FRACTIONS.values())))]
    splits = {
        name: Part(target, RowRange(low, high))
        for name, (low, high) in zip(_FRACTIONS, itertools.pairwise(edges), strict=True)
    }
    rule = (
        "label: click. Integers as log(1 + max(x, 0)), blank as 0; categorical values hashed to "
        f"1..{options.table_size - 1}, blank as 0. Contiguous in file order: {_FRACTIONS}"
    )
    categorical = tuple((name, options.table_size) for name in CATEGORICAL)
    return PreparedData("criteo", target.parent, splits, categorical, NUMERIC, LABEL, rule)


def _require(source: Path, rows: int) -> None:
    if rows < _FEWEST_ROWS:
        raise DataError(
            "the file is too short to be divided into four splits",
            where=str(source),
            evidence=f"it holds {rows} rows",
            remedy=f"give a file with at least {_FEWEST_ROWS} rows",
        )


def _schema() -> pa.Schema:
    fields = [(LABEL, pa.int8())]
    fields += [(name, pa.float32()) for name in NUMERIC] + [(name, pa.int64()) for name in CATEGORICAL]
    return pa.schema(fields)


def _open(source: Path) -> BinaryIO:
    if not source.is_file():
        raise DataError(
            "the Criteo file does not exist",
            where=str(source),
            evidence=f"looked in {source.parent.absolute()}",
            remedy="correct the path",
        )
    if source.suffix == ".gz":
        return cast(BinaryIO, gzip.open(source, "rb"))
    return source.open("rb")


def _chunks(stream: BinaryIO, source: Path, options: CriteoOptions) -> Iterator[tuple[Array, Array, Array]]:
    """Labels (rows,) int8, numbers (rows, 13) float32 and ids (rows, 26) int64, chunk by chunk."""
    labels: list[int] = []
    numbers: list[list[float]] = []
    codes: list[list[int]] = []
    for number, line in enumerate(stream, start=1):
        fields = line.rstrip(b"\r\n").split(b"\t")
        try:
            if len(fields) != _FIELDS:
                raise ValueError(f"{len(fields)} fields instead of {_FIELDS}")
            label = int(fields[0])
            if label not in (0, 1):
                raise ValueError(f"label {label} is neither 0 nor 1")
            integers = [float(int(field or b"0")) for field in fields[1:14]]
            # -1 marks a blank: hexadecimal text of up to 15 digits is never negative as an int64.
            hexes = [int(field, 16) % (1 << 60) if field else -1 for field in fields[14:]]
        except ValueError as error:
            raise DataError(
                f"line {number} of '{source.name}' is not a line of the Criteo format",
                evidence=str(error),
                remedy="a line is a label, 13 integers and 26 hexadecimal values, separated by tabs",
            ) from None
        labels.append(label)
        numbers.append(integers)
        codes.append(hexes)
        if len(labels) == options.chunk_rows:
            yield _encode(labels, numbers, codes, options)
            labels, numbers, codes = [], [], []
    if labels:
        yield _encode(labels, numbers, codes, options)


def _encode(
    labels: list[int], numbers: list[list[float]], codes: list[list[int]], options: CriteoOptions
) -> tuple[Array, Array, Array]:
    code = np.array(codes, dtype=np.int64)
    ids = np.empty_like(code)
    for column in range(code.shape[1]):
        # Seeded by column: a value that occurs in two columns does not collide with the same ids in both.
        hashed = stable_hash(code[:, column], seed=column) % np.uint64(options.table_size - 1)
        ids[:, column] = np.where(code[:, column] < 0, 0, hashed.astype(np.int64) + 1)
    dense = np.log1p(np.maximum(np.array(numbers), 0.0)).astype(np.float32)
    return np.array(labels, dtype=np.int8), dense, ids
