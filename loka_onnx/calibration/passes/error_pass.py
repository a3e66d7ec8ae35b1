"""The error pass: totals over batches of a graph with error observers, and the stopping rule.

Ranges need every row, because one row holds the largest value. An error is a mean, √(ΣA/ΣB) of noise energy A
and signal energy B, for which some ten thousand rows suffice. `core.intervals` bounds ΣA/ΣB at every
number of rows at once, because the pass stops when the bound is tight. Its units are spans of rows in random
order: a file may be sorted, and the batches of one span alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loka_onnx.calibration.observers.reductions import BatchTotals, Outputs, all_finite
from loka_onnx.calibration.observers.site_observers import ErrorObserver
from loka_onnx.calibration.passes.executors import BatchResult
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import FEWEST_UNITS, RatioMoments
from loka_onnx.core.statistics import ErrorStats
from loka_onnx.errors import CalibrationError

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
        """Add one batch, which messages call `where`.

        Raises CalibrationError if the output of a site is not finite.
        """
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
        """True if every site's relative error ‖quantized − exact‖ / ‖exact‖ is known well enough.

        `precision` is the largest half width of its 95 % interval over its value. The interval holds after
        every span at once.
        """
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
            quantized = observer.output.quantized.read(outputs)
            if all(map(math.isfinite, (signal, noise, quantized))):
                continue
            which = f"its output in {observer.recipe}" if math.isfinite(signal) else "its output"
            return CalibrationError(
                f"E0505 site '{observer.site}': {which} is not finite in {where}",
                evidence=f"sum of squares {signal:g}, in {observer.recipe} {quantized:g}, of the difference "
                f"{noise:g}",
                remedy="an error needs finite values: drop those rows, or clamp the output in the model",
            )
        raise AssertionError("every reduction belongs to an observer")
