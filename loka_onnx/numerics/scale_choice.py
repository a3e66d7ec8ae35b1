"""Scale of an activation from its range and histogram, and the rounding error that a histogram predicts.

Let Q round to the grid of a format at scale 1, and take the elements of a histogram's bin [l, u) as evenly
spread. The error of a scale s, per element of the bin, is the mean of (x − s·Q(x/s))² over the bin,

    s² · (G(u/s) − G(l/s)) / (u/s − l/s),        G(t) = ∫₀ᵗ (x − Q(x))² dx,

and G has a closed form. Where the grid has the spacing d, one step of it adds ∫ r² dr = d³/12 (the textbook's
ulp²/12 over the width ulp), and a part r < d of a step adds r³/3 up to its middle and d³/12 − (d − r)³/3
after it. Binade [2ᵉ, 2ᵉ⁺¹) has 2ᵐ steps of d = 2ᵉ⁻ᵐ and adds 2³ᵉ⁻²ᵐ/12; the subnormals, 2ᵐ steps as wide as
those of the first binade e₀, add as much as it does; so that, with the geometric sum,

    G(2ᵉ) = 2⁻²ᵐ/12 · (2³ᵉ⁰ + (2³ᵉ − 2³ᵉ⁰)/7)    for e ≥ e₀.

An integer format has steps of d = 1 throughout. Beyond the largest number M everything becomes M and adds (t
− M)³/3. The only approximation is the even spread in a bin: bins are an eighth of an octave, E4M3's own
steps. Values at a few points (flags, counts) are predicted badly, so the probe measures the chosen scale.
With a zero point, M is another for negative values; half of those that both signs reach count as negative.

Sources: the even-spread model of rounding is Bennett, "Spectra of Quantized Signals" (1948); choosing an FP8
range by squared error is in Kuzmin et al., "FP8 Quantization: The Power of the Exponent" (arXiv 2208.09225).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from loka_onnx.core.formats import NumberFormat
from loka_onnx.core.recipe import AMAX, Recipe, Scaling
from loka_onnx.core.statistics import RangeStats
from loka_onnx.errors import CalibrationError
from loka_onnx.numerics.scales import range_scaling, round_up_to_bfloat16

STEPS_PER_OCTAVE = 16
"""Scales that `mse` tries in each octave; BF16 has 128."""
OCTAVES_BELOW = 10
"""Octaves below amax where the range may end; of a normal distribution 99 % of the energy saturates there."""

Values = npt.NDArray[np.float64]


def activation_scaling(stats: RangeStats, recipe: Recipe) -> Scaling:
    """Return the scale of an activation by a recipe's rule, a BF16 number, and its zero point. ``percentile``
    reaches that percentage of all magnitudes, zeros included; where that is zero, amax. Raises
    CalibrationError if the range is not finite, or the rule needs a histogram that the profile lacks.
    """
    widest = _reaching(stats, stats.amax, recipe.format)
    if recipe.scale == AMAX or stats.amax == 0.0:
        return widest
    if not stats.histogram.total:
        raise CalibrationError(
            f"E1903 the scale rule '{recipe.scale}' needs a histogram, and the profile has none",
            evidence=f"amax {stats.amax:g} over {stats.count} elements",
            remedy="calibrate again with this version, or use `plan.scale: amax`",
        )
    if recipe.percentile is None:
        return _smallest_error(stats, widest, recipe.format)
    reached = min(stats.histogram.quantile(recipe.percentile / 100.0), stats.amax)
    return _reaching(stats, reached, recipe.format) if reached > 0.0 else widest


def _reaching(stats: RangeStats, magnitude: float, format: NumberFormat) -> Scaling:
    """Return the scaling under which no value up to a magnitude saturates."""
    if not format.has_zero_point:
        return range_scaling(-magnitude, magnitude, format)
    return range_scaling(max(stats.minimum, -magnitude), min(stats.maximum, magnitude), format)


def _smallest_error(stats: RangeStats, widest: Scaling, format: NumberFormat) -> Scaling:
    steps = np.arange(-STEPS_PER_OCTAVE, OCTAVES_BELOW * STEPS_PER_OCTAVE + 1) / STEPS_PER_OCTAVE
    # amax first: it is kept unless another scale is better.
    tried = np.concatenate([[widest.scale], round_up_to_bfloat16(widest.scale * 2.0**-steps)])
    # A scale must be finite in FP32.
    tried = tried[tried <= float(np.finfo(np.float32).max)]
    noise = expected_noise(stats, tried, format, widest.zero_point)
    return replace(widest, scale=float(tried[np.argmin(noise)]))


def expected_noise(stats: RangeStats, scales: Values, format: NumberFormat, zero_point: int = 0) -> Values:
    """Return (scales,) the expected sum of squares of the rounding error over the histogram's elements."""
    counts = np.array(stats.histogram.counts, dtype=np.float64)
    if not counts.size:
        return np.zeros(scales.size)
    edges = np.minimum(np.array(stats.histogram.edges), stats.amax)
    if not format.has_zero_point:
        return np.asarray(scales**2 * (_mean_error(edges, scales, format, format.max) @ counts))
    is_positive, is_negative = edges[:-1] >= -stats.minimum, edges[:-1] >= stats.maximum
    positive = counts * np.where(is_positive, 1.0, np.where(is_negative, 0.0, 0.5))
    above = _mean_error(edges, scales, format, format.max - zero_point) @ positive
    below = _mean_error(edges, scales, format, zero_point - format.min) @ (counts - positive)
    return np.asarray(scales**2 * (above + below))


