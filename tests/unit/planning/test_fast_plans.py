"""The plan `fp8-fast`: safe and fast sites, by the kernel times of a device; latencies that are expected."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_models import CTR, graph_of, kl_of, profile_of

from loka_onnx.core import serde
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, SpeedVerdict, Verdict
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Granularity
from loka_onnx.core.timing import QUANTIZE, Kernel, KernelTiming, Provenance, Shape
from loka_onnx.errors import InternalError
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.planning.costs import LABELLED_ALLOWANCE
from loka_onnx.planning.expected_latency import (
    Known,
    Point,
    expected_us,
    front,
    predict_latency,
    why_not_expected,
)
from loka_onnx.planning.policy import Planner, PlanOptions, make_plans
from loka_onnx.planning.site_speed import DeviceTimings, SiteSpeeds

ALLOWED = CTR.budget * (1 - LABELLED_ALLOWANCE)
SOURCE = Provenance("a device", {}, "", "2026-11-21")
BATCH = 100
SHAPES = {"fc0": Shape(BATCH, 64, 32), "fc1": Shape(BATCH, 16, 64), "fc2": Shape(BATCH, 16, 256)}
"""fc0 reads an input, fc1 the LayerNormalization, fc2 a product."""
DEVICE, FUSING, PLAIN = "nvidia-h100", "tensorrt_rtx", "plain"
"""TensorRT for RTX is known to quantize in the kernel of a norm; of a backend `plain` nothing is known."""

Us = tuple[float, float, float]
"""In BF16, in FP8, and the cast."""


def timings(us: Mapping[str, Us], backend: str = PLAIN, device: str = DEVICE) -> DeviceTimings:
    """Times of the sites at the batch size that is served."""

    def kernels() -> Iterator[KernelTiming]:
        for site, (wide, narrow, cast) in us.items():
            shape = SHAPES[site]
            scales = Granularity.PER_CHANNEL
            for kernel, at, time in (
                (Kernel(device, backend, "mm", Precision.BF16), shape, wide),
                (Kernel(device, backend, "scaled_mm-row_wise", Precision.FP8, scales), shape, narrow),
                (Kernel(device, backend, QUANTIZE, Precision.FP8), Shape(shape.m, 0, shape.k), cast),
            ):
                yield KernelTiming(kernel, at, time, 0.0, SOURCE)

    return DeviceTimings(device, backend, tuple(kernels()), (BATCH,))


def plans_of(model, devices, kl=None, plans=("fp8-fast",), **options):
    chosen = PlanOptions(plans=plans, devices=devices, **options)  # type: ignore[arg-type]
    return make_plans(model, profile_of(model, kl or {}), (CTR,), [PER_CHANNEL_WEIGHT], chosen)


def plan_of(model, us, kl=None, **options):
    return plans_of(model, (timings(us),), kl, **options).plan("fp8-fast")  # type: ignore[arg-type]


ALL_FAST: Mapping[str, Us] = {"fc0": (10.0, 5.0, 1.0), "fc1": (8.0, 4.0, 1.0), "fc2": (6.0, 3.0, 1.0)}
ONE_FAST: Mapping[str, Us] = {"fc0": (10.0, 5.0, 1.0), "fc1": (8.0, 9.0, 1.0), "fc2": (6.0, 5.5, 1.0)}


def test_sites_that_save_time_run_in_fp8_and_what_a_norm_quantizes_costs_nothing(model):
    plan = plan_of(model, ONE_FAST)
    assert plan.fp8_sites == ("fc0",)
    assert (plan.device, plan.base) == (DEVICE, Precision.BF16)
    decision = plan.decision("fc0")
    assert (decision.verdict, decision.recipe) == (Verdict.SAFE, PER_CHANNEL_WEIGHT)
    assert "takes 10 µs in bf16 and 5 in fp8 at batch 100, quantizing takes 1 µs" in decision.reason
    us: Mapping[str, Us] = {"fc0": (3.0, 9.0, 1.0), "fc1": (8.0, 7.5, 4.0), "fc2": (6.0, 5.5, 1.0)}
    assert plans_of(model, (timings(us),)).plans == ()
    found = plans_of(model, (timings(us, FUSING),)).plan("fp8-fast")
    assert found.fp8_sites == ("fc1",)
    assert "quantizing is part of 'ln'" in found.decision("fc1").reason


def test_what_an_engine_maker_fuses_stays_and_breaking_it_up_has_no_expected_time(model):
    known = replace(timings(ALL_FAST), fused={"fc1": "factorization-norm"})
    found = plans_of(model, (known,), plans=("bf16", "fp8-all", "fp8-fast"))
    bf16, everything, fast = (found.plan(name) for name in ("bf16", "fp8-all", "fp8-fast"))
    assert plan_of(model, ALL_FAST).fp8_sites == ("fc0", "fc1", "fc2")
    assert fast.fp8_sites == ("fc0", "fc2")
    assert fast.decision("fc1").precision is Precision.BF16
    assert "break up the kernel 'factorization-norm'" in fast.decision("fc1").reason
    assert everything.breaks_up == {DEVICE: {"fc1": "factorization-norm"}}
    assert (bf16.breaks_up, fast.breaks_up) == ({}, {})
    assert expected_us(everything, bf16, {BATCH: 50.0}, DEVICE) == {}
    # fc0 and fc2 save 5 and 3 µs beside a cast each.
    assert expected_us(fast, bf16, {BATCH: 50.0}, DEVICE) == {BATCH: pytest.approx(44.0)}
    assert serde.loads(PlanSet, serde.dumps(found)) == found
    (speed,) = (each for each in found.speeds if each.site == "fc1")
    assert (speed.verdict, speed.saved_us) == (SpeedVerdict.UNKNOWN, {})


def test_the_budget_is_spent_on_what_saves_most(model):
    kl = {"fc0": kl_of(0.6 * ALLOWED), "fc1": kl_of(0.5 * ALLOWED), "fc2": kl_of(0.4 * ALLOWED)}
    plan = plan_of(model, ALL_FAST, kl)
    assert plan.fp8_sites == ("fc0", "fc2")
    assert plan.predicted_kl == {"ctr": pytest.approx(1.0 * ALLOWED)}
    assert plan.decision("fc1").reason.startswith(
        "fast, but there is no room beside the sites that save more"
    )


def test_without_kernel_times_or_a_gain_there_is_no_plan_and_the_reader_is_told(model):
    unknown = DeviceTimings("amd-mi300x", "migraphx", (), (BATCH,))
    found = plans_of(model, (unknown,), plans=("bf16", "fp8-fast"))
    assert [plan.id for plan in found.plans] == ["bf16"]
    (note,) = found.notes
    assert "no kernel timings for device amd-mi300x" in note and found.speeds == ()
    assert "no device was named" in plans_of(model, ()).notes[0]
    slow = plans_of(model, (timings({"fc0": (5.0, 6.0, 1.0), "fc1": (5.0, 4.5, 1.0)}),))
    assert slow.plans == ()
    assert "no set of sites inside of the budget saves time on nvidia-h100" in slow.notes[0]
    unsafe = plans_of(model, (timings({"fc0": (5.0, 3.0, 1.0)}),), {"fc0": kl_of(2 * ALLOWED)})
    assert unsafe.notes[0].endswith("of 1 sites with known times 1 is fast, none of them fits the budget")


def test_kept_sites_stay_and_forced_ones_spend(model):
    assert plan_of(model, ALL_FAST, keep=("fc0",)).fp8_sites == ("fc1", "fc2")
    kl = {"fc0": kl_of(0.6 * ALLOWED), "fc1": kl_of(0.5 * ALLOWED)}
    poor: Mapping[str, Us] = {"fc0": (10.0, 5.0, 1.0), "fc1": (8.0, 6.5, 1.0)}
    assert plan_of(model, poor, kl).fp8_sites == ("fc0",)
    assert plan_of(model, poor, kl, force=("fc1",)).fp8_sites == ("fc1",)
    # Forced though there is no time of it: it spends all the same.
    plan = plan_of(model, {"fc0": (10.0, 5.0, 1.0), "fc2": (6.0, 3.0, 1.0)}, kl, force=("fc1",))
    assert plan.fp8_sites == ("fc1", "fc2")
    assert "forced by 'fc1'" in plan.decision("fc1").reason
    assert "its time is not known" in plan.decision("fc1").reason


def test_several_devices_have_a_plan_each_and_every_plan_a_predicted_time(model):
    other = timings({"fc1": (8.0, 4.0, 1.0)}, device="nvidia-h200")
    none = DeviceTimings("amd-mi300x", "migraphx", (), (BATCH,))
    found = plans_of(model, (timings(ONE_FAST), other, none))
    assert [(plan.id, plan.device, plan.fp8_sites) for plan in found.plans] == [
        ("fp8-fast-nvidia-h100", "nvidia-h100", ("fc0",)),
        ("fp8-fast-nvidia-h200", "nvidia-h200", ("fc1",)),
    ]
    assert {speed.device for speed in found.speeds} == {"nvidia-h100", "nvidia-h200"}
    assert len(found.notes) == 1
    found = plans_of(model, (timings(ONE_FAST),), plans=("fp32", "bf16", "fp8-all", "fp8-safe", "fp8-fast"))
    us = {plan.id: plan.predicted_us for plan in found.plans}
    assert us == {
        "fp32": {},
        "bf16": {DEVICE: {"100": pytest.approx(10 + 8 + 6)}},
        "fp8-all": {DEVICE: {"100": pytest.approx(5 + 9 + 5.5 + 3)}},
        "fp8-safe": {DEVICE: {"100": pytest.approx(5 + 9 + 5.5 + 3)}},
        "fp8-fast": {DEVICE: {"100": pytest.approx(5 + 8 + 6 + 1)}},
    }
    expected = expected_us(found.plan("fp8-fast"), found.plan("bf16"), {100: 50.0, 7: 9.0}, DEVICE)
    assert expected == {100: pytest.approx(46.0)}
    assert serde.loads(PlanSet, serde.dumps(found)) == found


@pytest.mark.parametrize(("us", "verdict"), [
    ((10.0, 5.0, 4.0), SpeedVerdict.FAST),
    ((10.0, 5.0, 5.0), SpeedVerdict.SLOW),  # the cast takes all that the product saves
    ((10.0, 5.0, 6.0), SpeedVerdict.SLOW),
    ((10.0, 10.0, 1e-9), SpeedVerdict.SLOW),  # nothing is saved
    ((10.0, 10.5, 1e-9), SpeedVerdict.SLOW),
])  # fmt: skip
def test_fp8_is_fast_where_it_saves_more_than_its_cast(model, us, verdict):
    found = {speed.site: speed.verdict for speed in plans_of(model, (timings({"fc0": us}),)).speeds}
    assert found["fc0"] == verdict


def test_refinements_toggle_sites_and_are_numbered(model):
    options = PlanOptions(devices=(timings(ALL_FAST),))
    kl = {"fc0": kl_of(0.6 * ALLOWED), "fc1": kl_of(0.5 * ALLOWED)}
    profile = profile_of(model, kl)
    assert plan_of(model, ALL_FAST, kl).fp8_sites == ("fc0", "fc2")
    found = Planner(model, profile, (CTR,), [PER_CHANNEL_WEIGHT], options).refinements()
    assert [(plan.id, plan.fp8_sites) for plan in found] == [
        ("fp8-fast-1", ("fc1", "fc2")),
        ("fp8-fast-2", ("fc0",)),
    ]
    assert all(plan.device == DEVICE for plan in found)
    assert all(plan.predicted_kl["ctr"] <= ALLOWED for plan in found)


SHARED = """(float[batch,32] x, float[batch,4,32] e) => (
    float[batch,64] a, float[batch,64] b, float[batch,4,64] c, float[2,batch,32] t
) {
    h = Relu(x)
    u = Unsqueeze(h, one)
    [fa] a = MatMul(h, wa)
    [fb] v = MatMul(u, wb)
    b = Squeeze(v, one)
    [fc] c = MatMul(e, wc)
    [towers] t = MatMul(x, we)
}"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> GraphModel:
    constants = {name: np.ones((32, 64)) for name in ("wa", "wb", "wc")}
    constants |= {"we": np.ones((2, 32, 32)), "one": np.array([1])}
    return graph_of(tmp_path_factory.mktemp("shared") / "model.onnx", SHARED, constants)


