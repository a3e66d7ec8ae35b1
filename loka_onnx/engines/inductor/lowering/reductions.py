"""Reductions over axes, softmax, positions of extremes, and normalizations.

torch computes norms of BF16 and FP16 tensors in FP32 and rounds once at the end, as ``stash_type`` asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from loka_onnx.engines.inductor.lowering.node import OPERATORS, Lowering, Node, Operator, operator
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


def _reduction(reduce: Reduce) -> Lowering:
    def lowered(node: Node, x: Tensor, axes: Value = None) -> Tensor:
        chosen = node.axes(axes)
        if not chosen and not node.get("noop_with_empty_axes", 0):
            chosen = list(range(x.dim()))
        if not chosen:
            # Each element alone.
            return reduce(x.unsqueeze(-1), [-1], False)
        return reduce(x, [axis % x.dim() for axis in chosen], bool(node.get("keepdims", 1)))

    return lowered


OPERATORS |= {
    ("", op_type): Operator(_reduction(reduce), numbers=(1,)) for op_type, reduce in REDUCTIONS.items()
} | {
    ("", "GlobalAveragePool"): Operator(lambda node, x: x.mean(list(range(2, x.dim())), keepdim=True)),
    ("", "GlobalMaxPool"): Operator(lambda node, x: x.amax(list(range(2, x.dim())), keepdim=True)),
    ("", "LogSoftmax"): Operator(lambda node, x: torch.log_softmax(x, node.get("axis", -1))),
    ("", "Softmax"): Operator(lambda node, x: torch.softmax(x, node.get("axis", -1))),
}


@operator("MaxPool", "AveragePool")
def pool(node: Node, x: Tensor) -> Tensor:
    """The largest or mean value of windows over one, two or three axes."""
    spatial = x.dim() - 2
    kernel: list[int] = node.get("kernel_shape", [])
    ones = [1] * spatial
    strides, dilations = node.get("strides", ones), node.get("dilations", ones)
    ends: list[int] = node.get("pads", [0] * (2 * spatial))
    is_largest, before = node.op_type == "MaxPool", ends[:spatial]
    padding, ceil = node.get("auto_pad", "NOTSET"), bool(node.get("ceil_mode", 0))
    is_plain = not (ceil and any(ends)) if is_largest else not ceil and before == ends[spatial:]
    is_plain &= is_largest or dilations == ones
    if padding not in {"NOTSET", "VALID"} or node.wants(1) or not is_plain:
        form = f"auto_pad {padding}, pads {ends}, dilations {dilations}, ceil_mode {int(ceil)}"
        raise node.error(f"a {node.op_type} of this form is not lowered", form)
    if is_largest:
        if any(ends):
            pads = [pad for axis in reversed(range(spatial)) for pad in (ends[axis], ends[axis + spatial])]
            x = functional.pad(x, pads, value=-math.inf)
        largest = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[spatial - 1]
        return largest(x, kernel, strides, 0, dilations, ceil)
    mean = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[spatial - 1]
    return mean(x, kernel, strides, before, ceil, bool(node.get("count_include_pad", 0)))


@operator("ArgMax", "ArgMin")
def arg_extreme(node: Node, x: Tensor) -> Tensor:
    """Position of the extreme element along an axis: the first or, on request, the last."""
    axis, keep = node.get("axis", 0) % x.dim(), bool(node.get("keepdims", 1))
    find = torch.argmax if node.op_type == "ArgMax" else torch.argmin
    if not node.get("select_last_index", 0):
        return find(x, axis, keep)
    return x.shape[axis] - 1 - find(x.flip(axis), axis, keep)


@operator("LayerNormalization")
def layer_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    """(x − mean) / √(variance + ε) · scale + bias over the axes from ``axis``."""
    if node.wants(1) or node.wants(2):
        raise node.error("statistics of LayerNormalization are not lowered", "they are for training")
    lengths, epsilon = list(x.shape[node.get("axis", -1) % x.dim() :]), node.get("epsilon", 1e-5)
    if list(scale.shape) == lengths and (bias is None or list(bias.shape) == lengths):
        return functional.layer_norm(x, lengths, scale, bias, epsilon)
    result = functional.layer_norm(x, lengths, None, None, epsilon) * scale
    return result if bias is None else result + bias


@operator("RMSNormalization")
def rms_normalization(node: Node, x: Tensor, scale: Tensor) -> Tensor:
    """Compute x / √(mean(x²) + ε) · scale over the axes from ``axis``."""
    lengths, epsilon = list(x.shape[node.get("axis", -1) % x.dim() :]), node.get("epsilon", 1e-5)
    if list(scale.shape) == lengths:
        return functional.rms_norm(x, lengths, scale, epsilon)
    return functional.rms_norm(x, lengths, None, epsilon) * scale


@operator("GroupNormalization", "InstanceNormalization")
def group_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normalize groups of channels, or each."""
    channels = x.shape[1]
    groups = node.attributes["num_groups"] if node.op_type == "GroupNormalization" else channels
    return torch.group_norm(x, groups, scale, bias, node.get("epsilon", 1e-5))


@operator("BatchNormalization")
def batch_normalization(
    node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """Normalize channels by stored statistics."""
    if node.get("training_mode", 0):
        raise node.error("BatchNormalization in training mode is not lowered", "training_mode is 1")
    return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, node.get("epsilon", 1e-5))
