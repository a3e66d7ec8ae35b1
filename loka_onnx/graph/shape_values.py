"""Read a tensor of dimensions from the nodes that compute it.

With a dynamic batch, exporters compute the target of Reshape and Expand from Shape, Gather, Slice and Concat.
Each entry is a number or a named dimension of the model, by the name of shape inference, so that two tensors
with a batch axis agree on it, else ``<tensor>[<axis>]``.
"""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import onnx

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.graph.model import Node, Tensor, element_type, is_constant, producer, shape_of, values_of

Dim = int | str
"""A dimension: its length, or its name."""

_DEEPEST = 32
"""Most nodes between a dimension and its tensor; exporters write fewer than ten."""
_LONGEST = 64
"""Most elements of a constant that holds dimensions."""
_PASSING = frozenset({"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Flatten"})
"""Operators that keep the elements of a vector, in order."""


def dimension(tensor: Tensor, axis: int) -> Dim:
    """Return the length or name of an axis, else ``<tensor>[<axis>]``; InternalError for an unknown rank."""
    length = shape_of(tensor)[axis]
    if isinstance(length, int) and length >= 0:
        return length
    return length if isinstance(length, str) and length else f"{tensor.name}[{axis % len(shape_of(tensor))}]"


def dimensions(tensor: Tensor) -> tuple[Dim, ...] | None:
    """Return every dimension of a tensor; None where its rank is unknown."""
    if tensor.shape is None:
        return None
    return tuple(dimension(tensor, axis) for axis in range(len(tensor.shape)))


def static_shape(tensor: Tensor) -> tuple[int | None, ...]:
    """Return the lengths of a tensor, None for a dynamic one; empty where its rank is unknown."""
    return tuple(d if isinstance(d, int) and d >= 0 else None for d in tensor.shape or ())


def tensor_spec(tensor: Tensor) -> TensorSpec:
    """Name, type and shape of a graph input or output."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(element_type(tensor.dtype))
    return TensorSpec(tensor.name, np.dtype(dtype).name, static_shape(tensor))


def read_dimensions(tensor: Tensor) -> tuple[Dim, ...] | None:
    """Return the entries of an integer tensor; None where one is neither a number nor a dimension."""
    return _read(tensor, _DEEPEST)


def read_number(tensor: Tensor) -> float | None:
    """Return the only element of a constant, or of a tensor made of known dimensions; None for others."""
    if is_constant(tensor):
        values = values_of(tensor)
        return float(values.reshape(-1)[0]) if values.size == 1 else None
    entry, *others = read_dimensions(tensor) or ("",)
    return float(entry) if isinstance(entry, int) and not others else None


def reshaped(
    source: tuple[Dim, ...], target: tuple[Dim, ...], *, zero_copies: bool
) -> tuple[Dim, ...] | None:
    """Return the dimensions after a Reshape to a target with -1 and, if `zero_copies`, 0 for the same length;
    None where they do not fit the source, or -1 stands for a product of named dimensions.
    """
    if zero_copies:
        if any(entry == 0 and axis >= len(source) for axis, entry in enumerate(target)):
            return None
        target = tuple(source[axis] if entry == 0 else entry for axis, entry in enumerate(target))
    if -1 not in target:
        return target
    named = Counter(entry for entry in source if isinstance(entry, str))
    named.subtract(entry for entry in target if isinstance(entry, str))
    left = [entry for entry, count in named.items() for _ in range(abs(count))]
    before = prod(entry for entry in source if isinstance(entry, int))
    after = prod(entry for entry in target if isinstance(entry, int) and entry != -1)
    if any(count < 0 for count in named.values()) or not after or before % after:
        return None
    if len(left) + (before != after) > 1:
        return None
    missing: Dim = left[0] if left else before // after
    return tuple(missing if entry == -1 else entry for entry in target)


def _read(tensor: Tensor, depth: int) -> tuple[Dim, ...] | None:
    if is_constant(tensor):
        values = values_of(tensor)
        return tuple(int(v) for v in values.reshape(-1)) if values.size <= _LONGEST else None
    node = producer(tensor)
    if node is None or not depth or node.op == "Shape":
        return None if node is None or not depth else _of_shape(node)
    parts = [_read(part, depth - 1) for part in (node.inputs if node.op == "Concat" else node.inputs[:1])]
    entries = tuple(entry for part in parts for entry in part or ())
    is_flag = node.op == "Cast" and node.attrs["to"] == onnx.TensorProto.BOOL
    if is_flag or any(part is None for part in parts):
        return None
    if node.op in {"Gather", "Slice"}:
        return _selected(node, entries)
    if node.op == "ReduceProd":
        numbers = [entry for entry in entries if isinstance(entry, int)]
        return (prod(numbers),) if len(numbers) == len(entries) else None
    return entries if node.op in _PASSING or node.op == "Concat" else None


def _of_shape(node: Node) -> tuple[Dim, ...] | None:
    every = dimensions(node.inputs[0])
    return None if every is None else every[node.attrs.get("start", 0) : node.attrs.get("end")]


def _selected(node: Node, entries: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """Return the elements that Gather or Slice with constant positions takes from a vector."""
    is_vector = len(node.inputs[0].shape or (None,)) == 1
    if not is_vector or not all(is_constant(tensor) for tensor in node.inputs[1:] if tensor.name):
        return None
    numbers = [values_of(tensor).reshape(-1) for tensor in node.inputs[1:] if tensor.name]
    if node.op == "Gather":
        inside = all(-len(entries) <= position < len(entries) for position in numbers[0])
        return tuple(entries[int(position)] for position in numbers[0]) if inside else None
    start, end = int(numbers[0][0]), int(numbers[1][0])
    step = int(numbers[3][0]) if len(numbers) > 3 else 1
    return entries[start : min(end, len(entries)) : step]
