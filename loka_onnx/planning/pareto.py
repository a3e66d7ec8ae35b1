"""The Pareto front of time and accuracy: engines that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from loka_onnx.errors import InternalError


@dataclass(frozen=True)
class Point:
    """An engine, its time in any unit, and its worst upper bound over budget; infinite without a bound."""

    name: str
    time: float
    loss: float


def front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points that no other dominates, by rising time; equal points are all on it.

    Raises InternalError if a time or a loss is NaN, which has no order.
    """
    for point in points:
        if isnan(point.time) or isnan(point.loss):
            raise InternalError(f"'{point.name}' has no place among the others", evidence=repr(point))
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.time, p.loss)):
        best = kept[-1] if kept else None
        if best is None or point.loss < best.loss or (point.time, point.loss) == (best.time, best.loss):
            kept.append(point)
    return tuple(kept)