def speeds_of(shared: GraphModel, backend: str, serve: tuple[int, ...] = (10,)) -> SiteSpeeds:
    """At batch 10 the product of `fa` saves 2 µs and its cast takes 3; at batch 20 all take thrice that."""
    kernels = []
    for batch, factor in ((10, 1.0), (20, 3.0), (40, 1.0)):
        shape, cast = Shape(batch, 64, 32), Shape(batch, 0, 32)
        for name, precision, scales, us, at in (
            ("mm", Precision.BF16, None, 5.0, shape),
            ("scaled_mm", Precision.FP8, Granularity.PER_TENSOR, 3.0, shape),
            (QUANTIZE, Precision.FP8, None, 3.0, cast),
        ):
            kernel = Kernel("d", backend, name, precision, scales)
            kernels.append(KernelTiming(kernel, at, us * factor, 0.1, SOURCE))
    sites = find_sites(shared)
    recipes = {site.name: PER_TENSOR for site in sites}
    known = DeviceTimings("d", backend, tuple(kernels), serve)
    return SiteSpeeds(shared, sites, known, Precision.BF16, recipes)


def test_readers_of_one_tensor_share_its_cast(shared):
    speeds = speeds_of(shared, PLAIN)
    assert speeds.sources["fa"] == speeds.sources["fb"]
    assert speeds.speed("fa").verdict is SpeedVerdict.FAST
    assert "quantizing takes 3 µs, shared with 1 other site (measured on d)" in speeds.speed("fa").reason
    # 40 rows of e for 10 examples: the product saves 2 µs, the cast takes 3, and nobody shares it.
    assert speeds.speed("fc").verdict is SpeedVerdict.SLOW
    assert speeds.speed("fc").saved_us == {"10": 2.0}
    # An activation that quantizes makes it free.
    speeds = speeds_of(shared, FUSING)
    assert (speeds.sources["fa"].fused_into, speeds.sources["fc"].fused_into) == ("inner/h", "")
    assert speeds.quantize_per_row("fa") == 0.0


