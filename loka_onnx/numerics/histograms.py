"""Histograms of magnitudes: a bin's index is the upper eleven bits of |x| in FP32 (`core.statistics`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.statistics import BINS, MagnitudeHistogram

Counts = npt.NDArray[np.int64]
_SHIFT = 20
_MAGNITUDE = np.uint32(0x7FFFFFFF)


def count_magnitudes(x: npt.NDArray[Any]) -> Counts:
    """Return (BINS,) counts of the elements of a finite array, in FP32, by bin; bin 0 is below 2⁻¹²⁹."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return np.bincount(((bits & _MAGNITUDE) >> _SHIFT).ravel(), minlength=BINS)


def histogram_of(counts: Counts) -> MagnitudeHistogram:
    """Return the histogram with the given counts, (BINS,)."""
    filled = np.flatnonzero(counts[1:]) + 1
    if not filled.size:
        return MagnitudeHistogram(int(counts[0]))
    first, last = int(filled[0]), int(filled[-1])
    return MagnitudeHistogram(int(counts[0]), first, tuple(counts[first : last + 1].tolist()))
