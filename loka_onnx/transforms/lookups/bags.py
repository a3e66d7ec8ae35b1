"""Reduce bags of embedding rows without a loop, as `nn.EmbeddingBag` and TorchRec are exported.

With bags of one length L in a request of b rows, and r of n = b · L looked-up rows of width D::

    Loop over i: Concat(reduce(r[o[i] : o[i + 1]]))   =   reduce(Reshape(r, (b, L, D)), axis 1)      o[i] = iL

Exporters write the loop whatever the bags are; it takes one row at a time, and no compiler for GPUs takes it.
TorchRec counts a bag's ids at run time, by which it cuts its flat vector of ids into one for each feature::

    Split(Reshape(x, −1), sizes)[f]   =   Reshape(x[f], −1)      x (F, b) or (F, b, L), F equal sizes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, values_of
from loka_onnx.graph.regular_values import common_step, common_value
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.transforms.base import Mod, NotRewritten, find
from loka_onnx.transforms.linears.pattern import made_by

_FLOATS, _INTEGERS = (np.float32,), (np.int32, np.int64)
_REDUCING = ("ReduceSum", "ReduceMean", "ReduceMax")
_TAKING = frozenset({"Cast", "Constant", "Gather", "Identity", "Slice", "Unsqueeze", *_REDUCING})
_COUNTING = frozenset({"Add", "CastLike", "Div", "Equal", "Greater", "Less", "Not", "Reshape", "Sub"})
_IN_A_SEQUENCE = _TAKING | _COUNTING | {"Concat", "If", "Loop", "SequenceInsert", "Shape", "Size"}
"""Operators of the loop that the exporter by torch.export writes."""


@dataclass(frozen=True)
class Bags:
    """A loop that reduces bags of `length` rows each.

    Attributes:
        node: The node that gives the reduced rows (b, D).
        reduce: ReduceSum, ReduceMean or ReduceMax.
        rows: Looked-up rows (n, D), or the table where the loop looks `ids` up.
        ids: The ids (n); None where nothing reads them.
        weights: Factors (n) of the rows that the loop looks up; None for none.
        padding: Id whose rows do not count; None for none.
    """

    node: Node
    reduce: str
    length: int
    rows: Tensor
    ids: Tensor | None = None
    weights: Tensor | None = None
    padding: int | None = None


class BagsToSums(Mod[Bags]):
    """Loop over bags of one length → a reduction over an axis."""

    name = "bags-to-sums"

    def _find(self, model: GraphModel) -> Iterator[Bags | Declined]:
        for op, read in (("ConcatFromSequence", _read_sequence), ("Loop", _read_scan)):
            yield from find((node for node in model.nodes if node.op == op), read)

    def rewrite(self, model: GraphModel, match: Bags) -> Applied:
        """Reduce the rows of a request in one node; what only the loop read is removed with it."""
        name, rows = str(match.node.name), _unweighted(match.rows)
        if is_constant(match.rows) and match.ids is not None:
            rows = model.add("Gather", [match.rows, match.ids], f"{name}/rows", match.rows.dtype)
        if match.weights is not None:
            last = model.constant(f"{name}/last", np.array([1], np.int64))
            factors = model.add("Unsqueeze", [match.weights, last], f"{name}/factors")
            rows = model.add("Mul", [rows, factors], f"{name}/weighted")
        model.hand_over(match.node.outputs[0], _Reduction(model, match).of(rows))
        return Applied(name, f"a loop over bags of {match.length} → one {match.reduce}")


@dataclass(frozen=True)
class _Reduction:
    model: GraphModel
    match: Bags

    def of(self, rows: Tensor) -> Tensor:
        """Reduce rows (n, D) to (b, D)."""
        match = self.match
        if match.padding is not None and match.ids is not None:
            return self._without_padding(rows, match.ids)
        if match.length == 1:
            return self._add("Identity", [rows], rows.dtype)
        return self._reduce(match.reduce, self._in_bags(rows, static_shape(match.rows)[1]))

    def _without_padding(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Reduce the rows whose id is not that of padding; a bag without one gives 0, as in PyTorch."""
        reduce, padding = self.match.reduce, self._number(self.match.padding, ids.dtype)
        pads = self._in_bags(self._add("Equal", [ids, padding], np.bool_), 1)
        to = {"to": onnx.TensorProto.FLOAT}
        count = self._reduce("ReduceSum", self._add("Cast", [self._add("Not", [pads])], np.float32, to))
        bags, nothing = self._in_bags(rows, static_shape(self.match.rows)[1]), self._number(0.0)
        if reduce == "ReduceMax":
            kept = self._add("Where", [pads, self._number(-np.inf), bags], rows.dtype)
            is_empty = self._add("Equal", [count, nothing], np.bool_)
            return self._add("Where", [is_empty, nothing, self._reduce(reduce, kept)], rows.dtype)
        total = self._reduce("ReduceSum", self._add("Where", [pads, nothing, bags], rows.dtype))
        if reduce == "ReduceSum":
            return total
        return self._add("Div", [total, self._add("Max", [count, self._number(1.0)])])

    def _in_bags(self, tensor: Tensor, width: int | None) -> Tensor:
        target = np.array([-1, self.match.length, width], np.int64)
        return self._add("Reshape", [tensor, self.model.constant(f"{self.match.node.name}/shape", target)])

    def _reduce(self, op: str, bags: Tensor) -> Tensor:
        axis = self.model.constant(f"{self.match.node.name}/axis", np.array([1], np.int64))
        return self._add(op, [bags, axis], attrs={"keepdims": 0})

    def _number(self, value: float | None, dtype: Any = np.float32) -> Tensor:
        return self.model.constant(f"{self.match.node.name}/number", np.array(value, dtype))

    def _add(self, op: str, inputs: list[Tensor], dtype: Any = None, attrs: Any = None) -> Tensor:
        return self.model.add(op, inputs, f"{self.match.node.name}/{op.lower()}", dtype, attrs)


