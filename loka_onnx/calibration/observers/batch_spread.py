"""Spread of statistics over full batches, per tensor; drift of later data is measured against it.

Of each full batch: mean and root mean square of all elements; of the sampled ones the share of zeros and the
share in each octave of magnitude. Of a narrow tensor, whose columns are features, also the mean and rms of
each column of the sampled rows: ``column.<i>.mean``, ``column.<i>.rms``. Kept are the sum of each statistic
and of its square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.statistics import BINS, BINS_PER_OCTAVE, NO_BATCHES, BatchSpread, BatchSums
from loka_onnx.numerics.column_sums import ColumnSums
from loka_onnx.numerics.histograms import Counts

_OCTAVES = BINS // BINS_PER_OCTAVE
_LOWEST_OCTAVE = -127
"""Exponent of the first octave of the bins; what is below 2**-126 counts into it."""
STATISTICS = ("mean", "rms", "zeros", *(f"log2.{_LOWEST_OCTAVE + octave}" for octave in range(_OCTAVES)))
"""Names of the statistics, in the order in which they stand in a row."""
COLUMN = "column."
"""Begins the name of a statistic of one column."""

Values = npt.NDArray[np.float64]


class SpreadTotals:
    """Adds up the statistics of full batches, in place; batches of other sizes are ignored."""

    def __init__(self, tensors: int, batch_rows: int) -> None:
        self.batch_rows = batch_rows
        self.batches = 0
        self._tensors = tensors
        # A square is rounded, but equally wherever the batch ran.
        self._sums = ColumnSums()
        self._columns: list[ColumnSums] = []

    def add(
        self,
        mean: Values,
        mean_square: Values,
        counts: Sequence[Counts],
        columns: Sequence[Values],
        rows: int,
    ) -> None:
        """Add one batch.

        Args:
            mean: (tensors,) mean of the elements.
            mean_square: (tensors,) mean of their squares.
            counts: (BINS,) sampled elements in each bin, of each tensor.
            columns: (2, columns) mean and mean square of each column, of each tensor; (2, 0) of a wide one.
            rows: Rows of the batch.
        """
        if rows != self.batch_rows or not self._tensors:
            return
        self.batches += 1
        table = np.stack(counts)
        octaves = np.add.reduceat(table, np.arange(0, BINS, BINS_PER_OCTAVE), axis=1)
        zeros = table[:, :1]
        octaves[:, :1] -= zeros
        shares = (
            np.concatenate([zeros, octaves], axis=1)
            / np.maximum(octaves.sum(axis=1) + zeros[:, 0], 1)[:, None]
        )
        values = np.concatenate([mean[:, None], np.sqrt(mean_square)[:, None], shares], axis=1).ravel()
        self._sums.add(np.concatenate([values, np.square(values)]))
        if not self._columns:
            self._columns = [ColumnSums() for _ in columns]
        for total, (column_mean, column_square) in zip(self._columns, columns, strict=True):
            values = np.concatenate([column_mean, np.sqrt(column_square)])
            total.add(np.concatenate([values, np.square(values)]))

    def read(self) -> tuple[BatchSpread, ...]:
        """Return the spread of each tensor."""
        if not self.batches:
            return (NO_BATCHES,) * self._tensors
        sums, width = self._sums.sums(), len(STATISTICS)
        squares = sums[self._tensors * width :]
        return tuple(
            BatchSpread(
                self.batches,
                self.batch_rows,
                {
                    name: BatchSums(sums[position], squares[position])
                    for position, name in enumerate(STATISTICS, tensor * width)
                    if sums[position].parts or squares[position].parts
                }
                | _by_column(self._columns[tensor].sums()),
            )
            for tensor in range(self._tensors)
        )


def _by_column(sums: Sequence[ExactSum]) -> dict[str, BatchSums]:
    """Return the sums by column name, from those of means, of rms, and of the squares of both."""
    half, width = len(sums) // 2, len(sums) // 4
    return {
        f"{COLUMN}{position % width}.{'mean' if position < width else 'rms'}": BatchSums(
            sums[position], sums[half + position]
        )
        for position in range(half)
        if sums[position].parts or sums[half + position].parts
    }


def without_columns(spread: BatchSpread) -> BatchSpread:
    """Return the spread without columns: for a layout whose last axis is not that of the sampled rows."""
    return replace(
        spread, statistics={n: v for n, v in spread.statistics.items() if not n.startswith(COLUMN)}
    )
