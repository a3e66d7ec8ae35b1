"""What every transform promises.

A transform finds places (`match`) and rewrites one place (`rewrite`); what it finds is handed over as a
value. What it looked at and left alone is a result too, with the reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel

M = TypeVar("M")


@dataclass(frozen=True)
class Found(Generic[M]):
    """Places that a transform found in a graph.

    Attributes:
        matches: Places to rewrite; no two share a node.
        declined: Places that look alike and were left alone.
    """

    matches: tuple[M, ...]
    declined: tuple[Declined, ...] = ()


class Mod(ABC, Generic[M]):
    """A rewrite that is mathematically equivalent in exact arithmetic.

    Attributes:
        name: Name in reports.
        tolerance: Largest accepted change of an output on the check rows, relative to the larger of 1 and
            its own largest magnitude: what FP32 rounding in another order may do.
    """

    name: ClassVar[str]
    tolerance: ClassVar[float] = 1e-5

    @abstractmethod
    def match(self, model: GraphModel) -> Found[M]:
        """Find the places; the graph is not changed."""

    @abstractmethod
    def rewrite(self, model: GraphModel, match: M) -> Applied:
        """Rewrite one place in the graph."""
