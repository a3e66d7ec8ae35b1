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
from collections.abc import Sequence
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
from loka_onnx.graph.naming import merged_name
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.linears.pattern import static_dim


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


@dataclass(frozen=True)
class Lookups:
    """Lookups in one id matrix that become one."""

    lookups: tuple[ColumnLookup, ...]

    @property
    def is_one_table(self) -> bool:
        """True if all of them read the same table."""
        return all(lookup.table is self.lookups[0].table for lookup in self.lookups)


class MergeGathers(Mod[Lookups]):
    """Lookups of single columns → one lookup, in a stack of tables of `largest_bytes` at most."""

    name = "merge-gathers"

    def __init__(self, largest_bytes: int = 1 << 28) -> None:
        self._largest_bytes = largest_bytes

    def match(self, model: GraphModel) -> Found[Lookups]:
        """Match id matrices with several looked-up columns."""
        groups: defaultdict[tuple[int, int | None], list[ColumnLookup]] = defaultdict(list)
        for node in model.nodes:
            lookup = read_column_lookup(model, node)
            if lookup is not None:
                groups[id(lookup.ids), lookup.id_type].append(lookup)
        matches: list[Lookups] = []
        declined: list[Declined] = []
        for lookups in groups.values():
            if len(lookups) > 1:
                self._match_group(model, lookups, matches, declined)
        return Found(tuple(matches), tuple(declined))

    def rewrite(self, model: GraphModel, match: Lookups) -> Applied:
        """Look all columns up at once; split the result where single columns were read."""
        lookups = match.lookups
        modules = [str(lookup.node.name).rpartition("/")[0] or str(lookup.node.name) for lookup in lookups]
        name = model.fresh_name(f"{merged_name(modules)}/lookup")
        ids = _selected(model, lookups, name)
        if match.is_one_table:
            table = lookups[0].table
        else:
            tables = [values_of(lookup.table) for lookup in lookups]
            table = model.constant(f"{name}.table", np.concatenate(tables))
            ids = _with_offsets(model, ids, [len(values) for values in tables], name)
        width = static_dim(lookups[0].table, 1) or 0
        rows = model.add(
            "Gather", [table, ids], f"{name}/gather", lookups[0].node.outputs[0].dtype, {"axis": 0}
        )
        flat = model.add(
            "Reshape", [rows, _axes(model, name, "flat", [-1, width * len(lookups)])], f"{name}/flat"
        )
        batch = shape_of(lookups[0].ids)[0]
        rows.shape, flat.shape = [batch, len(lookups), width], [batch, width * len(lookups)]
        for lookup, part in zip(
            lookups, model.split(flat, [width] * len(lookups), -1, f"{name}/split"), strict=True
        ):
            found = part
            if lookup.keeps_axis:
                found = model.add("Unsqueeze", [part, _axes(model, name, "axis", [1])], f"{name}/unsqueeze")
            model.hand_over(lookup.node.outputs[0], found)
        tables_read = "one table" if match.is_one_table else f"{len(lookups)} tables"
        return Applied(rows.inputs[0].name, f"{len(lookups)} lookups in {tables_read} → one of width {width}")

    def _match_group(
        self, model: GraphModel, lookups: list[ColumnLookup], matches: list[Lookups], declined: list[Declined]
    ) -> None:
        """Sort the lookups of one id matrix into stacks, repeated tables and declined ones."""
        by_table: defaultdict[int, list[ColumnLookup]] = defaultdict(list)
        for lookup in lookups:
            by_table[id(lookup.table)].append(lookup)
        stacks: defaultdict[tuple[int | None, str], list[ColumnLookup]] = defaultdict(list)
        for same in by_table.values():
            table = same[0].table
            reason = _why_not_stacked(model, same)
            if len(same) > 1:
                matches.append(Lookups(tuple(same)))
            elif reason:
                declined.append(Declined(same[0].node.name, reason))
            else:
                stacks[static_dim(table, 1), str(table.dtype)].append(same[0])
        for stack in stacks.values():
            size = sum(values_of(lookup.table).nbytes for lookup in stack)
            if len(stack) < 2:
                reason = "no other table that is looked up in these ids has its width and type"
            elif size > self._largest_bytes:
                reason = f"its stack would copy {size} bytes of tables, over {self._largest_bytes}"
            else:
                matches.append(Lookups(tuple(stack)))
                continue
            declined += [Declined(lookup.node.name, reason) for lookup in stack]


def read_column_lookup(model: GraphModel, node: Node) -> ColumnLookup | None:
    """Return the lookup of one column of an id matrix; None for other nodes."""
    if node.op != "Gather" or int(node.attrs.get("axis", 0)) != 0:
        return None
    table = node.inputs[0]
    if not (is_constant(table) or model.is_table(table)) or len(table.shape or ()) != 2:
        return None
    tensor, id_type = node.inputs[1], None
    keeps_axis = tensor.shape is not None and len(tensor.shape) == 2
    step = producer(tensor)
    if step is not None and step.op == "Cast":
        id_type, tensor = int(step.attrs["to"]), step.inputs[0]
        step = producer(tensor)
    if step is not None and step.op == "Squeeze" and _integers(step, 1) in ([1], [-1]):
        tensor = step.inputs[0]
        step = producer(tensor)
    column = None if step is None else _column(step, tensor)
    if step is None or column is None or len(step.inputs[0].shape or ()) != 2:
        return None
    return ColumnLookup(node, table, step.inputs[0], column, keeps_axis, id_type)


def _column(step: Node, tensor: Tensor) -> int | None:
    """Return the one column of a matrix that a node selects; None for other nodes."""
    width = static_dim(step.inputs[0], 1)
    if width is None:
        return None
    column: int | None = None
    if step.op == "Gather" and int(step.attrs.get("axis", 0)) in (1, -1):
        chosen = _integers(step, 1)
        column = chosen[0] if chosen is not None and len(chosen) == 1 else None
    elif step.op == "Slice" and _integers(step, 3) in ([1], [-1]) and _integers(step, 4) in (None, [1]):
        starts, ends = _integers(step, 1), _integers(step, 2)
        if starts is not None and ends is not None:
            chosen = list(range(width))[starts[0] : ends[0]]
            column = chosen[0] if len(chosen) == 1 else None
    elif step.op == "Split" and int(step.attrs.get("axis", 0)) in (1, -1) and len(step.outputs) == width:
        column = next(i for i, part in enumerate(step.outputs) if part is tensor)
    if column is None or not -width <= column < width:
        return None
    return column % width


def _integers(node: Node, position: int) -> list[int] | None:
    if len(node.inputs) <= position or not is_constant(node.inputs[position]):
        return None
    return [int(v) for v in values_of(node.inputs[position]).reshape(-1)]


def _why_not_stacked(model: GraphModel, lookups: Sequence[ColumnLookup]) -> str:
    """Return why a table is not stacked; empty when it is."""
    table = lookups[0].table
    if model.is_table(table):
        return f"its table '{table.name}' stays outside the model, and stacking would copy it"
    if len(table.outputs) > len(lookups):
        return f"others read its table '{table.name}', which would be stored twice"
    return ""


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