def _mean_error(edges: Values, scales: Values, format: NumberFormat, limit: float) -> Values:
    """Return (scales, bins) the mean squared error of each bin over the scale's square."""
    column, low, high = scales[:, None], edges[:-1], edges[1:]
    cumulated = cumulated_error(np.stack([low, high])[:, None, :] / column, format, limit)
    width = (high - low) / column
    # A bin that amax cuts to nothing holds one value.
    is_point = width <= 1e-9 * (high / column)
    mean = (cumulated[1] - cumulated[0]) / np.where(is_point, 1.0, width)
    return np.where(is_point, _squared_error(high / column, format, limit), mean)


def cumulated_error(t: Values, format: NumberFormat, limit: float) -> Values:
    """Return G(t) = ∫₀ᵗ (x − Q(x))² dx at scale 1, for t ≥ 0, any shape, where Q saturates at a limit."""
    inside = np.minimum(t, limit)
    spacing = _spacing(inside, format)
    start: Values | float = 0.0
    before: Values | float = 0.0
    if format.mantissa_bits is not None:
        is_normal = inside >= format.min_normal
        first = int(np.log2(format.min_normal))
        binade = np.frexp(spacing)[1] - 1 + format.mantissa_bits
        start = np.where(is_normal, np.ldexp(1.0, binade), 0.0)
        per_step = 2.0 ** (-2 * format.mantissa_bits) / 12.0
        subnormals = 2.0 ** (3 * first)
        before = per_step * (subnormals + (np.ldexp(1.0, 3 * binade) - subnormals) / 7.0)
        before = np.where(is_normal, before, 0.0)
    steps, rest = np.divmod((inside - start) / spacing, 1.0)
    part = np.where(rest <= 0.5, rest**3 / 3.0, 1.0 / 12.0 - (1.0 - rest) ** 3 / 3.0)
    beyond = np.maximum(t - limit, 0.0)
    return np.asarray(before + spacing**3 * (steps / 12.0 + part) + beyond**3 / 3.0)


def _squared_error(t: Values, format: NumberFormat, limit: float) -> Values:
    inside = np.minimum(t, limit)
    spacing = _spacing(inside, format)
    return np.asarray((t - np.rint(inside / spacing) * spacing) ** 2)


def _spacing(magnitudes: Values, format: NumberFormat) -> Values:
    """Return the distance of neighbours on the grid at magnitudes."""
    if format.mantissa_bits is None:
        return np.ones_like(magnitudes)
    binade = np.maximum(np.frexp(magnitudes)[1] - 1, int(np.log2(format.min_normal)))
    return np.asarray(np.ldexp(1.0, binade - format.mantissa_bits))
