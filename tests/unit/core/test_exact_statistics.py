"""Exact sums and ratios of moments, with their intervals, against fractions, SciPy and simulation."""

import functools
import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from scipy import integrate, optimize, special, stats

from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import RatioMoments, anytime_quantile, students_t
from loka_onnx.core.statistics import BINS, RELATIVE_BIN_WIDTH, MagnitudeHistogram, bin_edge
from loka_onnx.errors import InternalError
from loka_onnx.numerics.histograms import count_magnitudes, histogram_of
from loka_onnx.numerics.intervals import ratio_interval

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


def moments_of(a: np.ndarray, b: np.ndarray, rows: int | None = None) -> RatioMoments:
    sums = (ExactSum.of(values.tolist()) for values in (a, b, a * a, a * b, b * b))
    return RatioMoments(len(a) if rows is None else rows, len(a), *sums)


def skewed(random: np.random.Generator, units: int) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominators like KL and loss: both skewed, and correlated. Their ratio is 0.5/1."""
    b = random.exponential(1.0, units)
    return 0.25 * b + random.exponential(0.25, units), b


# Against other computations ------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", [7, 8, 10, 20, 50, 4095])
def test_students_t_is_scipys(freedom):
    for probability in (0.5, 0.6, 0.9, 0.95, 0.975, 0.995, 0.999):
        assert students_t(probability, freedom) == pytest.approx(
            stats.t.ppf(probability, freedom), rel=1e-3, abs=1e-12
        )


def test_the_fixed_interval_is_the_delta_method_row_by_row():
    a, b = skewed(np.random.default_rng(0), 300)
    mine, rows = moments_of(a, b).interval(), ratio_interval(a, b)
    assert mine.value == pytest.approx(a.sum() / b.sum(), rel=1e-14)
    assert (mine.lower, mine.upper) == pytest.approx((rows.lower, rows.upper), rel=1e-6)
    groups = np.random.default_rng(1).integers(0, 40, 300)
    sums = [np.bincount(groups, weights=values) for values in (a, b)]
    grouped, reference = moments_of(*sums, rows=300).interval(), ratio_interval(a, b, groups=groups)
    # The expansion of Student's t against its inverse.
    assert grouped.lower == pytest.approx(reference.lower, rel=1e-6) and grouped.rows == 300


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.9995])
def test_the_boundary_is_where_the_mixture_of_likelihood_ratios_reaches_one_over_alpha(confidence):
    """∫ exp(λS − λ²n/2) dN(λ; 0, ρ²) is a martingale of mean 1, and at most 1/α ever but with chance α."""
    alpha, tightest = 1 - confidence, 5000
    # The exact minimizer, by the Lambert function; the module takes its expansion.
    rho2 = (-2 * math.log(alpha) + math.log(1 - 2 * math.log(alpha))) / tightest
    exact = (-special.lambertw(-(alpha**2) / math.e, -1).real - 1) / tightest
    assert rho2 == pytest.approx(exact, rel=0.05)
    for n in (1, 100, 5000, 300_000):
        s = anytime_quantile(n, tightest, confidence) * math.sqrt(n)
        # exp(λS − λ²n/2) = exp(S²/2n) · exp(−n(λ − S/n)²/2): the peak is near S/n, shrunk towards 0.
        peak, width = s * rho2 / (n * rho2 + 1), math.sqrt(rho2 / (n * rho2 + 1))

        def integrand(x: float, n: int = n, s: float = s, rho2: float = rho2) -> float:
            exponent = x * s - x * x * n / 2 - x * x / (2 * rho2) + math.log(alpha)
            return math.exp(exponent) / math.sqrt(2 * math.pi * rho2)

        mass, _ = integrate.quad(integrand, peak - 12 * width, peak + 12 * width, epsabs=0)
        assert mass == pytest.approx(1.0, rel=1e-6)


def test_the_interval_is_tightest_where_it_was_asked_to_be():
    def width(rows: int, tightest: float) -> float:
        return anytime_quantile(rows, round(tightest), 0.95)

    best = optimize.minimize_scalar(
        lambda log: width(10_000, math.exp(log)), bounds=(math.log(100), math.log(10**6)), method="bounded"
    )
    assert width(10_000, 10_000) <= 1.001 * best.fun
    assert width(1, 1) == pytest.approx(width(10_000, 10_000), rel=1e-9)
    assert width(10_000, 100) > 1.05 * best.fun and width(10_000, 10**6) > 1.5 * best.fun


def test_few_units_widen_the_anytime_interval_as_students_t_does():
    for units in (9, 60, 4000):
        moments = moments_of(*skewed(np.random.default_rng(0), units), rows=16384)
        interval = moments.anytime_interval(16384)
        errors = (interval.upper - interval.value) / moments.standard_error
        tail = stats.norm.cdf(anytime_quantile(16384, 16384, 0.95))
        assert errors == pytest.approx(stats.t.ppf(tail, units - 1), rel=1e-3)
    assert errors == pytest.approx(3.036, abs=0.003)
    # A tail beyond float64.
    assert moments_of(*skewed(np.random.default_rng(0), 9)).anytime_interval(10**9).upper < math.inf


def test_seven_units_say_nothing_and_a_denominator_of_zero_is_refused():
    a, b = skewed(np.random.default_rng(0), 7)
    assert moments_of(a, b).interval().upper == math.inf
    assert moments_of(a, b).anytime_interval(100).lower == -math.inf
    with pytest.raises(InternalError) as caught:
        moments_of(a, 0 * b).interval()
    assert str(caught.value) == "the denominator of a ratio sums to 0\n  evidence: over 7 rows"
    for arguments in ((0, 10, 0.95), (10, 0, 0.95), (10, 10, 1.0)):
        with pytest.raises(InternalError, match="a confidence sequence needs rows, and a confidence between"):
            anytime_quantile(*arguments)


# Promises ------------------------------------------------------------------------------------------


def paths(kind: str, replicates: int, looks: list[int]) -> list[list[RatioMoments]]:
    """Moments at every look of each replicate."""
    random, rows, found = np.random.default_rng(7), looks[-1], []
    parts = list(itertools.pairwise([0, *looks]))
    for _ in range(replicates):
        a, b = skewed(random, rows)
        if kind == "rows":
            sums = [np.cumsum(values)[np.array(looks) - 1] for values in (a, b, a * a, a * b, b * b)]
            units = looks
        else:
            # 200 users: each row's is drawn (scattered), or rows come user by user (sorted).
            users = random.integers(0, 200, rows)
            users = np.sort(users) if kind == "sorted users" else users
            a *= np.exp(random.normal(-0.02, 0.2, 200))[users]
            x, y = (
                np.cumsum([np.bincount(users[i:j], v[i:j], 200) for i, j in parts], axis=0) for v in (a, b)
            )
            sums = [values.sum(axis=1) for values in (x, y, x * x, x * y, y * y)]
            units = np.count_nonzero(y, axis=1).tolist()
        each = zip(looks, units, *sums, strict=True)
        found.append([RatioMoments(n, g, *(ExactSum((float(v),)) for v in values)) for n, g, *values in each])
    return found


def held_throughout(found: list[list[RatioMoments]], how) -> float:
    """Share of the replicates in which the truth is inside at every look."""
    return float(np.mean([all(how(m).lower <= 0.5 <= how(m).upper for m in path) for path in found]))


@pytest.mark.slow
def test_the_anytime_interval_holds_at_all_of_fifty_looks_and_the_fixed_one_does_not():
    looks = [round(100 * 1.1**k) for k in range(50)]
    found = paths("rows", 400, looks)
    assert held_throughout(found, lambda m: m.anytime_interval(400)) >= 0.95
    assert held_throughout(found, lambda m: m.interval()) < 0.85


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sorted users", "scattered users"])
def test_the_anytime_interval_holds_for_grouped_rows(kind):
    """Also where all users have been seen at the first look, and only their rows go on."""
    looks = [round(2000 * 1.08**k) for k in range(50)]
    found = paths(kind, 200, looks)
    assert held_throughout(found, lambda m: m.anytime_interval(4000)) >= 0.95


@pytest.mark.parametrize(("share", "is_carried"), [(0.1, False), (0.3, False), (0.45, True), (0.9, True)])
def test_a_sum_that_one_unit_in_a_hundred_carries_is_marked(share, is_carried):
    random = np.random.default_rng(0)
    a = random.uniform(0.5, 1.5, 10_000)
    rest = a[100:].sum()
    a[:100] *= share / (1 - share) * rest / a[:100].sum()
    for scale in (1e-9, 1.0, 1e9):
        assert moments_of(scale * a, np.ones(a.size)).is_carried_by_few == is_carried
