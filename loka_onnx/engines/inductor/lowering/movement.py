"""Operators that move, repeat, drop or pad elements, or read or write them at computed positions.

ONNX counts negative positions from the end; so does torch's indexing, but not gather or scatter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from loka_onnx.engines.inductor.lowering.node import OPERATORS, Node, Operator, operator
from loka_onnx.engines.inductor.lowering.values import (
    Constant,
    Dequantized,
    ShapeValue,
    Value,
    along_axis,
    numbers_of,
)

Tensor = torch.Tensor
_MOST_NUMBERS = 64
"""Most elements of a filled vector that may be a shape; longer ones are data."""
_REDUCTIONS = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}
OPERATORS |= {
    ("", "Identity"): Operator(lambda node, x: x, raw=True),
    ("", "Size"): Operator(
        lambda node, x: ShapeValue((math.prod(_lengths(node, x)),), scalar=True), raw=True
    ),
    ("", "Tile"): Operator(
        lambda node, x, repeats: x.repeat(node.numbers(repeats, "repeats")), numbers=(1,), moves=True
    ),
}


@operator("Constant")
def constant(node: Node) -> Any:
    """Refuse a Constant that could not be folded."""
    evidence = f"its attributes are {sorted(node.attributes)}"
    raise node.error("a constant of this kind is not lowered", evidence)


@operator("Reshape", numbers=(1,), moves=True)
def reshape(node: Node, x: Tensor, shape: Value) -> Tensor:
    """New shape; 0 keeps a length unless ``allowzero``, and one -1 takes the rest."""
    target = node.numbers(shape, "shape")
    if not node.get("allowzero", 0):
        target = [x.shape[i] if isinstance(n, int) and n == 0 else n for i, n in enumerate(target)]
    return x.reshape(target)


@operator("Flatten", moves=True)
def flatten(node: Node, x: Tensor) -> Tensor:
    """A matrix: the axes before ``axis`` and those from it on."""
    axis = node.get("axis", 1)
    axis += x.dim() if axis < 0 else 0
    if axis == 1 and x.dim() > 1:
        return x.flatten(1) if x.dim() > 2 else x
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Transpose", raw=True)
def transpose(node: Node, x: Value) -> Value:
    """Permute axes, including the channel axis of quantized values."""
    if isinstance(x, Dequantized):
        return x.permuted(node.get("perm", list(range(x.values.dim()))[::-1]))
    tensor = node.tensor(x)
    return tensor.permute(node.get("perm", list(range(tensor.dim()))[::-1]))


@operator("Squeeze", numbers=(1,), moves=True)
def squeeze(node: Node, x: Tensor, axes: Value = None) -> Tensor:
    """Axes of length 1 taken out; all of them when none are named."""
    chosen = node.axes(axes)
    if chosen is None:
        chosen = [axis for axis, length in enumerate(x.shape) if isinstance(length, int) and length == 1]
    return x.squeeze(tuple(axis % x.dim() for axis in chosen)) if chosen else x


@operator("Unsqueeze", numbers=(1,), moves=True)
def unsqueeze(node: Node, x: Tensor, axes: Value = None) -> Tensor:
    """Axes of length 1 put in, at positions in the result."""
    chosen = node.axes(axes) or []
    rank = x.dim() + len(chosen)
    for axis in sorted(axis % rank for axis in chosen):
        x = x.unsqueeze(axis)
    return x


@operator("Concat", raw=True)
def concat(node: Node, *parts: Value) -> Value:
    """Concatenate; quantized values of one type and scale stay so."""
    axis = node.get("axis", 1)
    narrow = [part for part in parts if isinstance(part, Dequantized)]
    first = narrow[0] if narrow else None
    if first is not None and len(narrow) == len(parts) and all(first.has_scale_of(part) for part in narrow):
        return replace(first, values=torch.cat([part.values for part in narrow], axis))
    return torch.cat([node.tensor(part) for part in parts], axis)


@operator("Split", numbers=(1,), moves=True)
def split(node: Node, x: Tensor, sizes: Value = None) -> tuple[Tensor, ...]:
    """Split an axis into the given sizes, or into equal ones with a smaller last."""
    axis = node.get("axis", 0)
    if sizes is not None:
        return torch.split(x, node.numbers(sizes, "split"), axis)
    return torch.split(x, -(-x.shape[axis] // node.get("num_outputs", len(node.outputs))), axis)


@operator("Slice", numbers=(1, 2, 3, 4), moves=True)
def slice_(
    node: Node, x: Tensor, starts: Value, ends: Value, axes: Value = None, steps: Value = None
) -> Tensor:
    """Every n-th element between two positions of some axes."""
    first, last = node.numbers(starts, "starts"), node.numbers(ends, "ends")
    chosen = node.axes(axes)
    stride = [1] * len(first) if steps is None else node.numbers(steps, "steps")
    for position, axis in enumerate(range(len(first)) if chosen is None else chosen):
        begin, end, step = first[position], last[position], stride[position]
        if step > 0:
            x = x[(slice(None),) * (axis % x.dim()) + (slice(begin, end, step),)]
        else:
            x = torch.index_select(x, axis, _backwards(x, axis, (begin, end, step)))
    return x


def _backwards(x: Tensor, axis: int, bounds: tuple[Any, Any, Any]) -> Tensor:
    """Positions of a slice with a negative step; ONNX clamps its bounds to [0, n−1] and [−1, n−1]."""
    length = x.shape[axis]
    begin, end, step = bounds
    begin = min(begin + length if begin < 0 else begin, length - 1)
    end = max(end + length, -1) if end < 0 else min(end, length - 1)
    return torch.arange(begin, end, step, device=x.device)


@operator("Expand", numbers=(1,), moves=True)
def expand(node: Node, x: Tensor, shape: Value) -> Tensor:
    """Broadcast axes of length 1; a target length of 1 keeps the tensor's length."""
    target = node.numbers(shape, "shape")
    rank = max(len(target), x.dim())
    target = [1] * (rank - len(target)) + target
    first = rank - x.dim()
    # Without a reshape to the rank: Inductor (PyTorch 2.11) has none for a constant of rank 0.
    return x.expand([-1 if axis >= first and _is_one(n) else n for axis, n in enumerate(target)])


