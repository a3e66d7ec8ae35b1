"""Open a data file of any format."""

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
    """Open a Parquet or npz file, by its suffix; see `Layout` and `Dataset` for arguments and errors.

    Types and names are checked now; values as they are read, or by `Dataset.check`.
    """
    path, layout = Path(path), Layout(tuple(bindings), tuple(columns), frozenset(nullable), dict(keys or {}))
    if path.suffix in (".parquet", ".pq"):
        return ParquetDataset(path, layout, rows)
    if path.suffix == ".npz":
        return NpzDataset(path, layout, rows)
    raise DataError(
        "E0220 the format of the data file is not known",
        where=str(path),
        evidence=f"its suffix is '{path.suffix}'",
        remedy="give a .parquet or an .npz file",
    )
