"""Operators on numbers that come from shapes.

They run while the module is traced, on Python's numbers and torch's symbols, and add no operation to the
compiled graph. A function returns NotImplemented where the result is neither a number nor a vector; the
numbers then become tensors.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.values import FLOAT8, TORCH_TYPES, ShapeValue

OnShapes = Callable[..., Any]
_SYMBOLS: Any = torch
"""torch, whose functions of symbols carry no types."""


def _lifted(function: Callable[..., Any], dtype: torch.dtype | None = None) -> OnShapes:
    """Lift a function of plain or symbolic numbers to `ShapeValue`, with broadcasting."""

    def combined(node: Node, *values: ShapeValue) -> Any:
        length = max(len(value.entries) for value in values)
        if any(len(value.entries) not in (1, length) for value in values):
            return NotImplemented
        columns = [each.entries * length if len(each.entries) == 1 else each.entries for each in values]
        entries = tuple(function(*row) for row in zip(*columns, strict=True))
        return ShapeValue(entries, dtype or values[0].dtype, all(value.scalar for value in values))

    return combined


def _reduced(combine: Callable[[Any, Any], Any]) -> OnShapes:
    def reduce(node: Node, x: ShapeValue, axes: ShapeValue | None = None) -> Any:
        if not x.entries or (node.get("noop_with_empty_axes", 0) and not node.axes(axes)):
            return NotImplemented
        entry = functools.reduce(combine, x.entries)
        return ShapeValue((entry,), x.dtype, scalar=x.scalar or not node.get("keepdims", 1))

    return reduce


def _quotient(a: Any, b: Any) -> Any:
    if isinstance(a, float | torch.SymFloat) or isinstance(b, float | torch.SymFloat):
        return a / b
    # Lengths are not negative, so that floor and truncation agree.
    return a // b if not isinstance(a, int) or not isinstance(b, int) else math.trunc(a / b)


def _cast(node: Node, x: ShapeValue) -> Any:
    target = TORCH_TYPES.get(node.attributes["to"])
    if target is None or target in FLOAT8:
        return NotImplemented
    if target.is_floating_point:
        return _lifted(_SYMBOLS.sym_float, target)(node, x)
    return _lifted(bool if target is torch.bool else _SYMBOLS.sym_int, target)(node, x)


def _gather(node: Node, data: ShapeValue, indices: ShapeValue) -> Any:
    taken = tuple(data.entries[int(position)] for position in indices.entries)
    return ShapeValue(taken, data.dtype, indices.scalar)


def _slice(node: Node, data: ShapeValue, *bounds: ShapeValue | None) -> Any:
    steps = bounds[3] if len(bounds) > 3 else None
    start, end = node.number(bounds[0], "starts"), node.number(bounds[1], "ends")
    step = 1 if steps is None else node.number(steps, "steps")
    return ShapeValue(data.entries[start:end:step], data.dtype)


def _unsqueeze(node: Node, x: ShapeValue, axes: ShapeValue | None = None) -> Any:
    return ShapeValue(x.entries, x.dtype) if x.scalar and len(node.axes(axes) or ()) == 1 else NotImplemented


def _split(node: Node, x: ShapeValue, sizes: ShapeValue | None = None) -> Any:
    lengths = [-(-len(x.entries) // len(node.outputs))] * len(node.outputs)
    lengths = lengths if sizes is None else node.numbers(sizes, "split")
    ends = accumulate(lengths)
    return tuple(ShapeValue(x.entries[end - n : end], x.dtype) for end, n in zip(ends, lengths, strict=True))


def _expand(node: Node, x: ShapeValue, shape: ShapeValue) -> Any:
    if len(shape.entries) != 1 or not isinstance(shape.entries[0], int):
        return NotImplemented
    return ShapeValue(x.entries * shape.entries[0] if len(x.entries) == 1 else x.entries, x.dtype)


def _scatter(node: Node, data: ShapeValue, indices: ShapeValue, updates: ShapeValue) -> Any:
    if node.get("reduction", "none") != "none":
        return NotImplemented
    entries = list(data.entries)
    for position, entry in zip(indices.entries, updates.entries, strict=True):
        entries[int(position)] = entry
    return ShapeValue(tuple(entries), data.dtype)


ON_SHAPES: dict[str, OnShapes] = {
    **{op: _lifted(getattr(operator, op.lower())) for op in ("Abs", "Add", "Mul", "Neg", "Pow", "Sub")},
    "Cast": _cast,
    "Concat": lambda node, *parts: ShapeValue(
        tuple(entry for part in parts for entry in part.entries), parts[0].dtype
    ),
    "Div": _lifted(_quotient),
    "Equal": _lifted(operator.eq, torch.bool),
    "Expand": _expand,
    "Gather": _gather,
    "Greater": _lifted(operator.gt, torch.bool),
    "GreaterOrEqual": _lifted(operator.ge, torch.bool),
    "Less": _lifted(operator.lt, torch.bool),
    "LessOrEqual": _lifted(operator.le, torch.bool),
    "Max": _lifted(lambda *xs: functools.reduce(_SYMBOLS.sym_max, xs)),
    "Min": _lifted(lambda *xs: functools.reduce(_SYMBOLS.sym_min, xs)),
    "Mod": lambda node, a, b: NotImplemented if node.get("fmod", 0) else _lifted(operator.mod)(node, a, b),
    "Not": _lifted(_SYMBOLS.sym_not, torch.bool),
    "ReduceMax": _reduced(_SYMBOLS.sym_max),
    "ReduceMin": _reduced(_SYMBOLS.sym_min),
    "ReduceProd": _reduced(operator.mul),
    "ReduceSum": _reduced(operator.add),
    "Reshape": lambda node, x, shape: (
        ShapeValue(x.entries, x.dtype, not shape.entries) if len(shape.entries) < 2 else NotImplemented
    ),
    "ScatterElements": _scatter,
    "Slice": _slice,
    "Split": _split,
    "Sqrt": _lifted(_SYMBOLS.sym_sqrt),
    "Squeeze": lambda node, x, axes=None: ShapeValue(x.entries, x.dtype, scalar=len(x.entries) == 1),
    "Unsqueeze": _unsqueeze,
    "Where": lambda node, condition, yes, no: _lifted(lambda flag, a, b: a if flag else b, yes.dtype)(
        node, condition, yes, no
    ),
}
"""Functions of ONNX operators whose inputs are all numbers."""
