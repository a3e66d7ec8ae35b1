"""Base of every transform: `match` finds nodes to rewrite, as values, and `rewrite` rewrites one of them.

Look-alikes that stay as they are are returned too, with the reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from loka_onnx.core.rewrite import Applied, Declined, RewriteRecord
from loka_onnx.graph.model import GraphModel, Node

M = TypeVar("M")


@dataclass(frozen=True)
class Found(Generic[M]):
    """Matches of a transform, in the order of rewriting: each holds when those before it are rewritten."""

    matches: tuple[M, ...]
    declined: tuple[Declined, ...] = ()

    @classmethod
    def of(cls, items: Iterable[M | Declined]) -> Found[M]:
        """Separate matches from declined look-alikes, each in their order."""
        known = list(items)
        matches = tuple(each for each in known if not isinstance(each, Declined))
        return cls(matches, tuple(each for each in known if isinstance(each, Declined)))


class NotRewritten(Exception):
    """A look-alike stays as it is; the message says why."""


def find(nodes: Iterable[Node], read: Callable[[Node], M | None]) -> Iterator[M | Declined]:
    """Yield the matches that `read` returns, without None, and `Declined` where it raises `NotRewritten`."""
    for node in nodes:
        try:
            match = read(node)
        except NotRewritten as reason:
            yield Declined(node.name, str(reason))
        else:
            if match is not None:
                yield match


class Mod(ABC, Generic[M]):
    """A rewrite that is equivalent in exact arithmetic.

    `tolerance` is the largest accepted change of an output on the check rows, over max(1, largest |output|).
    """

    name: ClassVar[str]
    tolerance: ClassVar[float] = 1e-5

    def match(self, model: GraphModel) -> Found[M]:
        """Return matches and declined look-alikes; the graph is not changed."""
        return Found.of(self._find(model))

    @abstractmethod
    def _find(self, model: GraphModel) -> Iterable[M | Declined]:
        """Return matches, in the order of rewriting, and declined look-alikes between them."""

    @abstractmethod
    def rewrite(self, model: GraphModel, match: M) -> Applied:
        """Rewrite one match, in place, in the graph that it was found in."""


def record(transform: str, said: Iterable[Applied | Declined]) -> RewriteRecord:
    """Return the record of a transform that is no `Mod`, of what it applied and declined, without times."""
    entries = Found.of(said)
    return RewriteRecord(transform, entries.matches, entries.declined)
