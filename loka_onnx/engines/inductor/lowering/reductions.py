"""Reductions over axes, softmax, positions of extremes, and normalizations.

torch computes the statistics of norms of BF16 and FP16 tensors in FP32 and rounds once, after the affine
step, which meets ``stash_type``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.registry import OPERATORS, Lowering, Operator, operator
from loka_onnx.engines.inductor.lowering.values import Value

Tensor = torch.Tensor
Reduce = Callable[[Tensor, list[int], bool], Tensor]


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keep)
    count = math.prod(x.shape[axis] for axis in axes)
    return torch.div(_sum(x, axes, keep), count, rounding_mode="trunc").to(x.dtype)


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.sum(axes, keep, dtype=x.dtype)


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keep, dtype=x.dtype)
    return x


def _in_float(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute in floating point and round back to the input's type, as ONNX types it."""
    return function(x) if x.is_floating_point() else function(x.to(torch.float64)).to(x.dtype)


def _of_bits(reduce: Reduce) -> Reduce:
    """The same for booleans, of which torch has no amax and amin."""
    return lambda x, axes, keep: (
        reduce(x, axes, keep) if x.dtype is not torch.bool else reduce(x.to(torch.uint8), axes, keep).bool()
    )


REDUCTIONS: dict[str, Reduce] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceProd": _prod,
    "ReduceMax": _of_bits(torch.amax),
    "ReduceMin": _of_bits(torch.amin),
    "ReduceL1": lambda x, axes, keep: _sum(x.abs(), axes, keep),
    "ReduceL2": lambda x, axes, keep: _in_float(x, lambda y: torch.sqrt(_sum(y * y, axes, keep))),
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
    "ReduceLogSum": lambda x, axes, keep: _in_float(x, lambda y: _sum(y, axes, keep).log()),
    "ReduceLogSumExp": lambda x, axes, keep: _in_float(x, lambda y: y.logsumexp(axes, keep)),
}
OVER_NO_AXES: dict[str, Callable[[Tensor], Tensor]] = {
    "ReduceL1": torch.abs,
    "ReduceL2": torch.abs,
    "ReduceSumSquare": torch.square,
    "ReduceLogSum": lambda x: _in_float(x, torch.log),
}
"""Result for each element alone; the element itself for other reductions."""


def _reduction(reduce: Reduce) -> Lowering:
    def lowered(node: Node, x: Tensor, axes: Value = None) -> Tensor:
        chosen = node.axes(axes)
        if not chosen and not node.get("noop_with_empty_axes", 0):
            chosen = list(range(x.dim()))
        if not chosen:
            return OVER_NO_AXES[node.op_type](x) if node.op_type in OVER_NO_AXES else x
        return reduce(x, [axis % x.dim() for axis in chosen], bool(node.get("keepdims", 1)))

    return lowered


OPERATORS |= {
    ("", op_type): Operator(_reduction(reduce), numbers=(1,)) for op_type, reduce in REDUCTIONS.items()
}


@operator("GlobalAveragePool", "GlobalMaxPool")
def global_pool(node: Node, x: Tensor) -> Tensor:
    """The mean or the largest element over every spatial axis."""
    axes = list(range(2, x.dim()))
    return x.amax(axes, keepdim=True) if node.op_type == "GlobalMaxPool" else x.mean(axes, keepdim=True)


@operator("ArgMax", "ArgMin")
def arg_extreme(node: Node, x: Tensor) -> Tensor:
    """Position of the extreme element along an axis: the first or, on request, the last."""
    axis, keep = node.get("axis", 0) % x.dim(), bool(node.get("keepdims", 1))
    find = torch.argmax if node.op_type == "ArgMax" else torch.argmin
    if not node.get("select_last_index", 0):
        return find(x, axis, keep)
    return x.shape[axis] - 1 - find(x.flip(axis), axis, keep)


@operator("Softmax", "LogSoftmax")
def softmax(node: Node, x: Tensor) -> Tensor:
    """Softmax along an axis; before operator set 13, over all axes from it on."""
    function = torch.softmax if node.op_type == "Softmax" else torch.log_softmax
    if node.opset >= 13:
        return function(x, node.get("axis", -1))
    axis = node.get("axis", 1) % x.dim()
    return function(x.flatten(axis), axis).reshape(x.shape)


@operator("LayerNormalization")
def layer_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    """(x − mean) / √(variance + ε) · scale + bias over the axes from ``axis``; mean and 1/σ if requested."""
    axis, epsilon = node.get("axis", -1) % x.dim(), node.get("epsilon", 1e-5)
    lengths = list(x.shape[axis:])
    is_whole = list(scale.shape) == lengths and (bias is None or list(bias.shape) == lengths)
    if is_whole and not (node.wants(1) or node.wants(2)):
        return functional.layer_norm(x, lengths, scale, bias, epsilon)
    axes = list(range(axis, x.dim()))
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    mean = wide.mean(axes, keepdim=True)
    centered = wide - mean
    inverse = torch.rsqrt((centered * centered).mean(axes, keepdim=True) + epsilon)
    result = (centered * inverse).to(x.dtype) * scale
    return (result if bias is None else result + bias), mean, inverse


@operator("RMSNormalization")
def rms_normalization(node: Node, x: Tensor, scale: Tensor) -> Tensor:
    """Compute x / √(mean(x²) + ε) · scale over the axes from ``axis``."""
    axis, epsilon = node.get("axis", -1) % x.dim(), node.get("epsilon", 1e-5)
    lengths = list(x.shape[axis:])
    if list(scale.shape) == lengths:
        return functional.rms_norm(x, lengths, scale, epsilon)
    return functional.rms_norm(x, lengths, None, epsilon) * scale


@operator("GroupNormalization", "InstanceNormalization")
def group_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normalize groups of channels, or each; before operator set 21 scale and bias are per group."""
    channels = x.shape[1]
    groups = node.attributes["num_groups"] if node.op_type == "GroupNormalization" else channels
    if scale.shape[0] != channels:
        scale = scale.repeat_interleave(channels // groups)
        bias = bias.repeat_interleave(channels // groups)
    return torch.group_norm(x, groups, scale, bias, node.get("epsilon", 1e-5))


@operator("BatchNormalization")
def batch_normalization(
    node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """Normalize channels by stored statistics."""
    if node.get("training_mode", 0):
        raise node.error("BatchNormalization in training mode is not lowered", "training_mode is 1")
    return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, node.get("epsilon", 1e-5))


@operator("LpNormalization")
def lp_normalization(node: Node, x: Tensor) -> Tensor:
    """Divide x by its L1 or L2 norm along an axis; 0 where the norm is 0."""
    axis, is_l1 = node.get("axis", -1), node.get("p", 2) == 1
    total = (x.abs() if is_l1 else x * x).sum(axis, keepdim=True)
    norm = total if is_l1 else total.sqrt()
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)