@dataclass(frozen=True)
class FlatSplit:
    """A Split of the flat form of `rows` into one part for each entry of an axis, of any rank beyond 1."""

    node: Node
    rows: Tensor
    axis: int


class SplitToRows(Mod[FlatSplit]):
    """Split of a flat tensor into equal parts → its rows."""

    name = "split-to-rows"

    def _find(self, model: GraphModel) -> Iterator[FlatSplit | Declined]:
        return find((node for node in model.nodes if node.op == "Split"), _read_split)

    def rewrite(self, model: GraphModel, match: FlatSplit) -> Applied:
        """Take each part from the tensor that was flattened."""
        name, is_matrix = str(match.node.name), len(static_shape(match.rows)) == 2
        for index, part in enumerate(list(match.node.outputs)):
            position, axis = model.constant(f"{name}/row", np.array(index, np.int64)), {"axis": match.axis}
            taken = model.add("Gather", [match.rows, position], f"{name}/row_{index}", part.dtype, axis)
            shape = model.constant(f"{name}/flat", np.array([-1], np.int64))
            flat = taken if is_matrix else model.add("Reshape", [taken, shape], f"{name}/flat_{index}")
            model.replace_uses(part, flat)
        return Applied(name, f"{len(match.node.outputs)} equal parts of a flat tensor → its rows")


def _read_split(node: Node) -> FlatSplit | None:
    flat = made_by(node.inputs[0], "Reshape")
    if flat is None or len(node.inputs) < 2 or is_constant(node.inputs[1]):
        return None
    rows = flat.inputs[0]
    if len(static_shape(rows)) < 2 or len(static_shape(flat.outputs[0])) != 1:
        return None
    if static_shape(rows)[0] != len(node.outputs) or common_value(node.inputs[1]) is None:
        raise NotRewritten("parts of a flat tensor are not known to be its rows")
    turned = made_by(rows, "Transpose") if len(static_shape(rows)) == 2 else None
    return FlatSplit(node, rows, 0) if turned is None else FlatSplit(node, turned.inputs[0], 1)


