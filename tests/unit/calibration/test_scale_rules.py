"""Scale rules in the probe: each is measured, and the best by measurement is the one that a plan gets."""

from __future__ import annotations

import numpy as np
import pytest
from test_probe_limits import HEAD, OUTPUTS, W1, artifact_of, data_of

from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.config import PlanConfig, ScaleRule
from loka_onnx.config.choices import Float8Format
from loka_onnx.core.formats import FLOATS
from loka_onnx.numerics.rounding import fake_quantize
from loka_onnx.numerics.scale_choice import activation_scaling
from loka_onnx.numerics.scales import weight_scales
from loka_onnx.pipeline.plans import planned_recipes
from loka_onnx.planning.policy import make_plans

pytest.importorskip("onnxruntime")

BODY = "[fc1] h = MatMul(x, w1)  r = Relu(h)  [fc2] y = MatMul(r, head)"


def rows_with_outliers() -> np.ndarray:
    """Uniform from the very bottom of a binade up, and 1 in 5,000 values at 3,000 times the rest."""
    random = np.random.default_rng(5)
    x = random.uniform(-1.0, 1.0, (2000, 16)).astype(np.float32)
    x[random.random(x.shape) < 2e-4] *= 3000.0
    return x


@pytest.mark.parametrize("format", list(FLOATS))
def test_every_rule_is_measured_under_its_own_scale(format, tmp_path):
    x = rows_with_outliers()
    artifact, data = artifact_of(tmp_path, BODY, w1=W1, head=HEAD), data_of(tmp_path, x)
    recipes = planned_recipes(PlanConfig(format=Float8Format(format.name), scale=ScaleRule.BEST))
    assert len({recipe.id for recipe in recipes}) == 6
    profile = calibrate(
        artifact, OUTPUTS, data, tmp_path, ProbeOptions(recipes=recipes, batch_size=512, threads=1)
    )
    entry, w = profile.site("fc1"), W1.astype(np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    for recipe in recipes:
        error = entry.error(recipe.id)
        scale = activation_scaling(entry.operands["x"], recipe).scale
        assert error.activation_scale == scale
        assert error.saturated == int((np.abs(x) / np.float32(scale) > format.max).sum())
        # A smallest squared error may cut the very largest values, too.
        assert recipe.scale == "mse" or (error.saturated > 0) == recipe.scale.startswith("percentile")
        scales = weight_scales(w, recipe.weight, 1, format)
        low = fake_quantize(x, scale, format).astype(np.float64) @ fake_quantize(
            w, scales, format, 1 if scales.ndim else None
        ).astype(np.float64)
        assert error.noise.value == pytest.approx(float(np.square(low - exact).sum()), rel=1e-5)
    best = min(entry.errors, key=lambda error: error.relative_error)
    assert entry.sensitivities[0].recipe == best.recipe


def test_the_plan_quantizes_with_the_scale_of_the_rule_that_won(tmp_path):
    """E4M3 has so little range that 3,000 times the rest pushes the rest under its normal numbers."""
    artifact = artifact_of(tmp_path, BODY, w1=W1, head=HEAD)
    data = data_of(tmp_path, rows_with_outliers())
    decided = {}
    for rule in ScaleRule:
        recipes = planned_recipes(PlanConfig(scale=rule))
        profile = calibrate(artifact, OUTPUTS, data, tmp_path, ProbeOptions(recipes=recipes, threads=1))
        decided[rule] = make_plans(artifact, profile, OUTPUTS, recipes).plan("fp8-all").decision("fc1")
        stats = profile.site("fc1").operands["x"]
        assert decided[rule].recipe is not None
        assert decided[rule].activation_scale == activation_scaling(stats, decided[rule].recipe).scale
    assert decided[ScaleRule.PERCENTILE].activation_scale < decided[ScaleRule.AMAX].activation_scale / 100
    assert decided[ScaleRule.BEST].recipe.scale in {"amax", "mse"}