def test_a_product_in_fp8_quantizes_for_the_next_one(tmp_path):
    text = "(float[batch,32] x) => (float[batch,64] b) { [down] a = MatMul(x, wd) [up] b = MatMul(a, wu) }"
    weights = {"wd": np.ones((32, 32)), "wu": np.ones((32, 64))}
    graph = graph_of(tmp_path / "model.onnx", text, weights)
    assert speeds_of(graph, FUSING).sources["up"].made_by == "down"
    assert speeds_of(graph, PLAIN).sources["up"].made_by == ""
    speeds = speeds_of(graph, FUSING)
    assert (speeds.speed("up").made_by, speeds.speed("down").made_by) == ("down", "")
    # Of `down` no time is known here: alone, `up` has its cast.
    assert speeds.quantize_per_row("up") > 0.0
    assert "nothing behind 'down' in fp8" in speeds.speed("up").reason
    for sites, us in ((["up"], 6.0), (["up", "down"], 3.0)):
        quantized = [Decision(site, Precision.FP8, None, Verdict.SAFE, "") for site in sites]
        assert speeds.predicted_us(Precision.BF16, quantized) == {"10": us}


SAVED = {"a": 30.0, "b": 10.0, "c": 20.0}


def plan(*fp8: str, base: Precision = Precision.BF16) -> PrecisionPlan:
    """Products take 60 µs at 10 rows and twice that at 20, less what FP8 saves."""
    decisions = tuple(
        Decision(site, Precision.FP8, PER_TENSOR, Verdict.SAFE, "", 1.0, (1.0,))
        if site in fp8
        else Decision(site, base, None, Verdict.NOT_JUDGED, "")
        for site in SAVED
    )
    us = 60.0 - sum(SAVED[site] for site in fp8)
    return PrecisionPlan("p", "d", base, decisions, {}, 0.0, predicted_us={"gpu": {"10": us, "20": 2 * us}})


