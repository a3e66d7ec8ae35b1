"""FP8 rounding written in FP32 arithmetic, for graphs that measure FP8 error.

ONNX Runtime's CPU kernels for FP8 QuantizeLinear and DequantizeLinear work an element at a time. The same
values come from a few vectorized FP32 operations:

* normal range: Veltkamp's splitting (Dekker 1971, "A floating-point technique for extending the available
  precision", section 5). With C = 2**(23 − m) + 1, t = C·v and h = t + (v − t), h is v rounded to m + 1
  significant bits. Ties go to even for these m: the tests compare every one of the 2**23 mantissas of a
  binade with ml_dtypes, and the operations commute with powers of two;
* subnormal range: adding and subtracting 1.5·2**23·u rounds to a multiple of the smallest subnormal u, to
  even, because that is FP32's own rounding at this magnitude.

The form holds for finite inputs only, which calibration checks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from loka_onnx.core.formats import FLOAT8_SPECS, Float8
from loka_onnx.graph.model import GraphModel, Tensor


@dataclass(frozen=True)
class FakeQuantized:
    """Tensors that the rounding leaves in the graph.

    Attributes:
        magnitude: |x / scale| before clipping.
        values: The FP8 value times the scale, in FP32.
    """

    magnitude: Tensor
    values: Tensor


def fake_quantize(
    model: GraphModel, tensor: Tensor, scale: float, format: Float8, name: str
) -> FakeQuantized:
    """Add nodes that compute ``dequantize(quantize(tensor, scale))`` in FP32.

    Args:
        model: The graph to add to.
        tensor: FP32 activation.
        scale: Its per-tensor scale.
        format: FP8 format.
        name: Base of the names of the new nodes.
    """
    spec = FLOAT8_SPECS[format]

    def scalar(label: str, value: float) -> Tensor:
        return model.constant(f"{name}.{label}", np.array(value, dtype=np.float32))

    factor = scalar("scale", scale)
    scaled = model.add("Div", [tensor, factor], f"{name}.scaled")
    clipped = model.add("Clip", [scaled, scalar("min", -spec.max), scalar("max", spec.max)], f"{name}.clip")
    magnitude = model.add("Abs", [scaled], f"{name}.abs")
    split = scalar("split", 2.0 ** (23 - spec.mantissa_bits) + 1.0)
    high = model.add("Mul", [clipped, split], f"{name}.t")
    rest = model.add("Sub", [clipped, high], f"{name}.d")
    normal = model.add("Add", [high, rest], f"{name}.normal")
    magic = scalar("magic", 1.5 * 2.0**23 * spec.min_subnormal)
    shifted = model.add("Add", [clipped, magic], f"{name}.shift")
    subnormal = model.add("Sub", [shifted, magic], f"{name}.subnormal")
    is_small = model.add(
        "Less", [magnitude, scalar("min_normal", spec.min_normal)], f"{name}.small", onnx.TensorProto.BOOL
    )
    rounded = model.add("Where", [is_small, subnormal, normal], f"{name}.round", np.float32)
    return FakeQuantized(magnitude, model.add("Mul", [rounded, factor], f"{name}.fp8"))
