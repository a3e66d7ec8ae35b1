"""Scales: no saturation, no waste, exact in every float type; by rule, with the error that they predict."""

import re
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import E4M3FN, FLOATS, INT8, UINT8, NumberFormat
from loka_onnx.core.recipe import Granularity, Recipe
from loka_onnx.core.statistics import NOTHING_COUNTED, RangeStats
from loka_onnx.errors import CalibrationError
from loka_onnx.numerics.histograms import count_magnitudes, histogram_of
from loka_onnx.numerics.rounding import fake_quantize
from loka_onnx.numerics.scale_choice import activation_scaling, cumulated_error, expected_noise
from loka_onnx.numerics.scales import SMALLEST_SCALE, amax_scale, weight_scales

FLOAT32_MAX = float(np.finfo(np.float32).max)
AMAX = st.floats(min_value=0.0, max_value=FLOAT32_MAX, exclude_min=True) | st.floats(
    min_value=1e-6, max_value=1e6
)


def bf16_ceiling(ratio: Fraction) -> Fraction:
    """The smallest BF16 number, of any exponent, that is not below the ratio; in exact arithmetic."""
    exponent = 0
    while ratio >= Fraction(2) ** (exponent + 8):
        exponent += 1
    while ratio < Fraction(2) ** (exponent + 7):
        exponent -= 1
    step = Fraction(2) ** exponent
    return -(-ratio // step) * step


@pytest.mark.parametrize("format", FLOATS)
@given(amax=AMAX)
@settings(max_examples=150, deadline=None)
def test_a_scale_is_the_bf16_ceiling_of_the_ratio_and_nothing_saturates(format, amax):
    scale, limit = amax_scale(amax, format), format.max
    assert Fraction(scale) == max(bf16_ceiling(Fraction(amax) / Fraction(limit)), Fraction(SMALLEST_SCALE))
    assert Fraction(amax) / Fraction(scale) <= Fraction(limit)
    with np.errstate(over="ignore", under="ignore"):
        assert np.float32(amax) / np.float32(scale) <= limit
    assert float(np.float32(scale)) == scale
    assert float(ml_dtypes.bfloat16(scale)) == scale
    if 2.0**-14 <= scale <= 65504:
        assert float(np.float16(scale)) == scale


@pytest.mark.parametrize("format", FLOATS)
def test_amax_on_and_just_beside_the_grid(format):
    for significand in range(128, 256):
        grid = significand * 2.0**-20
        assert amax_scale(grid * format.max, format) == grid
        assert amax_scale(np.nextafter(grid * format.max, np.inf), format) > grid


def test_zero_and_tiny_ranges_and_scales_per_tensor():
    assert amax_scale(0.0, E4M3FN) == 1.0
    assert amax_scale(1e-45, E4M3FN) == 2.0**-126
    w = np.array([[1.0, -7.0]], np.float16)
    scale = weight_scales(w, Granularity.PER_TENSOR, 99, E4M3FN)
    assert scale.shape == ()
    assert float(scale) == 2.0**-6
    assert weight_scales(w[:0], Granularity.PER_TENSOR, 0, E4M3FN) == 1.0


@pytest.mark.parametrize("amax", [float("inf"), float("nan"), -1.0, 1e39])
def test_a_range_without_a_scale_is_refused(amax):
    with pytest.raises(CalibrationError, match=f"amax is {amax:g}:".replace("+", r"\+")) as caught:
        amax_scale(amax, E4M3FN)
    assert (caught.value.code, caught.value.evidence) == ("E1905", "1 of 1 ranges, the first is number 0")


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_weight_scales_per_channel_are_those_of_each_channel(format, axis):
    w = np.random.default_rng(2).normal(size=(4, 6)).astype(np.float32)
    w[1] = 0.0
    w[:, 2] = 0.0
    channels = np.moveaxis(w, axis, 0)
    scales = weight_scales(w, Granularity.PER_CHANNEL, axis, format)
    assert scales.dtype == np.float32
    assert scales.tolist() == [amax_scale(float(np.abs(c).max()), format) for c in channels]
    assert 1.0 in scales
    # Half an ulp of the top binade bounds the error of every element.
    error = np.abs(fake_quantize(w, scales, format, axis) - w)
    bound = np.moveaxis(np.broadcast_to(scales, channels.T.shape).T, 0, axis)
    half_ulp = format.max * 2.0 ** -(format.mantissa_bits + 1)
    assert (error <= bound * half_ulp).all()


def test_weights_without_a_scale_are_refused():
    with pytest.raises(CalibrationError, match=r"1 of 3 ranges, the first is number 1"):
        weight_scales(np.array([[1.0], [1e39], [2.0]]), Granularity.PER_CHANNEL, 0, E4M3FN)
    w = np.array([[1.0, np.nan], [np.inf, 0.0]], np.float32)
    with pytest.raises(CalibrationError) as caught:
        weight_scales(w, Granularity.PER_CHANNEL, 0, E4M3FN)
    assert (caught.value.code, caught.value.evidence) == ("E1904", "2 of 4 elements")


RULES = ("amax", "percentile-99.9", "percentile-99.99", "mse")


def stats_of(x: np.ndarray) -> RangeStats:
    ends = float(np.abs(x).max()), float(x.min()), float(x.max())
    return RangeStats(x.size, *ends, ExactSum(), ExactSum(), histogram_of(count_magnitudes(x)))


def scale_of(stats: RangeStats, recipe: Recipe) -> float:
    return activation_scaling(stats, recipe).scale


def measured_noise(x: np.ndarray, scale: float, format: NumberFormat) -> float:
    return float(np.square(fake_quantize(x, scale, format).astype(np.float64) - x).sum())


SIZE = 200_000
DISTRIBUTIONS = {
    "normal": lambda random: random.standard_normal(SIZE),
    "relu": lambda random: np.maximum(random.standard_normal(SIZE), 0.0),
    "lognormal": lambda random: random.lognormal(0.0, 2.0, SIZE),
    "heavy tails": lambda random: random.standard_t(2.5, SIZE),
    "uniform": lambda random: random.uniform(-3.0, 3.0, SIZE),
    "two scales": lambda random: (
        random.standard_normal(SIZE) * np.where(np.arange(SIZE) % 100 == 0, 100.0, 0.01)
    ),
}


def sample(name: str) -> np.ndarray:
    return DISTRIBUTIONS[name](np.random.default_rng(7)).astype(np.float32)


HEAVY = ("lognormal", "heavy tails", "two scales")


@pytest.mark.parametrize("format", FLOATS)
def test_the_integral_of_the_error_against_a_fine_sum(format):
    """Midpoint sums of (x − Q(x))² with ml_dtypes, from the subnormals to beyond the largest number."""
    for low, high in (
        (0.0, 5.3 * format.smallest),
        (0.4 * format.min_normal, 3.1 * format.min_normal),
        (0.7, 9.9),
        (0.8 * format.max, format.max),
        (0.9 * format.max, 1.7 * format.max),
    ):
        x = low + (high - low) * (np.arange(400_000) + 0.5) / 400_000
        rounded = fake_quantize(x, 1.0, format).astype(np.float64)
        summed = float(np.square(x - rounded).mean() * (high - low))
        found = cumulated_error(np.array([low, high]), format, format.max)
        # Ties and the midpoint rule: seen 3e-5, at the smallest of these integrals.
        assert float(found[1] - found[0]) == pytest.approx(summed, rel=1e-4)


@pytest.mark.parametrize("format", [*FLOATS, INT8, UINT8])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_predicted_and_measured_error(name, rule, format):
    """Within a factor of 1.05 in the relative error, 1.15 where a few of the values hold most of the energy.

    Seen: 1.03 and 1.12 in floats, 1.06 in integers, over 200,000 values.
    """
    is_integer = format in (INT8, UINT8)
    if is_integer and name in ("lognormal", "two scales"):
        return  # A step of an integer grid is larger than most of these values.
    allowed = 0.15 if name in HEAVY else 0.06 if is_integer else 0.05
    x = sample(name)
    stats = stats_of(x)
    found = activation_scaling(stats, Recipe.of(format, scale=rule))
    assert found.zero_point == 0 or format is UINT8
    rounded = fake_quantize(x, found.scale, format, zero_point=found.zero_point).astype(np.float64)
    predicted = float(expected_noise(stats, np.array([found.scale]), format, found.zero_point)[0])
    assert (predicted / np.square(rounded - x).sum()) ** 0.5 == pytest.approx(1.0, abs=allowed)
    if is_integer and rule == "amax":
        # A rounded zero point may cut half a step off.
        assert np.abs(rounded - x).max() <= found.scale * (1.0 if format is UINT8 else 0.5) * (1 + 1e-5)


values = npst.arrays(
    np.float32, st.integers(1, 50), elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
)


@given(values, st.sampled_from(FLOATS))
def test_mse_is_never_predicted_worse_than_amax(x, format):
    stats = stats_of(x)
    amax, mse = (scale_of(stats, Recipe.of(format, scale=rule)) for rule in ("amax", "mse"))
    of_mse, of_amax = expected_noise(stats, np.array([mse, amax]), format)
    assert of_mse <= of_amax


@pytest.mark.slow
@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_mse_against_the_best_scale_there_is(name, format):
    """A floating-point format loses little by any scale: amax itself comes within 1.13. Seen: 1.10."""
    x = sample(name)
    stats = stats_of(x)
    chosen = measured_noise(x, scale_of(stats, Recipe.of(format, scale="mse")), format)
    widest = amax_scale(stats.amax, format)
    best = min(measured_noise(x, widest * 2.0 ** (-step / 16), format) for step in range(-16, 100))
    assert (chosen / best) ** 0.5 <= (1.12 if name in HEAVY else 1.02)


def test_outliers_and_profiles_without_histogram():
    # One value at 1000 times the rest: amax spends the range on it, the percentile cuts it off.
    x = np.append(sample("normal"), np.float32(4000.0))
    scales = {rule: scale_of(stats_of(x), Recipe.of(scale=rule)) for rule in RULES}
    assert scales["amax"] == amax_scale(4000.0, E4M3FN)
    exact = float(np.quantile(np.abs(x), 0.999))
    assert scales["percentile-99.9"] * 448 == pytest.approx(exact, rel=0.125 + 2**-7)
    assert scales["percentile-99.9"] < scales["percentile-99.99"] < scales["amax"]
    # Its energy is that of eighty of the others together: squared error keeps it.
    assert scales["mse"] * 448 > 3000
    stats = replace(stats_of(np.ones(3, np.float32)), histogram=NOTHING_COUNTED)
    assert scale_of(stats, Recipe.of()) == amax_scale(1.0, E4M3FN)
    with pytest.raises(CalibrationError, match=re.escape("the scale rule 'mse' needs a histogram")):
        scale_of(stats, Recipe.of(scale="mse"))


@pytest.mark.parametrize("rule", RULES)
def test_scales_are_bfloat16_numbers_also_of_dead_and_sparse_tensors(rule):
    for x in (sample("lognormal"), np.full(7, 0.3, np.float32), np.float32([0] * 99_999 + [2.0])):
        scale = scale_of(stats_of(x), Recipe.of(scale=rule))
        assert float(np.float32(scale)) == scale and np.float32(scale).view(np.uint32) % 2**16 == 0
    assert scale_of(stats_of(np.zeros(5, np.float32)), Recipe.of(scale=rule)) == 1.0
    # 99.99 % are zero: the percentile says nothing of the range.
    sparse = stats_of(np.float32([0] * 99_999 + [2.0]))
    if rule.startswith("percentile"):
        assert scale_of(sparse, Recipe.of(scale=rule)) == amax_scale(2.0, E4M3FN)


@pytest.mark.parametrize("rule", ["", "max", "percentile", "percentile-", "percentile-100", "percentile-nan"])
def test_unknown_rules_are_refused(rule):
    with pytest.raises(ValueError, match=f"no scale rule '{rule}'"):
        Recipe.of(scale=rule)
    assert Recipe.of(scale="percentile-99.9").percentile == 99.9


def test_a_zero_point_spends_the_whole_range_on_what_is_there():
    """A tensor of one sign gets 255 steps in UINT8, and 127 in INT8."""
    x = sample("relu")
    symmetric, positive, negative = (
        activation_scaling(stats_of(values), Recipe.of(format))
        for values, format in ((x, INT8), (x, UINT8), (-x, UINT8))
    )
    assert positive.scale == pytest.approx(symmetric.scale * 127 / 255, rel=2**-6)
    assert (positive.zero_point, symmetric.zero_point) == (0, 0)
    assert (negative.scale, negative.zero_point) == (positive.scale, round(x.max() / positive.scale))
    # Without a value below 3, zero still has a code.
    assert activation_scaling(stats_of(x + 3), Recipe.of(UINT8)).zero_point == 0
