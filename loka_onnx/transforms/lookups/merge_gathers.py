"""One lookup for many columns of an id matrix.

Column i of ids (batch, F) is looked up in table Tᵢ (rᵢ, d). Stacked, with offsets oᵢ = r₁ + … + rᵢ₋₁::

    [T₁[ids[:, 1]], …, T_F[ids[:, F]]]   =   [T₁; …; T_F][ids + o]

ONNX counts a negative id from the end: it gets the offset oᵢ + rᵢ, so every id that Gather defines finds its
row. (Others are refused before they enter: `graph.id_bounds`.) Columns of one table need no offset, so that
table may be of any size and lie outside the model. 26 lookups and their stack take 118 to 199 µs on one H100,
one lookup 7 to 36 (`benchmarks/micro/site_shapes.py`).

Tables outside the model, or together above `largest_bytes`, stay, because stacking copies them; tables with
other readers stay, because they would be stored twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import (
    GraphModel,
    Node,
    Tensor,
    element_type,
    is_constant,
    producer,
    shape_of,
    values_of,
)
from loka_onnx.graph.moves import move, taken_axes
from loka_onnx.graph.naming import merged_name
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.linears.pattern import constant_at, made_by, static_dim

_ROWS = 3
"""Of the matrix of column numbers that a selection is tried on."""


@dataclass(frozen=True)
class ColumnLookup:
    """``Gather(table, ids[:, column])`` with a table (rows, width) and ids (batch, columns).

    `keeps_axis` if the column is (batch, 1), not (batch,); `id_type` is the type that the ids are cast to.
    """

    node: Node
    table: Tensor
    ids: Tensor
    column: int
    keeps_axis: bool
    id_type: int | None


Lookups = tuple[ColumnLookup, ...]
"""Lookups in one id matrix that become one."""


class MergeGathers(Mod[Lookups]):
    """Lookups of single columns → one lookup, in a stack of tables of `largest_bytes` at most."""

    name = "merge-gathers"

    def __init__(self, largest_bytes: int = 1 << 28) -> None:
        self._largest_bytes = largest_bytes

    def _find(self, model: GraphModel) -> Iterator[Lookups | Declined]:
        groups: defaultdict[tuple[int, int | None], list[ColumnLookup]] = defaultdict(list)
        for node in model.nodes:
            lookup = _read(model, node)
            if lookup is not None:
                groups[id(lookup.ids), lookup.id_type].append(lookup)
        for lookups in groups.values():
            if len(lookups) > 1:
                yield from self._sorted(model, lookups)

    def _sorted(self, model: GraphModel, lookups: list[ColumnLookup]) -> Iterator[Lookups | Declined]:
        """Sort the lookups of one id matrix into stacks, repeated tables and declined ones."""
        by_table: defaultdict[int, list[ColumnLookup]] = defaultdict(list)
        for lookup in lookups:
            by_table[id(lookup.table)].append(lookup)
        stacks: defaultdict[tuple[int | None, str], list[ColumnLookup]] = defaultdict(list)
        for same in by_table.values():
            table, name = same[0].table, same[0].node.name
            if len(same) > 1:
                yield tuple(same)
            elif model.is_table(table):
                reason = f"its table '{table.name}' stays outside the model, and stacking would copy it"
                yield Declined(name, reason)
            elif len(table.outputs) > 1:
                yield Declined(name, f"others read its table '{table.name}', which would be stored twice")
            else:
                stacks[static_dim(table, 1), str(table.dtype)] += same
        for stack in stacks.values():
            size = sum(values_of(lookup.table).nbytes for lookup in stack)
            reason = "no other table that is looked up in these ids has its width and type"
            if size > self._largest_bytes and len(stack) > 1:
                reason = f"its stack would copy {size} bytes of tables, over {self._largest_bytes}"
            elif len(stack) > 1:
                yield tuple(stack)
                continue
            yield from (Declined(lookup.node.name, reason) for lookup in stack)

    def rewrite(self, model: GraphModel, match: Lookups) -> Applied:
        """Replace the lookups by one and a Split, whose parts go to the readers of each lookup."""
        modules = [str(lookup.node.name).rpartition("/")[0] or str(lookup.node.name) for lookup in match]
        name = model.fresh_name(f"{merged_name(modules)}/lookup")
        ids, table = _selected(model, match, name), match[0].table
        is_one_table = all(lookup.table is table for lookup in match)
        if not is_one_table:
            tables = [values_of(lookup.table) for lookup in match]
            table = model.constant(f"{name}.table", np.concatenate(tables))
            ids = _with_offsets(model, ids, [len(values) for values in tables], name)
        width = static_dim(match[0].table, 1) or 0
        dtype = match[0].node.outputs[0].dtype
        rows = model.add("Gather", [table, ids], f"{name}/gather", dtype, {"axis": 0})
        flat_shape = _axes(model, name, "flat", [-1, width * len(match)])
        flat = model.add("Reshape", [rows, flat_shape], f"{name}/flat")
        batch = shape_of(match[0].ids)[0]
        rows.shape, flat.shape = [batch, len(match), width], [batch, width * len(match)]
        parts = model.split(flat, [width] * len(match), -1, f"{name}/split")
        for lookup, part in zip(match, parts, strict=True):
            row = part
            if lookup.keeps_axis:
                row = model.add("Unsqueeze", [part, _axes(model, name, "axis", [1])], f"{name}/unsqueeze")
            model.hand_over(lookup.node.outputs[0], row)
        tables_read = "one table" if is_one_table else f"{len(match)} tables"
        return Applied(rows.inputs[0].name, f"{len(match)} lookups in {tables_read} → one of width {width}")


def _read(model: GraphModel, node: Node) -> ColumnLookup | None:
    """Return the lookup of one column of an id matrix; None for other nodes."""
    if node.op != "Gather" or int(node.attrs.get("axis", 0)) != 0:
        return None
    table, tensor = node.inputs[:2]
    if not (is_constant(table) or model.is_table(table)) or len(table.shape or ()) != 2:
        return None
    id_type, keeps_axis = None, len(tensor.shape or ()) == 2
    cast = made_by(tensor, "Cast")
    if cast is not None:
        id_type, tensor = int(cast.attrs["to"]), cast.inputs[0]
    squeeze = made_by(tensor, "Squeeze")
    if squeeze is not None and (axes := constant_at(squeeze, 1)) is not None and axes.tolist() in ([1], [-1]):
        tensor = squeeze.inputs[0]
    step = producer(tensor)
    column = None if step is None else _column(step, tensor)
    if step is None or column is None:
        return None
    return ColumnLookup(node, table, step.inputs[0], column, keeps_axis, id_type)


def _column(step: Node, tensor: Tensor) -> int | None:
    """Return the one column of a matrix that a node selects; None for other nodes."""
    width = static_dim(step.inputs[0], 1) if step.op in {"Gather", "Slice", "Split"} else None
    if width is None or len(shape_of(step.inputs[0])) != 2:
        return None
    numbers = np.broadcast_to(np.arange(width), (_ROWS, width))
    try:
        if {axis % 2 for axis in taken_axes(step)} != {1}:
            return None
        parts = move(step, step.inputs[0], numbers, {})
    except (ValueError, IndexError):
        return None
    (part,) = (part for part, output in zip(parts, step.outputs, strict=True) if output is tensor)
    return int(part.flat[0]) if part.size == _ROWS else None


def _selected(model: GraphModel, lookups: Sequence[ColumnLookup], name: str) -> Tensor:
    """Return the looked-up columns of the id matrix, in order, (batch, lookups)."""
    ids = lookups[0].ids
    columns = [lookup.column for lookup in lookups]
    if columns != list(range(static_dim(ids, 1) or 0)):
        positions = model.constant(f"{name}.columns", np.array(columns, np.int64))
        ids = model.add("Gather", [ids, positions], f"{name}/columns", ids.dtype, {"axis": 1})
    target = lookups[0].id_type
    if target is not None:
        ids = model.add("Cast", [ids], f"{name}/cast", target, {"to": target})
    return ids


def _with_offsets(model: GraphModel, ids: Tensor, rows: Sequence[int], name: str) -> Tensor:
    """Return ids of the stacked table; negative ones count from the end of their own table."""
    dtype = np.int32 if element_type(ids.dtype) == element_type(np.int32) else np.int64
    ends = np.cumsum(rows)
    from_start = model.constant(f"{name}.starts", (ends - np.array(rows)).astype(dtype))
    from_end = model.constant(f"{name}.ends", ends.astype(dtype))
    zero = model.constant(f"{name}.zero", np.array(0, dtype))
    is_negative = model.add("Less", [ids, zero], f"{name}/is_negative", np.bool_)
    offsets = model.add("Where", [is_negative, from_end, from_start], f"{name}/offsets", dtype)
    return model.add("Add", [ids, offsets], f"{name}/ids", dtype)


def _axes(model: GraphModel, name: str, label: str, values: Sequence[int]) -> Tensor:
    return model.constant(f"{name}.{label}", np.array(values, np.int64))
