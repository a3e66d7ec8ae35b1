"""Ids that an input may hold, read off its embedding tables.

Gather takes indices from -rows, which counts from the end, to rows - 1. ONNX Runtime refuses others; another
engine returns the row of some other id. Every id of a small batch gets a tag for its position in the input.
Tags are moved as the model moves ids, and constants that it adds to ids (the offsets of fields that share a
table) are added. A bound is one that every row of a column meets in a Gather of the main graph. Ids that are
computed otherwise (a hash, a clip), or looked up in a branch, have no bound, and are left to the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
from loka_onnx.graph.shape_values import dimension, read_dimensions

Tags = npt.NDArray[np.int64]

_INTEGERS = frozenset(map(element_type, (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32))) | {
    element_type(np.int64),
    element_type(np.uint64),
}
_HOLDING_IDS = frozenset(
    map(element_type, (np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64))
)
"""Types through which the ids of a table pass unchanged."""
_REARRANGING = frozenset(
    {
        "Identity",
        "Cast",
        "Squeeze",
        "Unsqueeze",
        "Reshape",
        "Flatten",
        "Transpose",
        "Concat",
        "Expand",
        "Tile",
    }
)
"""Every element of the first input appears in the output."""
_ROWS = 61
"""Rows of the batch. A Slice of more rows, counted from the first, counts as all rows."""
_STEP = 1 << 40
"""Distance of two tags: constants added to an id are less than half of it. 0 is no id of the input."""
_MOST = 1 << 22
"""Most elements of a tensor of tags; for a larger one only the set of tags is followed."""


@dataclass(frozen=True)
class _Ids:
    """A tensor that holds ids of the input.

    Attributes:
        tags: Of its elements in place; else each once, in any order.
    """

    tags: Tags
    is_placed: bool = True

    def loose(self) -> _Ids:
        return _Ids(np.unique(self.tags), is_placed=False)


def id_bounds(model: GraphModel) -> dict[str, tuple[range | None, ...]]:
    """Return the ids that each column of the integer inputs may hold.

    Args:
        model: A canonical graph (`graph.entry`).

    Returns:
        By name of input, for integer inputs (batch,) and (batch, columns): one range for each column, None
        without a bound. An input with a dynamic number of columns is left out.
    """
    main = {id(node) for node in model.nodes}
    return {
        tensor.name: _bounds(tensor, main)
        for tensor in model.inputs
        if tensor.dtype is not None and element_type(tensor.dtype) in _INTEGERS and _columns(tensor)
    }


def _columns(tensor: Tensor) -> int:
    shape: list[int | str] = list(tensor.shape or ())
    if len(shape) == 1:
        return 1
    width = shape[1] if len(shape) == 2 else 0
    return width if isinstance(width, int) else 0


def _bounds(source: Tensor, main: set[int]) -> tuple[range | None, ...]:
    width = _columns(source)
    tags = _STEP * np.arange(1, _ROWS * width + 1, dtype=np.int64)
    found: list[range | None] = [None] * width
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
                found = [narrowed(*pair) for pair in zip(found, met, strict=True)]
            pending += _followed(node, tensor, ids, dimension(source, 0))
    return tuple(found)


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


def _followed(node: Node, tensor: Tensor, ids: _Ids, batch: int | str) -> list[tuple[Tensor, _Ids]]:
    """Return outputs of the node that hold ids of the tensor."""
    if node.op == "Cast" and int(node.attrs["to"]) not in _HOLDING_IDS:
        return []
    if node.op in {"Add", "Sub"}:
        return _shifted(node, tensor, ids)
    if node.op != "Concat" and node.inputs[0] is not tensor:
        return []
    if ids.is_placed and ids.tags.size <= _MOST:
        try:
            moved = _moved(node, tensor, ids.tags, batch)
        except (ValueError, IndexError):  # a form that NumPy does not take: nothing is known behind it
            return []
        if moved:
            return [(out, _Ids(tags)) for out, tags in zip(node.outputs, moved, strict=False)]
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


def _moved(node: Node, tensor: Tensor, tags: Tags, batch: int | str) -> list[Tags]:
    """Return tags of the outputs; none where the operator, or an operand of it, is unknown."""
    rest = [operand for operand in node.inputs[1:] if operand.name]
    if node.op == "Concat":
        axis = int(node.attrs["axis"])
        parts = [tags if part is tensor else _no_ids(part, tags, axis) for part in node.inputs]
        known = [part for part in parts if part is not None]
        return [np.concatenate(known, axis)] if len(known) == len(parts) else []
    if node.op in {"Reshape", "Expand"}:
        target = _lengths(node, rest[0], tags, batch)
        if target is None:
            return []
        return [tags.reshape(target) if node.op == "Reshape" else tags * np.ones(target, np.int64)]
    if node.op == "Split":
        return _split(node, tags)
    move = _MOVES.get(node.op)
    if move is None or not all(map(is_constant, rest)):
        return []
    return [move(tags, node, [values_of(operand).astype(np.int64) for operand in rest])]


def _split(node: Node, tags: Tags) -> list[Tags]:
    axis, parts = int(node.attrs.get("axis", 0)), len(node.outputs)
    if len(node.inputs) > 1 and not is_constant(node.inputs[1]):
        return []
    sizes = values_of(node.inputs[1]) if len(node.inputs) > 1 else [-(-tags.shape[axis] // parts)] * parts
    return list(np.split(tags, np.cumsum(sizes)[:-1], axis))


def _flattened(tags: Tags, node: Node, _: Sequence[Tags]) -> Tags:
    return tags.reshape(int(np.prod(tags.shape[: int(node.attrs.get("axis", 1))])), -1)


def _sliced(tags: Tags, _: Node, operands: Sequence[Tags]) -> Tags:
    starts, ends, *rest = operands
    axes = rest[0] if rest else np.arange(len(starts))
    steps = rest[1] if len(rest) > 1 else np.ones_like(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        where = [slice(None)] * tags.ndim
        where[axis] = slice(int(start), int(end), int(step))
        tags = tags[tuple(where)]
    return tags


_MOVES: Mapping[str, Callable[[Tags, Node, Sequence[Tags]], Tags]] = {
    "Identity": lambda tags, node, operands: tags,
    "Cast": lambda tags, node, operands: tags,
    "Transpose": lambda tags, node, operands: tags.transpose(node.attrs.get("perm")),
    "Flatten": _flattened,
    "Squeeze": lambda tags, node, operands: np.squeeze(tags, tuple(operands[0]) if operands else None),
    "Unsqueeze": lambda tags, node, operands: np.expand_dims(tags, tuple(operands[0])),
    "Tile": lambda tags, node, operands: np.tile(tags, operands[0]),
    "Gather": lambda tags, node, operands: np.take(tags, operands[0], int(node.attrs.get("axis", 0))),
    "Slice": _sliced,
}
"""Movements with constant operands."""


def _no_ids(part: Tensor, tags: Tags, axis: int) -> Tags | None:
    """Return tags of another operand of Concat; None where its length along the axis is unknown."""
    length = None if part.shape is None else part.shape[axis]
    if not isinstance(length, int):
        return None
    shape = list(tags.shape)
    shape[axis] = length
    return np.zeros(shape, np.int64)


def _lengths(node: Node, target: Tensor, tags: Tags, batch: int | str) -> list[int] | None:
    """Return the target dimensions of Reshape or Expand; None where one is unknown."""
    entries = [_ROWS if entry == batch else entry for entry in read_dimensions(target) or ("",)]
    if node.op == "Reshape" and not node.attrs.get("allowzero", 0):
        entries = [tags.shape[at] if entry == 0 else entry for at, entry in enumerate(entries)]
    lengths = [entry for entry in entries if isinstance(entry, int)]
    return lengths if len(lengths) == len(entries) else None
