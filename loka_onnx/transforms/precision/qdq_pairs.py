"""Q/DQ pairs of activations, as `insert_qdq` writes them, and tensors that are read only after rounding.

A pair has one scale for the whole tensor; a Q of an initializer is part of a weight and no pair.

From outputs to inputs, each tensor gets a *demand*: the key of the Q that read it, directly or behind
operators that move its values, when all of them round alike and nothing else reads it; otherwise the reason
why it is needed exactly. An operator that moves only values that are rounded later may move the rounded
values instead: it is *carrying*. No exact reader reads its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from loka_onnx.core.formats import FORMATS
from loka_onnx.core.rewrite import Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, producer, values_of

SELECTIONS = frozenset({"Gather", "Slice"})
"""Movements that may drop values."""
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Movements that keep the values in place in memory."""
MOVEMENTS = SELECTIONS | VIEWS | {"Concat", "Expand", "Split", "Tile", "Transpose"}
"""Operators that move or repeat unchanged values: of all inputs for Concat, else of the first."""
_STORED = {format.storage: format for format in FORMATS.values()}


@dataclass(frozen=True)
class Key:
    """Rounding of a tensor; pairs of one key round equal values to equal values."""

    scale: float
    format: str
    zero_point: float = 0.0

    def __str__(self) -> str:
        zero = f", zero point {self.zero_point:g}" if self.zero_point else ""
        return f"scale {self.scale:.6g}, {self.format}{zero}"


@dataclass(frozen=True)
class Pair:
    """A Q and the one or more DQ that read it."""

    q: Node
    dqs: tuple[Node, ...]
    key: Key

    @property
    def name(self) -> str:
        """Site and operand that the pair was written for: ``<site>/in<index>``."""
        return str(self.q.name).removesuffix("/q")

    @property
    def source(self) -> Tensor:
        """The tensor that is quantized."""
        return self.q.inputs[0]

    @property
    def rounded(self) -> Tensor:
        """Its values after rounding."""
        return self.dqs[0].outputs[0]


def find_pairs(model: GraphModel, nodes: Sequence[Node]) -> Iterator[Pair | Declined]:
    """Yield the pairs among nodes of the main graph, and `Declined` for each Q of an activation in none."""
    for node in nodes:
        if node.op != "QuantizeLinear" or is_constant(node.inputs[0]):
            continue
        key, dqs = _key(node), consumers(node.outputs[0])
        if key is None:
            yield Declined(node.name, "it is not one scale, known beforehand, for the tensor")
        elif not dqs or any(_key(dq) != key or dq.op != "DequantizeLinear" for dq in dqs):
            yield Declined(node.name, "something besides a DQ of its scale reads its quantized values")
        elif any(model.is_output(tensor) for tensor in (node.outputs[0], *(dq.outputs[0] for dq in dqs))):
            yield Declined(node.name, "its values leave the graph")
        else:
            yield Pair(node, tuple(dqs), key)


def _key(node: Node) -> Key | None:
    """Return the key of a Q or a DQ; None for another form."""
    if len(node.inputs) < 3 or not all(is_constant(tensor) for tensor in node.inputs[1:3]):
        return None
    scale, zero = (values_of(tensor) for tensor in node.inputs[1:3])
    format = _STORED.get(str(zero.dtype))
    if scale.ndim or zero.ndim or format is None or (float(zero) and not format.has_zero_point):
        return None
    is_plain = node.attrs.get("saturate", 1) == 1 and not node.attrs.get("block_size", 0)
    return Key(float(scale), format.storage, float(zero)) if is_plain else None


def moved(node: Node, movements: frozenset[str] = MOVEMENTS) -> tuple[Tensor, ...]:
    """Return the distinct tensors whose values a node moves; empty for another node."""
    if node.op not in movements or node.domain not in {None, "", "ai.onnx"}:
        return ()
    if node.op == "Concat":
        return tuple({id(tensor): tensor for tensor in node.inputs}.values())
    if is_constant(node.inputs[0]) or (node.op == "Gather" and not is_constant(node.inputs[1])):
        return ()
    return (node.inputs[0],)


def add_pair(model: GraphModel, source: Tensor, like: Pair) -> Pair:
    """Append and return a pair that rounds another tensor like this one; no reader changes."""
    constants = like.q.inputs[1:3]
    narrow = model.add("QuantizeLinear", [source, *constants], f"{like.name}/q", like.q.outputs[0].dtype)
    wide = model.add("DequantizeLinear", [narrow, *constants], f"{like.name}/dq", source.dtype or np.float32)
    narrow.shape = wide.shape = source.shape
    return Pair(narrow.inputs[0], (wide.inputs[0],), like.key)


def move_pair(pair: Pair, source: Tensor) -> None:
    """Let a pair quantize another tensor, in place; its readers then read that one's rounded values."""
    pair.q.inputs[0] = source
    for tensor in (pair.q.outputs[0], *(dq.outputs[0] for dq in pair.dqs)):
        tensor.shape = source.shape


