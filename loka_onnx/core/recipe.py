"""Quantization recipes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loka_onnx.core.formats import Float8

AMAX = "amax"
"""Nothing in the calibration rows saturates."""
MSE = "mse"
"""The scale with the smallest squared error predicted by the histogram."""


class Granularity(StrEnum):
    """Elements that share one scale."""

    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"
    """One scale for each index of the output-channel axis; weights only."""


@dataclass(frozen=True)
class Recipe:
    """Format, granularity of each operand, and scale rule.

    Attributes:
        format: FP8 format of both operands.
        activation: Granularity of the activation; only per tensor is defined.
        scale: Rule for the activation scale: ``amax``, ``mse`` or ``percentile-`` and a number, as in
            ``percentile-99.99``. Weights are scaled by amax.
    """

    format: Float8 = Float8.E4M3FN
    activation: Granularity = Granularity.PER_TENSOR
    weight: Granularity = Granularity.PER_TENSOR
    scale: str = AMAX

    def __post_init__(self) -> None:
        if self.scale not in (AMAX, MSE) and self.percentile is None:
            raise ValueError(
                f"no scale rule '{self.scale}': there are amax, mse and percentile-99.99 (or other)"
            )

    @classmethod
    def of_id(cls, text: str) -> Recipe:
        """Return the recipe of an `id`.

        Raises:
            ValueError: It is none.
        """
        parts = text.split("/")
        if len(parts) != 4:
            raise ValueError(f"'{text}' is no id of a recipe: it has {len(parts)} parts, not 4")
        return cls(Float8(parts[0].upper()), Granularity(parts[1]), Granularity(parts[2]), parts[3])

    @property
    def percentile(self) -> float | None:
        """Percentage of magnitudes that the scale must reach, 50 to 100; None for another rule."""
        word, _, number = self.scale.partition("-")
        try:
            percentage = float(number)
        except ValueError:
            return None
        return percentage if word == "percentile" and 50.0 < percentage < 100.0 else None

    @property
    def activation_id(self) -> str:
        """Key of an activation's rounding: ``e4m3fn/amax``."""
        return f"{self.format.lower()}/{self.scale}"

    @property
    def id(self) -> str:
        """Short name, for example ``e4m3fn/per_tensor/per_channel/amax``."""
        return f"{self.format.lower()}/{self.activation}/{self.weight}/{self.scale}"


PER_TENSOR = Recipe()
PER_CHANNEL_WEIGHT = Recipe(weight=Granularity.PER_CHANNEL)
