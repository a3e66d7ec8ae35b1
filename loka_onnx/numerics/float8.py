"""Reference FP8 quantization, as ONNX defines it.

Source: ONNX operators, `QuantizeLinear-23` and `DequantizeLinear-23`, and "Float stored in 8 bits", the
table of the saturating cast. For every format here:

    quantize(x)   = cast(clip(float32(x) / float32(scale), -max, max)), nearest even
    dequantize(q) = float32(q) · float32(scale)

- NaN stays NaN. ±∞ and everything beyond ±max become ±max, so E5M2's own infinities are never produced.
- E4M3FNUZ has one zero: −0, and negative values that underflow, become +0 (its 0x80 is NaN).
- The division is in FP32. A graph that is itself in FP16 or BF16 divides in that type unless its `precision`
  attribute says FP32, and may round to the other neighbour there.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loka_onnx.core.formats import FLOAT8_SPECS, Float8
from loka_onnx.errors import CalibrationError, InternalError

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Scale = float | Array


def float8_dtype(format: Float8) -> np.dtype[Any]:
    """Return the NumPy dtype of an FP8 format, from `ml_dtypes`."""
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, FLOAT8_SPECS[format].ml_dtype))
    return dtype


def quantize(x: Array, scale: Scale, format: Float8, axis: int | None = None) -> Array:
    """Quantize with saturation; returns the `ml_dtypes` type of `format`.

    Args:
        x: Values of any floating type and shape.
        scale: One positive number, or one per index of `axis`, shape (x.shape[axis],).
        format: Target format.
        axis: Channel axis of a scale with more than one element.

    Raises:
        CalibrationError: A scale is not positive and finite in FP32.
        InternalError: The shape of the scale does not fit.
    """
    limit = np.float32(FLOAT8_SPECS[format].max)
    divisor = _broadcast_scale(scale, x.shape, axis)
    # A quotient or a float64 input beyond FP32's range becomes ±inf, which the clip then saturates.
    with np.errstate(over="ignore", under="ignore"):
        quotient = x.astype(np.float32) / divisor
        return np.asarray(np.clip(quotient, -limit, limit).astype(float8_dtype(format)))


def dequantize(q: Array, scale: Scale, axis: int | None = None) -> Float32:
    """Convert FP8 values back to FP32; scale, axis and errors as in `quantize`."""
    factor = _broadcast_scale(scale, q.shape, axis)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(q.astype(np.float32) * factor, dtype=np.float32)


def fake_quantize(x: Array, scale: Scale, format: Float8, axis: int | None = None) -> Float32:
    """Quantize and dequantize, as a Q/DQ pair does; arguments and errors as in `quantize`."""
    return dequantize(quantize(x, scale, format, axis), scale, axis)


def _broadcast_scale(scale: Scale, shape: tuple[int, ...], axis: int | None) -> Float32:
    with np.errstate(over="ignore", under="ignore"):
        values = np.asarray(scale).astype(np.float32)
    wrong = ~((values > 0) & np.isfinite(values))
    if wrong.any():
        first = int(np.argmax(wrong.ravel()))
        value = float(np.asarray(scale).ravel()[first])
        raise CalibrationError(
            "an FP8 scale must be positive and finite in FP32",
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
