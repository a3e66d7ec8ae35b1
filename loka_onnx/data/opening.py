"""Opening a data file, whatever its format."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from loka_onnx.data.binding import InputBinding
from loka_onnx.data.dataset import Dataset, Layout
from loka_onnx.data.npz import NpzDataset
from loka_onnx.data.parquet import ParquetDataset
from loka_onnx.data.selection import RowSelection
from loka_onnx.errors import DataError


def open_dataset(
    path: str | Path,
    bindings: Sequence[InputBinding],
    columns: Sequence[str] = (),
    rows: RowSelection | None = None,
    nullable: Collection[str] = (),
    keys: Mapping[str, str] | None = None,
) -> Dataset:
    """Opens a Parquet or npz file, told apart by its suffix.

    Args:
        path: The file.
        bindings: How the model inputs are made of its columns.
        columns: Further columns wanted: labels, weights, group, slices.
        rows: Which rows; None for all.
        nullable: Those of `columns` in which a null is a value, handed over as None.
        keys: Where the run file names columns that are no inputs, for messages.

    Returns:
        The data set. Types and names are checked; values are checked as they are read, or by `check`.

    Raises:
        DataError: When the file is missing, unreadable or empty, has another suffix, lacks a column, or
            holds a type that an input cannot take.
        ConfigError: When neither bindings nor columns are given.
    """
    path, layout = Path(path), Layout(tuple(bindings), tuple(columns), frozenset(nullable), dict(keys or {}))
    if path.suffix in (".parquet", ".pq"):
        return ParquetDataset(path, layout, rows)
    if path.suffix == ".npz":
        return NpzDataset(path, layout, rows)
    raise DataError(
        "the format of the data file is not known",
        where=str(path),
        evidence=f"its suffix is '{path.suffix}'",
        remedy="give a .parquet or an .npz file",
    )
