"""Histogram of magnitudes: bins, exact merging, and how far its quantiles may be off."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from loka_onnx.core.statistics import BINS, RELATIVE_BIN_WIDTH, MagnitudeHistogram, bin_edge
from loka_onnx.numerics.histograms import count_magnitudes, histogram_of

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = npst.arrays(np.float32, st.integers(0, 200), elements=floats)


def of(x: np.ndarray) -> MagnitudeHistogram:
    return histogram_of(count_magnitudes(x))


@given(arrays)
def test_every_element_is_counted_in_the_bin_that_holds_it(x):
    histogram, magnitude = of(x), np.abs(x.astype(np.float64))
    assert histogram.total == x.size and histogram.zeros == int((magnitude < 2.0**-129).sum())
    for index, count in enumerate(histogram.counts):
        low, high = histogram.edges[index], histogram.edges[index + 1]
        assert count == int(((magnitude >= low) & (magnitude < high)).sum())


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
