"""Scales moved a little: other draws of the rounding noise.

Where a value falls on the FP8 grid is decided by its scale, which is decided by the largest value of some
rows. Other rows would have given another scale, and every error another sign and size: one draw of the noise
was seen, and an interval over rows says nothing of the others. So the first rows are run again under scales
times 2^(1/5), 2^(2/5), ….

- A factor decides a draw by its fraction of an octave only: a power of two moves no value on the grid
  (but where numbers underflow). So the factors lie inside one octave, and evenly.
- Fifths, because errors under scales so far apart have the least in common: for normal values, correlations
  up to .15 in E4M3 and .26 in E5M2 among four draws (eighths: .29 and .44; quarters: .11 and .39).
- Factors are above 1, because below it values beyond the format's range would saturate. That is no other draw
  but another kind of error. What is left of the range is enough: 2^(4/5) is less than one of E4M3's 18
  binades.
- Moved scales are rounded up to BF16, like every scale (`numerics.scales`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.errors import ConfigError
from loka_onnx.numerics.scales import round_up_to_bfloat16

Array = npt.NDArray[Any]

DRAW_ROWS = 4096
"""Rows that are run under moved scales."""
STEPS_IN_OCTAVE = 5
MOST_DRAWS = 8
"""More would only be near each other."""


def draw_factors(draws: int) -> tuple[float, ...]:
    """What scales are multiplied by in each draw; 1 in the first.

    Raises:
        ConfigError: There are no draws, or more than `MOST_DRAWS`.
    """
    if not 1 <= draws <= MOST_DRAWS:
        raise ConfigError(
            f"rounding noise can be drawn 1 to {MOST_DRAWS} times",
            evidence=f"{draws} draws are asked for",
            remedy="1 measures under the profile's own scales only; 4 is the default",
        )
    return tuple(2.0 ** (step / max(draws, STEPS_IN_OCTAVE)) for step in range(draws))


def moved(scales: Array, factor: float) -> Array:
    """Scales of any shape times a factor, on the BF16 grid; the same scales for the factor 1."""
    if factor == 1.0:
        return scales
    return round_up_to_bfloat16(scales.astype(np.float64) * factor).astype(scales.dtype)


def moved_activations(
    scales: Mapping[str, Mapping[str, float]], factor: float
) -> dict[str, dict[str, float]]:
    """Activation scales, by `Recipe.activation_id` and tensor name, times a factor."""
    return {
        rounding: {tensor: float(moved(np.array(scale), factor)) for tensor, scale in known.items()}
        for rounding, known in scales.items()
    }
