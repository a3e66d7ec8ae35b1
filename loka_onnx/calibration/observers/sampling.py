"""Rows that an instrumented graph outputs, to count their magnitudes outside; statistics of full batches.

ONNX has no bincount. For an activation of 512 × 512, on one core, a batch's five exact reductions take 150
µs; a histogram in the graph (Log, Floor, ScatterElements) 1430 µs, counting every element in NumPy 470 µs,
and counting every 11th row 40 µs, the copy included. The largest magnitude of each channel takes 135 µs in
the graph. Both therefore come from every n-th row of a batch, with n the first prime that leaves at most 64
rows (and at least 11); a prime, so that the sample does not align with fields folded into the first axis.
Exact statistics (amax, zeros, saturated and underflowed elements) count all rows.

The sample is a fixed function of the batches, so a profile does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.observers.reductions import Outputs
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.statistics import BINS, BINS_PER_OCTAVE, NO_BATCHES, BatchSpread, BatchSums
from loka_onnx.graph.model import GraphModel, Tensor
from loka_onnx.numerics.column_sums import ColumnSums
from loka_onnx.numerics.histograms import Counts, count_magnitudes

SAMPLED_ROWS = 64
"""Most rows of a batch that are counted, where the first axis is the batch."""
NARROW = 64
"""Most columns of a tensor (rows, columns) whose columns are observed one by one: features, as a rule."""
_OCTAVES = BINS // BINS_PER_OCTAVE
_LOWEST_OCTAVE = -127
"""Exponent of the first octave of the bins; what is below 2**-126 counts into it."""
STATISTICS = ("mean", "rms", "zeros", *(f"log2.{_LOWEST_OCTAVE + octave}" for octave in range(_OCTAVES)))
"""Names of the statistics, in the order in which they stand in a row."""
COLUMN = "column."
"""Begins the name of a statistic of one column."""
_SMALLEST_STRIDE = 11
_TO_THE_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Magnitudes:
    """Magnitudes of one tensor in the sampled rows of one batch.

    `counts` is (BINS,); `channel_amax` (channels,) is empty if the last axis is no channel axis. `columns`
    (2, columns) holds mean and mean square of each column; (2, 0) unless the tensor is narrow.
    """

    counts: Counts
    channel_amax: npt.NDArray[np.float32]
    columns: npt.NDArray[np.float64]


@dataclass(frozen=True)
class SampleObserver:
    """Graph output with one tensor's sampled rows; `has_channels` if its last axis has a fixed length."""

    output: str
    has_channels: bool

    def read(self, outputs: Outputs) -> Magnitudes:
        """Count one batch."""
        rows = outputs[self.output]
        channels = np.zeros(0, np.float32)
        if self.has_channels:
            channels = np.abs(rows).reshape(-1, rows.shape[-1]).max(axis=0, initial=0.0)
        columns = np.zeros((2, 0))
        if self.has_channels and rows.ndim == 2 and rows.size and rows.shape[1] <= NARROW:
            wide = rows.astype(np.float64)
            columns = np.stack([wide.mean(axis=0), np.square(wide).mean(axis=0)])
        return Magnitudes(count_magnitudes(rows), channels, columns)


class MagnitudeTotals:
    """Adds up the batches of one tensor, in place."""

    def __init__(self) -> None:
        self.counts: Counts = np.zeros(BINS, np.int64)
        self._channels: npt.NDArray[np.float32] | None = None

    def add(self, batch: Magnitudes) -> None:
        """Add one batch."""
        self.counts += batch.counts
        known = self._channels
        self._channels = batch.channel_amax if known is None else np.maximum(known, batch.channel_amax)

    @property
    def channel_amax(self) -> tuple[float, ...]:
        """Largest magnitude of each channel so far."""
        return () if self._channels is None else tuple(self._channels.tolist())


def sampling_stride(batch_size: int) -> int:
    """Return n: every n-th row of a full batch of `batch_size` rows is sampled."""
    if batch_size <= SAMPLED_ROWS:
        return 1
    stride = max(-(-batch_size // SAMPLED_ROWS), _SMALLEST_STRIDE)
    while any(stride % divisor == 0 for divisor in range(2, int(stride**0.5) + 1)):
        stride += 1
    return stride


def add_sample(model: GraphModel, tensor: Tensor, stride: int, name: str) -> SampleObserver:
    """Output every `stride`-th row of a tensor; of a scalar all, of unknown rank every n-th element."""
    shape: Sequence[Any] | None = tensor.shape
    rows = tensor
    if shape is None or len(shape) == 0:
        flat = model.constant(f"{name}.flat_shape", np.array([-1], np.int64))
        rows = model.add("Reshape", [tensor, flat], f"{name}.flat", np.float32)
    bounds = [
        model.constant(f"{name}.{part}", np.array([value], np.int64))
        for part, value in (("start", 0), ("end", _TO_THE_END), ("axis", 0), ("stride", stride))
    ]
    sample = model.add("Slice", [rows, *bounds], f"{name}.sample", np.float32)
    kept: list[int | str] = ["samples" + str(len(model.outputs))]
    kept += [d if isinstance(d, int) else f"{kept[0]}.{axis}" for axis, d in enumerate((shape or ())[1:])]
    model.add_output(sample, np.float32, kept)
    return SampleObserver(sample.name, shape is not None and len(shape) > 1 and isinstance(shape[-1], int))


class SpreadTotals:
    """Adds up the statistics of full batches, in place; batches of other sizes are ignored.

    Of each: mean and root mean square of all elements; of the sampled ones the share of zeros and the share
    in each octave of magnitude. Of a narrow tensor, whose columns are features, also the mean and rms of each
    column of the sampled rows: ``column.<i>.mean``, ``column.<i>.rms``. Kept are the sum of each statistic
    and of its square; drift of later data is measured against their spread.
    """

    def __init__(self, tensors: int, batch_rows: int) -> None:
        self.batch_rows = batch_rows
        self.batches = 0
        self._tensors = tensors
        # A square is rounded, but equally wherever the batch ran.
        self._sums = ColumnSums()
        self._columns: list[ColumnSums] = []

    def add(
        self,
        mean: npt.NDArray[np.float64],
        mean_square: npt.NDArray[np.float64],
        counts: Sequence[Counts],
        columns: Sequence[npt.NDArray[np.float64]],
        rows: int,
    ) -> None:
        """Add one batch: (tensors,) mean and mean square; `counts` and `columns` as in `Magnitudes`."""
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
