"""Totals over batches of the range pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loka_onnx.calibration.observers.reductions import BatchTotals, Outputs, all_finite, reduced_only
from loka_onnx.calibration.observers.sampling import (
    Magnitudes,
    MagnitudeTotals,
    SampleObserver,
    SpreadTotals,
    without_columns,
)
from loka_onnx.calibration.observers.site_observers import RangeObserver, RangeSlots
from loka_onnx.calibration.passes.executors import BatchResult, BatchWork
from loka_onnx.core.statistics import RangeStats
from loka_onnx.data import Batch
from loka_onnx.errors import CalibrationError
from loka_onnx.numerics.histograms import histogram_of
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions


@dataclass(frozen=True)
class RangeBatch:
    """Result of one batch: the outputs of `Reductions`, and the magnitudes of each tensor's sampled rows."""

    reduced: Outputs
    magnitudes: tuple[Magnitudes, ...]


@dataclass(frozen=True)
class RangeWork(BatchWork[RangeBatch]):
    """Runs a graph with range observers; `samples` are the outputs that hold sampled rows."""

    samples: tuple[SampleObserver, ...]

    def open(self) -> Callable[[Batch], RangeBatch]:
        """See `BatchWork.open`."""
        session = OnnxSession(self.path, SessionOptions(threads=1))

        def run(batch: Batch) -> RangeBatch:
            outputs = session.run(batch.inputs)
            return RangeBatch(reduced_only(outputs), tuple(sample.read(outputs) for sample in self.samples))

        return run


class RangeTotals:
    """Adds up batches of range observers, in place; `batch_rows` is the size of a full batch."""

    def __init__(self, observers: Sequence[RangeObserver], batch_rows: int) -> None:
        self.observers = tuple(observers)
        # Layouts of one tensor share its slots.
        self._positions: dict[RangeSlots, int] = {}
        for observer in observers:
            self._positions.setdefault(observer.slots, len(self._positions))
        self._totals = BatchTotals()
        self._magnitudes = [MagnitudeTotals() for _ in self._positions]
        self._spread = SpreadTotals(len(self._positions), batch_rows)

    @property
    def samples(self) -> tuple[SampleObserver, ...]:
        """Graph outputs with the sampled rows of each tensor."""
        return tuple(slots.sample for slots in self._positions)

    def add(self, result: BatchResult[RangeBatch], where: str) -> None:
        """Add one batch, which messages call `where`.

        Raises CalibrationError if an activation is not finite.
        """
        batch, rows = result.value, result.rows
        if not all_finite(batch.reduced):
            raise self._not_finite(batch.reduced, rows, where)
        self._totals.add(batch.reduced, rows)
        for total, each in zip(self._magnitudes, batch.magnitudes, strict=True):
            total.add(each)
        counts = np.array([max(slots.count.read(batch.reduced, rows), 1) for slots in self._positions])
        self._spread.add(
            np.array([slots.total.read(batch.reduced) for slots in self._positions]) / counts,
            np.array([slots.squares.read(batch.reduced) for slots in self._positions]) / counts,
            [each.counts for each in batch.magnitudes],
            [each.columns for each in batch.magnitudes],
            rows,
        )

    def read(self) -> dict[str, RangeStats]:
        """Return the range of every tensor, by name."""
        spreads, totals = self._spread.read(), self._totals
        ranges: dict[str, RangeStats] = {}
        for observer in self.observers:
            slots, position = observer.slots, self._positions[observer.slots]
            magnitudes = self._magnitudes[position]
            low, high = totals.extreme(slots.minimum), totals.extreme(slots.maximum)
            ranges[observer.tensor] = RangeStats(
                count=totals.count(slots.count),
                amax=max(abs(low), abs(high)),
                minimum=low,
                maximum=high,
                total=totals.sum(slots.total),
                total_squares=totals.sum(slots.squares),
                histogram=histogram_of(magnitudes.counts),
                channel_amax=() if observer.is_layout else magnitudes.channel_amax,
                spread=without_columns(spreads[position]) if observer.is_layout else spreads[position],
            )
        return ranges

    def _not_finite(self, reduced: Outputs, rows: int, where: str) -> CalibrationError:
        for observer in self.observers:
            slots = observer.slots
            low, high = slots.minimum.read(reduced), slots.maximum.read(reduced)
            total, squares = slots.total.read(reduced), slots.squares.read(reduced)
            if not all(map(math.isfinite, (low, high, total, squares))):
                return CalibrationError(
                    f"E0506 site '{observer.site}': its input '{observer.tensor}' is not finite in {where}",
                    evidence=f"amax {max(abs(low), abs(high)):g}, sum of squares {squares:g}, "
                    f"{slots.count.read(reduced, rows)} elements",
                    remedy="an FP8 scale needs a finite range: drop those rows, or clamp the input in the "
                    "model",
                )
        raise AssertionError("every reduction belongs to an observer")
