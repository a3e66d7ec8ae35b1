"""What stays in FP32 in each plan, the base that the profile chooses, and what is shown to fit FP16."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from planned_models import CTR, artifact_of, graph_of, magnitudes_of, profile_of

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet, PrecisionPlan, Protection, Verdict, Wide
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT
from loka_onnx.core.statistics import TensorRange
from loka_onnx.errors import PlanningError
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.fp16 import LARGEST, MARGIN, count_places, scale_fits, unproven_places
from loka_onnx.planning.policy import PlanOptions, make_plans
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

TEXT = """(float[batch,32] x) => (float[batch,1] ctr) {
    [fc0] h0 = MatMul(x, w0)
    [act] r0 = Relu(h0)
    [join0] s0 = Add(x, r0)
    [norm] n = LayerNormalization(s0, gain)
    [fc1] h1 = MatMul(n, w1)
    [join1] s1 = Add(n, h1)
    [head] l = MatMul(s1, w_head)
    [heat__div] t = Div(l, temperature)
    [platt] p = Gemm(t, slope, shift)
    [sigmoid] ctr = Sigmoid(p)
}"""
SITES = ("fc0", "norm", "fc1", "head", "platt")
ENDS = {"heat/div", "sigmoid"}
BEHIND = "is computed behind the last product of output 'ctr'"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelArtifact:
    random = np.random.default_rng(0)
    constants = {"w0": random.normal(size=(32, 32)) / 4, "w1": random.normal(size=(32, 32)) / 4}
    constants |= {"w_head": random.normal(size=(32, 1)) / 4, "gain": np.ones(32)}
    constants |= {"temperature": np.array(1.7), "slope": np.array([[0.9]]), "shift": np.array([0.1])}
    found = artifact_of(tmp_path_factory.mktemp("model") / "m.onnx", TEXT, constants)
    assert tuple(site.name for site in found.sites) == SITES
    return found


def plan_of(model, plan_id, tensors=None, **options):
    profile = profile_of(model, {})
    if tensors is not None:
        profile = replace(profile, tensors=tensors)
    chosen = PlanOptions(plans=(plan_id,), **options)  # type: ignore[arg-type]
    plans = make_plans(model, profile, (CTR,), [PER_CHANNEL_WEIGHT], chosen)
    assert serde.loads(PlanSet, serde.dumps(plans)) == plans
    return plans.plan(plan_id)


def wide(plan: PrecisionPlan) -> set[str]:
    return {each.node for each in plan.wide}


@pytest.mark.parametrize("plan_id", ["bf16", "fp16", "fp8-all", "fp8-safe"])
def test_the_logit_end_stays_in_fp32(plan_id, model):
    plan = plan_of(model, plan_id)
    assert set(plan.wide) == {Wide("heat/div", BEHIND), Wide("sigmoid", BEHIND)}
    platt = plan.decision("platt")
    assert (platt.precision, platt.reason) == (Precision.FP32, "calibrates output 'ctr'")
    # The product that yields the logit is judged like any other.
    assert plan.decision("head").precision is (Precision.FP8 if plan_id == "fp8-all" else plan.base)


def test_protection_is_the_users_choice_and_a_node_that_is_kept_stays_in_fp32(model):
    nothing = plan_of(model, "fp8-all", protect=())
    assert nothing.wide == () and nothing.decision("platt").precision is Precision.FP8
    stream = plan_of(model, "fp8-all", protect=(Protection.RESIDUAL,))
    assert wide(stream) == {"join0", "join1"}
    assert stream.decision("norm").precision is Precision.FP32
    assert stream.decision("norm").reason == "carries the residual stream to the next block"
    both = plan_of(model, "fp8-all", protect=tuple(Protection))
    assert wide(both) == {"join0", "join1"} | ENDS
    plan = plan_of(model, "fp8-all", keep=("act", "fc1", "heat"))
    assert set(plan.wide) == {
        Wide("act", "kept by 'act'"),
        Wide("heat/div", "kept by 'heat'"),
        Wide("sigmoid", BEHIND),
    }
    assert plan.decision("fc1").precision is Precision.BF16
    # A site is kept by the name that it had before mods.
    sites = tuple(replace(s, merged_from=("q", "k") if s.name == "fc1" else ()) for s in model.sites)
    merged = plan_of(replace(model, sites=sites), "fp8-all", keep=("q",)).decision("fc1")
    assert merged.precision is Precision.BF16 and merged.reason.startswith("kept in bf16 by 'q'; ")


def test_an_overflow_stays_in_fp32_in_fp16_and_an_fp8_site_that_reads_it_even_if_forced(model):
    tensors = magnitudes_of(model, h0=TensorRange(7e4), r0=TensorRange(7e4))
    plan = plan_of(model, "fp16", tensors)
    why = "tensor 'h0' reaches 7e+04: 8 times that is beyond FP16's 65504"
    assert wide(plan) == {"act", "join0"} | ENDS
    assert next(each.reason for each in plan.wide if each.node == "act") == why
    assert (plan.decision("fc0").precision, plan.decision("fc0").reason) == (Precision.FP32, why)
    assert plan.decision("fc0").verdict is Verdict.NOT_JUDGED
    assert wide(plan_of(model, "bf16", tensors)) == ENDS
    tensors = magnitudes_of(model, n=TensorRange(7e4))
    for options in ({}, {"force": ("fc1",)}):
        plan = plan_of(model, "fp8-all", tensors, base=Precision.FP16, **options)
        assert plan.fp8_sites == ("fc0", "head")
        assert plan.decision("fc1").reason.startswith("tensor 'n' reaches 7e+04")
        assert plan.decision("norm").precision is Precision.FP32
    assert "fc1" in plan_of(model, "fp8-all", tensors).fp8_sites


def test_fp16_needs_what_calibration_was_not_asked_for(model):
    for plan_id, base in (("fp16", Precision.BF16), ("fp8-all", Precision.FP16), ("fp8-all", None)):
        with pytest.raises(PlanningError) as caught:
            plan_of(model, plan_id, {}, base=base)
        assert caught.value.code == "E0701"
    assert plan_of(model, "fp8-all", {}).base is Precision.BF16


def test_fp16_is_chosen_where_it_and_the_scales_fit(model):
    plan = plan_of(model, "fp8-safe", base=None)
    assert (plan.base, plan.base_reason) == (Precision.FP16, "8 times what was measured fits fp16")
    assert plan.decision("norm").precision is Precision.FP16
    assert plan_of(model, "bf16", base=None).base is Precision.BF16
    tensors = {name: TensorRange(7e4) for name in magnitudes_of(model)}
    plan = plan_of(model, "fp8-safe", tensors, base=None)
    assert plan.base is Precision.BF16 and wide(plan) == ENDS
    assert plan.base_reason.startswith("6 places are not shown to fit fp16")
    # Where a site is kept in the base precision, its reason names the base that was chosen.
    kept = plan_of(model, "fp8-safe", tensors, base=None, keep=("fc1",))
    assert kept.decision("fc1").reason.startswith("kept in bf16 by 'fc1'")
    options = PlanOptions(base=None, plans=("fp8-safe",))
    profile = profile_of(model, {}, scale=2.0**-15)
    plan = make_plans(model, profile, (CTR,), [PER_CHANNEL_WEIGHT], options).plan("fp8-safe")
    assert plan.base is Precision.BF16
    assert plan.base_reason == "site 'fc0' has a scale of 3.052e-05, which fp16 does not hold"


def planned(model: ModelArtifact, plan: PrecisionPlan, folder: Path) -> onnx.ModelProto:
    result = apply_plan(model, plan, PlanForm(plan.base), folder / f"{plan.id}.onnx")
    proto = onnx.load(result.path)
    onnx.checker.check_model(proto, full_check=True)
    casts = result.log.records[-1].applied
    assert {a.at for a in casts if a.what.startswith("kept in FP32 between casts: ")} == wide(plan)
    return proto


def types_of(proto: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True).graph
    infos = (*inferred.input, *inferred.output, *inferred.value_info)
    return {info.name: info.type.tensor_type.elem_type for info in infos}


@pytest.mark.parametrize("base", [Precision.BF16, Precision.FP16])
def test_the_adds_of_the_stream_read_the_exact_tensor(base, model, tmp_path):
    """In FP8 throughout: a Q stands between the stream and a product, never between it and the Add."""
    proto = planned(model, plan_of(model, "fp8-all", base=base), tmp_path)
    assert sum(node.op_type == "QuantizeLinear" for node in proto.graph.node) == 3
    quantized = {n.output[0] for n in proto.graph.node if n.op_type == "DequantizeLinear"}
    for name in ("join0", "join1"):
        (add,) = (node for node in proto.graph.node if node.name == name)
        assert quantized.isdisjoint(add.input)


@pytest.mark.parametrize("plan_id", ["bf16", "fp8-all"])
def test_the_logit_end_is_typed_fp32_and_the_head_is_not(plan_id, model, tmp_path):
    proto = planned(model, plan_of(model, plan_id), tmp_path)
    types = types_of(proto)
    assert types["l"] == TensorProto.BFLOAT16
    assert {types[name] for name in ("t", "p", "ctr")} == {TensorProto.FLOAT}
    names = {tensor.name for tensor in proto.graph.initializer}
    assert {"temperature", "slope", "shift"} <= names


def test_an_fp16_model_that_would_overflow_does_not(model, tmp_path):
    """Rows whose first product is 7e4 and more; ONNX Runtime would compute FP16 in FP32 on a CPU."""
    x = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32) * 4e4
    exact = OnnxSession(model.path).run({"x": x})["ctr"]
    full = magnitudes_of(model)
    ranges = {name: TensorRange(3e5) for name in ("x", "h0", "r0", "s0")}
    for tensors, holds in ((full | ranges, True), (full, False)):
        plan = plan_of(model, "fp16", tensors)
        folder = tmp_path / str(holds)
        proto = planned(model, plan, folder)
        with np.errstate(invalid="ignore", over="ignore"):
            (got,) = ReferenceEvaluator(proto).run(None, {"x": x})
        assert np.isfinite(got).all() == holds
        if holds:
            np.testing.assert_allclose(got, exact, rtol=0, atol=5e-3)
            np.testing.assert_allclose(
                OnnxSession(folder / "fp16.onnx").run({"x": x})["ctr"], exact, atol=5e-3
            )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("protect", [(), tuple(Protection)])
@pytest.mark.parametrize("base", [Precision.BF16, Precision.FP16])
def test_nvidias_builder_accepts_what_is_protected(base, protect, model, tmp_path):
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    tensors = magnitudes_of(model, h0=TensorRange(7e4))
    plan = plan_of(model, "fp8-all", tensors, base=base, protect=protect, keep=("act",))
    planned(model, plan, tmp_path)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(tmp_path / "fp8-all.onnx")), parser.get_error(0).desc()
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, 32), (64, 32), (64, 32))
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    assert builder.build_serialized_network(network, config) is not None


CONSTANTS = {
    "w": np.eye(8), "huge": np.array(-1e9), "edge": np.array(65504.0), "infinite": np.array(-np.inf),
    "epsilon": np.array(1e-12), "small": np.array(1e-7), "nought": np.array(0.0), "minus": np.array(-1.0),
    "last": np.array([1]), "first": np.array([0]),
}  # fmt: skip


def load(folder: Path, body: str) -> GraphModel:
    constants = {name: values for name, values in CONSTANTS.items() if name in body}
    return graph_of(folder / "m.onnx", f"(float[b,8] x) => (float[] y) {{ {body} }}", constants)


def ranges_of(model: GraphModel, **amax: float | TensorRange) -> dict[str, TensorRange]:
    """What is not given reaches 1, and is at least 0.5 where it is divided by."""
    computed = [t for node in model.nodes for t in node.outputs]
    known = {t.name: TensorRange(1.0, 0.5) for t in (*model.inputs, *computed)}
    return known | {k: v if isinstance(v, TensorRange) else TensorRange(v, v) for k, v in amax.items()}


def reasons(model: GraphModel, **amax: float | TensorRange) -> dict[str, str]:
    """By node; a node of several places has the first reason."""
    found: dict[str, str] = {}
    for place in unproven_places(model, ranges_of(model, **amax)):
        for node in place.nodes:
            found.setdefault(node, place.reason)
    return found


MLP = "h = MatMul(x, w) t = Transpose(h) r = Relu(t) s = Tanh(x) y = Add(r, s)"


def test_an_activation_of_70000_is_refused_with_a_margin_for_rows_that_were_not_seen(tmp_path):
    model = load(tmp_path, MLP)
    why = "tensor 'h' reaches 7e+04: 8 times that is beyond FP16's 65504"
    assert reasons(model, h=7e4, t=7e4) == dict.fromkeys(("inner/h", "inner/t", "inner/r"), why)
    # What is written, what is read, and the view are one place.
    assert count_places(unproven_places(model, ranges_of(model, h=7e4, t=7e4))) == 1
    assert reasons(model) == {}

    # So are a constant and what it makes: an attention mask.
    model = load(tmp_path, "s = Add(x, huge) y = Softmax(s)")
    places = unproven_places(model, ranges_of(model, s=1e9))
    assert {node for place in places for node in place.nodes} == {"inner/s", "inner/y"}
    assert (len(places), count_places(places)) == (2, 1)
    model = load(tmp_path, MLP)
    inside = LARGEST / MARGIN
    assert reasons(model, h=inside, t=inside) == {}
    assert set(reasons(model, r=np.nextafter(inside, np.inf))) == {"inner/r", "inner/y"}
    # What was not measured is not shown.
    ranges = ranges_of(model)
    del ranges["r"]
    (place,) = unproven_places(model, ranges)
    assert (place.nodes, place.reason) == (("inner/r", "inner/y"), "tensor 'r' was not measured")


@pytest.mark.parametrize(("body", "x", "expected"), [
    ("y = ReduceSum(x, last)", 8000.0, {}),
    ("y = ReduceSum(x, last)", LARGEST / 8, {}),
    ("y = ReduceSum(x, last)", 8190.0, "'inner/y' sums 8 terms of up to 8190; FP16 ends at 65504"),
    ("y = ReduceMean(x, last)", 8190.0, "'inner/y' sums 8 terms of up to 8190; FP16 ends at 65504"),
    ("y = ReduceSumSquare(x, last)", 90.0, {}),
    ("y = ReduceL2(x, last)", 91.0, "'inner/y' sums 8 terms of up to 8281; FP16 ends at 65504"),
    ("y = ReduceSum(x, first)", 1.0, "'inner/y' sums over an axis of unknown length"),
    ("y = ReduceMax(x, first)", 8000.0, {}),
])  # fmt: skip
def test_sums_are_bounded_whatever_their_order(body, x, expected, tmp_path):
    model = load(tmp_path, body)
    places = unproven_places(model, ranges_of(model, x=x))
    # The terms themselves may lack the margin; what is asked here is the sum.
    found = {place.nodes[0]: place.reason for place in places if "sums" in place.reason}
    assert found == (expected if isinstance(expected, dict) else {"inner/y": expected})


def test_constants_and_scales(tmp_path):
    for body, expected in (
        ("y = Add(x, huge)", "constant 'huge' of 'inner/y' holds 1e+09, FP16 ends at 65504"),
        ("y = Add(x, edge)", None),
        ("y = Max(x, infinite)", None),
        ("y = Add(x, epsilon)", "constant 'epsilon' of 'inner/y' is 1e-12, which is 0 in FP16"),
        ("y = Add(x, small)", None),
        ("y = Add(x, nought)", None),
    ):
        assert reasons(load(tmp_path, body)) == ({} if expected is None else {"inner/y": expected})
    held = [2.0**-14, 0.0078125, 1.0, 65280.0]
    lost = [2.0**-15, 2.24e-5, 1.0 + 2.0**-12, 2.0**16]
    assert [scale_fits(scale) for scale in held + lost] == [True] * 4 + [False] * 4


def l2_norm(floor: str) -> str:
    return (
        "q = Mul(x, x) s = ReduceSum(q, last) r = Sqrt(s)"
        f" m = Max(r, {floor}) t = Tanh(x) d = Div(t, m) y = Relu(d)"
    )


def test_a_guard_that_becomes_zero_keeps_all_of_the_divisor_in_fp32(tmp_path):
    found = reasons(load(tmp_path, l2_norm("epsilon")))
    assert set(found) == {"inner/q", "inner/s", "inner/r", "inner/m", "inner/d"}
    assert found["inner/s"] == "'inner/d' divides by 'm', which only 1e-12 keeps from 0; in FP16 that is 0"
    assert reasons(load(tmp_path, l2_norm("small"))) == {}


@pytest.mark.parametrize("result", ["Div(x, h)", "Reciprocal(h)", "Log(h)", "Pow(h, minus)"])
def test_what_is_divided_by_must_be_normal(result, tmp_path):
    model = load(tmp_path, f"h = Exp(x) y = {result}")
    assert reasons(model, h=TensorRange(1.0, 2.0**-14)) == {}
    why = "'inner/y' divides by 'h', which is as small as 6e-05; FP16 begins at 6.104e-05"
    assert reasons(model, h=TensorRange(1.0, 6e-5)) == dict.fromkeys(("inner/y", "inner/h"), why)
