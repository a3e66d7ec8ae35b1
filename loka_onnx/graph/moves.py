"""Follow elements of a tensor through operators that move them.

An array with a number for each element stands for the tensor. Behind Transpose, Reshape, Slice and the like,
it shows which element stands where. Named dimensions, as the batch, have the lengths of the array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka_onnx.graph.model import Node, Tensor, is_constant, producer, values_of
from loka_onnx.graph.shape_values import dimensions, read_dimensions

Numbers = npt.NDArray[np.int64]


def move(
    node: Node, tensor: Tensor, numbers: Numbers, lengths: Mapping[str, int], other: int = 0
) -> list[Numbers]:
    """Return the outputs of a node as arrays: `numbers` stands for its input `tensor`, `other` for elements
    of a Concat's other inputs; `lengths` are of other named dimensions. ValueError or IndexError where the
    node does not move elements, or its operands are not known or do not fit.
    """
    if node.op == "Concat":
        axis = int(node.attrs["axis"])
        parts = [numbers if part is tensor else _filled(part, numbers, axis, other) for part in node.inputs]
        return [np.concatenate(parts, axis)]
    if node.inputs[0] is not tensor:
        raise ValueError("it does not stand in the first place")
    if node.op == "Split":
        return _split(numbers, node)
    if node.op in {"Reshape", "Expand"}:
        target = tuple(_target(node, numbers, lengths))
        if node.op == "Reshape":
            return [numbers.reshape(target)]
        return [np.broadcast_to(numbers, np.broadcast_shapes(numbers.shape, target))]
    if node.op not in _MOVES:
        raise ValueError("it does not move elements")
    return [_MOVES[node.op](numbers, node)]


def taken_axes(node: Node) -> tuple[int, ...]:
    """Return the axes along which a Slice, Split or Gather takes parts, else (); ValueError if computed."""
    if node.op in {"Gather", "Split"}:
        return (int(node.attrs.get("axis", 0)),)
    constants = _constants(node) if node.op == "Slice" else []
    if not constants:
        return ()
    return tuple(map(int, constants[2])) if len(constants) > 2 else tuple(range(len(constants[0])))


def _constants(node: Node) -> list[Numbers]:
    if not all(is_constant(operand) for operand in node.inputs[1:] if operand.name):
        raise ValueError("what it takes is not constant")
    return [np.atleast_1d(values_of(operand)) for operand in node.inputs[1:] if operand.name]


def _target(node: Node, numbers: Numbers, lengths: Mapping[str, int]) -> list[int]:
    """Return the target dimensions of Reshape or Expand."""
    entries, sizes = read_dimensions(node.inputs[1]), dimensions(node.inputs[0]) or ()
    if entries is None:
        raise ValueError("its target is not known")
    known: dict[int | str, int] = dict(zip(sizes, numbers.shape, strict=False))
    known.update(lengths)
    zero_copies = node.op == "Reshape" and not node.attrs.get("allowzero", 0)
    target = [numbers.shape[axis] if zero_copies and e == 0 else e for axis, e in enumerate(entries)]
    unknown = [entry for entry in target if isinstance(entry, str) and entry not in known]
    if unknown:
        raise ValueError(f"its target holds the dimension '{unknown[0]}'")
    return [known[entry] if isinstance(entry, str) else entry for entry in target]


def _split(numbers: Numbers, node: Node) -> list[Numbers]:
    """Take parts, equal ones by default, of which the last may be smaller."""
    axis, sizes = int(node.attrs.get("axis", 0)), _constants(node)
    step = -(-numbers.shape[axis] // len(node.outputs))
    ends = np.cumsum(sizes[0]) if sizes else step * np.arange(1, len(node.outputs) + 1)
    return list(np.split(numbers, ends[:-1], axis))


def _flattened(numbers: Numbers, node: Node) -> Numbers:
    axis = int(node.attrs.get("axis", 1)) % (numbers.ndim + 1)
    return numbers.reshape(int(np.prod(numbers.shape[:axis], dtype=np.int64)), -1)


def _gathered(numbers: Numbers, node: Node) -> Numbers:
    shape = values_of(node.inputs[1]).shape if is_constant(node.inputs[1]) else ()
    return np.take(numbers, _constants(node)[0].reshape(shape), int(node.attrs.get("axis", 0)))


def _sliced(numbers: Numbers, node: Node) -> Numbers:
    starts, ends, *rest = _constants(node)
    axes = rest[0] if rest else np.arange(len(starts))
    steps = rest[1] if len(rest) > 1 else np.ones_like(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index = [slice(None)] * numbers.ndim
        index[axis] = slice(int(start), int(end), int(step))
        numbers = numbers[tuple(index)]
    return numbers


_MOVES: Mapping[str, Callable[[Numbers, Node], Numbers]] = {
    "Identity": lambda numbers, node: numbers,
    "Cast": lambda numbers, node: numbers,
    "Transpose": lambda numbers, node: numbers.transpose(node.attrs.get("perm")),
    "Flatten": _flattened,
    "Squeeze": lambda numbers, node: np.squeeze(numbers, *map(tuple, _constants(node))),
    "Unsqueeze": lambda numbers, node: np.expand_dims(numbers, tuple(_constants(node)[0])),
    "Tile": lambda numbers, node: np.tile(numbers, _constants(node)[0]),
    "Gather": _gathered,
    "Slice": _sliced,
}


def _filled(part: Tensor, numbers: Numbers, axis: int, value: int) -> Numbers:
    length = None if part.shape is None else part.shape[axis]
    if not isinstance(length, int):
        raise ValueError(f"the length of '{part.name}' along axis {axis} is not known")
    shape = list(numbers.shape)
    shape[axis] = length
    return np.full(shape, value, np.int64)


_ELEMENTWISE = frozenset(
    {"Identity", "Cast", "Abs", "Neg", "Log", "Exp", "Sqrt", "Reciprocal", "Sign", "Floor", "Ceil", "Round"}
) | {"Clip", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Erf", "Softplus"}
"""Elementwise functions of the first input."""
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max"})


@dataclass(frozen=True)
class InputColumn:
    """A column of an input; 0 in an input (batch,)."""

    input: str
    column: int


def column_origins(tensor: Tensor) -> tuple[InputColumn | None, ...]:
    """Return the origin of each column of a tensor (batch, columns); None where it is no one input's column.
    Columns are followed back through elementwise functions, arithmetic with constants and joins along
    columns. Empty unless the tensor has two axes and a fixed number of columns.
    """
    width = 0 if is_constant(tensor) or len(tensor.shape or ()) != 2 else width_of(tensor)
    if not width:
        return ()
    node = producer(tensor)
    if node is None:
        return tuple(InputColumn(tensor.name, column) for column in range(width))
    origins = _through(node)
    return origins if len(origins) == width else (None,) * width


def _through(node: Node) -> tuple[InputColumn | None, ...]:
    """Return origins of a node's output columns, as far as its inputs are known."""
    if node.op in _ELEMENTWISE and all(map(is_constant, node.inputs[1:])):
        return column_origins(node.inputs[0])
    if node.op in _ARITHMETIC:
        varying = [tensor for tensor in node.inputs if not is_constant(tensor)]
        return column_origins(varying[0]) if len(varying) == 1 else ()
    if node.op == "Concat" and int(node.attrs.get("axis", 0)) in {1, -1}:
        return tuple(origin for tensor in node.inputs for origin in column_origins(tensor))
    source = node.inputs[0]
    if node.op == "Unsqueeze" and producer(source) is None and not is_constant(source):
        return (InputColumn(source.name, 0),) if len(source.shape or ()) == 1 else ()
    return ()


def width_of(tensor: Tensor) -> int:
    """Return the columns of (batch, columns), 1 for (batch,); 0 for a dynamic number or another rank."""
    shape = tensor.shape or ()
    width = shape[1] if len(shape) == 2 else int(len(shape) == 1)
    return width if isinstance(width, int) else 0
