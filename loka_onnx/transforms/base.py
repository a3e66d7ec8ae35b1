"""Base of every transform: `match` finds nodes to rewrite, as values, and `rewrite` rewrites one of them.

Look-alikes that stay as they are are returned too, with the reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node

M = TypeVar("M")


@dataclass(frozen=True)
class Found(Generic[M]):
    """Matches of a transform in a graph; no two share a node."""

    matches: tuple[M, ...]
    declined: tuple[Declined, ...] = ()


class NotRewritten(Exception):
    """A look-alike stays as it is; the message says why."""


def find(nodes: Iterable[Node], read: Callable[[Node], M | None]) -> Found[M]:
    """Offer nodes to a reader, which returns a match or None, or raises `NotRewritten` for a look-alike."""
    matches: list[M] = []
    declined: list[Declined] = []
    for node in nodes:
        try:
            match = read(node)
        except NotRewritten as reason:
            declined.append(Declined(node.name, str(reason)))
        else:
            matches += [] if match is None else [match]
    return Found(tuple(matches), tuple(declined))


class Mod(ABC, Generic[M]):
    """A rewrite that is equivalent in exact arithmetic.

    `tolerance` is the largest accepted change of an output on the check rows, over max(1, largest |output|).
    """

    name: ClassVar[str]
    tolerance: ClassVar[float] = 1e-5

    @abstractmethod
    def match(self, model: GraphModel) -> Found[M]:
        """Return matches and declined look-alikes; the graph is not changed."""

    @abstractmethod
    def rewrite(self, model: GraphModel, match: M) -> Applied:
        """Rewrite one match in the graph."""
