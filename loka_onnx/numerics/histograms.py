"""Counting magnitudes into the bins of `core.histogram`.

The index of a bin is the upper eleven bits of |x| in FP32, so that counting is a shift and a bincount.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.histogram import BINS, MagnitudeHistogram

Counts = npt.NDArray[np.int64]
_SHIFT = 20
_MAGNITUDE = np.uint32(0x7FFFFFFF)


def count_magnitudes(x: npt.NDArray[Any]) -> Counts:
    """How many elements fall into each bin.

    Args:
        x: Finite values, any shape and floating type; rounded to FP32 first.

    Returns:
        (BINS,) counts; bin 0 holds the zeros.
    """
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return np.bincount(((bits & _MAGNITUDE) >> _SHIFT).ravel(), minlength=BINS)


def histogram_of(counts: Counts) -> MagnitudeHistogram:
    """The histogram with the given counts, (BINS,)."""
    filled = np.flatnonzero(counts[1:]) + 1
    if not filled.size:
        return MagnitudeHistogram(int(counts[0]))
    first, last = int(filled[0]), int(filled[-1])
    return MagnitudeHistogram(int(counts[0]), first, tuple(counts[first : last + 1].tolist()))
