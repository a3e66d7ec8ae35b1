"""Quantization recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from loka_onnx.core.formats import E4M3FN, FORMATS, NumberFormat, Precision

AMAX = "amax"
"""Nothing in the calibration rows saturates."""
MSE = "mse"
"""The scale with the smallest squared error predicted by the histogram."""

Scales = Mapping[str, Mapping[str, float]]
"""Scales of activations by `Recipe.activation_id` and tensor, zero points by `Recipe.zero_point_id`."""
ZERO_POINT = "zero_point"


class Granularity(StrEnum):
    """Elements that share one scale."""

    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"
    """One scale for each index of the output-channel axis; weights only."""


@dataclass(frozen=True)
class Scaling:
    """Rounding parameters of a tensor: a value x is stored as x / scale + zero point."""

    scale: float
    zero_point: int = 0


@dataclass(frozen=True)
class Recipe:
    """Quantization of both operands of a product, and the scale rule; `of` has defaults.

    `format` is of the activation; weights have the one that belongs to it (`NumberFormat.of_weights`).
    `activation` is always per tensor. `scale` is the rule for the activation scale: ``amax``, ``mse`` or
    ``percentile-`` and a number, as in ``percentile-99.99``; weights are scaled by amax.
    """

    format: NumberFormat
    activation: Granularity
    weight: Granularity
    scale: str

    def __post_init__(self) -> None:
        if self.scale not in (AMAX, MSE) and self.percentile is None:
            raise ValueError(
                f"no scale rule '{self.scale}': there are amax, mse and percentile-99.99 (or other)"
            )

    @classmethod
    def of(
        cls, format: NumberFormat = E4M3FN, weight: Granularity = Granularity.PER_TENSOR, scale: str = AMAX
    ) -> Recipe:
        """Return the recipe of activations in a format and weights of a granularity."""
        return cls(format, Granularity.PER_TENSOR, weight, scale)

    @classmethod
    def of_id(cls, text: str) -> Recipe:
        """Return the recipe of an `id`. Raises ValueError if it is none."""
        parts = text.split("/")
        if len(parts) != 4 or parts[0] not in FORMATS:
            raise ValueError(f"'{text}' is no id of a recipe, such as '{PER_TENSOR.id}'")
        activation, weight = (Granularity(part) for part in parts[1:3])
        return cls(FORMATS[parts[0]], activation, weight, parts[3])

    @property
    def precision(self) -> Precision:
        """Precision of a site under this recipe."""
        return self.format.precision

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
        return f"{self.format.id}/{self.scale}"

    @property
    def zero_point_id(self) -> str:
        """Key of an activation's zero points, which only asymmetric formats have."""
        return f"{self.activation_id}/{ZERO_POINT}"

    @property
    def id(self) -> str:
        """Short name, for example ``e4m3fn/per_tensor/per_channel/amax``."""
        return f"{self.format.id}/{self.activation}/{self.weight}/{self.scale}"

    def scaling(self, scales: Scales, tensor: str) -> Scaling:
        """Return the rounding parameters of an activation."""
        zero_point = scales.get(self.zero_point_id, {}).get(tensor, 0.0)
        return Scaling(scales[self.activation_id][tensor], int(zero_point))


def precision_of(recipe: str) -> Precision | None:
    """Return the precision of products under a recipe, by its `id` or `activation_id`; None for a norm's."""
    format = FORMATS.get(recipe.partition("/")[0])
    return None if format is None else format.precision


PER_TENSOR = Recipe.of()
PER_CHANNEL_WEIGHT = Recipe.of(weight=Granularity.PER_CHANNEL)
