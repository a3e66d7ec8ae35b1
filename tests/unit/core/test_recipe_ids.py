"""Ids of recipes."""

from __future__ import annotations

import pytest

from loka_onnx.core.formats import INT8, UINT8
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe


@pytest.mark.parametrize(
    "recipe",
    [
        PER_TENSOR,
        PER_CHANNEL_WEIGHT,
        Recipe.of(scale="percentile-99.9"),
        Recipe.of(INT8),
        Recipe.of(UINT8, scale="mse"),
    ],
)
def test_a_recipe_is_read_from_its_id(recipe: Recipe) -> None:
    assert Recipe.of_id(recipe.id) == recipe


def test_weights_beside_asymmetric_activations_are_symmetric() -> None:
    recipe = Recipe.of(UINT8, scale="mse")
    assert (recipe.id, recipe.format.of_weights) == ("uint8/per_tensor/per_tensor/mse", INT8)


@pytest.mark.parametrize(
    "text", ["bf16", "e4m3fn/per_tensor/per_row/amax", "e9m9/per_tensor/per_tensor/amax"]
)
def test_what_is_no_id_of_a_recipe(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no id of a recipe|is not a valid"):
        Recipe.of_id(text)
