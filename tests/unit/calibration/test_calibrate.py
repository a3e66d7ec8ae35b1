"""The whole of calibration: what a profile holds, under which scales, and rows that are added to it."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from small_models import LOGIT, SHARED, TWO_SITES, W1, artifact_of, columns_of, data_of, dataset_of

from loka_onnx.calibration.calibrate import ProbeOptions, ProfiledModel, calibrate, update
from loka_onnx.config import ScaleRule
from loka_onnx.core import serde
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.formats import E4M3FN, E5M2, FLOATS
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.errors import CalibrationError, InternalError
from loka_onnx.numerics.rounding import fake_quantize
from loka_onnx.numerics.scale_choice import activation_scaling
from loka_onnx.numerics.scales import weight_scales
from loka_onnx.pipeline.plans import recipes_of

SITES = ("left", "right", "norm", "deep", "head")


@pytest.fixture
def measure(tmp_path):
    artifact = artifact_of(tmp_path)

    def run(rows: int = 600, seed: int = 1, **options) -> Profile:
        data = dataset_of(tmp_path / f"data-{seed}", columns_of(rows, seed))
        return calibrate(artifact, (LOGIT,), data, tmp_path, ProbeOptions(threads=1, **options))

    return run


def test_a_profile_holds_every_site_group_scale_and_pass(measure):
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


def test_the_range_of_a_weight_is_that_of_its_elements(measure, tmp_path):
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
