"""Operators of a model and the tensors between them (no weights), for drawing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NodeKind(StrEnum):
    """Kind of a node."""

    INPUT = "input"
    OUTPUT = "output"
    OPERATOR = "operator"
    FOLDED = "folded"
    """Several nodes drawn as one."""


@dataclass(frozen=True)
class GraphNode:
    """One node; a folded one has the sites of all its members and stands for so many nodes."""

    name: str
    kind: NodeKind
    op: str = ""
    module: str = ""
    sites: tuple[str, ...] = ()
    stands_for: int = 1


@dataclass(frozen=True)
class GraphEdge:
    """A tensor (the first of several) from its producer to a later reader, by index."""

    source: int
    target: int
    tensor: str


@dataclass(frozen=True)
class ModelGraph:
    """The nodes of a model, producers before consumers, and the tensors between them, one between two nodes.

    `operators` is the number of operators of the model, of which `folded` are drawn as part of a folded node:
    each of one module, or `in_runs` of consecutive nodes where modules do not make the graph small enough.
    """

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
        """Number of folded nodes."""
        return sum(node.kind is NodeKind.FOLDED for node in self.nodes)

    @property
    def note(self) -> str:
        """Folded nodes in words; empty where every node is shown."""
        if not self.folded:
            return ""
        how = "in runs of consecutive nodes: no modules make it small enough" if self.in_runs else "by module"
        return f"To keep the drawing usable, {self.folded:,} nodes are drawn as {self.parts:,}, {how}."
