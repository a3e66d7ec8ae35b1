"""Exact sums against rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.errors import InternalError

# A sum of sixty of the largest stays inside float64.
finite = st.floats(-1e306, 1e306)
lists = st.lists(finite, max_size=60)


def exactly(values) -> Fraction:
    return sum(map(Fraction, values), Fraction(0))


@given(lists)
def test_the_parts_are_the_sum_and_the_value_is_the_nearest_float64(values):
    total = ExactSum.of(values)
    assert exactly(total.parts) == exactly(values)
    # Division of integers rounds correctly in Python.
    nearest = exactly(values)
    assert total.value == nearest.numerator / nearest.denominator
    # Each part is the nearest to what those before it leave: one form for one sum.
    left = exactly(values)
    for part in total.parts:
        assert part == left.numerator / left.denominator != 0.0
        left -= Fraction(part)
    assert left == 0


@given(lists, lists, lists)
def test_merging_is_associative_commutative_and_neutral_for_nothing(a, b, c):
    x, y, z = map(ExactSum.of, (a, b, c))
    assert x.merge(y) == y.merge(x)
    assert x.merge(y).merge(z) == x.merge(y.merge(z)) == ExactSum.of([*a, *b, *c])
    assert x.merge(ExactSum()) == ExactSum().merge(x) == x


def test_what_float64_loses_is_kept():
    assert (0.1 + 1e16) - 1e16 != 0.1
    assert ExactSum.of([0.1, 1e16]).merge(ExactSum.of([-1e16])).value == 0.1
    assert ExactSum.of([1e300, 1.0, -1e300]) == ExactSum.of([1.0])
    assert ExactSum.of([]) == ExactSum.of([0.0, -0.0]) == ExactSum.of([5.0, -5.0]) == ExactSum()
    assert ExactSum().value == 0.0


@pytest.mark.parametrize("values", [[math.nan], [1.0, math.inf], [-math.inf, math.inf], [1.7e308, 1.7e308]])
def test_what_is_not_finite_or_beyond_float64_has_no_sum(values):
    with pytest.raises(InternalError):
        ExactSum.of(values)
