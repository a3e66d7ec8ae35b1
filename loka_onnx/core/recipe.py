"""Quantization recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict
from pydantic_core import core_schema

from loka_onnx.core.formats import E4M3FN, FORMATS, NumberFormat, Precision

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler

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
class OperandSpec:
    """Quantization of one operand."""

    format: NumberFormat = E4M3FN
    granularity: Granularity = Granularity.PER_TENSOR

    @property
    def is_symmetric(self) -> bool:
        """True if zero is stored as 0."""
        return not self.format.has_zero_point


@dataclass(frozen=True)
class RecipeDocument:
    """A recipe in documents: the parts of its `id`."""

    __pydantic_config__ = ConfigDict(extra="forbid", title="Recipe")

    format: NumberFormat
    activation: Granularity
    weight: Granularity
    scale: str

    @classmethod
    def of(cls, recipe: Recipe) -> RecipeDocument:
        """Return the document of a recipe."""
        return cls(recipe.format, recipe.activation.granularity, recipe.weight.granularity, recipe.scale)

    def recipe(self) -> Recipe:
        """Return the recipe."""
        weight = OperandSpec(self.format.of_weights, self.weight)
        return Recipe(OperandSpec(self.format, self.activation), weight, self.scale)


@dataclass(frozen=True)
class Recipe:
    """Quantization of both operands of a product, and the scale rule.

    In documents it has the four parts of its `id`.

    Attributes:
        activation: Per tensor; nothing else is defined.
        weight: In the format that belongs to that of the activation (`NumberFormat.of_weights`).
        scale: Rule for the activation scale: ``amax``, ``mse`` or ``percentile-`` and a number, as in
            ``percentile-99.99``. Weights are scaled by amax.
    """

    activation: OperandSpec = field(default_factory=OperandSpec)
    weight: OperandSpec = field(default_factory=OperandSpec)
    scale: str = AMAX

    def __post_init__(self) -> None:
        if self.weight.format != self.activation.format.of_weights:
            raise ValueError(f"no weights in {self.weight.format} go with {self.activation.format}")
        if self.scale not in (AMAX, MSE) and self.percentile is None:
            raise ValueError(
                f"no scale rule '{self.scale}': there are amax, mse and percentile-99.99 (or other)"
            )

    @classmethod
    def of(
        cls, format: NumberFormat = E4M3FN, weight: Granularity = Granularity.PER_TENSOR, scale: str = AMAX
    ) -> Recipe:
        """Return the recipe of activations in a format and weights of a granularity."""
        return cls(OperandSpec(format), OperandSpec(format.of_weights, weight), scale)

    @classmethod
    def of_id(cls, text: str) -> Recipe:
        """Return the recipe of an `id`. Raises ValueError if it is none."""
        parts = text.split("/")
        if len(parts) != 4 or parts[0] not in FORMATS:
            raise ValueError(f"'{text}' is no id of a recipe, such as '{PER_TENSOR.id}'")
        activation, weight = (Granularity(part) for part in parts[1:3])
        return RecipeDocument(FORMATS[parts[0]], activation, weight, parts[3]).recipe()

    @property
    def format(self) -> NumberFormat:
        """Format of the activation, which names the recipe."""
        return self.activation.format

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
        return f"{self.format.id}/{self.activation.granularity}/{self.weight.granularity}/{self.scale}"

    def scaling(self, scales: Scales, tensor: str) -> Scaling:
        """Return the rounding parameters of an activation."""
        zero_point = scales.get(self.zero_point_id, {}).get(tensor, 0.0)
        return Scaling(scales[self.activation_id][tensor], int(zero_point))

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Read and write the four parts of the `id`."""
        document = handler.generate_schema(RecipeDocument)
        return core_schema.no_info_after_validator_function(
            RecipeDocument.recipe,
            document,
            serialization=core_schema.plain_serializer_function_ser_schema(
                RecipeDocument.of, return_schema=document
            ),
        )


PER_TENSOR = Recipe()
PER_CHANNEL_WEIGHT = Recipe.of(weight=Granularity.PER_CHANNEL)
