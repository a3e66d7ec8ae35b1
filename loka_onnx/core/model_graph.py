"""What a model computes, and from what: its operators, and the tensors between them.

It is what a report draws. Weights are no part of it, and neither are precisions and verdicts: those are a
plan's, which names the same sites.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loka_onnx.core.serde import STRICT


class NodeKind(StrEnum):
    """What a node of a model graph stands for."""

    INPUT = "input"
    OUTPUT = "output"
    OPERATOR = "operator"
    FOLDED = "folded"
    """Several nodes drawn as one, because the graph is too large to show each."""


@dataclass(frozen=True)
class GraphNode:
    """One node.

    Attributes:
        name: Name of the graph input or output, of the operator's node, or of what is folded.
        kind: What it stands for.
        op: ONNX operator; empty unless an operator.
        module: Path of the module that holds it; empty where nothing tells it.
        sites: Sites in it: of an operator its own name or none, of what is folded all of them.
        stands_for: Nodes that it stands for; 1 unless folded.
    """

    __pydantic_config__ = STRICT

    name: str
    kind: NodeKind
    op: str = ""
    module: str = ""
    sites: tuple[str, ...] = ()
    stands_for: int = 1


@dataclass(frozen=True)
class GraphEdge:
    """A tensor, from the node that computes it to one that reads it.

    Attributes:
        source: Index of the node that computes it.
        target: Index of the node that reads it, always a later one.
        tensor: Name of the tensor; of the first one where several go the same way.
    """

    __pydantic_config__ = STRICT

    source: int
    target: int
    tensor: str


@dataclass(frozen=True)
class ModelGraph:
    """The nodes of a model and the tensors between them.

    Attributes:
        nodes: Producers before consumers.
        edges: At most one between two nodes, by source and target.
        operators: Operators of the model, those that are folded included.
        folded: How many of the model's nodes are drawn as a part of a folded one.
        in_runs: Whether they are folded in runs of consecutive nodes, because modules do not make the graph
            small enough; else each is of one module.

    Raises:
        ValueError: An edge leads backwards or to a node that there is not.
    """

    __pydantic_config__ = STRICT

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    operators: int
    folded: int = 0
    in_runs: bool = False

    def __post_init__(self) -> None:
        for edge in self.edges:
            if not 0 <= edge.source < edge.target < len(self.nodes):
                raise ValueError(
                    f"an edge goes from a node to a later one: {edge.source} to {edge.target} "
                    f"of {len(self.nodes)} nodes"
                )

    @property
    def parts(self) -> int:
        """Nodes that stand for several."""
        return sum(node.kind is NodeKind.FOLDED for node in self.nodes)

    @property
    def note(self) -> str:
        """What is folded and how, in words; empty where every node is shown."""
        if not self.folded:
            return ""
        how = "in runs of consecutive nodes: no modules make it small enough" if self.in_runs else "by module"
        return f"To keep the drawing usable, {self.folded:,} nodes are drawn as {self.parts:,}, {how}."
