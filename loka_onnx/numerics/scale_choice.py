"""Scale of an activation from its range and histogram, and the FP8 error that a histogram predicts.

Expected error. Let Q round to the grid of an FP8 format at scale 1, and take the elements of a histogram's
bin [l, u) as evenly spread. The error of a scale s, per element of the bin, is the mean of (x − s·Q(x/s))²
over the bin,

    s² · (G(u/s) − G(l/s)) / (u/s − l/s),        G(t) = ∫₀ᵗ (x − Q(x))² dx,

and G has a closed form. Where the grid has the spacing d, one step of it adds ∫ r² dr = d³/12 (the textbook's
ulp²/12 over the width ulp), and a part r < d of a step adds r³/3 up to its middle and d³/12 − (d − r)³/3
after it. Binade [2ᵉ, 2ᵉ⁺¹) has 2ᵐ steps of d = 2ᵉ⁻ᵐ and adds 2³ᵉ⁻²ᵐ/12; the subnormals, 2ᵐ steps as wide as
those of the first binade e₀, add as much as it does; so that, with the geometric sum,

    G(2ᵉ) = 2⁻²ᵐ/12 · (2³ᵉ⁰ + (2³ᵉ − 2³ᵉ⁰)/7)    for e ≥ e₀.

Beyond the largest number M everything becomes M and adds (t − M)³/3. The only approximation is the even
spread in a bin: bins are an eighth of an octave, E4M3's own steps. Values at a few points (flags, counts) are
predicted badly, so the probe measures the chosen scale.

Sources: saturating cast as in `float8`; the even-spread model of rounding is Bennett, "Spectra of Quantized
Signals" (1948); choosing an FP8 range by squared error is in Kuzmin et al., "FP8 Quantization: The Power of
the Exponent" (arXiv 2208.09225).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loka_onnx.core.formats import FLOAT8_SPECS, Float8
from loka_onnx.core.recipe import AMAX, Recipe
from loka_onnx.core.statistics import RangeStats
from loka_onnx.errors import CalibrationError
from loka_onnx.numerics.scales import amax_scale, round_up_to_bfloat16

STEPS_PER_OCTAVE = 16
"""Scales that `mse` tries in each octave; BF16 has 128."""
OCTAVES_BELOW = 10
"""How far below amax the range may end; of a normal distribution 99 % of the energy would saturate there."""

Values = npt.NDArray[np.float64]


def activation_scale(stats: RangeStats, recipe: Recipe) -> float:
    """Return the scale of an activation by a recipe's rule, a BF16 number.

    ``percentile`` reaches that percentage of all magnitudes, zeros included; where that is zero, amax. Raises
    CalibrationError if the range is not finite, or the rule needs a histogram that the profile lacks.
    """
    widest = amax_scale(stats.amax, recipe.format)
    if recipe.scale == AMAX or stats.amax == 0.0:
        return widest
    if not stats.histogram.total:
        raise CalibrationError(
            f"the scale rule '{recipe.scale}' needs a histogram, and the profile has none",
            evidence=f"amax {stats.amax:g} over {stats.count} elements",
            remedy="calibrate again with this version, or use `plan.scale: amax`",
        )
    if recipe.percentile is None:
        return _smallest_error(stats, widest, recipe.format)
    reached = min(stats.histogram.quantile(recipe.percentile / 100.0), stats.amax)
    return amax_scale(reached, recipe.format) if reached > 0.0 else widest


def _smallest_error(stats: RangeStats, widest: float, format: Float8) -> float:
    steps = np.arange(-STEPS_PER_OCTAVE, OCTAVES_BELOW * STEPS_PER_OCTAVE + 1) / STEPS_PER_OCTAVE
    # amax first: it is kept unless another scale is better.
    tried = np.concatenate([[widest], round_up_to_bfloat16(widest * 2.0**-steps)])
    # A scale must be finite in FP32.
    tried = tried[tried <= float(np.finfo(np.float32).max)]
    return float(tried[np.argmin(expected_noise(stats, tried, format))])


def expected_noise(stats: RangeStats, scales: Values, format: Float8) -> Values:
    """Return (scales,) the expected sum of squares of the rounding error over the histogram's elements."""
    low, high = _bins(stats)
    counts = np.array(stats.histogram.counts, dtype=np.float64)
    if not counts.size:
        return np.zeros(scales.size)
    column = scales[:, None]
    cumulated = cumulated_error(np.stack([low, high])[:, None, :] / column, format)
    width = (high - low) / column
    # A bin that amax cuts to nothing holds one value.
    is_point = width <= 1e-9 * (high / column)
    mean = (cumulated[1] - cumulated[0]) / np.where(is_point, 1.0, width)
    mean = np.where(is_point, _squared_error(high / column, format), mean)
    noise: Values = scales**2 * (mean @ counts)
    return noise


def _bins(stats: RangeStats) -> tuple[Values, Values]:
    edges = np.minimum(np.array(stats.histogram.edges), stats.amax)
    return edges[:-1], edges[1:]


def cumulated_error(t: Values, format: Float8) -> Values:
    """Return G(t) = ∫₀ᵗ (x − Q(x))² dx at scale 1, for t ≥ 0, any shape."""
    spec = FLOAT8_SPECS[format]
    inside = np.minimum(t, spec.max)
    first = int(np.log2(spec.min_normal))
    binade = np.maximum(np.frexp(inside)[1] - 1, first)
    spacing = np.ldexp(1.0, binade - spec.mantissa_bits)
    start = np.where(inside < spec.min_normal, 0.0, np.ldexp(1.0, binade))
    per_step = 2.0 ** (-2 * spec.mantissa_bits) / 12.0
    subnormals = 2.0 ** (3 * first)
    before = per_step * (subnormals + (np.ldexp(1.0, 3 * binade) - subnormals) / 7.0)
    before = np.where(inside < spec.min_normal, 0.0, before)
    steps, rest = np.divmod((inside - start) / spacing, 1.0)
    part = np.where(rest <= 0.5, rest**3 / 3.0, 1.0 / 12.0 - (1.0 - rest) ** 3 / 3.0)
    beyond = np.maximum(t - spec.max, 0.0)
    result: Values = before + spacing**3 * (steps / 12.0 + part) + beyond**3 / 3.0
    return result


def _squared_error(t: Values, format: Float8) -> Values:
    """Return (t − Q(t))², for t ≥ 0."""
    spec = FLOAT8_SPECS[format]
    inside = np.minimum(t, spec.max)
    binade = np.maximum(np.frexp(inside)[1] - 1, int(np.log2(spec.min_normal)))
    spacing = np.ldexp(1.0, binade - spec.mantissa_bits)
    result: Values = (t - np.rint(inside / spacing) * spacing) ** 2
    return result
