"""Totals over batches of the error pass, with its stopping rule, and of the range pass.

Ranges need every row, because one row holds the largest value. An error is a mean, √(ΣA/ΣB) of noise energy A
and signal energy B, for which some ten thousand rows suffice. `core.intervals` bounds ΣA/ΣB at every
number of rows at once, because the pass stops when the bound is tight. Its units are spans of rows in random
order: a file may be sorted, and the batches of one span alike.
"""

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
from loka_onnx.calibration.observers.site_observers import ErrorObserver, RangeObserver, RangeSlots
from loka_onnx.calibration.passes.executors import BatchResult, BatchWork
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import FEWEST_UNITS, RatioMoments
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.data import Batch
from loka_onnx.errors import CalibrationError
from loka_onnx.numerics.histograms import histogram_of
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

TIGHTEST_AT = 16
"""Spans at which the confidence sequence is tightest."""


class ErrorTotals:
    """Adds up batches of error observers, in place."""

    def __init__(self, observers: Sequence[ErrorObserver]) -> None:
        self.observers = tuple(observers)
        self._totals = BatchTotals()
        self._spans = 0
        # Noise energy A and signal energy B of the current span; ΣA², ΣAB, ΣB² over earlier spans.
        self._energies = np.zeros((2, len(self.observers)))
        self._products = np.zeros((3, len(self.observers)))

    @property
    def rows(self) -> int:
        """Rows so far."""
        return self._totals.rows

    def add(self, result: BatchResult[Outputs], where: str) -> None:
        """Add one batch, which messages call `where`; CalibrationError if an output is not finite."""
        outputs = result.value
        if not all_finite(outputs):
            raise self._not_finite(outputs, where)
        self._totals.add(outputs, result.rows)
        self._energies[0] += [observer.output.noise.read(outputs) for observer in self.observers]
        self._energies[1] += [observer.output.signal.read(outputs) for observer in self.observers]

    def end_span(self) -> None:
        """End a span: the batches added since the last call."""
        noise, signal = self._energies
        self._products += np.stack([noise * noise, noise * signal, signal * signal])
        self._energies = np.zeros_like(self._energies)
        self._spans += 1

    def is_precise(self, precision: float) -> bool:
        """True if the 95 % interval of each relative error has at most `precision` of it as half width."""
        return self._spans >= FEWEST_UNITS and all(
            self._is_precise(position, precision) for position in range(len(self.observers))
        )

    def read(self) -> dict[str, list[ErrorStats]]:
        """Return errors by site, in the order of the observers."""
        by_site: dict[str, list[ErrorStats]] = {}
        for observer in self.observers:
            by_site.setdefault(observer.site, []).append(observer.read(self._totals))
        return by_site

    def _is_precise(self, position: int, precision: float) -> bool:
        slots = self.observers[position].output
        noise, signal = self._totals.sum(slots.noise), self._totals.sum(slots.signal)
        if noise.value == 0.0:
            return True
        if signal.value == 0.0:
            return False
        products = (ExactSum.of([float(total)]) for total in self._products[:, position])
        moments = RatioMoments(self.rows, self._spans, noise, signal, *products)
        interval = moments.anytime_interval(TIGHTEST_AT * self.rows // self._spans)
        # The lower end of the square root is the farther one.
        return interval.lower >= (1.0 - precision) ** 2 * interval.value

    def _not_finite(self, outputs: Outputs, where: str) -> CalibrationError:
        for observer in self.observers:
            signal, noise = observer.output.signal.read(outputs), observer.output.noise.read(outputs)
            if math.isfinite(signal) and math.isfinite(noise):
                continue
            which = f"its output in {observer.recipe}" if math.isfinite(signal) else "its output"
            return CalibrationError(
                f"E0505 site '{observer.site}': {which} is not finite in {where}",
                evidence=f"sum of squares {signal:g}, of the difference in {observer.recipe} {noise:g}",
                remedy="an error needs finite values: drop those rows, or clamp the output in the model",
            )
        raise AssertionError("every reduction belongs to an observer")


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
        """Add one batch, which messages call `where`; CalibrationError if an activation is not finite."""
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