def _is_one(length: Any) -> bool:
    return isinstance(length, int) and length == 1


@operator("Trilu", numbers=(1,))
def trilu(node: Node, x: Tensor, diagonal: Value = None) -> Tensor:
    """The upper or lower triangle of matrices."""
    k = 0 if diagonal is None else int(node.number(diagonal, "k"))
    return torch.triu(x, k) if node.get("upper", 1) else torch.tril(x, k)


@operator("Pad", numbers=(1, 2, 3))
def pad(node: Node, x: Tensor, pads: Value, value: Value = None, axes: Value = None) -> Tensor:
    """Pad both ends of axes with a constant; negative amounts crop."""
    if node.get("mode", "constant") != "constant":
        raise node.error(f"mode '{node.get('mode', '')}' of Pad is not lowered", "constant is")
    amounts = node.numbers(pads, "pads")
    chosen = list(range(x.dim())) if axes is None else [a % x.dim() for a in node.numbers(axes, "axes")]
    ends = [(0, 0)] * x.dim()
    for position, axis in enumerate(chosen):
        ends[axis] = (amounts[position], amounts[position + len(chosen)])
    fill: Any = node.number(value, "constant_value") if isinstance(value, ShapeValue) else 0.0
    return functional.pad(x, [amount for pair in reversed(ends) for amount in pair], value=fill)


@operator("Shape", raw=True)
def shape_of(node: Node, x: Value) -> ShapeValue:
    """Lengths of a tensor, as numbers."""
    lengths = _lengths(node, x)
    return ShapeValue(tuple(lengths[node.get("start", 0) : node.get("end", len(lengths))]))


def _lengths(node: Node, x: Value) -> list[Any]:
    if isinstance(x, ShapeValue):
        return [] if x.scalar else [len(x.entries)]
    if isinstance(x, Constant):
        return list(x.shape)
    return list((x.values if isinstance(x, Dequantized) else node.tensor(x)).shape)


@operator("ConstantOfShape", numbers=(0,))
def constant_of_shape(node: Node, shape: Value) -> Value:
    """A filled tensor; a short integer vector stays numbers, because it may be a shape."""
    lengths = node.numbers(shape, "shape")
    fill = node.attributes.get("value")
    known = None if fill is None else numbers_of(fill)
    value, dtype = (0.0, torch.float32) if known is None else (known.entries[0], known.dtype)
    is_short = len(lengths) == 1 and isinstance(lengths[0], int) and lengths[0] <= _MOST_NUMBERS
    if is_short and dtype is torch.int64:
        return ShapeValue((value,) * lengths[0])
    return torch.full(lengths, value, dtype=dtype, device=node.scope.device)  # type: ignore[arg-type]


@operator("Range", numbers=(0, 1, 2))
def range_(node: Node, start: Value, limit: Value, delta: Value) -> Tensor:
    """Numbers from a start up to, excluding, a limit."""
    begin, end = node.number(start, "start"), node.number(limit, "limit")
    dtype = start.dtype if isinstance(start, ShapeValue) else torch.int64
    return torch.arange(begin, end, node.number(delta, "delta"), dtype=dtype, device=node.scope.device)


@operator("Gather", scalars=(1,), moves=True)
def gather(node: Node, data: Tensor, indices: Value) -> Tensor:
    """Slices along an axis; the indices' shape replaces the axis."""
    axis = node.get("axis", 0) % data.dim()
    if isinstance(indices, ShapeValue):
        return data.select(axis, indices.entries[0])  # type: ignore[arg-type]
    return data[(slice(None),) * axis + (node.tensor(indices),)]


@operator("GatherElements")
def gather_elements(node: Node, data: Tensor, indices: Tensor) -> Tensor:
    """Return the element at each index along an axis, in the shape of `indices`."""
    axis = node.get("axis", 0) % data.dim()
    return torch.gather(data, axis, _from_start(indices, data.shape[axis]))


@operator("GatherND")
def gather_nd(node: Node, data: Tensor, indices: Tensor) -> Tensor:
    """Slices at index tuples, behind shared batch axes."""
    shared, rank = range(node.get("batch_dims", 0)), indices.dim() - 1
    steps = (torch.arange(data.shape[axis], device=data.device) for axis in shared)
    parts = [along_axis(each, axis, rank) for axis, each in enumerate(steps)]
    return data[(*parts, *(part.to(torch.int64) for part in indices.unbind(-1)))]


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
