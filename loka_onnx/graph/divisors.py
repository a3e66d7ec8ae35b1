"""Divisors of a graph: a small one that becomes 0 in a narrower type gives an infinity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loka_onnx.graph.layout import LAYOUT_OPS
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, producer, values_of

_POSITIONS = {"Div": 1, "Reciprocal": 0, "Log": 0}
"""Position of the operand that must not be 0."""
# fmt: off
_MAKERS = LAYOUT_OPS | {
    "Abs", "Add", "Cast", "Clip", "Exp", "Expand", "Max", "Mul", "Pow", "ReduceL1", "ReduceL2",
    "ReduceMean", "ReduceSum", "ReduceSumSquare", "Reciprocal", "Sqrt", "Where",
}
# fmt: on
"""Operators of roots, sums of squares and their guards."""
_LONGEST = 24
"""Decomposed norms have fewer nodes; the bound keeps the search linear in the nodes of the graph."""


@dataclass(frozen=True)
class Divisor:
    """A computed operand that must not become 0, its reader, and nodes that compute it of sums, squares,
    roots and guards.
    """

    reader: Node
    tensor: Tensor
    makers: tuple[Node, ...]


def divisors(model: GraphModel) -> tuple[Divisor, ...]:
    """Return every computed divisor of the main graph, in node order."""
    return tuple(_find(model))


def _find(model: GraphModel) -> Iterator[Divisor]:
    for node in model.nodes:
        position = _position(node)
        if position is None or producer(node.inputs[position]) is None:
            continue
        tensor = node.inputs[position]
        yield Divisor(node, tensor, _makers(tensor))


def _position(node: Node) -> int | None:
    if node.op != "Pow":
        return _POSITIONS.get(node.op)
    exponent = node.inputs[1]
    return 0 if is_constant(exponent) and (values_of(exponent) < 0).any() else None


def _makers(tensor: Tensor) -> tuple[Node, ...]:
    found: dict[int, Node] = {}
    waiting = [tensor]
    while waiting and len(found) < _LONGEST:
        node = producer(waiting.pop())
        if node is None or id(node) in found or node.op not in _MAKERS:
            continue
        found[id(node)] = node
        waiting += [each for each in node.inputs if not is_constant(each)]
    return tuple(found.values())
