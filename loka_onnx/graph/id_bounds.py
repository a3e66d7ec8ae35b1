"""How large the ids of an input may be, read off the embedding tables that it looks up.

An id beyond its table is undefined in ONNX: one engine fails, another returns the row of some other id. The
walk starts at an integer input and follows the nodes that move values without changing them, so that every
bound is one that each id of its column meets in some Gather. Ids that are changed on the way (an offset, a
hash) have no bound of their own and end the walk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, element_type, is_constant, values_of

_REARRANGING = frozenset(
    {"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Transpose", "Concat", "Expand"}
)
"""Every element of the first input appears in the output, unchanged."""
_AXIS_KEEPING = frozenset({"Identity", "Cast"})
_END = 2**31 - 1
"""A Slice that ends here or later runs to the end of its axis."""


@dataclass(frozen=True)
class _Ids:
    """Where the elements of a tensor come from.

    Attributes:
        columns: Columns of the graph input.
        axis: Axis along which they lie in a tensor of rank 2; None when that is no longer known, or there
            is no such axis.
    """

    columns: tuple[int, ...]
    axis: int | None


def id_bounds(model: GraphModel) -> dict[str, tuple[int | None, ...]]:
    """Exclusive upper bound of the ids in each column of the integer inputs.

    Args:
        model: A canonical graph (`graph.entry`).

    Returns:
        By name of input, for integer inputs (batch,) and (batch, columns): one bound for each column, None
        where no lookup gives one. An input whose number of columns is dynamic is left out.
    """
    return {
        tensor.name: _bounds(tensor) for tensor in model.inputs if _is_integer(tensor) and _columns(tensor)
    }


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype is not None and element_type(tensor.dtype) in {
        element_type(kind) for kind in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32)
    } | {element_type(np.int64), element_type(np.uint64)}


def _columns(tensor: Tensor) -> int:
    shape: list[int | str] = list(tensor.shape or ())
    if len(shape) == 1:
        return 1
    width = shape[1] if len(shape) == 2 else 0
    return width if isinstance(width, int) else 0


def _bounds(source: Tensor) -> tuple[int | None, ...]:
    width = _columns(source)
    found: dict[int, int] = {}
    pending = [(source, _Ids(tuple(range(width)), 1 if len(source.shape) == 2 else None))]
    seen: set[tuple[int, _Ids]] = set()
    while pending:
        tensor, ids = pending.pop()
        if (id(tensor), ids) in seen:
            continue
        seen.add((id(tensor), ids))
        for node in consumers(tensor):
            rows = _looked_up_rows(node, tensor)
            if rows is not None:
                found.update({column: min(rows, found.get(column, rows)) for column in ids.columns})
            pending += _followed(node, tensor, ids)
    return tuple(found.get(column) for column in range(width))


def _looked_up_rows(node: Node, ids: Tensor) -> int | None:
    """Rows of the table in which the node looks the ids up."""
    if node.op != "Gather" or node.inputs[1] is not ids:
        return None
    shape = node.inputs[0].shape
    axis = int(node.attrs.get("axis", 0))
    if shape is None or not -len(shape) <= axis < len(shape) or not isinstance(shape[axis], int):
        return None
    return int(shape[axis])


def _followed(node: Node, tensor: Tensor, ids: _Ids) -> list[tuple[Tensor, _Ids]]:
    """Outputs of the node that hold the same ids, or some columns of them."""
    if node.op in _REARRANGING and (node.op == "Concat" or node.inputs[0] is tensor):
        return [(node.outputs[0], ids if node.op in _AXIS_KEEPING else _Ids(ids.columns, None))]
    if ids.axis is None or node.inputs[0] is not tensor or not all(map(is_constant, node.inputs[1:])):
        return []
    if node.op == "Gather":
        return _gathered(node, ids)
    if node.op == "Slice":
        return _sliced(node, ids)
    return _split(node, ids) if node.op == "Split" else []


def _gathered(node: Node, ids: _Ids) -> list[tuple[Tensor, _Ids]]:
    if int(node.attrs.get("axis", 0)) % 2 != ids.axis:
        return []
    index = values_of(node.inputs[1])
    columns = tuple(ids.columns[int(i)] for i in index.reshape(-1))
    return [(node.outputs[0], _Ids(columns, ids.axis if index.ndim == 1 else None))]


def _sliced(node: Node, ids: _Ids) -> list[tuple[Tensor, _Ids]]:
    starts, ends, *rest = ([int(v) for v in values_of(t).reshape(-1)] for t in node.inputs[1:])
    axes = rest[0] if rest else list(range(len(starts)))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    columns: tuple[int, ...] = ids.columns
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if axis % 2 == ids.axis:
            columns = columns[start:end:step]
        elif (start, step) != (0, 1) or end < _END:
            return []
    return [(node.outputs[0], _Ids(columns, ids.axis))]


def _split(node: Node, ids: _Ids) -> list[tuple[Tensor, _Ids]]:
    if int(node.attrs.get("axis", 0)) % 2 != ids.axis:
        return []
    width, parts = len(ids.columns), len(node.outputs)
    sizes: Any = [-(-width // parts)] * parts
    if len(node.inputs) > 1:
        sizes = [int(v) for v in values_of(node.inputs[1])]
    starts = np.cumsum([0, *sizes])
    return [
        (output, _Ids(ids.columns[int(start) : int(start) + size], ids.axis))
        for output, start, size in zip(node.outputs, starts, sizes, strict=False)
    ]
