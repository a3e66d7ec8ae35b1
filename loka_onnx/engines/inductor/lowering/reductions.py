"""Reductions over axes, and the positions of extremes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.registry import OPERATORS
from loka_onnx.engines.inductor.lowering.values import Value

Tensor = torch.Tensor
Reduce = Callable[[Tensor, list[int], bool], Tensor]


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keep)
    count: Any = 1
    for axis in axes:
        count = count * x.shape[axis]
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


def _any_or_amax(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.amax(axes, keep) if x.dtype is not torch.bool else x.to(torch.uint8).amax(axes, keep).bool()


def _all_or_amin(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.amin(axes, keep) if x.dtype is not torch.bool else x.to(torch.uint8).amin(axes, keep).bool()


REDUCTIONS: dict[str, Reduce] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceProd": _prod,
    "ReduceMax": _any_or_amax,
    "ReduceMin": _all_or_amin,
    "ReduceL1": lambda x, axes, keep: _sum(x.abs(), axes, keep),
    "ReduceL2": lambda x, axes, keep: _in_float(
        x, lambda floats: torch.sqrt(_sum(floats * floats, axes, keep))
    ),
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
    "ReduceLogSum": lambda x, axes, keep: _in_float(x, lambda floats: _sum(floats, axes, keep).log()),
    "ReduceLogSumExp": lambda x, axes, keep: _in_float(x, lambda floats: floats.logsumexp(axes, keep)),
}


def _register_reductions() -> None:
    for op_type, function in REDUCTIONS.items():

        def lowered(node: Node, x: Tensor, axes: Value = None, reduce: Reduce = function) -> Tensor:
            chosen = node.axes(axes)
            if not chosen and node.get("noop_with_empty_axes", 0):
                return _elementwise_part(node.op_type, x)
            over = [axis % x.dim() for axis in chosen] if chosen else list(range(x.dim()))
            return (
                reduce(x, over, bool(node.get("keepdims", 1))) if over else _elementwise_part(node.op_type, x)
            )

        OPERATORS.operator(op_type, numbers=(1,))(lowered)


def _elementwise_part(op_type: str, x: Tensor) -> Tensor:
    """Result of a reduction over no axes: each element alone."""
    if op_type in {"ReduceL1", "ReduceL2"}:
        return x.abs()
    if op_type == "ReduceSumSquare":
        return x * x
    return _in_float(x, torch.log) if op_type == "ReduceLogSum" else x


_register_reductions()


@OPERATORS.operator("ArgMax", "ArgMin")
def arg_extreme(node: Node, x: Tensor) -> Tensor:
    """Position of the largest or smallest element along an axis: the first or, on request, the last of
    equals.
    """
    axis, keep = node.get("axis", 0) % x.dim(), bool(node.get("keepdims", 1))
    find = torch.argmax if node.op_type == "ArgMax" else torch.argmin
    if not node.get("select_last_index", 0):
        return find(x, axis, keep)
    return x.shape[axis] - 1 - find(x.flip(axis), axis, keep)


@OPERATORS.operator("Softmax", "LogSoftmax")
def softmax(node: Node, x: Tensor) -> Tensor:
    """Softmax along an axis; before operator set 13, over all axes from it on."""
    function = torch.softmax if node.op_type == "Softmax" else torch.log_softmax
    if node.opset >= 13:
        return function(x, node.get("axis", -1))
    axis = node.get("axis", 1) % x.dim()
    return function(x.flatten(axis), axis).reshape(x.shape)


@OPERATORS.operator("GlobalAveragePool")
def global_average_pool(node: Node, x: Tensor) -> Tensor:
    """The mean over every spatial axis."""
    return x.mean(list(range(2, x.dim())), keepdim=True)


@OPERATORS.operator("GlobalMaxPool")
def global_max_pool(node: Node, x: Tensor) -> Tensor:
    """The largest element over every spatial axis."""
    return x.amax(list(range(2, x.dim())), keepdim=True)
