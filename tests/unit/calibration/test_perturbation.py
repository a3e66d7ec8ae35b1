"""Moved scales, and what they do to a site, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from small_models import artifact_of

from loka_onnx.calibration.effects.switchable import Switch, write_switchable
from loka_onnx.calibration.observers.arithmetic import draw_factors, moved, moved_activations
from loka_onnx.core.formats import E4M3FN
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR
from loka_onnx.errors import ConfigError
from loka_onnx.graph.model import GraphModel, values_of


def test_factors_are_steps_of_one_octave_from_the_profiles_own_scales_on():
    assert draw_factors(1) == (1.0,)
    assert draw_factors(4) == pytest.approx([1, 2**0.2, 2**0.4, 2**0.6])
    assert draw_factors(8) == pytest.approx([2 ** (step / 8) for step in range(8)])
    for draws in (0, 9):
        with pytest.raises(ConfigError) as caught:
            draw_factors(draws)
        assert caught.value.code == "E0503"


def test_moved_scales_are_bfloat16_and_integers_keep_zero_points():
    scales = (np.random.default_rng(0).random(1000) + 0.01).astype(ml_dtypes.bfloat16).astype(np.float32)
    for factor in draw_factors(8)[1:]:
        found = moved(scales, factor, E4M3FN)
        np.testing.assert_array_equal(found, found.astype(ml_dtypes.bfloat16).astype(np.float32))
        ratio = found.astype(np.float64) / (scales.astype(np.float64) * factor)
        assert found.dtype == np.float32 and ratio.min() >= 1.0 and ratio.max() < 1 + 2**-7
    assert moved(scales, 1.0, E4M3FN) is scales
    assert moved_activations({"e4m3fn/amax": {"x": 0.5}}, 2**0.5) == {
        "e4m3fn/amax": {"x": 0.70703125 + 2**-8}
    }
    scales = {"uint8/mse": {"x": 0.5}, "uint8/mse/zero_point": {"x": 7.0}}
    again = moved_activations(scales, 2 ** (4 / 5))
    assert again["uint8/mse/zero_point"] == {"x": 7.0}
    assert 2 ** (1 / 10) <= again["uint8/mse"]["x"] / 0.5 <= 2 ** (1 / 10) * (1 + 2**-7)


@pytest.mark.parametrize("recipe", [PER_TENSOR, PER_CHANNEL_WEIGHT])
def test_a_site_under_moved_scales_is_rounded_on_the_moved_grid(recipe, tmp_path):
    artifact = artifact_of(tmp_path, "[left] y = MatMul(x, w_left)")
    x = np.random.default_rng(0).standard_normal((64, 16)).clip(-3.4, 3.4).astype(np.float32)
    scales = {recipe.activation_id: {"x": 0.0078125}}
    weight = values_of(GraphModel.load(artifact.path).node("left").inputs[1])
    amax = np.abs(weight).max(axis=0 if recipe is PER_CHANNEL_WEIGHT else None).astype(np.float64)
    found = []
    for number, factor in enumerate(draw_factors(4)):
        file = write_switchable(
            GraphModel.load(artifact.path),
            [Switch(artifact.site("left"), recipe)],
            scales,
            tmp_path / f"switchable-{number}.onnx",
            factor,
        )
        found.append(file.open().run({"x": x}, ("left",))["y"])
        # Scales as documented: amax / 448, up to BF16, times the factor, up to BF16 again.
        weight_scale = _up(_up(amax / 448) * factor).astype(np.float32)
        rounded = [
            (values / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
            for values, scale in (
                (x, _up(np.array(0.0078125 * factor)).astype(np.float32)),
                (weight, weight_scale),
            )
        ]
        np.testing.assert_allclose(found[-1], rounded[0] @ rounded[1], rtol=0, atol=1e-5)
    errors = np.stack([(y - x @ weight).ravel() for y in found])
    # 256 weights are few; what many values say is below.
    assert np.abs(np.corrcoef(errors) - np.eye(4)).max() < 0.5


@pytest.mark.parametrize(("format", "common"), [("float8_e4m3fn", 0.16), ("float8_e5m2", 0.27)])
def test_errors_of_different_draws_have_little_in_common(format, common):
    x = np.random.default_rng(0).standard_normal(200_000).astype(np.float32) * 50
    errors = []
    for factor in draw_factors(4):
        scale = np.float32(factor)
        errors.append((x / scale).astype(getattr(ml_dtypes, format)).astype(np.float32) * scale - x)
    assert np.abs(np.corrcoef(errors) - np.eye(4)).max() < common


def _up(scales: np.ndarray) -> np.ndarray:
    """The next BF16 number at or above, by search."""
    near = scales.astype(ml_dtypes.bfloat16)
    above = np.nextafter(near, np.array(np.inf, dtype=ml_dtypes.bfloat16))
    return np.where(near.astype(np.float64) >= scales, near, above).astype(np.float64)
