"""Error of a matrix product of rounded operands, measured on rows, in float64.

Before rounding, smoothing does not change the product of x (M, K) and W (K, N)::

    x · W   =   [ (x diag(a)⁻¹) · (diag(a) W diag(b)⁻¹) ] diag(b)

with divisors a of the input channels and b of the output channels. The operands in the inner parentheses are
rounded; the error is relative to the product on the left. An activation's scale is measured again on later
rows, with other rounding errors: rows take several scales, `_MOVED`, in turns. A weight's scale is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka_onnx.core.formats import E4M3FN, NumberFormat
from loka_onnx.core.recipe import Granularity
from loka_onnx.numerics.rounding import fake_quantize
from loka_onnx.numerics.scales import amax_scale, weight_scales

Doubles = npt.NDArray[np.float64]

_MOVED = (1.0, 1.03, 1.07, 1.13)
"""Factors of the largest magnitude: rows to come are seldom smaller."""


@dataclass(frozen=True)
class Rounding:
    """Rounding of operands: the activation's format, and granularities of the weight, of which the best
    counts. Without a zero point: rounding errors depend on its position little.
    """

    format: NumberFormat = E4M3FN
    weights: Sequence[Granularity] = (Granularity.PER_TENSOR, Granularity.PER_CHANNEL)


class SampledProduct:
    """A product with a weight (K, N) to be measured on some of its output columns, under scales of the whole.
    `amax` (K,) is the largest magnitude of each input channel, over all rows that scales are made from;
    `units` (N,) are factors of the error and value of each output channel.
    """

    def __init__(
        self, amax: Doubles, weight: Doubles, columns: npt.NDArray[np.int64], units: Doubles | None = None
    ) -> None:
        self.amax, self.weight, self._columns = amax, weight, columns
        self._units = (np.ones(weight.shape[1]) if units is None else units)[columns]

    def exact(self, rows: Doubles) -> Doubles:
        """Return the measured output channels (M, columns) of rows x (M, K), in their units."""
        return np.asarray(rows @ (self.weight[:, self._columns] * self._units))

    def relative_error(
        self, rows: Doubles, exact: Doubles, before: Doubles, behind: Doubles, rounding: Rounding
    ) -> float:
        """Return ‖rounded − exact‖² / ‖exact‖² on rows x (M, K), with divisors a = `before` (K,) and b =
        `behind` (N,). `exact` is `exact(rows)`; 0 where it is 0 throughout.
        """
        energy = float(np.square(exact).sum())
        if energy == 0.0:
            return 0.0
        format = rounding.format.of_weights
        x = np.empty_like(rows)
        for turn, moved in enumerate(_MOVED):
            scale = amax_scale(float((self.amax / before).max()) * moved, format)
            x[turn :: len(_MOVED)] = fake_quantize(rows[turn :: len(_MOVED)] / before, scale, format)
        weight = before[:, None] * self.weight / behind
        part, factors = weight[:, self._columns], behind[self._columns] * self._units
        errors = []
        for granularity in rounding.weights:
            is_shared = granularity is Granularity.PER_TENSOR
            scales = weight_scales(weight if is_shared else part, granularity, 1, format)
            w = fake_quantize(part, scales, format, None if is_shared else 1)
            errors.append(float(np.square(x @ (w * factors) - exact).sum()))
        return min(errors) / energy
