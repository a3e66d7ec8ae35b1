"""Slightly moved scales: further seeds of the rounding noise.

A value's position on the grid depends on its scale, and the scale on the largest value of some rows.
Other rows would give another scale, and every error another sign and size. One profile shows one seed of this
noise, and an interval over rows says nothing of the others. So the first rows run again under scales times
2^(1/5), 2^(2/5), ….

- A factor matters only by its fraction of an octave: a power of two moves no value on the grid (except at
  underflow). So the factors are evenly spaced inside one octave.
- Fifths, because errors under scales so far apart correlate least: for normal values up to .15 in E4M3 and
  .26 in E5M2 among four seeds (eighths: .29 and .44; quarters: .11 and .39).
- An integer grid has no octaves: a larger scale only makes it coarser. Its scales take the eighth root of the
  factors, so that the noise grows by less than a sixth; that moves all values of more than some six steps.
- Factors are above 1: below it, values beyond the format's range would saturate, which is another kind of
  error. The largest, 2^(4/5), costs less than one of E4M3's 18 binades.
- Moved scales are rounded up to BF16, like every scale (`numerics.scales`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.formats import FORMATS, NumberFormat
from loka_onnx.core.recipe import ZERO_POINT, Scales
from loka_onnx.errors import ConfigError
from loka_onnx.numerics.scales import round_up_to_bfloat16

Array = npt.NDArray[Any]

DRAW_ROWS = 4096
"""Rows that are run under moved scales."""
STEPS_IN_OCTAVE = 5
UNIFORM_SHARE = 1 / 8
"""Exponent of the factors on an integer grid."""
MOST_DRAWS = 8
"""More would only be near each other."""


def draw_factors(draws: int) -> tuple[float, ...]:
    """Return the factor of the scales for each noise seed; the first is 1.

    Raises ConfigError if `draws` is not between 1 and `MOST_DRAWS`.
    """
    if not 1 <= draws <= MOST_DRAWS:
        raise ConfigError(
            f"E0503 rounding noise can be drawn 1 to {MOST_DRAWS} times",
            evidence=f"{draws} draws are asked for",
            remedy="1 measures under the profile's own scales only; 4 is the default",
        )
    return tuple(2.0 ** (step / max(draws, STEPS_IN_OCTAVE)) for step in range(draws))


def moved(scales: Array, factor: float, format: NumberFormat) -> Array:
    """Return scales of any shape times a factor, on the BF16 grid; unchanged for the factor 1."""
    if factor == 1.0:
        return scales
    if not format.is_float:
        factor **= UNIFORM_SHARE
    return round_up_to_bfloat16(scales.astype(np.float64) * factor).astype(scales.dtype)


def moved_activations(scales: Scales, factor: float) -> dict[str, dict[str, float]]:
    """Return activation scales times a factor; zero points stay, as both ends of a range move."""

    def again(rounding: str, scale: float) -> float:
        if rounding.endswith(f"/{ZERO_POINT}"):
            return scale
        return float(moved(np.array(scale), factor, FORMATS[rounding.partition("/")[0]]))

    return {
        rounding: {tensor: again(rounding, scale) for tensor, scale in known.items()}
        for rounding, known in scales.items()
    }
