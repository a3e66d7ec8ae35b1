"""Values of a drift report: what they say at the edges."""

from __future__ import annotations

from math import inf

import pytest

from loka_onnx.core.drift import RangeShift, Shift, SiteDrift, TensorDrift
from loka_onnx.core.formats import INT8, UINT8
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, OperandSpec, Recipe


def shift(profile: float, live: float, unit: float = 1.0, error: float = 1.0) -> Shift:
    return Shift("mean", profile, live, unit, error, 0.5)


@pytest.mark.parametrize(
    ("value", "effect", "deviation"),
    [
        (shift(1.0, 1.5, unit=2.0, error=0.1), 0.25, 5.0),
        (shift(1.0, 1.0, unit=0.0, error=0.0), 0.0, 0.0),
        (shift(0.0, 1.0, unit=0.0, error=0.0), inf, inf),
        (shift(1.0, 0.0, unit=0.0, error=0.0), -inf, -inf),
    ],
)
def test_a_shift_in_its_unit_and_in_standard_errors(value: Shift, effect: float, deviation: float) -> None:
    assert value.effect == pytest.approx(effect)
    assert value.deviation == pytest.approx(deviation)


@pytest.mark.parametrize(("before", "after", "growth"), [(2.0, 3.0, 1.5), (0.0, 0.0, 1.0), (0.0, 1.0, inf)])
def test_growth_of_a_range(before: float, after: float, growth: float) -> None:
    assert RangeShift(before, after, 0, 8, 1.0).growth == growth


def test_a_tensor_finds_its_statistics_and_its_surest_change() -> None:
    mean = Shift("mean", 0.0, 1.0, 4.0, 0.1, 1e-9, 1e-6)
    tensor = TensorDrift("x", ("fc",), RangeShift(1.0, 1.0, 0, 8, 1.0, 0.3), (mean,), 0.0)
    assert tensor.effect("mean") == 0.25 and tensor.effect("rms") == 0.0
    assert tensor.shift("mean") is mean and tensor.shift("rms") is None
    assert tensor.smallest_adjusted == 1e-6


def test_a_site_predicts_where_it_was_measured() -> None:
    site = SiteDrift("fc", "r", "x", True, 0.0, 0.0, 0.0, 0.0, {"ctr": 0.25, "cvr": 1.0}, {"ctr": 0.75})
    assert site.predicted == {"ctr": 0.5}


@pytest.mark.parametrize(
    "recipe",
    [
        PER_TENSOR,
        PER_CHANNEL_WEIGHT,
        Recipe(scale="percentile-99.9"),
        Recipe.of(INT8),
        Recipe.of(UINT8, scale="mse"),
    ],
)
def test_a_recipe_is_read_from_its_id(recipe: Recipe) -> None:
    assert Recipe.of_id(recipe.id) == recipe


def test_weights_beside_asymmetric_activations_are_symmetric() -> None:
    recipe = Recipe.of(UINT8, scale="mse")
    assert (recipe.id, recipe.weight.format) == ("uint8/per_tensor/per_tensor/mse", INT8)
    assert recipe.weight.is_symmetric and not recipe.activation.is_symmetric
    with pytest.raises(ValueError, match="no weights in UINT8 go with UINT8"):
        Recipe(OperandSpec(UINT8), OperandSpec(UINT8))


@pytest.mark.parametrize(
    "text", ["bf16", "e4m3fn/per_tensor/per_row/amax", "e9m9/per_tensor/per_tensor/amax"]
)
def test_what_is_no_id_of_a_recipe(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no id of a recipe|is not a valid"):
        Recipe.of_id(text)
