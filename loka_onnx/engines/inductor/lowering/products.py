"""QuantizeLinear, DequantizeLinear, and products: MatMul, Gemm, Einsum and convolutions.

Source: ONNX operators, `QuantizeLinear-23` and `DequantizeLinear-23`::

    Q(x)  = saturate(round(x / s) + z)      rounding half to even, saturating at the type's limits
    DQ(q) = (q − z) · s

FP8 saturates infinities too, keeps NaN, and has z = 0. The quotient is always computed in FP32, the
``precision`` with which quantized plans are measured.

The module's strategy (`strategies`) multiplies two FP8 factors, or INT8 ones with z = 0, of a MatMul or Gemm;
torch computes all other products, in the type of their factors. One with a vector (`_is_of_vector`) is a sum
that the compiler fuses with its neighbours: for the bilinear heads of fuxictr-finalmlp, (batch, 4, 1, 16) by
(4, 16, 16) and that by (batch, 4, 16, 1), libraries took 37 of 134 µs at 2048 (sm90).
"""

from __future__ import annotations

import torch
from onnx import TensorProto
from torch.nn import functional

from loka_onnx.engines.inductor.lowering.node import Node, operator
from loka_onnx.engines.inductor.lowering.strategies import Factors, compiled_site
from loka_onnx.engines.inductor.lowering.values import (
    EIGHT_BITS,
    FLOAT8,
    TORCH_TYPES,
    Constant,
    Dequantized,
    Value,
    along_axis,
    saturated,
)

Tensor = torch.Tensor
_INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.uint16}
MOST_SHARED = 4096
"""Most elements of a matrix that all rows of a batch share, for a product with a vector that is a sum."""


@operator("QuantizeLinear", raw=True, wide=(1,))
def quantize_linear(node: Node, x: Value, scale: Value, zero_point: Value = None) -> Tensor:
    """Quantize: round half to even and saturate."""
    values, factor = node.tensor(x), node.tensor(scale).to(torch.float32)
    target = _target(node, zero_point)
    spread = _spread(node, factor, values)
    if target in _INTEGERS and (target not in EIGHT_BITS or not _is_zero(zero_point)):
        bounds = torch.iinfo(target)
        quotient = torch.round(values.to(torch.float32) / spread)
        if zero_point is not None:
            quotient = quotient + _spread(node, node.tensor(zero_point).to(torch.float32), values)
        return quotient.clamp(bounds.min, bounds.max).to(target)
    if target in FLOAT8 and not node.get("saturate", 1):
        raise node.error("FP8 without saturation is not lowered", "saturate is 0")
    _check_zero(node, zero_point)
    wide = values.to(torch.float32)
    if values.is_cuda and isinstance(scale, Constant) and scale.array is not None and scale.array.size == 1:
        # Multiply by 1/s like the kernels of `kernels`, so that fused and unfused Q agree. The product is
        # within one FP32 rounding of the quotient: only values that near to a boundary may cross it.
        return saturated(wide * (1.0 / float(scale.array.astype("float32").reshape(()))), target)
    return saturated(wide / spread, target)


@operator("DequantizeLinear", raw=True, wide=(1,))
def dequantize_linear(node: Node, x: Value, scale: Value, zero_point: Value = None) -> Value:
    """Keep eight-bit values with their scale, which a product can take directly; convert others to floats."""
    values, factor = node.tensor(x), node.tensor(scale).to(torch.float32)
    wide = TORCH_TYPES[node.attributes["output_dtype"]] if node.get("output_dtype", 0) else _type_of(scale)
    if values.dtype in FLOAT8:
        _check_zero(node, zero_point)
    if values.dtype in EIGHT_BITS and _is_zero(zero_point):
        origin = scale if isinstance(scale, Constant) else None
        if factor.numel() == 1:
            return Dequantized(values, factor.reshape(()), wide, None, origin)
        _check_blocks(node)
        return Dequantized(values, factor, wide, node.get("axis", 1) % values.dim(), origin)
    numbers = values.to(torch.float32)
    if zero_point is not None:
        numbers = numbers - _spread(node, node.tensor(zero_point).to(torch.float32), values)
    return (numbers * _spread(node, factor, values)).to(wide)


def _target(node: Node, zero_point: Value) -> torch.dtype:
    onnx_type = node.get("output_dtype", 0)
    target = TORCH_TYPES.get(onnx_type) if onnx_type else torch.uint8
    target = target if zero_point is None else _type_of(zero_point)
    if target is None or target not in {*FLOAT8, *_INTEGERS}:
        name = TensorProto.DataType.Name(onnx_type) if target is None else target
        known = "E4M3FN, E5M2 and integers of 8 and 16 bits are"
        raise node.error(f"values of type {name} are not lowered", known)
    return target


def _is_zero(zero_point: Value) -> bool:
    """True without a zero point, or with one that is certainly 0 for all channels."""
    if isinstance(zero_point, Constant) and zero_point.array is not None:
        return not zero_point.array.astype("float32").any()
    return zero_point is None


def _check_zero(node: Node, zero_point: Value) -> None:
    if not _is_zero(zero_point):
        raise node.error("the zero point of an FP8 tensor must be 0", "it is another, or computed")


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


@operator("MatMul", raw=True)
def matmul(node: Node, a: Value, b: Value) -> Tensor:
    """A·B over the last two axes, broadcast over the others."""
    if isinstance(a, Dequantized) and isinstance(b, Dequantized):
        return _multiply_quantized(node, a, b, None)
    left, right = node.tensor(a), node.tensor(b)
    _record_dense(node, (a, b), (left, right))
    return _sum_of_products(left, right) if _is_of_vector(left, right) else torch.matmul(left, right)


