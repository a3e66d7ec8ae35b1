"""Two formats in one profile, and a ranker planned in integers up to its graph in ONNX Runtime."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_models import LOGIT, SHARED, artifact_of, columns_of, dataset_of

from loka_onnx.calibration.calibrate import ProbeOptions, ProfiledModel, calibrate, measured_recipes, update
from loka_onnx.calibration.effects.switchable import SwitchableModel
from loka_onnx.core import serde
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import E4M3FN, INT8, UINT8, Precision
from loka_onnx.core.plan import Climb, Climbs, Decision, PrecisionPlan
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import MSE, Granularity, Recipe
from loka_onnx.pipeline.plans import recipes_of
from loka_onnx.planning.policy import PlanOptions, make_plans, open_verdicts
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

FLOAT, INTEGER = recipes_of(E4M3FN), recipes_of(UINT8)
BOTH = (*FLOAT, *INTEGER)
OPTIONS = ProbeOptions(BOTH, threads=1, error_precision=None, draws=2)
Measure = Callable[..., Profile]


@pytest.fixture
def measure(tmp_path) -> Measure:
    artifact = artifact_of(tmp_path)

    def run(recipes: tuple[Recipe, ...] = BOTH, seed: int = 1, **options) -> Profile:
        data = dataset_of(tmp_path / f"data-{seed}", columns_of(600, seed))
        return calibrate(artifact, (LOGIT,), data, tmp_path, replace(OPTIONS, recipes=recipes, **options))

    return run


def without_times(profile: Profile) -> Profile:
    return replace(profile, seconds=dict.fromkeys(profile.seconds, ExactSum()), scales={})


def test_each_format_is_measured_as_if_alone(measure):
    both = measure()
    assert both.precisions == (Precision.FP8, Precision.INT8)
    assert serde.loads(Profile, serde.dumps(both)) == both
    for recipes, precision in ((FLOAT, Precision.FP8), (INTEGER, Precision.INT8)):
        alone = measure(recipes)
        assert without_times(both.of(precision)) == without_times(alone)
        assert alone.of(precision) == alone
        assert alone.scales.items() <= both.scales.items()
        assert [group.sites for group in both.of(precision).groups] == [SHARED]
    norm = both.site("norm")
    assert [item.recipe for item in norm.sensitivities] == ["bf16"] == [item.recipe for item in norm.errors]


def test_the_exact_model_is_run_once(measure, monkeypatch):
    """Five sites, four of them products, and the two that share a tensor together."""
    runs: list[int] = []
    run = SwitchableModel.run_switched

    def counted(self, inputs, on, outputs=None):
        runs.append(len(on))
        return run(self, inputs, on, outputs)

    monkeypatch.setattr(SwitchableModel, "run_switched", counted)
    measure(draws=1, batch_size=600)
    assert sorted(runs) == [0, *[1] * (1 + 2 * 4), 2, 2]


@pytest.mark.slow
def test_rows_are_added_to_every_format(measure, tmp_path):
    first, second = measure(), measure(seed=2)
    subject = ProfiledModel(artifact_of(tmp_path), (LOGIT,))
    added = update(first, subject, dataset_of(tmp_path / "data-2", columns_of(600, 2)), tmp_path, OPTIONS)
    assert measured_recipes(added) == measured_recipes(first)
    assert added.rows == first.rows + second.rows
    assert added.scales == first.scales and "uint8/mse/zero_point" in added.scales
    for precision in first.precisions:
        # Scales of the second are its own.
        again = measure(seed=2, scales=first.scales, planned=measured_recipes(first))
        merged = first.of(precision).merge(again.of(precision))
        assert without_times(added.of(precision)) == without_times(merged)


def test_plans_of_each_format_rest_on_what_was_measured_in_it(measure, tmp_path):
    both, artifact = measure(), artifact_of(tmp_path)
    wanted = ("fp32", "fp8-all", "fp8-safe", "int8-all", "int8-safe")
    asked = PlanOptions(plans=wanted)
    plans = make_plans(artifact, both, (LOGIT,), BOTH, asked)
    assert plans.quantized == "FP8 or INT8"
    # A site is open while it is in any format.
    alone = [open_verdicts(artifact, both.of(p), (LOGIT,)) for p in both.precisions]
    assert {*open_verdicts(artifact, both, (LOGIT,))} == {*alone[0], *alone[1]}
    for recipes, word in ((FLOAT, "fp8"), (INTEGER, "int8")):
        ids = tuple(f"{word}-{which}" for which in ("all", "safe"))
        alone = make_plans(artifact, measure(recipes), (LOGIT,), recipes, replace(asked, plans=ids))
        for plan in alone.plans:
            ours = plans.plan(plan.id)
            assert ours.predicted_kl == plan.predicted_kl
            for one, other in zip(ours.decisions, plan.decisions, strict=True):
                assert replace(one, reason="") == replace(other, reason="")


def test_a_reason_says_which_format_has_the_site_and_by_how_much(measure, tmp_path):
    both, artifact = measure(), artifact_of(tmp_path)

    def climbed(*sites: str) -> Climb:
        return Climb(1, sites, 0.95, 0.9, ())

    safe = Climbs({"fp8": climbed("left"), "int8": climbed("left", "right")})
    assert serde.loads(Climbs, serde.dumps(safe)) == safe
    asked = PlanOptions(plans=("fp8-safe", "int8-safe"), safe=safe)
    plans = make_plans(artifact, both, (LOGIT,), BOTH, asked)
    lost = plans.plan("fp8-safe").decision("right")
    assert (lost.precision, plans.plan("int8-safe").decision("right").precision) == ("bf16", "int8")
    kl = {p: both.of(p).site("right").sensitivities[0].kl.value for p in both.precisions}
    assert f"{100 * kl[Precision.INT8]:.3g} %" in lost.reason.rpartition("int8-safe")[2]
    assert f"{100 * kl[Precision.FP8]:.3g} %" in lost.reason.rpartition("int8-safe")[2]
    assert "fp8-safe" not in plans.plan("int8-safe").decision("right").reason


PRODUCTS = {"left": "w_left", "right": "w_right", "deep": "w_deep", "head": "w_head"}


class Integers:
    """The model of `small_models` in float64, products of planned sites in int64."""

    def __init__(self, path: Path, decisions: dict[str, Decision]) -> None:
        stored = onnx.load(path).graph.initializer
        self.weights = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in stored}
        self.decisions = decisions

    def product(self, site: str, x: np.ndarray) -> np.ndarray:
        w, decision = self.weights[PRODUCTS[site]], self.decisions.get(site)
        if decision is None:
            return x @ w
        scale, zero = decision.activation_scale, decision.activation_zero_point
        columns = decision.weight_scale
        low, high = (0, 255) if decision.recipe.format == UINT8 else (-128, 127)
        a = np.clip(np.rint(np.float32(x) / np.float32(scale)).astype(np.int64) + zero, low, high) - zero
        b = np.rint(np.float32(w) / np.float32(columns)).astype(np.int64)
        return (a @ b) * (scale * np.array(columns))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        d = self.product("right", x) * np.tanh(self.product("left", x))
        centred = d - d.mean(axis=1, keepdims=True)
        e = centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-5)
        return self.product("head", np.maximum(self.product("deep", e), 0.0))


@pytest.mark.parametrize("format", [INT8, UINT8])
def test_from_rows_to_the_planned_graph(format, tmp_path):
    artifact, columns = artifact_of(tmp_path), columns_of(600)
    data, x = dataset_of(tmp_path / "data", columns), columns["x"]
    recipes = tuple(Recipe.of(format, weight, MSE) for weight in Granularity)
    options = ProbeOptions(recipes, threads=1, error_precision=None, weight=Granularity.PER_CHANNEL, draws=2)
    profile = calibrate(artifact, (LOGIT,), data, tmp_path, options)
    assert serde.loads(Profile, serde.dumps(profile)) == profile
    asked = PlanOptions(plans=("fp8-all",), base=Precision.FP32)
    (plan,) = make_plans(artifact, profile, (LOGIT,), recipes, asked).plans
    assert serde.loads(PrecisionPlan, serde.dumps(plan)) == plan
    decisions = {name: plan.decision(name) for name in PRODUCTS}
    # Zero points are left out where they are 0, so documents of symmetric formats hold none.
    assert ("activation_zero_point" in serde.dumps(plan)) is (format == UINT8)
    assert plan.quantized_sites == tuple(PRODUCTS)
    assert plan.fp8_sites == ()
    for name, decision in decisions.items():
        assert decision.precision is Precision.INT8
        assert decision.recipe.id == f"{format.id}/per_tensor/per_channel/mse"
        # Behind the Relu nothing is negative.
        assert (decision.activation_zero_point > 0) == (format == UINT8 and name != "head")

    path = Path(artifact.path)
    exact = Integers(path, {})(x)
    planned = apply_plan(artifact, plan, PlanForm(Precision.FP32), tmp_path / "planned.onnx")
    got = OnnxSession(planned.path, SessionOptions(optimize=False)).run({"x": x})["y"]
    want = Integers(path, decisions)(x)
    # A tie that falls the other way moves a row by a step.
    assert (np.abs(got - want) > 1e-4 * np.abs(want).max()).mean() < 0.02
    assert 0.001 < np.sqrt(np.square(want - exact).mean() / np.square(exact).mean()) < 0.1

    # What the probe measured, alone at each site.
    for name, decision in decisions.items():
        alone = Integers(path, {name: decision})(x) - exact
        sensitivity = profile.site(name).sensitivity(decision.recipe.id, "y")
        assert sensitivity.delta.rmse == pytest.approx(np.sqrt(np.square(alone).mean()), rel=1e-3)
        error = profile.site(name).error(decision.recipe.id)
        assert error.activation_scale == decision.activation_scale
        assert 0.0 < error.relative_error < 0.05
    of_left = profile.site("left").error(decisions["left"].recipe.id)
    rounded = Integers(path, decisions).product("left", x)
    plain = Integers(path, {}).product("left", x)
    noise = np.sqrt(np.square(rounded - plain).sum() / np.square(plain).sum())
    assert of_left.relative_error == pytest.approx(noise, rel=1e-4)
    left = decisions["left"]
    code = np.rint(x / np.float32(left.activation_scale)) + left.activation_zero_point
    assert of_left.saturated == ((code < format.min) | (code > format.max)).sum()
    assert of_left.underflowed == ((code == left.activation_zero_point) & (x != 0)).sum()


def test_formats_compete_at_each_site(tmp_path):
    """Normal values: an integer grid is finer there than that of E4M3."""
    artifact = artifact_of(tmp_path)
    data = dataset_of(tmp_path / "data", columns_of(256))
    recipes = tuple(Recipe.of(format) for format in (E4M3FN, INT8, UINT8))
    profile = calibrate(artifact, (LOGIT,), data, tmp_path, ProbeOptions(recipes, threads=1, draws=1))
    asked = PlanOptions(plans=("int8-all",), base=Precision.FP32)
    (plan,) = make_plans(artifact, profile, (LOGIT,), recipes, asked).plans
    for name in PRODUCTS:
        errors = {error.recipe: error.relative_error for error in profile.site(name).errors}
        assert len(errors) == 3
        assert plan.decision(name).recipe.id == min(errors, key=errors.__getitem__)
