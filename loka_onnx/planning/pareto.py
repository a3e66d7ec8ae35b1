"""The front of what is fast and what is accurate.

Of two engines the one is worth nothing if the other is no slower and no less accurate. What is left is the
Pareto front: on it, less time costs accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from loka_onnx.errors import InternalError


@dataclass(frozen=True)
class Point:
    """One engine.

    Attributes:
        name: Its id.
        time: What it takes, in any unit; not NaN.
        loss: What it costs: upper bound over budget, the worst of its outputs; not NaN. Infinite where the
            data allow no bound.
    """

    name: str
    time: float
    loss: float

    def dominates(self, other: Point) -> bool:
        """Whether this is no worse in both, and better in one."""
        no_worse = self.time <= other.time and self.loss <= other.loss
        return no_worse and (self.time < other.time or self.loss < other.loss)


def front(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other dominates, by rising time; equal points are all on it.

    One pass over the points by time: a point is on the front if no faster one costs as little.

    Raises:
        InternalError: A time or a loss is NaN, which orders nothing.
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
