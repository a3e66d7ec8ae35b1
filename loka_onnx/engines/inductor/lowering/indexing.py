"""Operators that read or write elements at computed positions.

ONNX counts negative positions from the end in all of them. So does torch's indexing, but not gather or
scatter.
"""

from __future__ import annotations

from typing import Any

import torch

from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.registry import operator
from loka_onnx.engines.inductor.lowering.values import ShapeValue, Value, along_axis

Tensor = torch.Tensor
_REDUCTIONS = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}


@operator("Gather", scalars=(1,), moves=True)
def gather(node: Node, data: Tensor, indices: Value) -> Tensor:
    """Slices along an axis; the indices' shape replaces the axis."""
    axis = node.get("axis", 0) % data.dim()
    if isinstance(indices, ShapeValue):
        position: Any = indices.entries[0]
        return data.select(axis, position)
    index = (slice(None),) * axis + (node.tensor(indices),)
    return data[index]


@operator("GatherElements")
def gather_elements(node: Node, data: Tensor, indices: Tensor) -> Tensor:
    """One element for each index along an axis; other coordinates are kept."""
    axis = node.get("axis", 0) % data.dim()
    return torch.gather(data, axis, _from_start(indices, data.shape[axis]))


@operator("GatherND")
def gather_nd(node: Node, data: Tensor, indices: Tensor) -> Tensor:
    """Slices at index tuples, behind shared batch axes."""
    shared = node.get("batch_dims", 0)
    parts: list[Tensor] = []
    for axis in range(shared):
        steps = torch.arange(data.shape[axis], device=data.device)
        parts.append(along_axis(steps, axis, indices.dim() - 1))
    parts += [part.to(torch.int64) for part in indices.unbind(-1)]
    return data[tuple(parts)]


@operator("ScatterElements")
def scatter_elements(node: Node, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Copy with elements replaced, or combined by a reduction."""
    axis = node.get("axis", 0) % data.dim()
    return _scattered(node, data, axis, _from_start(indices, data.shape[axis]), updates)


@operator("ScatterND")
def scatter_nd(node: Node, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Copy with slices replaced, or combined by a reduction, at index tuples."""
    depth = indices.shape[-1]
    rows: Any = 0
    for axis, part in enumerate(indices.to(torch.int64).unbind(-1)):
        rows = rows * data.shape[axis] + torch.where(part < 0, part + data.shape[axis], part)
    flat = data.reshape(-1, *data.shape[depth:])
    rows = rows.reshape([-1] + [1] * (data.dim() - depth))
    written = updates.reshape(-1, *data.shape[depth:])
    return _scattered(node, flat, 0, rows.expand_as(written), written).reshape(data.shape)


def _scattered(node: Node, data: Tensor, axis: int, positions: Tensor, updates: Tensor) -> Tensor:
    reduction = node.get("reduction", "none")
    if reduction == "none":
        return torch.scatter(data, axis, positions, updates)
    return torch.scatter_reduce(data, axis, positions, updates, _REDUCTIONS[reduction], include_self=True)


@operator("OneHot", numbers=(1,))
def one_hot(node: Node, indices: Tensor, depth: Value, values: Tensor) -> Tensor:
    """``values[1]`` at each index on a new axis, ``values[0]`` elsewhere and for indices out of range."""
    length = int(node.number(depth, "depth"))
    rank = indices.dim() + 1
    axis = node.get("axis", -1) % rank
    positions = along_axis(torch.arange(length, device=indices.device), axis, rank)
    chosen = _from_start(indices.to(torch.int64), length).unsqueeze(axis)
    off, on = values.unbind(0)
    return torch.where(chosen == positions, on, off)


@operator("TopK", numbers=(1,))
def top_k(node: Node, x: Tensor, count: Value) -> tuple[Tensor, ...]:
    """The largest or smallest elements along an axis, and their positions."""
    k = node.number(count, "K")
    largest, ordered = bool(node.get("largest", 1)), bool(node.get("sorted", 1))
    return tuple(torch.topk(x, k, node.get("axis", -1), largest, ordered))


@operator("CumSum", numbers=(1,))
def cum_sum(node: Node, x: Tensor, axis: Value) -> Tensor:
    """Running sums along an axis, from either end, with or without the element itself."""
    dim = int(node.number(axis, "axis"))
    x = x.flip(dim) if node.get("reverse", 0) else x
    if node.get("exclusive", 0):
        first = torch.zeros_like(x.narrow(dim, 0, 1))
        x = torch.cat([first, x.narrow(dim, 0, x.shape[dim] - 1)], dim)
    total = torch.cumsum(x, dim, dtype=x.dtype)
    return total.flip(dim) if node.get("reverse", 0) else total


def _from_start(indices: Tensor, length: Any) -> Tensor:
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + length, indices)