@operator("Gemm", raw=True)
def gemm(node: Node, a: Value, b: Value, c: Value = None) -> Tensor:
    """alpha·A·B + beta·C of matrices, with optionally transposed factors."""
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    addend = None if c is None or beta == 0 else node.tensor(c)
    if isinstance(a, Dequantized) and isinstance(b, Dequantized):
        left = a.permuted([1, 0]) if node.get("transA", 0) else a
        right = b.permuted([1, 0]) if node.get("transB", 0) else b
        bias = _bias(addend, right.values.shape[1]) if alpha == beta == 1 else None
        product = _multiply_quantized(node, left, right, bias)
    else:
        x, weight = node.tensor(a), node.tensor(b)
        _record_dense(node, (a, b), (x, weight))
        x = x.t() if node.get("transA", 0) else x
        weight = weight if node.get("transB", 0) else weight.t()
        bias = _bias(addend, weight.shape[0]) if alpha == beta == 1 else None
        if _is_of_vector(x, weight.t()):
            bias, product = None, _sum_of_products(x, weight.t())
        else:
            product = functional.linear(x, weight, bias)
    if bias is not None:
        return product
    product = product if alpha == 1 else product * alpha
    if addend is None:
        return product
    return product + (addend if beta == 1 else addend * beta)


def _is_of_vector(a: Tensor, b: Tensor) -> bool:
    """True for a row by matrices or matrices by a column, unless all rows of a batch read one large matrix.
    The batch is no row, even if it is 1.
    """
    if min(a.dim(), b.dim()) < 2 or not a.is_floating_point():
        return False
    is_row = a.dim() > 2 and _is_one(a.shape[-2])
    vector, matrix = (a, b) if is_row else (b, a)
    if not is_row and not _is_one(b.shape[-1]):
        return False
    return matrix.dim() >= vector.dim() or matrix.shape[-1] * matrix.shape[-2] <= MOST_SHARED


def _is_one(length: int | torch.SymInt) -> bool:
    """True for a length that is 1 in every request; comparing a dynamic one would fix it."""
    return isinstance(length, int) and length == 1


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """A·B elementwise, summed in FP32 or a wider type of the factors."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(-3)).sum(-2).to(a.dtype)


def _bias(addend: Tensor | None, columns: int) -> Tensor | None:
    """The addend of a Gemm as a vector (columns,); None for any other shape."""
    if addend is None or not addend.dim() or addend.shape[-1] != columns:
        return None
    if addend.dim() == 1:
        return addend
    return addend.reshape(-1) if addend.dim() == 2 and addend.shape[0] == 1 else None


def _multiply_quantized(node: Node, a: Dequantized, b: Dequantized, bias: Tensor | None) -> Tensor:
    rows, columns = a.values.dim() - 2, b.values.dim() - 1
    if rows < 0 or columns < 1 or a.axis not in (None, rows) or b.axis not in (None, columns):
        left, right = a.materialize(), b.materialize()
        reason = "a factor is a vector, or its scales lie along the axis that is summed over"
        product = torch.matmul(left, right)
        site = compiled_site(node.name, "dequantized", left, right, reason=reason)
        node.scope.sites[node.name] = site
        return product if bias is None else product + bias
    factors = Factors(node.name, a.values, a.scale, b.values, b.scale, bias, a.dtype)
    (values,), node.scope.sites[node.name] = node.scope.products.multiply(factors)
    return values


def _record_dense(node: Node, values: tuple[Value, ...], factors: tuple[Tensor, ...]) -> None:
    pairs = zip(node.inputs, values, strict=False)
    wide = [name for name, value in pairs if not isinstance(value, Dequantized)]
    mixed = len(wide) != len(values)
    reason = f"eight bits of one factor only: '{wide[0]}' is not quantized" if mixed and wide else ""
    kernel = "dequantized" if mixed else "dense"
    # A batched product computes several sites (`fusions.branches`).
    for site in node.get("products", [node.name]):
        node.scope.sites[site] = compiled_site(site, kernel, *factors, reason=reason)


@operator("Einsum")
def einsum(node: Node, *factors: Tensor) -> Tensor:
    """A product over named axes."""
    _record_dense(node, factors, factors)
    return torch.einsum(node.attributes["equation"], *factors)


@operator("Conv")
def conv(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A convolution over one, two or three axes."""
    _record_dense(node, (x, weight), (x, weight))
    spatial = x.dim() - 2
    strides = node.get("strides", [1] * spatial)
    dilations = node.get("dilations", [1] * spatial)
    if node.get("auto_pad", "NOTSET") not in {"NOTSET", "VALID"}:
        raise node.error(f"auto_pad {node.get('auto_pad', '')} of Conv is not lowered", "pads are")
    ends: list[int] = node.get("pads", [0] * (2 * spatial))
    # In the order of `torch.nn.functional.pad`: the last axis first.
    pads = [pad for axis in reversed(range(spatial)) for pad in (ends[axis], ends[axis + spatial])]
    even = pads[::2] == pads[1::2]
    x = x if even else functional.pad(x, pads)
    inside = pads[::-2] if even else 0
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[spatial - 1]
    result: Tensor = convolve(x, weight, bias, strides, inside, dilations, node.get("group", 1))
    return result
