"""The front against its definition, tried on every pair."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.errors import InternalError
from loka_onnx.planning.expected_latency import Point, front

# Few values, so that ties in one and in both come up.
VALUES = st.sampled_from([0.5, 1.0, 1.5, 2.0, inf])


def dominates(a: Point, b: Point) -> bool:
    no_worse = a.time <= b.time and a.loss <= b.loss
    return no_worse and (a.time < b.time or a.loss < b.loss)


@given(st.lists(st.tuples(VALUES, VALUES), max_size=12))
def test_it_is_what_no_other_point_dominates(places: list[tuple[float, float]]) -> None:
    points = [Point(f"p{i}", time, loss) for i, (time, loss) in enumerate(places)]
    found = front(points)
    by_definition = {p.name for p in points if not any(dominates(other, p) for other in points)}
    assert {p.name for p in found} == by_definition
    assert [p.time for p in found] == sorted(p.time for p in found)
    assert all(a.loss >= b.loss for a, b in pairwise(found))


def test_equal_points_are_both_on_it() -> None:
    a, b = Point("a", 1.0, 1.0), Point("b", 1.0, 1.0)
    assert front([a, b]) == (a, b)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(InternalError, match="'a' has no place among the others"):
        front([Point("a", nan, 1.0)])
