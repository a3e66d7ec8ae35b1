"""What the Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_float8(value, inverse_scale):  # type: ignore[no-untyped-def]
    """Value over its scale, saturated, in E4M3FN (ONNX QuantizeLinear with saturation, rounding to even)."""
    # A number from the caller may come as FP64, which nothing converts to FP8.
    scaled = value.to(tl.float32) * tl.cast(inverse_scale, tl.float32)
    # NaN passes both comparisons unchanged only with PROPAGATE; the cast keeps it NaN.
    scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv)
