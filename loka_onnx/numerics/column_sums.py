"""Exact sums of the columns of a table that comes row by row.

A column is split into a head, whose numbers have so few bits that float64 adds them without rounding, and a
rest, which is split again until nothing is left. With n numbers |p| < 2ᵉ, n < 2ᴹ and σ = 2ᵉ⁺ᴹ, the head of p
is (σ + p) − σ: a multiple of 2⁻⁵³σ, with |Σ heads| < σ, so that every order of adding is exact; and p − head
is exact too. Two or three rounds are the rule; `math.fsum` by column takes four times as long. Source: Rump,
Ogita, Oishi, "Accurate Floating-Point Summation Part I: Faithful Rounding" (SIAM J. Sci. Comput. 31, 2008),
algorithm 3.2 and lemma 3.3.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loka_onnx.core.exact_sum import NOTHING_ADDED, ExactSum
from loka_onnx.errors import InternalError

ROWS_HELD = 128
"""Rows that wait before they are added up; memory is bounded by them."""

Values = npt.NDArray[np.float64]


class ColumnSums:
    """Adds up rows with many zeros; a number that is not finite is an InternalError, in `sum` at latest."""

    def __init__(self) -> None:
        self._waiting: list[tuple[npt.NDArray[np.intp], Values]] = []
        self._sums: list[ExactSum] = []

    def add(self, row: Values) -> None:
        """Add one row, (columns,)."""
        self._sums = self._sums or [NOTHING_ADDED] * row.size
        filled = np.flatnonzero(row)
        self._waiting.append((filled, row[filled]))
        if len(self._waiting) == ROWS_HELD:
            self._collapse()

    def sum(self, column: int) -> ExactSum:
        """Return the exact sum of a column so far; IndexError before the first row."""
        if self._waiting:
            self._collapse()
        return self._sums[column]

    def sums(self) -> tuple[ExactSum, ...]:
        """Return the exact sum of each column so far; () before the first row."""
        return tuple(self.sum(column) for column in range(len(self._sums)))

    def _collapse(self) -> None:
        columns = np.unique(np.concatenate([filled for filled, _ in self._waiting]))
        table = np.zeros((len(self._waiting), columns.size))
        for number, (filled, values) in enumerate(self._waiting):
            table[number, np.searchsorted(columns, filled)] = values
        self._waiting = []
        for column, parts in zip(columns.tolist(), _exact_parts(table).T.tolist(), strict=True):
            self._sums[column] = ExactSum.of((*self._sums[column].parts, *parts))


def _exact_parts(table: Values) -> Values:
    """Return (parts, columns): the column sums of the table, in parts without rounding."""
    rest, heads = table, [np.zeros(table.shape[1])]
    while rest.any():
        largest = np.abs(rest).max(axis=0)
        exponent = np.frexp(largest)[1] + len(table).bit_length()
        if not np.isfinite(largest).all() or exponent.max() > np.finfo(np.float64).maxexp - 1:
            raise InternalError("exact sums take finite numbers", evidence=f"up to {largest.max():g}")
        sigma = np.where(largest > 0.0, np.ldexp(1.0, exponent), 0.0)
        head = (sigma + rest) - sigma
        heads.append(head.sum(axis=0))
        rest = rest - head
    return np.stack(heads)
