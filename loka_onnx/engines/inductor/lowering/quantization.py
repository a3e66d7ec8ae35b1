"""QuantizeLinear and DequantizeLinear.

Source: ONNX operators, `QuantizeLinear-23` and `DequantizeLinear-23`::

    Q(x)  = saturate(round(x / s) + z)      rounding half to even, saturating at the type's limits
    DQ(q) = (q − z) · s

FP8 saturates infinities too, keeps NaN, and has z = 0. The quotient is computed in FP32 in a BF16 or FP16
graph too, the ``precision`` with which FP8 plans are measured.
"""

from __future__ import annotations

import torch

from loka_onnx.engines.inductor.lowering.node import Node, operator
from loka_onnx.engines.inductor.lowering.values import (
    FLOAT8,
    TORCH_TYPES,
    Constant,
    Dequantized,
    Value,
    along_axis,
    type_name,
)

Tensor = torch.Tensor
_INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.uint16}


@operator("QuantizeLinear", raw=True, wide=(1,))
def quantize_linear(node: Node, x: Value, scale: Value, zero_point: Value = None) -> Tensor:
    """Quantize: round half to even and saturate."""
    values, factor = node.tensor(x), node.tensor(scale).to(torch.float32)
    target = _target(node, zero_point)
    spread = _spread(node, factor, values)
    if target in _INTEGERS:
        bounds = torch.iinfo(target)
        quotient = torch.round(values.to(torch.float32) / spread)
        if zero_point is not None:
            quotient = quotient + _spread(node, node.tensor(zero_point).to(torch.float32), values)
        return quotient.clamp(bounds.min, bounds.max).to(target)
    if not node.get("saturate", 1):
        raise node.error("FP8 without saturation is not lowered", "saturate is 0")
    _check_zero(node, zero_point)
    wide = values.to(torch.float32)
    if values.is_cuda and isinstance(scale, Constant) and scale.array is not None and scale.array.size == 1:
        # Multiply by 1/s like the kernels of `kernels`, so that fused and unfused Q agree. The product is
        # within one FP32 rounding of the quotient: only values that near to an FP8 boundary may cross it.
        return saturated(wide * (1.0 / float(scale.array.astype("float32").reshape(()))), target)
    return saturated(wide / spread, target)


def saturated(values: Tensor, target: torch.dtype) -> Tensor:
    """Round to an FP8 type; values beyond its range become its largest numbers, NaN is kept."""
    limit = torch.finfo(target).max
    return values.clamp(-limit, limit).to(target)


@operator("DequantizeLinear", raw=True, wide=(1,))
def dequantize_linear(node: Node, x: Value, scale: Value, zero_point: Value = None) -> Value:
    """Keep FP8 values with their scale, which a product can take directly; convert integers to floats."""
    values, factor = node.tensor(x), node.tensor(scale).to(torch.float32)
    wide = TORCH_TYPES[node.attributes["output_dtype"]] if node.get("output_dtype", 0) else _type_of(scale)
    if values.dtype in FLOAT8:
        _check_zero(node, zero_point)
        origin = scale if isinstance(scale, Constant) else None
        if factor.numel() == 1:
            return Dequantized(values, factor.reshape(()), wide, None, origin)
        _check_blocks(node)
        return Dequantized(values, factor, wide, node.get("axis", 1) % values.dim(), origin)
    numbers = values.to(torch.float32)
    if zero_point is not None and values.dtype not in FLOAT8:
        numbers = numbers - _spread(node, node.tensor(zero_point).to(torch.float32), values)
    return (numbers * _spread(node, factor, values)).to(wide)


def _target(node: Node, zero_point: Value) -> torch.dtype:
    if zero_point is not None:
        target = _type_of(zero_point)
    else:
        onnx_type = node.get("output_dtype", 0)
        target = TORCH_TYPES.get(onnx_type, torch.bool) if onnx_type else torch.uint8
        if target is torch.bool:
            raise node.error(
                f"values of type {type_name(onnx_type)} are not lowered",
                "E4M3FN, E5M2 and integers of 8 and 16 bits are",
            )
    if target not in FLOAT8 and target not in _INTEGERS:
        raise node.error(f"values of type {target} are not lowered", "E4M3FN, E5M2 and integers are")
    return target


def _check_zero(node: Node, zero_point: Value) -> None:
    if isinstance(zero_point, Constant) and zero_point.array is not None:
        offset = zero_point.array.astype("float32")
        if offset.any():
            raise node.error("the zero point of an FP8 tensor must be 0", f"it is {float(offset.max()):g}")


def _type_of(value: Value) -> torch.dtype:
    """Element type in the graph; the buffer of a scale is wider."""
    if isinstance(value, Constant | torch.Tensor):
        return value.dtype
    raise TypeError(f"{type(value).__name__} has no element type of its own")


def _spread(node: Node, scale: Tensor, values: Tensor) -> Tensor:
    """Broadcast a scale or zero point: one for all, or one for each index of an axis."""
    if scale.numel() == 1:
        return scale.reshape(())
    _check_blocks(node)
    return along_axis(scale, node.get("axis", 1) % values.dim(), values.dim())


def _check_blocks(node: Node) -> None:
    if node.get("block_size", 0):
        raise node.error("scales of blocks are not lowered", f"block_size is {node.get('block_size', 0)}")
