"""A batch: what a model is fed, and what is known about the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

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
        for array in (*self.inputs.values(), *self.columns.values()):
            return int(array.shape[0])
        return 0
