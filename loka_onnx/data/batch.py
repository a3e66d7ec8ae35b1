"""A batch of rows, and the binding of columns of a file to inputs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.errors import ConfigError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of a data set, from its row `first_row`.

    Attributes:
        inputs: Exactly the model inputs by name; each (rows,) or (rows, width), C-contiguous.
        columns: Labels, weights, group and slices by column name; each (rows,) as stored.
    """

    inputs: Mapping[str, Array]
    columns: Mapping[str, Array]
    first_row: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return next((len(array) for array in (*self.inputs.values(), *self.columns.values())), 0)


@dataclass(frozen=True)
class InputBinding:
    """Columns of one model input of rank 1, (rows,), or 2, (rows, width); `ConfigError` for others.

    Attributes:
        columns: Columns in order. Several scalar columns are stacked to (rows, len(columns)); one column
            of lists of L values gives (rows, L).
        ids: Ids that each column may hold (`graph.id_bounds`); for one column of lists, those of each value
            in a row, or of all of them. None where there is no bound.
    """

    input: str
    columns: tuple[str, ...]
    dtype: str
    rank: int
    ids: tuple[range | None, ...] | None = None

    def __post_init__(self) -> None:
        where = f"input '{self.input}'"
        if self.rank not in (1, 2):
            raise ConfigError(
                "E0201 an input fed from columns has rank 1 or 2",
                where=where,
                evidence=f"its rank is {self.rank}",
                remedy="reshape inside the model: (batch,) or (batch, width) is what a table can hold",
            )
        if not self.columns or (self.rank == 1 and len(self.columns) != 1):
            raise ConfigError(
                "E0202 the number of columns does not fit the rank",
                where=where,
                evidence=f"rank {self.rank} with {len(self.columns)} columns",
                remedy="give a rank-1 input exactly one column, and a rank-2 input at least one",
            )
        is_list = self.rank == 2 and len(self.columns) == 1
        if self.ids is not None and len(self.ids) != len(self.columns) and not is_list:
            raise ConfigError(
                "E0203 `ids` needs one range for each column",
                where=where,
                evidence=f"{len(self.ids)} ranges for {len(self.columns)} columns",
                remedy="list the ids of each column, or None where it holds none",
            )
        try:
            kind: str = np.dtype(self.dtype).kind
        except TypeError:
            kind = "?"
        if kind not in "fiub":
            raise ConfigError(
                "E0204 the type of the input is not a number type that NumPy has",
                where=where,
                evidence=f"dtype is '{self.dtype}'",
                remedy="use float32, float16, float64, int64, int32 or bool",
            )
