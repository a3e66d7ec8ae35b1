"""Opening a data file of any format, as a whole or as the three disjoint splits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loka_onnx.data.batch import InputBinding
from loka_onnx.data.dataset import Dataset, Layout
from loka_onnx.data.npz import NpzDataset
from loka_onnx.data.parquet import ParquetDataset
from loka_onnx.data.selection import HashRows, RowRange, RowSelection
from loka_onnx.errors import ConfigError, DataError

_WHY = {
    "calibration": "ranges that have seen a split's rows make its accuracy look better than it is",
    "selection": "plans are chosen on selection, so that it cannot also judge the choice",
}


def open_dataset(
    path: str | Path,
    bindings: Sequence[InputBinding],
    columns: Sequence[str] = (),
    rows: RowSelection | None = None,
    nullable: Collection[str] = (),
    keys: Mapping[str, str] | None = None,
) -> Dataset:
    """Open a Parquet or npz file, by its suffix, and check names and types; see `Layout` and `Dataset`."""
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


@dataclass(frozen=True)
class Splits:
    """The three splits, opened and known to be disjoint."""

    calibration: Dataset
    selection: Dataset
    certification: Dataset

    def __post_init__(self) -> None:
        ensure_disjoint(self.calibration, self.selection, self.certification)


@dataclass(frozen=True)
class SplitRule:
    """Division of one file into the three splits, by positive fractions of the rows that sum to at most 1.

    Without `column` contiguous rows in file order, which suits rows in order of time; else by fractions of
    the keys, the rows whose key hashes into an interval, so that the rows of one group stay together; `seed`
    chooses the hash.
    """

    calibration: float = 0.2
    selection: float = 0.3
    certification: float = 0.5
    column: str | None = None
    seed: int = 0

    def selections(self, rows: int) -> tuple[RowSelection, ...]:
        """Return the rows of the three splits; `ConfigError` if a split would hold no row."""
        edges = (0.0, *itertools.accumulate((self.calibration, self.selection, self.certification)))
        if self.column is not None:
            column, ends = self.column, [min(edge, 1.0) for edge in edges]
            return tuple(HashRows(column, low, high, self.seed) for low, high in itertools.pairwise(ends))
        # The small term keeps 0.2 + 0.3 + 0.5 of 10 rows from losing a row to rounding.
        bounds = [min(math.floor(edge * rows + 1e-6), rows) for edge in edges]
        if any(low == high for low, high in itertools.pairwise(bounds)):
            raise ConfigError(
                "E0230 a split would hold no row",
                evidence=f"row bounds {bounds} of {rows} rows",
                remedy="give a file with more rows, or larger fractions",
            )
        return tuple(RowRange(low, high) for low, high in itertools.pairwise(bounds))


def split_file(
    path: str | Path,
    rule: SplitRule,
    bindings: Sequence[InputBinding],
    columns: Sequence[str] = (),
    nullable: Collection[str] = (),
    keys: Mapping[str, str] | None = None,
) -> Splits:
    """Open the three splits of one file; arguments and errors as of `open_dataset` and `SplitRule`."""
    whole = open_dataset(path, bindings, columns, None, nullable, keys)
    calibration, selection, certification = (
        open_dataset(path, bindings, columns, rows, nullable, keys)
        for rows in rule.selections(whole.file_rows)
    )
    return Splits(calibration, selection, certification)


def ensure_disjoint(calibration: Dataset, selection: Dataset, certification: Dataset) -> None:
    """Refuse splits that share rows (`ConfigError`). Files are compared by content, copies and links too."""
    named = {"calibration": calibration, "selection": selection, "certification": certification}
    for (first, a), (second, b) in itertools.combinations(named.items(), 2):
        if a.file_digest != b.file_digest or not _may_overlap(a, b):
            continue
        same = a.selection == b.selection
        what = "are the same file" if same and a.selection == RowRange() else "share rows of the same file"
        raise ConfigError(
            f"E0231 {first} and {second} {what}; certification is looked at once, and {_WHY[first]}",
            where="data",
            evidence=f"{first} is '{a.name}', {second} is '{b.name}', content sha256 {a.file_digest[:12]}…",
            remedy="give three files, or one file with a split rule",
        )


def _may_overlap(a: Dataset, b: Dataset) -> bool:
    first, second = a.selection, b.selection
    if isinstance(first, RowRange) and isinstance(second, RowRange):
        first_stop = a.file_rows if first.stop is None else first.stop
        second_stop = b.file_rows if second.stop is None else second.stop
        return first.start < second_stop and second.start < first_stop
    if (
        isinstance(first, HashRows)
        and isinstance(second, HashRows)
        and (first.column, first.seed) == (second.column, second.seed)
    ):
        return first.low < second.high and second.low < first.high
    # Different rules over one file: nothing short of reading it proves the rows distinct.
    return True
