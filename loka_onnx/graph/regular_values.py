"""Read integer tensors of a regular form from the nodes that compute them: one value, or 0, s, 2s, …

Counts and offsets of ids have these forms where every row has as many ids, though an exporter computes them
from the request.
"""

from __future__ import annotations

from typing import Any

from loka_onnx.graph.model import Node, Tensor, is_constant, producer, values_of
from loka_onnx.graph.shape_values import dimensions, read_number, static_shape

_SAME_ELEMENTS = frozenset(
    {"Expand", "Flatten", "Gather", "GatherND", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile"}
    | {"Transpose", "Unsqueeze"}
)
"""Operators whose results hold elements of their first input alone."""


def common_value(tensor: Tensor) -> Any:
    """Return the value of all elements: a number, or a tuple that equal sums share; None if it is unknown."""
    if is_constant(tensor):
        values = values_of(tensor)
        return float(values.flat[0]) if values.size and (values == values.flat[0]).all() else None
    node = producer(tensor)
    if node is None or node.op not in _SAME_ELEMENTS | {"Cast", "Concat", "ReduceSum"}:
        return None
    first = common_value(node.inputs[0])
    if node.op == "Cast":
        # Other numbers may be rounded.
        return first if first in {0.0, 1.0} or isinstance(first, tuple) else None
    if node.op == "Concat":
        return first if {common_value(part) for part in node.inputs[1:]} <= {first} else None
    if node.op == "ReduceSum":
        lengths, axes = dimensions(node.inputs[0]), _axes(node, 1)
        is_known = first is not None and lengths is not None and axes
        return (first, *(lengths[axis] for axis in axes)) if is_known and lengths is not None else None
    return first


def common_step(tensor: Tensor) -> int | None:
    """Return s of a vector 0, s, 2s, … or of a matrix with such rows; None where it is not known. The number
    of ids may stand behind a vector of offsets.
    """
    node = producer(tensor)
    if node is None:
        return None
    if node.op == "Range":
        first, step = read_number(node.inputs[0]), read_number(node.inputs[2])
        return int(step) if first == 0 and step is not None else None
    if node.op == "Concat" and len(node.inputs) == 2:
        return _step_of_sums(node) if _is_made_by(node.inputs[1], "CumSum") else _step_before_a_size(node)
    is_row = node.op == "Slice" and len(node.inputs[0].shape or ()) == 2 and _axes(node, 3) == [0]
    is_row |= node.op == "Squeeze" and _axes(node, 1) == [0]
    return common_step(node.inputs[0]) if is_row or node.op == "Identity" else None


def _step_of_sums(node: Node) -> int | None:
    """Read Concat(0, CumSum(s)) along the last axis."""
    first, rest = node.inputs
    counted, last = producer(rest), len(first.shape or ()) - 1
    assert counted is not None
    is_along = node.attrs.get("axis") in {-1, last} and read_number(counted.inputs[1]) in {-1, last}
    is_plain = not counted.attrs.get("exclusive", 0) and not counted.attrs.get("reverse", 0)
    every = common_value(counted.inputs[0])
    is_zero = common_value(first) == 0 and static_shape(first)[-1:] == (1,)
    return int(every) if is_along and is_plain and is_zero and isinstance(every, float) else None


def _step_before_a_size(node: Node) -> int | None:
    """Read Concat(Range(0, n, s), n) with n from a Shape or Size."""
    first, rest = node.inputs
    while (maker := producer(rest)) is not None and maker.op in _SAME_ELEMENTS:
        rest = maker.inputs[0]
    is_size = _is_made_by(rest, "Shape") or _is_made_by(rest, "Size")
    return common_step(first) if is_size and _is_made_by(first, "Range") else None


def _is_made_by(tensor: Tensor, op: str) -> bool:
    node = producer(tensor)
    return node is not None and node.op == op


def _axes(node: Node, index: int) -> list[int]:
    is_known = len(node.inputs) > index and is_constant(node.inputs[index])
    return values_of(node.inputs[index]).reshape(-1).tolist() if is_known else []
