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
from typing import Any

import torch

from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.registry import OPERATORS
from loka_onnx.engines.inductor.lowering.types import FLOAT8, TORCH_TYPES
from loka_onnx.engines.inductor.lowering.values import ShapeValue

_SYMBOLS: Any = torch
"""torch, whose functions of symbols carry no types."""


def _on_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lift a function of plain or symbolic numbers to `ShapeValue`, with broadcasting."""

    def combined(node: Node, *values: ShapeValue) -> Any:
        length = max(len(value.entries) for value in values)
        if any(len(value.entries) not in (1, length) for value in values):
            return NotImplemented
        columns = [
            value.entries * length if len(value.entries) == 1 and length != 1 else value.entries
            for value in values
        ]
        entries = tuple(function(*row) for row in zip(*columns, strict=True))
        return ShapeValue(entries, values[0].dtype, all(value.scalar for value in values))

    return combined


def _quotient(a: Any, b: Any) -> Any:
    if isinstance(a, float | torch.SymFloat) or isinstance(b, float | torch.SymFloat):
        return a / b
    # Lengths are not negative, so that floor and truncation agree.
    return a // b if not isinstance(a, int) or not isinstance(b, int) else math.trunc(a / b)


for _name, _function in {
    "Add": lambda *xs: xs[0] + xs[1],
    "Sub": lambda *xs: xs[0] - xs[1],
    "Mul": lambda *xs: xs[0] * xs[1],
    "Div": _quotient,
    "Neg": lambda x: -x,
    "Abs": abs,
    "Sqrt": _SYMBOLS.sym_sqrt,
    "Max": lambda *xs: functools.reduce(_SYMBOLS.sym_max, xs),
    "Min": lambda *xs: functools.reduce(_SYMBOLS.sym_min, xs),
}.items():
    OPERATORS.on_shapes(_name)(_on_numbers(_function))


@OPERATORS.on_shapes("Pow")
def _power_of_numbers(node: Node, base: ShapeValue, exponent: ShapeValue) -> Any:
    return _on_numbers(lambda a, b: a**b)(node, base, exponent)


@OPERATORS.on_shapes("Mod")
def _mod_of_numbers(node: Node, a: ShapeValue, b: ShapeValue) -> Any:
    return NotImplemented if node.get("fmod", 0) else _on_numbers(lambda x, y: x % y)(node, a, b)


@OPERATORS.on_shapes("Cast")
def _cast_of_numbers(node: Node, x: ShapeValue) -> Any:
    target = TORCH_TYPES.get(node.attributes["to"])
    if target is None or target in FLOAT8:
        return NotImplemented
    if target.is_floating_point:
        return ShapeValue(tuple(_SYMBOLS.sym_float(entry) for entry in x.entries), target, x.scalar)
    if target is torch.bool:
        return ShapeValue(tuple(bool(entry) for entry in x.entries), target, x.scalar)
    return ShapeValue(tuple(_SYMBOLS.sym_int(entry) for entry in x.entries), target, x.scalar)


@OPERATORS.on_shapes("Where")
def _where_of_numbers(node: Node, condition: ShapeValue, yes: ShapeValue, no: ShapeValue) -> Any:
    chosen = _on_numbers(lambda flag, a, b: a if flag else b)(node, condition, yes, no)
    return chosen if chosen is NotImplemented else ShapeValue(chosen.entries, yes.dtype, chosen.scalar)


@OPERATORS.on_shapes("Concat")
def _concat_of_numbers(node: Node, *parts: ShapeValue) -> Any:
    return ShapeValue(tuple(entry for part in parts for entry in part.entries), parts[0].dtype)


@OPERATORS.on_shapes("Gather")
def _gather_of_numbers(node: Node, data: ShapeValue, indices: ShapeValue) -> Any:
    taken = tuple(data.entries[int(position)] for position in indices.entries)
    return ShapeValue(taken, data.dtype, indices.scalar)


@OPERATORS.on_shapes("Slice")
def _slice_of_numbers(node: Node, data: ShapeValue, *bounds: ShapeValue | None) -> Any:
    if not bounds:
        start, end, step = node.attributes["starts"][0], node.attributes["ends"][0], 1
    else:
        first, last = bounds[0], bounds[1]
        steps = bounds[3] if len(bounds) > 3 else None
        start, end = node.number(first, "starts"), node.number(last, "ends")
        step = 1 if steps is None else node.number(steps, "steps")
    return ShapeValue(data.entries[start:end:step], data.dtype)


@OPERATORS.on_shapes("Squeeze")
def _squeeze_of_numbers(node: Node, x: ShapeValue, axes: ShapeValue | None = None) -> Any:
    return ShapeValue(x.entries, x.dtype, scalar=len(x.entries) == 1)


@OPERATORS.on_shapes("Unsqueeze")
def _unsqueeze_of_numbers(node: Node, x: ShapeValue, axes: ShapeValue | None = None) -> Any:
    return ShapeValue(x.entries, x.dtype) if x.scalar and len(node.axes(axes) or ()) == 1 else NotImplemented


@OPERATORS.on_shapes("Reshape")
def _reshape_of_numbers(node: Node, x: ShapeValue, shape: ShapeValue) -> Any:
    rank = len(shape.entries)
    return ShapeValue(x.entries, x.dtype, scalar=rank == 0) if rank < 2 else NotImplemented


@OPERATORS.on_shapes("Split")
def _split_of_numbers(node: Node, x: ShapeValue, sizes: ShapeValue | None = None) -> Any:
    lengths = node.attributes.get("split") if sizes is None else node.numbers(sizes, "split")
    if lengths is None:
        each = -(-len(x.entries) // len(node.outputs))
        lengths = [each] * len(node.outputs)
    ends = [sum(lengths[: position + 1]) for position in range(len(lengths))]
    return tuple(ShapeValue(x.entries[end - n : end], x.dtype) for end, n in zip(ends, lengths, strict=True))


@OPERATORS.on_shapes("Expand")
def _expand_of_numbers(node: Node, x: ShapeValue, shape: ShapeValue) -> Any:
    if len(shape.entries) != 1 or not isinstance(shape.entries[0], int):
        return NotImplemented
    length = shape.entries[0]
    entries = x.entries * length if len(x.entries) == 1 else x.entries
    return ShapeValue(entries, x.dtype)


def _reduced(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def reduce(node: Node, x: ShapeValue, axes: ShapeValue | None = None) -> Any:
        if not x.entries or (node.get("noop_with_empty_axes", 0) and not node.axes(axes)):
            return NotImplemented
        entry = functools.reduce(combine, x.entries)
        return ShapeValue((entry,), x.dtype, scalar=x.scalar or not node.get("keepdims", 1))

    return reduce


for _name, _combine in {
    "ReduceProd": operator.mul,
    "ReduceSum": operator.add,
    "ReduceMax": _SYMBOLS.sym_max,
    "ReduceMin": _SYMBOLS.sym_min,
}.items():
    OPERATORS.on_shapes(_name)(_reduced(_combine))


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def lowered(node: Node, a: ShapeValue, b: ShapeValue) -> Any:
        found = _on_numbers(compare)(node, a, b)
        return found if found is NotImplemented else ShapeValue(found.entries, torch.bool, found.scalar)

    return lowered


for _name, _compare in {
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
}.items():
    OPERATORS.on_shapes(_name)(_compared(_compare))


@OPERATORS.on_shapes("Not")
def _not_of_numbers(node: Node, x: ShapeValue) -> Any:
    return ShapeValue(tuple(_SYMBOLS.sym_not(entry) for entry in x.entries), torch.bool, x.scalar)
