"""What the batches of an instrumented graph add up to, so that a tap is read once, at the end.

Sums are exact, extremes are by nature: neither the order of the batches nor how they are cut into shards
shows in the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.instruments.reductions import REDUCED, Count, Outputs, Reduction, Slot
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.numerics.column_sums import ColumnSums

_EXTREMES = {Reduction.MAX: np.maximum, Reduction.MIN: np.minimum}


class BatchTotals:
    """Adds up the outputs of `Reductions`, in place.

    Attributes:
        rows: Rows of the batches so far.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._sums: dict[str, ColumnSums] = {}
        self._extremes: dict[str, npt.NDArray[np.float64]] = {}
        self._read: Mapping[str, tuple[ExactSum, ...]] = {}

    def add(self, outputs: Outputs, rows: int) -> None:
        """Take in one batch.

        Args:
            outputs: What the graph returned; finite (`reductions.all_finite`).
            rows: Rows of the batch.
        """
        self.rows += rows
        self._read = {}
        for name, kind in REDUCED.items():
            if name not in outputs:
                continue
            vector = outputs[name]
            if kind is Reduction.SUM:
                self._sums_of(name, vector).add(vector)
            else:
                known = self._extremes.get(name)
                self._extremes[name] = vector if known is None else _EXTREMES[kind](known, vector)

    def sum(self, slot: Slot) -> ExactSum:
        """Sum over all batches of what is in the slot."""
        if not self._read:
            self._read = {name: sums.sums() for name, sums in self._sums.items()}
        return self._read[slot.output][slot.position]

    def extreme(self, slot: Slot) -> float:
        """Largest or smallest value over all batches of what is in the slot."""
        return float(self._extremes[slot.output][slot.position])

    def count(self, count: Count) -> int:
        """Elements over all batches."""
        if count.slot is not None:
            return round(self.sum(count.slot).value)
        return (count.per_row or 0) * self.rows

    def _sums_of(self, name: str, vector: npt.NDArray[Any]) -> ColumnSums:
        if name not in self._sums:
            self._sums[name] = ColumnSums(vector.size)
        return self._sums[name]
