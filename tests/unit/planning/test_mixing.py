"""The plan `mixed`: the format of each tensor's products."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planned_models import ALLOWED, CTR, artifact_of, kl_of, profile_of

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import INT8, Precision
from loka_onnx.core.plan import Climb, Climbs, PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import MSE, PER_CHANNEL_WEIGHT, Granularity, Recipe
from loka_onnx.core.timing import QUANTIZE, Kernel, KernelTiming, Provenance, Shape
from loka_onnx.operations.refresh.refreshing import with_new_scales
from loka_onnx.planning.high_error_channels import errors_to_leave
from loka_onnx.planning.policy import Planner, PlanOptions, make_plans
from loka_onnx.planning.site_speed import DeviceTimings

INTEGERS = Recipe.of(INT8, Granularity.PER_CHANNEL, MSE)
RECIPES = (PER_CHANNEL_WEIGHT, INTEGERS)
TEXT = """(float[batch,32] x) => (float[batch,1] ctr) {
    [fc0] a = MatMul(x, w0)
    [fc1] b = MatMul(x, w1)
    c = Mul(a, b)
    [fc3] e = MatMul(c, w3)
    [fc4] f = MatMul(e, w4)
    ctr = ReduceMean<keepdims=1>(f, one)
}"""
FLOAT, INTEGER = Precision.FP8, Precision.INT8
SOURCE = Provenance("a device", {}, "", "2026-11-27")


@pytest.fixture
def model(tmp_path: Path) -> ModelArtifact:
    """fc0 and fc1 read one tensor."""
    constants = {name: np.ones((32, 32)) for name in ("w0", "w1", "w3", "w4")}
    return artifact_of(tmp_path / "model.onnx", TEXT, constants | {"one": np.array([1])})


def measured(model: ModelArtifact, parts: Mapping[str, tuple[float, float]]) -> Profile:
    """KL of each site in FP8 and in INT8, in parts of what is allowed."""
    in_fp8, in_int8 = (
        profile_of(model, {name: kl_of(each[at] * ALLOWED) for name, each in parts.items()})
        for at in range(2)
    )

    def in_both(one, other):
        more = (replace(item, recipe=INTEGERS.id) for item in other.sensitivities)
        return replace(one, sensitivities=(*one.sensitivities, *more))

    sites = tuple(map(in_both, in_fp8.sites, in_int8.sites))
    of_tensors = in_fp8.scales[PER_CHANNEL_WEIGHT.activation_id]
    return replace(in_fp8, sites=sites, scales={**in_fp8.scales, INTEGERS.activation_id: of_tensors})


def plans_of(model: ModelArtifact, profile: Profile, **options: object) -> PlanSet:
    asked = {"plans": ("fp8-safe", "int8-safe", "mixed"), **options}
    return make_plans(model, profile, (CTR,), RECIPES, PlanOptions(**asked))  # type: ignore[arg-type]


PARTS = {"fc0": (0.05, 0.01), "fc1": (0.02, 0.03), "fc3": (0.01, 0.04), "fc4": (0.95, 0.02)}


def test_each_tensor_gets_the_format_of_the_smaller_error(model):
    plans = plans_of(model, measured(model, PARTS))
    mixed = plans.plan("mixed")
    # Together fc0 and fc1 cost .07 in FP8 and .04 in INT8.
    assert mixed.formats == {"fc0": INTEGER, "fc1": INTEGER, "fc3": FLOAT, "fc4": INTEGER}
    assert (mixed.kind, mixed.precisions, mixed.fp8_share) == ("mixed", (FLOAT, INTEGER), 1.0)
    assert mixed.predicted_kl["ctr"] == pytest.approx((0.01 + 0.03 + 0.01 + 0.02) * ALLOWED)
    assert plans.plan("fp8-safe").fp8_share < 1.0
    reason = mixed.decision("fc4").reason
    assert "INT8 (a KL of 2 % of what is allowed) rather than FP8 (a KL of 95 %" in reason
    recipes = {decision.site: decision.recipe for decision in mixed.decisions}
    assert (recipes["fc3"], recipes["fc4"]) == (PER_CHANNEL_WEIGHT, INTEGERS)


def timings(us: Mapping[int, tuple[float, float]], spread: float = 0.0) -> DeviceTimings:
    """Of products with 32 columns in FP8 and INT8, by K; 10 µs in BF16, casts of 1 µs."""

    def kernels() -> Iterator[KernelTiming]:
        for precision, name in ((FLOAT, "scaled_mm-row_wise"), (INTEGER, "int_mm")):
            kernel = Kernel("gpu", "plain", name, precision, Granularity.PER_CHANNEL)
            cast = Kernel("gpu", "plain", QUANTIZE, precision)
            for k, each in us.items():
                shape = Shape(8, 32, k)
                yield KernelTiming(kernel, shape, each[precision is INTEGER], spread, SOURCE)
                yield KernelTiming(cast, Shape(8, 0, k), 1.0, spread, SOURCE)
                yield KernelTiming(Kernel("gpu", "plain", "mm", Precision.BF16), shape, 10.0, spread, SOURCE)

    return DeviceTimings("gpu", "plain", tuple(kernels()), (8,))


@pytest.mark.parametrize(("spread", "of_fc4"), [(0.0, FLOAT), (3.0, INTEGER)])
def test_the_faster_format_inside_the_share_is_taken(model, spread, of_fc4):
    """fc4 is cheap in both: FP8 is faster, unless the spread of times hides it. The others fit in one."""
    parts = {"fc0": (0.3, 0.01), "fc1": (0.3, 0.01), "fc3": (0.2, 0.9), "fc4": (0.1, 0.02)}
    times = (timings({32: (5.0, 6.0)}, spread),)
    plans = plans_of(model, measured(model, parts), devices=times)
    assert plans.plan("mixed").formats == {"fc0": INTEGER, "fc1": INTEGER, "fc3": FLOAT, "fc4": of_fc4}
    speeds = {(speed.site, speed.precision) for speed in plans.speeds}
    assert speeds == {(name, precision) for name in PARTS for precision in (FLOAT, INTEGER)}
    fast = plans_of(model, measured(model, parts), devices=times, plans=("int8-fast",))
    assert fast.plan("int8-fast").int8_sites == ("fc0", "fc1", "fc3", "fc4")
    assert "10 µs in bf16 and 6 in int8 at batch 8" in fast.plan("int8-fast").decision("fc0").reason


def test_with_kernel_times_a_mixed_plan_has_the_sites_that_save_time(model):
    """No ladder: a site on it would run in eight bits whether that pays or not."""
    parts = {"fc0": (0.3, 0.01), "fc1": (0.3, 0.01), "fc3": (0.1, 0.9), "fc4": (0.1, 0.9)}
    climbs = Climbs({"mixed": Climb(1, ("fc0", "fc1"), 0.95, 0.9, ())})
    profile = measured(model, parts)
    for of_int8, sites in ((6.0, ("fc0", "fc1", "fc3", "fc4")), (9.8, None)):
        times = (timings({32: (5.0, of_int8)}),)
        plans = plans_of(model, profile, devices=times, safe=climbs)
        assert next((p.quantized_sites for p in plans.plans if p.id == "mixed"), None) == sites
        assert ("plan mixed is left out: it would have sites in FP8 alone" in plans.notes) == (sites is None)
        planner = Planner(model, profile, (CTR,), RECIPES, PlanOptions(devices=times), "mixed")
        assert not planner.has_ladder
    assert Planner(model, profile, (CTR,), RECIPES, PlanOptions(), "mixed").has_ladder


def test_what_the_search_proposes_beside_a_mixed_plan_keeps_its_formats(model):
    parts = {"fc0": (0.3, 0.01), "fc1": (0.3, 0.01), "fc3": (0.2, 0.9), "fc4": (0.1, 0.02)}
    options = PlanOptions(devices=(timings({32: (5.0, 6.0)}),), confidence=0.95)
    found = Planner(model, measured(model, parts), (CTR,), RECIPES, options, "mixed").refinements()
    assert found and all(plan.device == "gpu" for plan in found)
    formats = {"fc0": INTEGER, "fc1": INTEGER, "fc3": FLOAT, "fc4": FLOAT}
    for each in found:
        assert each.quantized_sites and set(each.quantized_sites) != set(formats)
        assert all(each.decision(site).precision is formats[site] for site in each.quantized_sites)


def test_a_mixed_plan_has_a_ladder_of_its_own(model):
    climbs = Climbs({"mixed": Climb(2, ("fc3", "fc4"), 0.95, 0.9, ())})
    plans = plans_of(model, measured(model, PARTS), safe=climbs)
    assert plans.plan("mixed").quantized_sites == ("fc3", "fc4")
    assert "above rung 2 of the ladder" in plans.plan("mixed").decision("fc0").reason


@pytest.mark.parametrize(("at", "word"), [(0, "FP8"), (1, "INT8")])
def test_a_mixed_plan_of_one_format_is_left_out(model, at, word):
    parts = dict.fromkeys(PARTS, (0.01 + 0.02 * at, 0.03 - 0.02 * at))
    plans = plans_of(model, measured(model, parts))
    assert [plan.id for plan in plans.plans] == ["fp8-safe", "int8-safe"]
    assert plans.notes == (f"plan mixed is left out: it would have sites in {word} alone",)


@pytest.mark.parametrize("plan_id", ["fp8-all", "int8-all", "mixed"])
def test_a_refresh_keeps_the_format_of_each_site(model, plan_id):
    """Scales and costs are those of the new profile, in the formats of the earlier plan."""
    before = plans_of(model, measured(model, PARTS), plans=(plan_id,)).plan(plan_id)
    profile = measured(model, {name: (2.0 * fp8, 3.0 * int8) for name, (fp8, int8) in PARTS.items()})
    doubled = {
        recipe: {tensor: 2.0 * scale for tensor, scale in of.items()} for recipe, of in profile.scales.items()
    }
    now = with_new_scales(before, model, replace(profile, scales=doubled), (CTR,))
    assert now.formats == before.formats and now.quantized_sites == before.quantized_sites
    for one, other in zip(now.decisions, before.decisions, strict=True):
        assert (one.recipe, one.weight_scale) == (other.recipe, other.weight_scale)
        assert one.activation_scale == pytest.approx(2.0 * other.activation_scale)
    grown = sum(PARTS[site][p is INTEGER] * (3.0 if p is INTEGER else 2.0) for site, p in now.formats.items())
    assert now.predicted_kl["ctr"] == pytest.approx(grown * ALLOWED)


def test_what_no_backend_multiplies_in_integers_is_in_fp8_and_in_no_integer_plan_though_forced(tmp_path):
    """A weight on the left has no scale for each column of the result; nor has one of three axes."""
    text = """(float[batch,32,32] x) => (float[batch,32,1] thin, float[batch,32,32] stacked) {
        [left] a = MatMul(w, x)
        [right] b = MatMul(a, w)
        [batched] stacked = MatMul(x, stack)
        [thin] thin = MatMul(b, column)
    }"""
    constants = {"w": np.ones((32, 32)), "stack": np.ones((1, 32, 32)), "column": np.ones((32, 1))}
    model = artifact_of(tmp_path / "left.onnx", text, constants)
    profile = measured(model, dict.fromkeys(("left", "right", "batched", "thin"), (0.1, 0.01)))
    forced = plans_of(model, profile, plans=("int8-all", "int8-safe"), force=("left", "batched"))
    for plan in forced.plans:
        assert plan.decision("batched").reason.startswith("its weight has 3 axes")
        assert plan.decision("left").reason.startswith("its weight is the left factor")
        assert not {"batched", "left"} & {*plan.quantized_sites}
    assert "INT8 kernels want both to be at least 16" in forced.plan("int8-safe").decision("thin").reason
    mixed = plans_of(model, profile, keep=("batched",)).plan("mixed")
    assert (mixed.fp8_sites, mixed.int8_sites) == (("left",), ("right",))
    assert "rather than" not in mixed.decision("left").reason


def test_what_a_site_may_keep_of_its_error_is_told_in_its_own_format(model):
    """A site that fits in one of both is left whole; of one that fits in none, the smaller error counts."""
    rows = {"selection": 100_000, "certification": 100_000}
    of_all = ((2.0, 0.01), (0.02, 0.03), (0.01, 3.0), (40.0, 5.0))
    profile = measured(model, dict(zip(PARTS, of_all, strict=True)))
    both, alone = (
        errors_to_leave(model, profile, (CTR,), of, PlanOptions(), rows) for of in (RECIPES, RECIPES[1:])
    )
    assert list(both) == ["fc4"]
    assert set(alone) == {"fc3", "fc4"}
    # Both share what is left.
    assert alone["fc4"] < both["fc4"] < 0.5
