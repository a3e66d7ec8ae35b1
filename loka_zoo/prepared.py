"""A source of built-in data: files, row ranges and the schema."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loka_onnx.data.batch import InputBinding
from loka_onnx.data.dataset import Dataset
from loka_onnx.data.selection import RowRange
from loka_onnx.data.splits import open_dataset
from loka_onnx.errors import ConfigError, DataError, OutputError

SPLITS = ("train", "calibration", "selection", "certification")
DATA_ENVIRONMENT = "LOKA_ONNX_DATA"


@dataclass(frozen=True)
class Part:
    """Rows of a file; `rows` None means all of them."""

    path: Path
    rows: RowRange | None = None


@dataclass(frozen=True)
class PreparedData:
    """A data set for a ranker, divided into train, calibration, selection and certification.

    Attributes:
        categorical: Name and number of ids of each categorical column, in the order of the `ids` input.
        numeric: Numeric columns, in the order of the `dense` input.
        label: Label column, 0 or 1.
        rule: How labels and splits were made, for reports.
        extra: Further columns in the files.
    """

    name: str
    directory: Path
    splits: Mapping[str, Part]
    categorical: tuple[tuple[str, int], ...]
    numeric: tuple[str, ...]
    label: str
    rule: str
    extra: tuple[str, ...] = ()

    @property
    def bindings(self) -> tuple[InputBinding, ...]:
        """Bindings of the inputs that every model of the zoo takes: `dense` and `ids`."""
        return (
            InputBinding("dense", self.numeric, "float32", 2),
            InputBinding(
                "ids",
                tuple(name for name, _ in self.categorical),
                "int64",
                2,
                tuple(range(cardinality) for _, cardinality in self.categorical),
            ),
        )

    def open(self, split: str, columns: tuple[str, ...] | None = None) -> Dataset:
        """Open a split with columns beside the inputs; the label alone by default."""
        if split not in self.splits:
            raise ConfigError(
                f"there is no split '{split}'",
                where=self.name,
                evidence=f"there are {', '.join(self.splits)}",
                remedy="name one of these",
            )
        part = self.splits[split]
        return open_dataset(
            part.path, self.bindings, (self.label,) if columns is None else columns, part.rows
        )


def data_root(root: str | Path | None = None) -> Path:
    """The directory of data that is not shipped: the argument, else `$LOKA_ONNX_DATA` (`DataError`)."""
    given = root if root is not None else os.environ.get(DATA_ENVIRONMENT)
    if given and Path(given).is_dir():
        return Path(given)
    raise DataError(
        "the directory of external data is not there",
        where=f"${DATA_ENVIRONMENT}",
        evidence=f"'{given}' is not a directory" if given else "the variable is not set",
        remedy=f"set {DATA_ENVIRONMENT} to the directory that holds movielens-1m/",
    )


def make_directory(directory: str | Path) -> Path:
    """Create a directory for output; `OutputError` if it cannot be created."""
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            "the directory cannot be created",
            where=str(path),
            evidence=str(error),
            remedy="choose another directory, or free the path",
        ) from error
    return path
