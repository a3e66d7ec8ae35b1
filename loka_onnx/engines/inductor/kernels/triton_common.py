"""Code that the Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_float8(value, inverse_scale):  # type: ignore[no-untyped-def]
    """Divide by a scale, saturate and round to E4M3FN (ONNX QuantizeLinear with saturation, rounding to
    even).
    """
    # The caller's number may arrive as FP64, which has no conversion to FP8.
    scaled = value.to(tl.float32) * tl.cast(inverse_scale, tl.float32)
    # Without PROPAGATE, NaN would become a number; the cast keeps NaN.
    scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv)
