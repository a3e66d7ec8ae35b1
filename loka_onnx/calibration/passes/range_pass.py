"""The range pass: what a batch leaves behind, and what the batches add up to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from loka_onnx.calibration.instruments.batch_spread import SpreadTotals, without_columns
from loka_onnx.calibration.instruments.batch_totals import BatchTotals
from loka_onnx.calibration.instruments.reductions import Outputs, all_finite, reduced_only
from loka_onnx.calibration.instruments.sampling import Magnitudes, MagnitudeTotals, SampleTap
from loka_onnx.calibration.instruments.taps import RangeSlots, RangeTap
from loka_onnx.calibration.passes.executors import BatchResult, BatchWork
from loka_onnx.core.statistics import RangeStats
from loka_onnx.data import Batch
from loka_onnx.errors import CalibrationError
from loka_onnx.numerics.histograms import histogram_of
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions


@dataclass(frozen=True)
class RangeBatch:
    """Result of one batch.

    Attributes:
        reduced: The outputs of `Reductions`.
        magnitudes: What the sampled rows of each tensor said.
    """

    reduced: Outputs
    magnitudes: tuple[Magnitudes, ...]


@dataclass(frozen=True)
class RangeWork(BatchWork[RangeBatch]):
    """Runs a graph with range taps.

    Attributes:
        path: The graph.
        samples: Where the sampled rows of each tensor are found.
    """

    path: Path
    samples: tuple[SampleTap, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """See `BatchWork.files`."""
        return (self.path,)

    def open(self) -> Callable[[Batch], RangeBatch]:
        """See `BatchWork.open`."""
        session = OnnxSession(self.path, SessionOptions(threads=1))

        def run(batch: Batch) -> RangeBatch:
            outputs = session.run(batch.inputs)
            return RangeBatch(reduced_only(outputs), tuple(sample.read(outputs) for sample in self.samples))

        return run


class RangeTotals:
    """Adds up batches, in place.

    Args:
        taps: What is measured.
        batch_rows: Rows of a full batch.
    """

    def __init__(self, taps: Sequence[RangeTap], batch_rows: int) -> None:
        self.taps = tuple(taps)
        # Layouts of one tensor share its slots.
        self._positions: dict[RangeSlots, int] = {}
        for tap in taps:
            self._positions.setdefault(tap.slots, len(self._positions))
        self._totals = BatchTotals()
        self._magnitudes = [MagnitudeTotals() for _ in self._positions]
        self._spread = SpreadTotals(len(self._positions), batch_rows)

    @property
    def samples(self) -> tuple[SampleTap, ...]:
        """Where the sampled rows of each tensor are found."""
        return tuple(slots.sample for slots in self._positions)

    def add(self, result: BatchResult[RangeBatch], where: str) -> None:
        """Take in one batch.

        Args:
            result: The batch.
            where: Which it is, for a message.

        Raises:
            CalibrationError: An activation is not finite.
        """
        batch, rows = result.value, result.rows
        if not all_finite(batch.reduced):
            raise self._not_finite(batch.reduced, rows, where)
        self._totals.add(batch.reduced, rows)
        for total, found in zip(self._magnitudes, batch.magnitudes, strict=True):
            total.add(found)
        sums = np.array(
            [
                (
                    max(slots.count.read(batch.reduced, rows), 1),
                    slots.total.read(batch.reduced),
                    slots.squares.read(batch.reduced),
                )
                for slots in self._positions
            ]
        ).reshape(-1, 3)
        self._spread.add(
            sums[:, 1] / sums[:, 0],
            sums[:, 2] / sums[:, 0],
            [found.counts for found in batch.magnitudes],
            [found.columns for found in batch.magnitudes],
            rows,
        )

    def read(self) -> dict[str, RangeStats]:
        """Range of every tensor, by name."""
        spreads = self._spread.read()
        found: dict[str, RangeStats] = {}
        for tap in self.taps:
            position = self._positions[tap.slots]
            magnitudes = self._magnitudes[position]
            found[tap.tensor] = replace(
                tap.read(self._totals),
                histogram=histogram_of(magnitudes.counts),
                channel_amax=() if tap.is_layout else magnitudes.channel_amax,
                spread=without_columns(spreads[position]) if tap.is_layout else spreads[position],
            )
        return found

    def _not_finite(self, reduced: Outputs, rows: int, where: str) -> CalibrationError:
        for tap in self.taps:
            slots = tap.slots
            low, high = slots.minimum.read(reduced), slots.maximum.read(reduced)
            total, squares = slots.total.read(reduced), slots.squares.read(reduced)
            if not all(map(math.isfinite, (low, high, total, squares))):
                return CalibrationError(
                    f"site '{tap.site}': its input '{tap.tensor}' is not finite in {where}",
                    evidence=f"amax {max(abs(low), abs(high)):g}, sum of squares {squares:g}, "
                    f"{slots.count.read(reduced, rows)} elements",
                    remedy="an FP8 scale needs a finite range: drop those rows, or clamp the input in the "
                    "model",
                )
        raise AssertionError("every reduction belongs to a tap")
