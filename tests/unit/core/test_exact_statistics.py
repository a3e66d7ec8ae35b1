"""Exact sums against rational arithmetic, histograms of magnitudes against counting; both merge exactly."""

from __future__ import annotations

import functools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.statistics import BINS, RELATIVE_BIN_WIDTH, MagnitudeHistogram, bin_edge
from loka_onnx.errors import InternalError
from loka_onnx.numerics.histograms import count_magnitudes, histogram_of

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = npst.arrays(np.float32, st.integers(0, 200), elements=floats)


def of(x: np.ndarray) -> MagnitudeHistogram:
    return histogram_of(count_magnitudes(x))


@given(arrays)
def test_every_element_is_counted_in_the_bin_that_holds_it(x):
    histogram, magnitude = of(x), np.abs(x.astype(np.float64))
    assert histogram.total == x.size and histogram.zeros == int((magnitude < 2.0**-129).sum())
    edges = np.array(histogram.edges)[:, None]
    assert (
        list(histogram.counts) == ((magnitude >= edges[:-1]) & (magnitude < edges[1:])).sum(axis=1).tolist()
    )


def test_edges_are_those_of_fp32_bits_and_bins_are_narrow():
    edges = np.array([bin_edge(index) for index in range(BINS - 8)])
    bits = (np.arange(BINS - 8, dtype=np.uint32) << 20).view(np.float32)
    np.testing.assert_array_equal(edges, bits.astype(np.float64))
    normal = edges[8:]
    assert (np.diff(normal) / normal[:-1]).max() == RELATIVE_BIN_WIDTH


@given(arrays, arrays, arrays)
def test_merging_is_exact_in_any_order_and_grouping(a, b, c):
    whole = of(np.concatenate([a, b, c]))
    assert of(a).merge(of(b)).merge(of(c)) == of(a).merge(of(b).merge(of(c))) == whole
    assert functools.reduce(MagnitudeHistogram.merge, map(of, (c, a, b)), MagnitudeHistogram()) == whole


@given(arrays.filter(lambda x: x.size > 0), st.floats(0, 1))
def test_a_quantile_is_within_a_bin_of_that_of_the_elements(x, share):
    x = np.where(np.abs(x) < 2.0**-126, np.float32(0), x)
    exact = float(np.quantile(np.abs(x.astype(np.float64)), share, method="inverted_cdf"))
    found = of(x).quantile(share)
    # share · size may round across an integer, where the quantile jumps to the neighbour.
    near = np.quantile(
        np.abs(x.astype(np.float64)), np.clip([share - 1e-12, share + 1e-12], 0, 1), method="inverted_cdf"
    )
    assert any(abs(found - value) <= RELATIVE_BIN_WIDTH * value for value in (exact, *near))


def test_quantiles_of_zeros_and_of_nothing():
    assert of(np.zeros(5)).quantile(1.0) == 0.0
    assert of(np.array([0.0, 0.0, 0.0, 3.0])).quantile(0.75) == 0.0
    for histogram, share in (
        (MagnitudeHistogram(), 0.5),
        (of(np.ones(3)), 1.5),
        (of(np.ones(3)), float("nan")),
    ):
        with pytest.raises(ValueError, match="no quantile"):
            histogram.quantile(share)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5, (0, 1)), "begin and end with a bin that holds something"),
        ((0, 5, (1, 0)), "begin and end with a bin that holds something"),
        ((0, 5, ()), "begin and end with a bin that holds something"),
        ((-1, 0, ()), "no count is negative"),
        ((0, 5, (1, -1, 1)), "no count is negative"),
        ((0, 0, (1,)), "bins are numbered 1 to 2047"),
        ((0, BINS - 1, (1, 1)), "bins are numbered 1 to 2047"),
    ],
)
def test_what_is_no_histogram_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MagnitudeHistogram(*arguments)


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