BF16 = Known("bf16", plan(), {10: 100.0, 20: 180.0})
# FP8 at a and b saves 10 µs less in the engine than kernel times say.
BOTH = Known("both", plan("a", "b"), {10: 70.0, 20: 130.0})


def test_the_difference_is_added_to_what_was_measured_of_the_plan_that_differs_in_fewest_sites():
    found = predict_latency(plan("a"), (BF16,), "gpu")
    assert (found.start, dict(found.us)) == ("bf16", {10: pytest.approx(70.0), 20: pytest.approx(120.0)})
    found = predict_latency(plan("a", "b", "c"), (BF16, BOTH), "gpu")
    assert (found.start, found.us[10]) == ("both", pytest.approx(50.0))
    nearer = predict_latency(plan("c"), (BF16, BOTH), "gpu")
    assert nearer.start == "bf16"


def test_nothing_is_predicted_without_a_like_engine_or_across_a_kernel_that_is_broken_up():
    other = Known("fp16", plan(base=Precision.FP16), {10: 90.0})
    assert predict_latency(plan("a"), (other,), "gpu") is None
    assert predict_latency(plan("a"), (BF16,), "another") is None
    unknown = Known("near", replace(plan("a"), predicted_us={}), {10: 1.0})
    found = predict_latency(plan("a"), (unknown, BF16), "gpu")
    assert found.start == "bf16"
    alone = replace(plan("a"), breaks_up={"gpu": {"a": "token-residual-norm"}})
    found = predict_latency(alone, (BF16,), "gpu")
    why = "FP8 at 'a' breaks up the kernel 'token-residual-norm', and what the parts take was not measured"
    assert (found.start, found.us, found.why_not) == ("", {}, why)
    # On another device it is no kernel.
    assert why_not_expected(alone, BF16.plan, "another") == ""
    # The other way round as well.
    found = predict_latency(plan("b"), (Known("parted", alone, {10: 90.0}),), "gpu")
    assert found.us == {}
    assert found.why_not.startswith("FP8 at 'a' of plan 'p' breaks up the kernel 'token-residual-norm'")
    # An engine that differs in more sites, and not by a kernel, is what it starts from.
    further = predict_latency(plan("a", "b"), (Known("near", alone, {10: 1.0}), BF16), "gpu")
    assert (further.start, further.why_not) == ("bf16", "")


# The front against its definition, tried on every pair

# Few values, so that ties in one and in both come up.
VALUES = st.sampled_from([0.5, 1.0, 1.5, 2.0, inf])


def dominates(a: Point, b: Point) -> bool:
    no_worse = a.time <= b.time and a.loss <= b.loss
    return no_worse and (a.time < b.time or a.loss < b.loss)


@given(st.lists(st.tuples(VALUES, VALUES), max_size=12))
def test_it_is_what_no_other_point_dominates(places):
    points = [Point(f"p{i}", time, loss) for i, (time, loss) in enumerate(places)]
    found = front(points)
    by_definition = {p.name for p in points if not any(dominates(other, p) for other in points)}
    assert {p.name for p in found} == by_definition
    assert [p.time for p in found] == sorted(p.time for p in found)
    assert all(a.loss >= b.loss for a, b in pairwise(found))
    with pytest.raises(InternalError):
        front([*points, Point("a", nan, 1.0)])
