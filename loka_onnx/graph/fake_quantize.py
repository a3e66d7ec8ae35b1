"""FP8, INT8 and BF16 rounding in FP32 arithmetic, for graphs that measure the error of low precision.

ONNX Runtime's CPU kernels for FP8 QuantizeLinear and DequantizeLinear, and for Where, Sign and casts, work on
one element at a time. Vectorized FP32 operations give the same values:

* FP8: let a = min(|x| / s, max) and p = max(a, 1.5 · smallest normal), in the binade [2**e, 2**(e+1)). With γ
  = 2**(23 − m)·p, the spacing of FP32 numbers around γ is 2**(e − m), which is that of the FP8 format at a
  (and that of its subnormals below the smallest normal). So γ − (γ − a) is a rounded to FP8. γ is a multiple
  of that spacing, an even one where a is a tie, so ties go to even. At the bottom of a binade γ − a may pass
  into the one below, whose spacing is half: a is then within 2**-20 of 2**e, and rounds to it all the same.
  (In (a + γ) − γ, a + γ may pass into the one above, whose spacing is double: that fails at 8 of 2**23
  mantissas.)
* Sign and scale come back at once: 2**20·x, clipped to [−s, s], is exactly ±s wherever |x| / s rounds to more
  than 0 (above 2**−17 in E5M2, 2**−11 in E4M3FNUZ).
* INT8 and UINT8: with C = 1.5 · 2**23, FP32 numbers around C have the spacing 1, so (x / s + C) − C is x / s
  rounded to the nearest integer, ties to even, for |x / s| ≤ 2**22. Larger ones stay beyond the range.
* BF16: with C = 2**16 + 1, t = C·x and h = t + (x − t), h is x rounded to 8 significant bits (Veltkamp's
  splitting; Dekker 1971, "A floating-point technique for extending the available precision", section 5).

The tests compare all 2**23 mantissas of a binade and the subnormal range with ml_dtypes; the operations
commute with powers of two. They hold for finite inputs, which calibration checks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loka_onnx.core.formats import NumberFormat
from loka_onnx.core.recipe import Scaling
from loka_onnx.graph.model import GraphModel, Tensor

TINY = 2.0**-100
"""Smaller magnitudes count as zero: FP8 and its scales cannot tell them from zero."""
_WHOLE = 1.5 * 2.0**23


@dataclass(frozen=True)
class Bounds:
    """A tensor `saturates` if it may exceed the format's range, and `is_signed` if it may be negative."""

    saturates: bool = True
    is_signed: bool = True


@dataclass(frozen=True)
class FakeQuantized:
    """Tensors of the rounding in the graph: x / scale before clipping (`scaled`), after clipping and rounding
    (`rounded`), both magnitudes in a floating format, and the rounded x in FP32 (`values`); `clipping` is the
    tensor before and the one after the Clip, None without a Clip.
    """

    scaled: Tensor
    rounded: Tensor
    values: Tensor
    clipping: tuple[Tensor, Tensor] | None


class _Chain:
    """Adds elementwise FP32 nodes of one shape."""

    def __init__(self, model: GraphModel, like: Tensor, name: str) -> None:
        self.model, self.shape, self.name = model, like.shape, name

    def __call__(self, op: str, label: str, *inputs: Tensor | float) -> Tensor:
        name = f"{self.name}.{label}"
        operands = [
            self.model.constant(f"{name}.by", np.array(each, np.float32)) if isinstance(each, float) else each
            for each in inputs
        ]
        result = self.model.add(op, operands, name, np.float32)
        result.shape = self.shape
        return result


def fake_quantize(
    model: GraphModel,
    tensor: Tensor,
    scaling: Scaling,
    format: NumberFormat,
    name: str,
    bounds: Bounds = Bounds(),
) -> FakeQuantized:
    """Add nodes that quantize and dequantize an FP32 tensor; `name` begins their names. No reader changes."""
    add, scale = _Chain(model, tensor, name), scaling.scale
    scaled = add("Div", "scaled", tensor, scale)
    if format.mantissa_bits is None:
        whole = add("Sub", "whole", add("Add", "lifted", scaled, _WHOLE), _WHOLE)
        low, high = format.min - scaling.zero_point, format.max - scaling.zero_point
        rounded = add("Clip", "clipped", whole, low, high) if bounds.saturates else whole
        values = add("Mul", "quantized", rounded, scale)
        return FakeQuantized(scaled, rounded, values, (whole, rounded) if bounds.saturates else None)
    magnitude = add("Abs", "magnitude", scaled) if bounds.is_signed else scaled
    clipped = add("Clip", "clipped", magnitude, 0.0, format.max) if bounds.saturates else magnitude
    normal = add("Clip", "normal", clipped, 1.5 * format.min_normal, format.max)
    shift = add("Mul", "shift", normal, 2.0 ** (23 - format.mantissa_bits))
    rounded = add("Sub", "rounded", shift, add("Sub", "shifted", shift, clipped))
    signed: Tensor | float = scale
    if bounds.is_signed:
        signed = add("Clip", "signed", add("Mul", "beyond", tensor, 2.0**20), -scale, scale)
    values = add("Mul", "quantized", rounded, signed)
    return FakeQuantized(magnitude, rounded, values, (magnitude, clipped) if bounds.saturates else None)


def round_to_bfloat16(model: GraphModel, tensor: Tensor, name: str) -> Tensor:
    """Add nodes that round an FP32 tensor to BF16; return their result, of type FP32. No reader changes."""
    add = _Chain(model, tensor, name)
    high = add("Mul", "high", tensor, 2.0**16 + 1.0)
    return add("Add", "bf16", high, add("Sub", "rest", tensor, high))
