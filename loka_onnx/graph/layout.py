"""Layout operations: they move elements and compute nothing, so statistics and rounding pass through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, producer

LAYOUT_OPS = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


@dataclass(frozen=True)
class LayoutRoot:
    """A tensor, and the layout nodes that lead from it to a given one, in that order."""

    tensor: Tensor
    chain: tuple[Node, ...]


def layout_root(tensor: Tensor) -> LayoutRoot:
    """Return the tensor that layout nodes rearranged into this one, and the nodes; itself and () for none."""
    chain: list[Node] = []
    node = producer(tensor)
    while node is not None and node.op in LAYOUT_OPS and not is_constant(node.inputs[0]):
        chain.append(node)
        tensor = node.inputs[0]
        node = producer(tensor)
    return LayoutRoot(tensor, tuple(reversed(chain)))


def reapply(model: GraphModel, chain: Sequence[Node], tensor: Tensor, name: str) -> Tensor:
    """Append copies of layout nodes behind another tensor of the same shape; return the last one's output."""
    for position, node in enumerate(chain):
        tensor = model.add_like(node, [tensor, *node.inputs[1:]], f"{name}.layout{position}")
    return tensor
