"""Ids that an input may hold, read off its embedding tables.

Gather takes indices from -rows, which counts from the end, to rows - 1. ONNX Runtime refuses others; another
engine returns the row of some other id. Every id of a small batch gets a tag for its position in the input.
Tags are moved as the model moves ids, and constants that it adds to ids (the offsets of fields that share a
table) are added. A bound is one that every row of a column meets in a Gather of the main graph. Ids that are
computed otherwise (a hash, a clip), or looked up in a branch, have no bound, and are left to the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from loka_onnx.graph.layout import LAYOUT_OPS
from loka_onnx.graph.model import (
    GraphModel,
    Node,
    Tensor,
    consumers,
    element_type,
    is_constant,
    shape_of,
    values_of,
)
from loka_onnx.graph.moves import Numbers as Tags
from loka_onnx.graph.moves import move, width_of
from loka_onnx.graph.shape_values import dimension

_INTEGERS = frozenset(
    element_type(np.dtype(f"{sign}int{bits}")) for sign in ("", "u") for bits in (8, 16, 32, 64)
)
_FLOATS = frozenset(map(element_type, (np.float32, np.float64)))
_HOLDING_IDS = frozenset(
    map(element_type, (np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64))
)
"""Types through which the ids of a table pass unchanged."""
_REARRANGING = LAYOUT_OPS | {"Cast", "Concat", "Expand", "Tile"}
"""Every element of the first input appears in the output."""
_ROWS = 61
"""Rows of the batch. A Slice of more rows, counted from the first, counts as all rows."""
_STEP = 1 << 40
"""Distance of two tags: constants added to an id are less than half of it. 0 is no id of the input."""
_MOST = 1 << 22
"""Most elements of a tensor of tags; for a larger one only the set of tags is followed."""


@dataclass(frozen=True)
class _Ids:
    """Tags of the ids that a tensor holds: of its elements in place; else each once, in any order."""

    tags: Tags
    is_placed: bool = True

    def loose(self) -> _Ids:
        return _Ids(np.unique(self.tags), is_placed=False)


def id_bounds(model: GraphModel) -> dict[str, tuple[range | None, ...]]:
    """Return the ids that each column of the inputs of a canonical graph may hold, by name of input (batch,)
    or (batch, columns): one range for each column, None without a bound. Of float inputs, only those with a
    column that is looked up: a matrix of ids and numbers.
    """
    main = {id(node) for node in model.nodes}
    by_input = {}
    for tensor in model.inputs:
        kind = 0 if tensor.dtype is None else element_type(tensor.dtype)
        if kind in _INTEGERS | _FLOATS and width_of(tensor):
            bounds = _bounds(tensor, main)
            if kind in _INTEGERS or any(bounds):
                by_input[tensor.name] = bounds
    return by_input


def _bounds(source: Tensor, main: set[int]) -> tuple[range | None, ...]:
    width = width_of(source)
    tags = _STEP * np.arange(1, _ROWS * width + 1, dtype=np.int64)
    narrowest: list[range | None] = [None] * width
    placed = tags.reshape(_ROWS, width) if len(shape_of(source)) > 1 else tags
    pending = [(source, _Ids(placed))]
    seen = set[tuple[int, tuple[int, ...], bytes]]()
    while pending:
        tensor, ids = pending.pop()
        key = (id(tensor), ids.tags.shape, ids.tags.tobytes())
        if key in seen:
            continue
        seen.add(key)
        for node in consumers(tensor):
            if id(node) not in main:
                continue
            rows = _looked_up_rows(node, tensor)
            if rows is not None:
                met = _met(ids.tags, rows, width)
                narrowest = [narrowed(*pair) for pair in zip(narrowest, met, strict=True)]
            pending += _followed(node, tensor, ids, {str(dimension(source, 0)): _ROWS})
    return tuple(narrowest)


def narrowed(one: range | None, other: range | None) -> range | None:
    """Return ids in both ranges; None is no bound."""
    if one is None or other is None:
        return one if other is None else other
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _met(tags: Tags, rows: int, width: int) -> list[range | None]:
    """Return ids of each column that stay inside the table; None where not all of it is looked up."""
    place = (tags.reshape(-1) + _STEP // 2) // _STEP
    added = tags.reshape(-1) - _STEP * place
    met = list[range | None]()
    for column in range(width):
        own = (place > 0) & ((place - 1) % width == column)
        if len(np.unique(place[own])) < _ROWS:
            met.append(None)
        else:
            met.append(range(-rows - int(added[own].min()), rows - int(added[own].max())))
    return met


def _looked_up_rows(node: Node, ids: Tensor) -> int | None:
    """Return the rows of the table in which the node looks the ids up."""
    if node.op != "Gather" or node.inputs[1] is not ids:
        return None
    shape = node.inputs[0].shape
    axis = int(node.attrs.get("axis", 0))
    if shape is None or not -len(shape) <= axis < len(shape) or not isinstance(shape[axis], int):
        return None
    return int(shape[axis])


def _followed(node: Node, tensor: Tensor, ids: _Ids, lengths: Mapping[str, int]) -> list[tuple[Tensor, _Ids]]:
    """Return outputs of the node that hold ids of the tensor."""
    if node.op == "Cast" and int(node.attrs["to"]) not in _HOLDING_IDS:
        return []
    if node.op in {"Add", "Sub"}:
        return _shifted(node, tensor, ids)
    if node.op != "Concat" and node.inputs[0] is not tensor:
        return []
    if ids.is_placed and ids.tags.size <= _MOST:
        try:
            parts = move(node, tensor, ids.tags, lengths)
            return [(out, _Ids(tags)) for out, tags in zip(node.outputs, parts, strict=False)]
        except (ValueError, IndexError):
            pass
    return [(node.outputs[0], ids.loose())] if node.op in _REARRANGING else []


def _shifted(node: Node, tensor: Tensor, ids: _Ids) -> list[tuple[Tensor, _Ids]]:
    """Add or subtract a constant."""
    others = [other for other in node.inputs if other is not tensor]
    if len(others) != 1 or not is_constant(others[0]) or (node.op == "Sub" and node.inputs[1] is tensor):
        return []
    values = values_of(others[0])
    whole = values.astype(np.int64)
    if not (whole == values).all() or not (np.abs(whole) < _STEP // 4).all():
        return []
    if not ids.is_placed and whole.size > 1:
        return []
    try:
        tags = ids.tags + whole if node.op == "Add" else ids.tags - whole
    except ValueError:
        return []
    return [(node.outputs[0], _Ids(tags if ids.is_placed else tags.reshape(-1), ids.is_placed))]
