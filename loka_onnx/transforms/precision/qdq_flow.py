"""Find tensors that are read only after rounding, whose values may be moved in FP8.

From outputs to inputs, each tensor gets a *demand*: the key of the Q that read it, directly or behind
operators that move its values, when all of them round alike and nothing else reads it; otherwise the reason
why it is needed exactly. An operator that moves only values that are rounded later may move the rounded
values instead: it is *carrying*. No exact reader reads its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, producer
from loka_onnx.transforms.precision.qdq_pairs import SELECTIONS, Key, Pair, moved

_READS_NO_VALUES = frozenset({"Shape", "Size"})


@dataclass(frozen=True)
class Demand:
    """Demands of the readers of a tensor.

    Attributes:
        key: How all of them round it; None where they differ, or without readers.
        reason: Why it is needed exactly, or in two roundings; else empty.
    """

    key: Key | None = None
    reason: str = ""


_NOTHING = Demand()


class Flow:
    """Operators that carry rounded values in a graph.

    Args:
        movements: Operators that the backend runs on FP8 values.
    """

    def __init__(
        self, model: GraphModel, nodes: Sequence[Node], pairs: Sequence[Pair], movements: frozenset[str]
    ) -> None:
        self._movements = movements
        self._pairs = {id(pair.q): pair for pair in pairs}
        self._outputs = {id(tensor) for tensor in model.outputs}
        self._rows = _rows_of_tables(model, nodes)
        self._of_node: dict[int, Demand] = {}
        self._of_tensor: dict[int, Demand] = {}
        for node in reversed(nodes):
            if self._passes(node):
                found = _NOTHING
                for tensor in node.outputs:
                    found = _both(found, self.demand(tensor))
                self._of_node[id(node)] = found
        self._carrying = {id(node) for node in nodes if self._carries(node)}

    def carries(self, node: Node | None) -> bool:
        """Return whether the operator may move rounded values."""
        return id(node) in self._carrying

    def demand(self, tensor: Tensor) -> Demand:
        """Return the demand of a tensor's readers."""
        known = self._of_tensor.get(id(tensor))
        if known is None:
            known = Demand(None, "it leaves the graph") if id(tensor) in self._outputs else _NOTHING
            for node in consumers(tensor):
                known = _both(known, self._edge(tensor, node))
            self._of_tensor[id(tensor)] = known
        return known

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
        pair = self._pairs.get(id(node))
        if pair is not None and pair.source is tensor:
            return Demand(pair.key)
        if any(tensor is read for read in moved(node, self._movements)) and id(node) in self._of_node:
            return self._of_node[id(node)]
        return Demand(None, f"{node.op} '{node.name}' reads '{tensor.name}' as it is")

    def _passes(self, node: Node) -> bool:
        sources = moved(node, self._movements)
        if node.op != "Concat":
            return bool(sources)
        return bool(sources) and not _joins_constant(node) and not any(id(t) in self._rows for t in sources)

    def _carries(self, node: Node) -> bool:
        found = self._of_node.get(id(node), _NOTHING)
        if found.key is None:
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
    found: set[int] = set()
    for node in nodes:
        is_lookup = node.op == "Gather" and (is_constant(node.inputs[0]) or model.is_table(node.inputs[0]))
        if is_lookup or any(id(tensor) in found for tensor in moved(node)):
            found.update(id(tensor) for tensor in node.outputs)
    return frozenset(found)
