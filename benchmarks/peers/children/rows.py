"""Calibration rows for quantizers that ask for batches, and how long they took over them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from onnxruntime.quantization import CalibrationDataReader


class Rows(CalibrationDataReader):  # type: ignore[misc]
    """The rows of an ``.npz``, batch by batch.

    Args:
        path: One array per input.
        batch: Rows of a batch.
    """

    def __init__(self, path: str, batch: int) -> None:
        with np.load(path) as arrays:
            self._arrays = {name: arrays[name] for name in arrays.files}
        self._count, self._batch, self._next = len(next(iter(self._arrays.values()))), batch, 0
        self._first = self._last = 0.0

    def get_next(self) -> dict[str, Any] | None:
        """One batch; None at the end."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        if self._next >= self._count:
            return None
        start, self._next = self._next, self._next + self._batch
        return {name: array[start : start + self._batch] for name, array in self._arrays.items()}

    def rewind(self) -> None:
        """Start over; some calibrators read twice."""
        self._next = 0

    @property
    def seconds(self) -> float:
        """From the first batch that was asked for to the end of the rows."""
        return self._last - self._first
