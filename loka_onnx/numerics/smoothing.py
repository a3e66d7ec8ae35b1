"""Factors that move range from an activation's channels to the weight that multiplies them.

SmoothQuant (Xiao et al., arXiv 2211.10438, equation 4): with the largest magnitudes aₖ of input channel k of
the activation and wₖ of row k of the weight, and a strength α between 0 and 1, the activation is divided and
the weight multiplied by sₖ = aₖ^α / wₖ^(1−α). α = 0 gives rows of the weight the same largest magnitude, α =
1 the channels of the activation; factors computed again after they were applied are ones.

SmoothQuant was made for integers, where a channel of small range has few levels left. FP8 is floating point:
between underflow and saturation a channel has the same relative precision at every scale. So factors help
only where one scale for all channels sends small channels below the smallest normal number (2⁻¹⁵ of the
largest for E4M3); otherwise they only change the rounding errors, and a measurement must decide.
`to_powers_of_two` keeps the benefit without new errors: scaling by a power of two commutes with rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
K = TypeVar("K")


def smoothing_factors(
    activation_channel_amax: Floats, weight_channel_amax: Floats, strength: float
) -> npt.NDArray[np.float64]:
    """Return sₖ (K,), divisors of an activation's channels and factors of the weight's rows; 1 beside zeros.
    `weight_channel_amax` is over the output channels of all weights that read the activation; `strength` is
    α. Raises ValueError if shapes differ, a magnitude is negative or not finite, or α is not between 0 and 1.
    """
    activation = np.asarray(activation_channel_amax, np.float64)
    weight = np.asarray(weight_channel_amax, np.float64)
    if activation.shape != weight.shape or activation.ndim != 1:
        raise ValueError(
            f"channels of shape {activation.shape} and rows of shape {weight.shape} do not match"
        )
    if not 0.0 <= strength <= 1.0:
        raise ValueError(f"strength {strength} is not between 0 and 1")
    both = np.concatenate([activation, weight])
    if not np.isfinite(both).all() or (both < 0).any():
        raise ValueError("a largest magnitude is negative or not finite")
    alive = (activation > 0) & (weight > 0)
    factors = np.ones_like(activation)
    factors[alive] = activation[alive] ** strength / weight[alive] ** (1.0 - strength)
    return factors


def to_powers_of_two(factors: Floats) -> npt.NDArray[np.float64]:
    """Return the powers of two nearest to positive factors, in the logarithm."""
    return np.exp2(np.rint(np.log2(np.asarray(factors, np.float64))))


def keeping_range(factors: Floats, activation_channel_amax: Floats) -> npt.NDArray[np.float64]:
    """Return factors (K,) times the power of two that keeps the activation's largest magnitude within √2. A
    common factor changes no error, as scales follow it, but could leave FP16's range. Unchanged for zeros.
    """
    amax = np.asarray(activation_channel_amax, np.float64)
    divisors = np.asarray(factors, np.float64)
    before, after = amax.max(initial=0.0), (amax / divisors).max(initial=0.0)
    if before == 0.0 or after == 0.0:
        return divisors
    return np.asarray(divisors * np.exp2(np.rint(np.log2(after / before))))


def is_gain(before: Mapping[K, float], after: Mapping[K, float], least: float) -> bool:
    """True if errors by key fall enough: their sum by the share `least`, and none rises by as much."""
    falls = sum(after.values()) <= (1.0 - least) * sum(before.values())
    return falls and all(after[name] <= (1.0 + least) * error for name, error in before.items())