def bypass_pair(model: GraphModel, pair: Pair, instead: Tensor) -> tuple[Node, ...]:
    """Let readers of the rounded values read another tensor that holds them; return the unused nodes."""
    for dq in pair.dqs:
        model.replace_uses(dq.outputs[0], instead, consumers(dq.outputs[0]))
    return (pair.q, *pair.dqs)


# Flow ------------------------------------------------------------------------------------------------


_READS_NO_VALUES = frozenset({"Shape", "Size"})


@dataclass(frozen=True)
class Demand:
    """The rounding of all readers of a tensor; None, with a `reason`, if they differ, and without readers."""

    key: Key | None = None
    reason: str = ""


_NOTHING = Demand()


class Flow:
    """Operators that carry rounded values in a graph; the backend runs `movements` on FP8 values."""

    def __init__(
        self, model: GraphModel, nodes: Sequence[Node], pairs: Sequence[Pair], movements: frozenset[str]
    ) -> None:
        self._movements = movements
        self.pairs = {id(pair.q): pair for pair in pairs}
        self._outputs = {id(tensor) for tensor in model.outputs}
        self._rows = _rows_of_tables(model, nodes)
        self._of_node: dict[int, Demand] = {}
        self._of_tensor: dict[int, Demand] = {}
        for node in filter(self._passes, reversed(nodes)):
            self._of_node[id(node)] = reduce(_both, map(self.demand, node.outputs), _NOTHING)
        self._carrying = {id(node) for node in nodes if self._carries(node)}

    def carries(self, node: Node | None) -> bool:
        """Return whether the operator may move rounded values."""
        return id(node) in self._carrying

    def demand(self, tensor: Tensor) -> Demand:
        """Return the demand of a tensor's readers."""
        if id(tensor) not in self._of_tensor:
            first = Demand(None, "it leaves the graph") if id(tensor) in self._outputs else _NOTHING
            edges = (self._edge(tensor, node) for node in consumers(tensor))
            self._of_tensor[id(tensor)] = reduce(_both, edges, first)
        return self._of_tensor[id(tensor)]

    def why_behind(self, tensor: Tensor) -> str:
        """Return why a pair stays behind the operator that moves a tensor's values; empty if none does."""
        node = producer(tensor)
        if node is None or not moved(node):
            return ""
        behind = f"stays behind {node.op} '{node.name}'"
        if not self._passes(node):
            if _joins_constant(node):
                return f"{behind}: it joins a constant, which is not to be quantized like an activation"
            if node.op in self._movements:
                return f"{behind}: it joins rows of a table, which engines store in FP8 for one Q behind it"
            return f"{behind}: the backend is not known to move FP8 values through it"
        reason = self._of_node[id(node)].reason
        if not reason:
            reason = f"more than these values of '{moved(node)[0].name}' would be quantized"
        return f"{behind}: {reason}"

    def _edge(self, tensor: Tensor, node: Node) -> Demand:
        if node.op in _READS_NO_VALUES:
            return _NOTHING
        pair = self.pairs.get(id(node))
        if pair is not None and pair.source is tensor:
            return Demand(pair.key)
        if any(tensor is read for read in moved(node, self._movements)) and id(node) in self._of_node:
            return self._of_node[id(node)]
        return Demand(None, f"{node.op} '{node.name}' reads '{tensor.name}' as it is")

    def _passes(self, node: Node) -> bool:
        sources = moved(node, self._movements)
        joins_rows = node.op == "Concat" and any(id(tensor) in self._rows for tensor in sources)
        return bool(sources) and not joins_rows and not _joins_constant(node)

    def _carries(self, node: Node) -> bool:
        carried = self._of_node.get(id(node), _NOTHING)
        if carried.key is None:
            return False
        # Quantizing a whole tensor for one part pays only where nothing reads the rest.
        return node.op not in SELECTIONS or self.demand(node.inputs[0]).key is not None


def _joins_constant(node: Node) -> bool:
    """Return whether a pair in front of each part of a Concat would quantize an initializer."""
    return node.op == "Concat" and any(is_constant(tensor) for tensor in node.inputs)


def _both(one: Demand, other: Demand) -> Demand:
    if _NOTHING in (one, other):
        return other if one == _NOTHING else one
    if one.reason or other.reason:
        return one if one.reason else other
    return one if one.key == other.key else Demand(None, f"it is rounded to {one.key} and to {other.key}")


def _rows_of_tables(model: GraphModel, nodes: Sequence[Node]) -> frozenset[int]:
    """Return identities of tensors that hold rows looked up in a table, moved or not."""
    rows: set[int] = set()
    for node in nodes:
        is_lookup = node.op == "Gather" and (is_constant(node.inputs[0]) or model.is_table(node.inputs[0]))
        if is_lookup or any(id(tensor) in rows for tensor in moved(node)):
            rows.update(id(tensor) for tensor in node.outputs)
    return frozenset(rows)