def _read_sequence(node: Node) -> Bags | None:
    """Read the loop of the exporter by torch.export, which collects rows in a sequence."""
    loop = made_by(node.inputs[0], "Loop")
    if loop is None or node.attrs.get("axis") != 0 or node.attrs.get("new_axis", 0):
        return None
    body = _Body(loop)
    if body.reduce is None or not body.ops <= _IN_A_SEQUENCE:
        return None
    rows = _matrix(body.only(body.read(_FLOATS, "Slice", "Gather"), "one tensor of rows"))
    inner = [inner for each in body.direct if each.op == "Loop" for inner in each.attrs["body"].nodes]
    if not inner:
        return Bags(node, body.reduce, body.length(body.read(_INTEGERS, "Slice")), rows)
    # With a padding id, a loop within lists the ids that count.
    starts = [each.inputs[0] for each in body.direct if each.op == "Gather"]
    ids = body.only([each.inputs[0] for each in inner if each.op == "Gather"], "one vector of ids")
    pads = [part for each in inner if each.op == "Equal" for part in each.inputs if is_constant(part)]
    padding = int(values_of(body.only(pads, "one padding id")).item())
    return Bags(node, body.reduce, body.length(starts), rows, ids, padding=padding)


def _read_scan(node: Node) -> Bags | None:
    """Read the loop of the TorchScript exporter, which looks rows up inside and stacks what it reduced."""
    body = _Body(node)
    if body.reduce is None or not body.ops <= _TAKING | {"Mul"} or len(node.outputs) != 1:
        return None
    weights = body.read(_FLOATS, "Slice")
    if [each.op for each in body.every].count("Mul") != len(weights):
        return None
    table = _matrix(body.only(body.read(_FLOATS, "Gather"), "one table"))
    bounds = [tensor for tensor in body.read(_INTEGERS, "Gather") if made_by(tensor, "Slice") is None]
    ids = body.only(body.read(_INTEGERS, "Slice"), "one vector of ids")
    return Bags(node, body.reduce, body.length(bounds), table, ids, next(iter(weights), None))


class _Body:
    """The nodes of a loop, and the tensors of the graph around it that they read."""

    def __init__(self, loop: Any) -> None:
        parts = list(loop.subgraphs(recursive=True))
        self.direct: list[Node] = list(loop.attrs["body"].nodes)
        self.every: list[Node] = [node for part in parts for node in part.nodes]
        self.ops = {node.op for node in self.every}
        self._made = {id(tensor) for node in self.every for tensor in node.outputs}
        self._made |= {id(tensor) for part in parts for tensor in part.inputs}
        reducing = self.ops & {*_REDUCING}
        # A mean divides the sum of the last bag apart.
        is_mean = reducing == {"ReduceSum", "ReduceMean"}
        self.reduce = "ReduceMean" if is_mean else next(iter(reducing)) if len(reducing) == 1 else None

    def read(self, types: tuple[Any, ...], *ops: str) -> list[Tensor]:
        """Return the outer tensors of these types that such nodes take parts of, without repeats."""
        read = [node.inputs[0] for node in self.every if node.op in ops]
        outer = {id(tensor): tensor for tensor in read if id(tensor) not in self._made}
        return [tensor for tensor in outer.values() if tensor.dtype in types]

    @staticmethod
    def only(tensors: list[Tensor], wanted: str) -> Tensor:
        if len({id(tensor) for tensor in tensors}) != 1:
            raise NotRewritten(f"a loop over rows reads {len(tensors)} tensors, not {wanted}")
        return tensors[0]

    def length(self, offsets: list[Tensor]) -> int:
        """Return the length of every bag; NotRewritten where they may differ."""
        step = common_step(self.only(offsets, "one vector of offsets"))
        if step is None or step < 1:
            raise NotRewritten("bags are not known to have one length")
        return step


def _matrix(rows: Tensor) -> Tensor:
    if len(static_shape(rows)) != 2 or static_shape(rows)[1] is None:
        raise NotRewritten("the width of the rows is not known")
    return rows


def _unweighted(rows: Tensor) -> Tensor:
    """Return rows before they are multiplied with ones."""
    node = made_by(rows, "Mul")
    if node is None or len(consumers(rows)) > 1:
        return rows
    for factor, other in (node.inputs, reversed(node.inputs)):
        is_column = static_shape(factor)[-1:] == (1,) and len(static_shape(other)) == 2
        if is_column and common_value(factor) == 1.0:
            return other
    return rows
