"""Statistics merge: the order of the batches, and how rows are cut into them, do not matter."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.core.histogram import MagnitudeHistogram
from loka_onnx.core.statistics import ErrorStats, RangeStats

# Integers as floats: sums of these are exact, so that equality can be asked for.
whole = st.integers(-(2**20), 2**20).map(float)
natural = st.integers(0, 2**30)
histograms = st.builds(
    MagnitudeHistogram,
    natural,
    st.integers(1, 2000),
    st.lists(st.integers(1, 2**40), min_size=1, max_size=4).map(tuple),
)
channels = st.one_of(st.just(()), st.tuples(whole, whole))
ranges = st.builds(RangeStats, natural, whole, whole, whole, whole, whole, histograms, channels)
errors = st.builds(
    ErrorStats,
    st.just("e4m3fn"),
    st.just(0.5),
    natural,
    whole,
    whole,
    whole,
    whole,
    natural,
    natural,
    natural,
    natural,
)


@pytest.mark.parametrize("stats", [ranges, errors], ids=["ranges", "errors"])
def test_merging_is_associative_and_commutative(stats):
    @given(stats, stats, stats)
    def check(a, b, c):
        assert a.merge(b) == b.merge(a)
        assert a.merge(b).merge(c) == a.merge(b.merge(c))

    check()


def range_of(values: np.ndarray) -> RangeStats:
    wide = values.astype(np.float64)
    return RangeStats(
        wide.size,
        float(np.abs(wide).max()),
        float(wide.min()),
        float(wide.max()),
        float(wide.sum()),
        float(np.square(wide).sum()),
    )


def error_of(exact: np.ndarray, low: np.ndarray) -> ErrorStats:
    sums = (
        float((a * b).sum())
        for a, b in ((exact, exact), (low - exact, low - exact), (exact, low), (low, low))
    )
    return ErrorStats("r", 0.25, exact.size, *sums, exact.size, int((exact > 1).sum()), 0)


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=60),
    st.lists(st.integers(1, 59), max_size=4, unique=True),
)
def test_cutting_rows_into_batches_changes_nothing_but_rounding(values, cuts):
    x = np.array(values, np.float32)
    parts = [p for p in np.split(x, sorted(c for c in cuts if c < len(x))) if p.size]
    merged = functools.reduce(RangeStats.merge, map(range_of, parts))
    direct = range_of(x)
    assert (merged.count, merged.amax, merged.minimum, merged.maximum) == (
        direct.count,
        direct.amax,
        direct.minimum,
        direct.maximum,
    )
    scale = float(np.abs(x.astype(np.float64)).sum())
    assert math.isclose(merged.total, direct.total, rel_tol=0, abs_tol=1e-12 * scale)
    assert math.isclose(merged.total_squares, direct.total_squares, rel_tol=1e-12)
    assert merged.mean == pytest.approx(x.astype(np.float64).mean(), abs=1e-9)
    assert merged.variance == pytest.approx(
        x.astype(np.float64).var(), abs=1e-7 * max(merged.amax, 1e-30) ** 2
    )


def test_channels_that_one_part_does_not_know_are_unknown():
    known = RangeStats(2, 3.0, -3.0, 2.0, 0.0, 9.0, channel_amax=(3.0, 1.0))
    other = RangeStats(2, 2.0, -3.0, 2.0, 0.0, 9.0, channel_amax=(0.5, 2.0))
    assert known.merge(other).channel_amax == (3.0, 2.0)
    assert known.merge(dataclasses.replace(other, channel_amax=())).channel_amax == ()
    with pytest.raises(ValueError, match="different numbers of channels do not merge"):
        known.merge(dataclasses.replace(other, channel_amax=(1.0,)))


def test_error_ratios_are_those_of_all_rows_together():
    random = np.random.default_rng(0)
    exact = random.standard_normal(1000)
    low = exact + 0.01 * random.standard_normal(1000)
    merged = functools.reduce(
        ErrorStats.merge, (error_of(exact[i : i + 300], low[i : i + 300]) for i in range(0, 1000, 300))
    )
    assert merged.count == 1000 and merged.saturated == int((exact > 1).sum())
    assert merged.relative_error == pytest.approx(
        np.linalg.norm(low - exact) / np.linalg.norm(exact), rel=1e-12
    )
    assert merged.sqnr_db == pytest.approx(-20 * np.log10(merged.relative_error), rel=1e-12)
    assert merged.cosine == pytest.approx(
        exact @ low / np.linalg.norm(exact) / np.linalg.norm(low), rel=1e-12
    )


@pytest.mark.parametrize(
    "change", [{"activation_scale": 0.5}, {"activation_scale": None}, {"recipe": "other"}]
)
def test_statistics_of_different_scales_or_recipes_refuse_to_merge(change):
    one = error_of(np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match="different recipes or scales do not merge"):
        one.merge(dataclasses.replace(one, **change))


def test_ratios_of_outputs_that_are_zero():
    zero = error_of(np.zeros(3), np.zeros(3))
    assert (zero.relative_error, zero.cosine) == (0.0, 1.0)
    assert error_of(np.zeros(3), np.ones(3)).relative_error == math.inf
    assert (zero.sqnr_db, error_of(np.zeros(3), np.ones(3)).sqnr_db) == (math.inf, -math.inf)
