"""Scales from ranges.

The scale is amax / max, with a zero point range / max, rounded *up* to BF16 (8-bit significand):

- rounding up keeps amax / scale ≤ max, so nothing in the range saturates (with a zero point, which is rounded
  too, by no more than half a step); it costs at most 2⁻⁷ of the format's range;
- a BF16 number is exact in FP32 too, and in FP16 wherever it is in FP16's normal range (2⁻¹⁴…65504), so
  FP32, BF16 and FP16 graphs of one plan quantize with the same scale.

The smallest scale is BF16's smallest normal number, 2⁻¹²⁶: many devices flush smaller ones to zero and would
divide by it. A tensor that is zero throughout gets the scale 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.formats import NumberFormat
from loka_onnx.core.recipe import Granularity, Scaling
from loka_onnx.errors import CalibrationError

SMALLEST_SCALE = 2.0**-126
_SIGNIFICAND = 2.0**8

Array = npt.NDArray[Any]


def amax_scale(amax: float, format: NumberFormat) -> float:
    """Return the least BF16 number s ≥ 2⁻¹²⁶ with amax / s ≤ the format's max; 1.0 where amax is 0. Raises
    CalibrationError if amax is negative, not finite, or beyond FP32.
    """
    return float(_scales(np.asarray(amax, dtype=np.float64), format)[()])


def range_scaling(low: float, high: float, format: NumberFormat) -> Scaling:
    """Return the scaling of values from `low` to `high`, raising as `amax_scale`. With a zero point the range
    is widened to hold 0, which is then exact.
    """
    if not format.has_zero_point:
        return Scaling(amax_scale(max(abs(low), abs(high)), format))
    low, high = min(low, 0.0), max(high, 0.0)
    scale = amax_scale(high - low, format)
    return Scaling(scale, round(min(format.min - low / scale, format.max)))


def weight_scales(w: Array, granularity: Granularity, channel_axis: int, format: NumberFormat) -> Array:
    """Return the FP32 scales of a constant operand: shape () per tensor, else (w.shape[channel_axis],); 1 for
    zeros. Raises CalibrationError if the weight is not finite.
    """
    magnitudes = np.abs(w.astype(np.float64))
    if not np.isfinite(magnitudes).all():
        raise CalibrationError(
            "E1904 a weight is not finite, so it has no scale",
            evidence=f"{int((~np.isfinite(magnitudes)).sum())} of {w.size} elements",
            remedy="check the checkpoint; a model with NaN or infinite weights cannot be served",
        )
    if granularity is Granularity.PER_TENSOR:
        amax = np.asarray(magnitudes.max(initial=0.0))
    else:
        others = tuple(i for i in range(w.ndim) if i != channel_axis % w.ndim)
        amax = np.asarray(magnitudes.max(axis=others, initial=0.0))
    return _scales(amax, format).astype(np.float32)


def _scales(amax: npt.NDArray[np.float64], format: NumberFormat) -> npt.NDArray[np.float64]:
    accepted = (amax >= 0) & (amax <= float(np.finfo(np.float32).max))
    if not accepted.all():
        first = int(np.argmin(accepted.ravel()))
        raise CalibrationError(
            f"E1905 amax is {amax.ravel()[first]:g}: a scale needs a finite range",
            evidence=f"{int((~accepted).sum())} of {amax.size} ranges, the first is number {first}",
            remedy="drop those rows from the data, or keep the site in BF16 with `plan.keep`",
        )
    # The quotient is rounded, but never down onto the grid: above grid·max, which is exact, the next
    # float64 moves the quotient by more than half an ulp, as no max is a power of two.
    return np.where(amax == 0.0, 1.0, round_up_to_bfloat16(amax / format.max))


def round_up_to_bfloat16(scales: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return positive scales rounded up to the BF16 grid, none below `SMALLEST_SCALE`."""
    significand, exponent = np.frexp(np.maximum(scales, SMALLEST_SCALE))
    return np.ldexp(np.ceil(significand * _SIGNIFICAND) / _SIGNIFICAND, exponent)
