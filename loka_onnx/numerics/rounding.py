"""Reference quantization in every number format, as ONNX defines it.

Source: ONNX operators, `QuantizeLinear-23` and `DequantizeLinear-23`, and "Float stored in 8 bits", the table
of the saturating cast. With the zero point z, which is 0 in floating formats:

    quantize(x)   = saturate(round(float32(x) / float32(scale)) + z), nearest even
    dequantize(q) = (float32(q) − z) · float32(scale)

- ±∞ and everything beyond the format's range become its ends, so E5M2's own infinities are never produced.
- NaN stays NaN in floating formats; an integer has none, so it is refused.
- E4M3FNUZ has one zero: −0, and negative values that underflow, become +0 (its 0x80 is NaN).
- The division is in FP32. A graph that is itself in FP16 or BF16 divides in that type unless its `precision`
  attribute says FP32, and may round to the other neighbour there.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loka_onnx.core.formats import NumberFormat
from loka_onnx.errors import CalibrationError, InternalError

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Scale = float | Array


def storage_type(format: NumberFormat) -> np.dtype[Any]:
    """Return the NumPy type of a format, of `ml_dtypes` where NumPy has none."""
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, format.storage, format.storage))
    return dtype


def quantize(
    x: Array, scale: Scale, format: NumberFormat, axis: int | None = None, zero_point: int = 0
) -> Array:
    """Quantize with saturation; returns `storage_type(format)`. `scale` is one positive number, or one per
    index of the channel `axis`, shape (x.shape[axis],). Raises CalibrationError if one is not positive and
    finite in FP32, or an integer format is to hold NaN; InternalError if the shape does not fit.
    """
    divisor = _broadcast_scale(scale, x.shape, axis)
    # A quotient or a float64 input beyond FP32's range becomes ±inf, which the clip then saturates.
    with np.errstate(over="ignore", under="ignore"):
        quotient = x.astype(np.float32) / divisor
        if not format.is_float:
            if np.isnan(quotient).any():
                raise CalibrationError(
                    f"E1901 {format} holds no NaN", evidence=f"in values of shape {x.shape}"
                )
            quotient = np.rint(quotient) + np.float32(zero_point)
        clipped = np.clip(quotient, np.float32(format.min), np.float32(format.max))
        return np.asarray(clipped.astype(storage_type(format)))


def dequantize(q: Array, scale: Scale, axis: int | None = None, zero_point: int = 0) -> Float32:
    """Convert quantized values back to FP32; arguments and errors as in `quantize`."""
    factor = _broadcast_scale(scale, q.shape, axis)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray((q.astype(np.float32) - np.float32(zero_point)) * factor, dtype=np.float32)


def fake_quantize(
    x: Array, scale: Scale, format: NumberFormat, axis: int | None = None, zero_point: int = 0
) -> Float32:
    """Quantize and dequantize, as a Q/DQ pair does; arguments and errors as in `quantize`."""
    return dequantize(quantize(x, scale, format, axis, zero_point), scale, axis, zero_point)


def _broadcast_scale(scale: Scale, shape: tuple[int, ...], axis: int | None) -> Float32:
    with np.errstate(over="ignore", under="ignore"):
        values = np.asarray(scale).astype(np.float32)
    wrong = ~((values > 0) & np.isfinite(values))
    if wrong.any():
        first = int(np.argmax(wrong.ravel()))
        value = float(np.asarray(scale).ravel()[first])
        raise CalibrationError(
            "E1902 a scale must be positive and finite in FP32",
            evidence=f"scale {first} of {values.size} is {value:g}",
            remedy="choose scales with `amax_scale` or `weight_scales`, which refuse ranges that have none",
        )
    if values.size == 1:
        return values.reshape(())
    if axis is None or values.ndim != 1 or not -len(shape) <= axis < len(shape) or shape[axis] != values.size:
        raise InternalError(
            "per-channel scales do not fit the tensor",
            evidence=f"scales {values.shape}, tensor {shape}, channel axis {axis}",
        )
    broadcast = [1] * len(shape)
    broadcast[axis] = values.size
    return values.reshape(broadcast)
