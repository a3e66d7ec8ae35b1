"""Products: MatMul, Gemm, Einsum and convolutions.

The module's strategy (`strategies`) multiplies two FP8 factors of a MatMul or Gemm and is recorded in
`Scope.sites`; all other products are torch's, in the type of their factors.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.padding import conv_padding
from loka_onnx.engines.inductor.lowering.registry import OPERATORS
from loka_onnx.engines.inductor.lowering.strategies import (
    FloatProduct,
    LoweredSite,
    Multiplied,
)
from loka_onnx.engines.inductor.lowering.types import short_name
from loka_onnx.engines.inductor.lowering.values import Dequantized, Value

Tensor = torch.Tensor


@OPERATORS.operator("MatMul", raw=True)
def matmul(node: Node, a: Value, b: Value) -> Tensor:
    """A·B over the last two axes, broadcast over the others."""
    if isinstance(a, Dequantized) and isinstance(b, Dequantized):
        return _multiply_float8(node, a, b, None)
    left, right = node.tensor(a), node.tensor(b)
    _record_dense(node, (a, b), (left, right))
    return torch.matmul(left, right)


@OPERATORS.operator("Gemm", raw=True)
def gemm(node: Node, a: Value, b: Value, c: Value = None) -> Tensor:
    """alpha·A·B + beta·C of matrices, with optionally transposed factors."""
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    addend = None if c is None or beta == 0 else node.tensor(c)
    if isinstance(a, Dequantized) and isinstance(b, Dequantized):
        left, right = _turned(a, node.get("transA", 0)), _turned(b, node.get("transB", 0))
        bias = _bias(addend, right.values.shape[1]) if alpha == beta == 1 else None
        result = _multiply_float8(node, left, right, bias)
        return result if bias is not None else _finish(result, addend, alpha, beta)
    x, weight = node.tensor(a), node.tensor(b)
    _record_dense(node, (a, b), (x, weight))
    x = x.t() if node.get("transA", 0) else x
    weight = weight if node.get("transB", 0) else weight.t()
    bias = _bias(addend, weight.shape[0]) if alpha == beta == 1 else None
    result = functional.linear(x, weight, bias)
    return result if bias is not None else _finish(result, addend, alpha, beta)


def _finish(product: Tensor, addend: Tensor | None, alpha: float, beta: float) -> Tensor:
    product = product if alpha == 1 else product * alpha
    if addend is None:
        return product
    return product + (addend if beta == 1 else addend * beta)


def _bias(addend: Tensor | None, columns: int) -> Tensor | None:
    """The addend of a Gemm as a vector (columns,); None for any other shape."""
    if addend is None or not addend.dim() or addend.shape[-1] != columns:
        return None
    if addend.dim() == 1:
        return addend
    return addend.reshape(-1) if addend.dim() == 2 and addend.shape[0] == 1 else None


def _turned(factor: Dequantized, transposed: int) -> Dequantized:
    if not transposed:
        return factor
    axis = None if factor.axis is None else 1 - factor.axis
    return replace(factor, values=factor.values.t(), axis=axis)


def _multiply_float8(node: Node, a: Dequantized, b: Dequantized, bias: Tensor | None) -> Tensor:
    if a.values.dim() < 2 or b.values.dim() < 2 or not _are_outer(a, b):
        left, right = a.materialize(), b.materialize()
        types = (short_name(left.dtype), short_name(right.dtype))
        reason = "a factor is a vector, or its scales lie along the axis that is summed over"
        result = torch.matmul(left, right)
        _record(node, Multiplied(result, "dequantized", types, engaged=False, reason=reason))
        return result if bias is None else result + bias
    product = FloatProduct(node.name, a.values, a.scale, b.values, b.scale, bias, a.dtype)
    done = node.scope.products.multiply(product)
    _record(node, done)
    return done.values


def _are_outer(a: Dequantized, b: Dequantized) -> bool:
    """Tell whether the scales of both factors are along axes that the product keeps."""
    rows, columns = a.values.dim() - 2, b.values.dim() - 1
    return a.axis in (None, rows) and b.axis in (None, columns)


def _record(node: Node, done: Multiplied) -> None:
    node.scope.sites[node.name] = LoweredSite(
        node.name, node.op_type, done.kernel, done.operands, done.engaged, done.reason
    )


def _record_dense(node: Node, values: tuple[Value, ...], factors: tuple[Tensor, ...]) -> None:
    wide = [
        name for name, value in zip(node.inputs, values, strict=False) if not isinstance(value, Dequantized)
    ]
    mixed = len(wide) != len(values)
    reason = f"FP8 of one factor only: '{wide[0]}' is not quantized" if mixed and wide else ""
    types = tuple(short_name(factor.dtype) for factor in factors)
    kernel = "dequantized" if mixed else "dense"
    node.scope.sites[node.name] = LoweredSite(
        node.name, node.op_type, kernel, types, engaged=False, reason=reason
    )


@OPERATORS.operator("Einsum")
def einsum(node: Node, *factors: Tensor) -> Tensor:
    """A product over named axes."""
    _record_dense(node, factors, factors)
    return torch.einsum(node.attributes["equation"], *factors)


@OPERATORS.operator("Conv")
def conv(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A convolution over one, two or three axes."""
    _record_dense(node, (x, weight), (x, weight))
    spatial = x.dim() - 2
    strides = node.get("strides", [1] * spatial)
    dilations = node.get("dilations", [1] * spatial)
    pads = conv_padding(node, x, list(weight.shape[2:]), strides, dilations)
    even = pads[::2] == pads[1::2]
    x = x if even else functional.pad(x, pads)
    inside = pads[::-2] if even else 0
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[spatial - 1]
    result: Tensor = convolve(x, weight, bias, strides, inside, dilations, node.get("group", 1))
    return result
