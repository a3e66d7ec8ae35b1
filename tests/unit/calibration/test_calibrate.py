"""The whole of calibration: profiles, scales, rows that are added, and two formats up to a planned graph."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_models import LOGIT, SHARED, TWO_SITES, W1, artifact_of, columns_of, data_of, dataset_of

from loka_onnx.calibration.calibrate import ProbeOptions, ProfiledModel, calibrate, measured_recipes, update
from loka_onnx.calibration.effects.switchable import SWITCHES
from loka_onnx.config import ScaleRule
from loka_onnx.core import serde
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import E4M3FN, E5M2, FLOATS, INT8, UINT8, Precision
from loka_onnx.core.plan import Climb, Climbs, Decision, PrecisionPlan
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import MSE, PER_CHANNEL_WEIGHT, PER_TENSOR, Granularity, Recipe
from loka_onnx.errors import CalibrationError, InternalError
from loka_onnx.numerics.rounding import fake_quantize
from loka_onnx.numerics.scale_choice import activation_scaling
from loka_onnx.numerics.scales import weight_scales
from loka_onnx.pipeline.plans import recipes_of
from loka_onnx.planning.policy import PlanOptions, make_plans, open_verdicts
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

SITES = ("left", "right", "norm", "deep", "head")


@pytest.fixture
def measure(tmp_path):
    artifact = artifact_of(tmp_path)

    def run(rows: int = 600, seed: int = 1, **options) -> Profile:
        data = dataset_of(tmp_path / f"data-{seed}", columns_of(rows, seed))
        return calibrate(artifact, (LOGIT,), data, tmp_path, ProbeOptions(threads=1, **options))

    return run


def test_a_profile_holds_every_site_group_scale_and_pass_and_the_range_of_weights(measure, tmp_path):
    profile = measure(synthetic=True, draws=2)
    assert tuple(entry.site for entry in profile.sites) == SITES
    assert all(len(entry.sensitivities) == 1 for entry in profile.sites)
    assert [group.sites for group in profile.groups] == [SHARED]
    assert profile.weights == ("w_deep", "w_head", "w_left", "w_right")
    assert list(profile.seconds) == ["ranges", "errors", "draws", "sensitivity"]
    assert all(seconds.value > 0 for seconds in profile.seconds.values())
    assert profile.rows == profile.error_rows == profile.sampling.rows == 600 and profile.synthetic
    amax = profile.site("left").operands["x"].amax
    # Up to BF16, as `numerics.scales` says.
    assert 1.0 <= profile.scales["e4m3fn/amax"]["x"] / (amax / 448) <= 1 + 2**-7
    assert profile.scales.keys() == {"e4m3fn/amax"}
    assert serde.loads(Profile, serde.dumps(profile)) == profile
    found = measure(200, draws=1).site("deep").operands["w_deep"]
    stored = next(t for t in onnx.load(tmp_path / "source.onnx").graph.initializer if t.name == "w_deep")
    w = onnx.numpy_helper.to_array(stored).astype(np.float64)
    assert (found.count, found.minimum, found.maximum) == (w.size, w.min(), w.max())
    assert found.amax == np.abs(w).max()
    assert found.total.value == pytest.approx(w.sum(), rel=1e-12)
    assert found.total_squares.value == pytest.approx(np.square(w).sum(), rel=1e-12)
    np.testing.assert_array_equal(found.channel_amax, np.abs(w).max(axis=0))


def test_verdicts_are_asked_of_the_whole_profile_and_end_the_pass(measure):
    asked: list[Profile] = []

    def open_verdicts(profile: Profile) -> tuple[str, ...]:
        asked.append(profile)
        return ("deep", "head") if len(asked) < 3 else ()

    profile = measure(20_000, open_verdicts=open_verdicts, draws=2, sensitivity_rows=15_000)
    assert [each.sampling.rows for each in asked] == [4096, 6144, 9216]
    assert profile.sites == asked[-1].sites and profile.groups == asked[-1].groups
    assert profile.rows == 20_000 and profile.sampling.undecided == ()
    # Draws are of the first look, and known from there on.
    first, last = (each.site("deep").sensitivities[0].draws for each in (asked[0], profile))
    assert first == last is not None
    asked.clear()
    left = measure(20_000, open_verdicts=lambda _: ("deep", "head"), draws=1, sensitivity_rows=5000)
    assert (left.sampling.rows, left.sampling.undecided) == (5000, ("deep", "head"))


def test_a_planned_recipe_is_measured_whatever_its_error(measure):
    planned = dict.fromkeys(SITES, (PER_TENSOR.id,))
    best = measure(draws=1).site("deep")
    assert min(best.errors, key=lambda error: error.relative_error).recipe == PER_CHANNEL_WEIGHT.id
    assert best.sensitivities[0].recipe == PER_CHANNEL_WEIGHT.id
    assert measure(draws=1, planned=planned).site("deep").sensitivities[0].recipe == PER_TENSOR.id
    with pytest.raises(InternalError) as caught:
        measure(draws=1, planned={**planned, "deep": ("e5m2",)})
    assert caught.value.evidence.startswith("'e5m2' is not among ")


# Scale rules in the probe: each is measured, and the best by measurement is the one that a plan gets


def rows_with_outliers() -> np.ndarray:
    """Uniform from the very bottom of a binade up, and 1 in 5,000 values at 3,000 times the rest."""
    random = np.random.default_rng(5)
    x = random.uniform(-1.0, 1.0, (2000, 16)).astype(np.float32)
    x[random.random(x.shape) < 2e-4] *= 3000.0
    return x


@pytest.mark.parametrize("format", list(FLOATS))
def test_every_rule_is_measured_under_its_own_scale(format, tmp_path):
    x = rows_with_outliers()
    artifact, data = artifact_of(tmp_path, TWO_SITES), data_of(tmp_path, x)
    recipes = recipes_of(format, ScaleRule.BEST)
    assert len({recipe.id for recipe in recipes}) == 6
    profile = calibrate(
        artifact, (LOGIT,), data, tmp_path, ProbeOptions(recipes=recipes, batch_size=512, threads=1)
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


SIZE = 128
OPTIONS = ProbeOptions(batch_size=SIZE, threads=1, draws=1, error_precision=None)


def world(folder, name, parts_of_rows):
    return data_of(folder / name, parts_of_rows)


@pytest.fixture
def subject(tmp_path):
    return ProfiledModel(artifact_of(tmp_path, TWO_SITES), (LOGIT,))


@pytest.fixture
def parts_of_rows():
    """The second part reaches four times as far as the first."""
    x = np.random.default_rng(1).standard_normal((10 * SIZE, 16))
    x[6 * SIZE :] *= 4
    return x


def test_parts_add_up_to_all_rows_to_the_last_bit(subject, parts_of_rows, tmp_path):
    whole = calibrate(subject.model, (LOGIT,), world(tmp_path, "all", parts_of_rows), tmp_path, OPTIONS)
    parts = [parts_of_rows[: 4 * SIZE], parts_of_rows[4 * SIZE : 7 * SIZE], parts_of_rows[7 * SIZE :]]
    scaled = replace(OPTIONS, scales=whole.scales)
    profile = calibrate(subject.model, (LOGIT,), world(tmp_path, "0", parts[0]), tmp_path, scaled)
    for number, part in enumerate(parts[1:], 1):
        # The size of a batch is that of the profile, whatever is asked for.
        asked = replace(OPTIONS, batch_size=50)
        profile = update(profile, subject, world(tmp_path, str(number), part), tmp_path, asked)
    assert profile.rows == profile.error_rows == profile.sampling.rows == len(parts_of_rows)
    assert profile.scales == whole.scales and profile.data_digest.count("+") == 2
    assert profile.baseline_loss == whole.baseline_loss
    for found, wanted in zip(profile.sites, whole.sites, strict=True):
        assert (found.operands, found.errors) == (wanted.operands, wanted.errors)
        assert found.sensitivities == wanted.sensitivities


def test_what_reaches_beyond_the_scales_saturates_and_is_counted(subject, parts_of_rows, tmp_path):
    profile = calibrate(
        subject.model, (LOGIT,), world(tmp_path, "a", parts_of_rows[: 6 * SIZE]), tmp_path, OPTIONS
    )
    assert all(error.saturated == 0 for entry in profile.sites for error in entry.errors)
    more = update(profile, subject, world(tmp_path, "b", parts_of_rows[6 * SIZE :]), tmp_path, OPTIONS)
    scale = profile.scales[PER_TENSOR.activation_id]["x"]
    assert more.scales == profile.scales
    x = parts_of_rows.astype(np.float32)
    limit = E4M3FN.max
    assert more.site("fc1").operands["x"].amax == np.abs(x).max() > 2 * limit * scale
    beyond = int((np.abs(x) / np.float32(scale) > limit).sum())
    assert more.site("fc1").error(PER_TENSOR.id).saturated == beyond > 0
    before, after = (p.site("fc1").error(PER_TENSOR.id).relative_error for p in (profile, more))
    assert after > 2 * before


@pytest.fixture
def measured(subject, parts_of_rows, tmp_path):
    data = world(tmp_path, "a", parts_of_rows[: 4 * SIZE])
    return calibrate(subject.model, (LOGIT,), data, tmp_path, OPTIONS), data


def test_what_is_of_something_else_is_refused(measured, subject, parts_of_rows, tmp_path):
    model = ProfiledModel(artifact_of(tmp_path / "other", TWO_SITES, w1=2 * W1), (LOGIT,))
    unlabelled = replace(subject, outputs=(OutputSpec("y", OutputKind.LOGIT, None),))
    other = replace(OPTIONS, recipes=(Recipe.of(E5M2),))
    more = world(tmp_path, "b", parts_of_rows)
    for asked, options, code in (
        (model, OPTIONS, "E0514"),
        (unlabelled, OPTIONS, "E0516"),
        (subject, other, "E0513"),
    ):
        with pytest.raises(CalibrationError) as caught:
            update(measured[0], asked, more, tmp_path, options)
        assert caught.value.code == code


FLOAT, INTEGER = recipes_of(E4M3FN), recipes_of(UINT8)
BOTH = (*FLOAT, *INTEGER)
BOTH_OPTIONS = ProbeOptions(BOTH, threads=1, error_precision=None, draws=2)
Measure = Callable[..., Profile]


@pytest.fixture
def measure_both(tmp_path) -> Measure:
    artifact = artifact_of(tmp_path)

    def run(recipes: tuple[Recipe, ...] = BOTH, seed: int = 1, **options) -> Profile:
        data = dataset_of(tmp_path / f"data-{seed}", columns_of(600, seed))
        return calibrate(
            artifact, (LOGIT,), data, tmp_path, replace(BOTH_OPTIONS, recipes=recipes, **options)
        )

    return run


def without_times(profile: Profile) -> Profile:
    return replace(profile, seconds=dict.fromkeys(profile.seconds, ExactSum()), scales={})


def test_each_format_is_measured_as_if_alone(measure_both):
    both = measure_both()
    assert both.precisions == (Precision.FP8, Precision.INT8)
    assert serde.loads(Profile, serde.dumps(both)) == both
    for recipes, precision in ((FLOAT, Precision.FP8), (INTEGER, Precision.INT8)):
        alone = measure_both(recipes)
        assert without_times(both.of(precision)) == without_times(alone)
        assert alone.of(precision) == alone
        assert alone.scales.items() <= both.scales.items()
        assert [group.sites for group in both.of(precision).groups] == [SHARED]
    norm = both.site("norm")
    assert [item.recipe for item in norm.sensitivities] == ["bf16"] == [item.recipe for item in norm.errors]


def test_a_switch_reruns_only_what_it_reaches(measure_both, monkeypatch):
    """Three of five sites read what others made; no unit of sites begins before its first."""
    parts: list[int] = []
    run = OnnxSession.run

    def counted(self, inputs, outputs=None):
        if SWITCHES in self.input_names:
            parts.append(int(np.count_nonzero(inputs[SWITCHES])))
        return run(self, inputs, outputs)

    monkeypatch.setattr(OnnxSession, "run", counted)
    measure_both(draws=1, batch_size=600)
    # Parts with a site: each once exact; from left, right, norm, deep and head there are 4, 4, 3, 2 and 1 to
    # the end; all but the norm have two formats, and left and right are on together too.
    assert (parts.count(0), parts.count(1), parts.count(2)) == (5, 2 * (4 + 4 + 2 + 1) + 3, 2 * 5)


@pytest.mark.slow
def test_rows_are_added_to_every_format(measure_both, tmp_path):
    first, second = measure_both(), measure_both(seed=2)
    subject = ProfiledModel(artifact_of(tmp_path), (LOGIT,))
    added = update(
        first, subject, dataset_of(tmp_path / "data-2", columns_of(600, 2)), tmp_path, BOTH_OPTIONS
    )
    assert measured_recipes(added) == measured_recipes(first)
    assert added.rows == first.rows + second.rows
    assert added.scales == first.scales and "uint8/mse/zero_point" in added.scales
    for precision in first.precisions:
        # Scales of the second are its own.
        again = measure_both(seed=2, scales=first.scales, planned=measured_recipes(first))
        merged = first.of(precision).merge(again.of(precision))
        assert without_times(added.of(precision)) == without_times(merged)


def test_plans_of_each_format_rest_on_what_was_measured_in_it(measure_both, tmp_path):
    both, artifact = measure_both(), artifact_of(tmp_path)
    wanted = ("fp32", "fp8-all", "fp8-safe", "int8-all", "int8-safe")
    asked = PlanOptions(plans=wanted)
    plans = make_plans(artifact, both, (LOGIT,), BOTH, asked)
    assert plans.quantized == "FP8 or INT8"
    # A site is open while it is in any format.
    alone = [open_verdicts(artifact, both.of(p), (LOGIT,)) for p in both.precisions]
    assert {*open_verdicts(artifact, both, (LOGIT,))} == {*alone[0], *alone[1]}
    for recipes, word in ((FLOAT, "fp8"), (INTEGER, "int8")):
        ids = tuple(f"{word}-{which}" for which in ("all", "safe"))
        alone = make_plans(artifact, measure_both(recipes), (LOGIT,), recipes, replace(asked, plans=ids))
        for plan in alone.plans:
            ours = plans.plan(plan.id)
            assert ours.predicted_kl == plan.predicted_kl
            for one, other in zip(ours.decisions, plan.decisions, strict=True):
                assert replace(one, reason="") == replace(other, reason="")


def test_a_reason_says_which_format_has_the_site_and_by_how_much(measure_both, tmp_path):
    both, artifact = measure_both(), artifact_of(tmp_path)

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
