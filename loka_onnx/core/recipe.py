"""Recipes: how a site is quantized."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loka_onnx.core.formats import Float8


class Granularity(StrEnum):
    """Over which elements one scale is shared."""

    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"
    """One scale for each index of the output-channel axis; weights only."""


@dataclass(frozen=True)
class Recipe:
    """Format, granularity of each operand, and where the scales come from.

    Attributes:
        format: FP8 format of both operands.
        activation: Granularity of the activation; only per tensor is defined.
        weight: Granularity of the weight.
        scale: Rule that turns a range into a scale.
    """

    format: Float8 = Float8.E4M3FN
    activation: Granularity = Granularity.PER_TENSOR
    weight: Granularity = Granularity.PER_TENSOR
    scale: str = "amax"

    @property
    def id(self) -> str:
        """Short name, for example ``e4m3fn/per_tensor/per_channel/amax``."""
        return f"{self.format.lower()}/{self.activation}/{self.weight}/{self.scale}"


PER_TENSOR = Recipe()
PER_CHANNEL_WEIGHT = Recipe(weight=Granularity.PER_CHANNEL)
