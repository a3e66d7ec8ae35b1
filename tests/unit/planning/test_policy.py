"""Plans, what users may ask for, and what their patterns name."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from planned_models import CTR, FLOPS, artifact_of, kl_of, linear, magnitudes_of, profile_of

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet, Verdict
from loka_onnx.core.profile import Sampling
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT
from loka_onnx.core.statistics import TensorRange
from loka_onnx.errors import ConfigError
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.planning.costs import LABELLED_ALLOWANCE
from loka_onnx.planning.judging import NORM_ALLOWANCE
from loka_onnx.planning.patterns import named_places
from loka_onnx.planning.policy import PlanOptions, make_plans, open_verdicts
from loka_onnx.transforms.norms.fold_batch_norm import FoldBatchNorm
from loka_onnx.transforms.sequence import apply_mods

ALLOWED = CTR.budget * (1 - LABELLED_ALLOWANCE)
TOTAL = sum(FLOPS.values())
SCALE = 0.0078125
"""Of every activation in `profile_of`."""


def plan_of(model, kl, plan_id="fp8-safe", **options):
    chosen = PlanOptions(plans=(plan_id,), **options)  # type: ignore[arg-type]
    return make_plans(model, profile_of(model, kl), (CTR,), [PER_CHANNEL_WEIGHT], chosen).plan(plan_id)


def share(name: str) -> float:
    """KL that a site may spend whatever the others do."""
    return ALLOWED * FLOPS[name] / TOTAL


def test_the_shares_follow_the_operations_and_sum_to_the_budget_less_the_allowance(model):
    almost = {name: kl_of(share(name) * (1 - 1e-9)) for name in FLOPS}
    assert sum(kl.value for kl in almost.values()) == pytest.approx(ALLOWED)
    plan = plan_of(model, almost)
    assert (plan.fp8_sites, plan.fp8_share) == (tuple(FLOPS), 1.0)
    assert plan.decision("fc0").verdict is Verdict.SAFE
    # Three products and a norm, of which all are shown at once.
    decision = plan.decision("fc1")
    assert "at 99.375 %, corrected for 4 bounds" in decision.reason
    # Scales come from the profile and the weights.
    weight = values_of(GraphModel.load(model.path).node("fc1").inputs[1])
    assert (decision.recipe, decision.activation_scale) == (PER_CHANNEL_WEIGHT, SCALE)
    for scale, column in zip(decision.weight_scale, weight.T, strict=True):
        assert 1 <= scale * 448 / abs(column).max() <= 1 + 2**-7


def test_unsafe_sites_stay_out_but_for_fp8_all_which_takes_every_linear_site_and_no_interaction(model):
    decision = plan_of(model, {"fc1": kl_of(2 * ALLOWED, 0.2 * ALLOWED)}).decision("fc1")
    assert (decision.verdict, decision.precision) == (Verdict.UNSAFE, Precision.BF16)
    assert "beyond the 0.05 % that the others leave" in decision.reason
    assert (decision.recipe, decision.activation_scale, decision.weight_scale) == (None, None, ())
    plan = plan_of(model, {"fc0": kl_of(1.0)}, "fp8-all")
    assert plan.fp8_sites == ("fc0", "fc1", "fc2", "thin")
    assert plan.decision("fc0").verdict is Verdict.UNSAFE
    assert plan.decision("dot").precision is Precision.BF16
    assert plan.decision("dot").reason.startswith("a product of two activations runs in FP8 only when forced")


@pytest.mark.parametrize("plan_id", ["bf16", "fp16"])
def test_an_unsafe_norm_stays_in_fp32_in_every_plan(model, plan_id):
    plan = plan_of(model, {"ln": kl_of(1.0)}, plan_id)
    assert plan.decision("ln").precision is Precision.FP32
    assert plan.decision("ln").reason.endswith("; measured in bf16") is (plan_id == "fp16")
    assert plan.decision("fc0").precision is plan.base


def test_verdicts_are_open_where_more_rows_could_change_them_and_close_as_rows_come_in(model):
    astride, norm = kl_of(ALLOWED, 1e-5), kl_of(NORM_ALLOWANCE * ALLOWED, 1e-5)
    kl = {"fc1": astride, "fc2": kl_of(1.0, 1e-3), "ln": norm, "thin": astride, "dot": astride}
    profile = profile_of(model, kl)
    # Neither what is decided nor what does not compete; in the model's order.
    assert open_verdicts(model, profile, (CTR,)) == ("ln", "fc1")
    assert open_verdicts(model, profile_of(model, {}), (CTR,)) == ()
    # The same spread of rows at four times as many rows, again and again: a standard error half as large.
    found = []
    for doublings in range(10):
        units = 2**6 * 4**doublings
        kl = {
            "fc1": kl_of(0.5 * ALLOWED, ALLOWED / units**0.5, units),
            "fc2": kl_of(0.4 * ALLOWED, ALLOWED / units**0.5, units),
        }
        profile = replace(profile_of(model, kl), sampling=Sampling(units, doublings + 2, 1024))
        found.append(open_verdicts(model, profile, (CTR,)))
    # fc2 costs less for each operation: it fits first, and fc1 beside it in the end.
    assert found[0] == ("fc1", "fc2") and ("fc1",) in found and found[-1] == ()
    assert sorted(found, key=len, reverse=True) == found


def test_predicted_kl_sums_the_chosen_sites_and_the_share_counts_their_operations(model):
    kl = {"fc0": kl_of(1e-5, 5e-7), "fc2": kl_of(2e-5), "fc1": kl_of(1.0), "thin": kl_of(3e-5)}
    safe, every = plan_of(model, kl), plan_of(model, kl, "fp8-all")
    assert safe.predicted_kl == {"ctr": pytest.approx(3e-5)}
    assert every.predicted_kl == {"ctr": pytest.approx(1.0 + 6e-5)}
    assert safe.fp8_share == pytest.approx((FLOPS["fc0"] + FLOPS["fc2"]) / TOTAL)
    assert every.fp8_share == 1.0  # the thin site is not FP8-able


def test_the_default_plans_in_order_and_as_json(model):
    plans = make_plans(model, profile_of(model, {}), (CTR,), [PER_CHANNEL_WEIGHT])
    assert [plan.id for plan in plans.plans] == ["fp32", "bf16", "fp8-all", "fp8-safe"]
    assert {plan.model_digest for plan in plans.plans} == {model.digest}
    assert [d.site for d in plans.plans[0].decisions] == [s.name for s in model.sites]
    assert serde.loads(PlanSet, serde.dumps(plans)) == plans


def test_a_kept_site_leaves_its_share_to_the_others_and_a_forced_one_runs_in_fp8(model):
    """fc0 and fc2 need all of what is allowed but fc1's share, and a little more."""
    parts = {"fc1": 0.5, "fc0": 0.99, "fc2": 1.16}
    kl = {name: kl_of(share(name) * part) for name, part in parts.items()}
    assert plan_of(model, kl).fp8_sites == ("fc0", "fc1")
    plan = plan_of(model, kl, keep=("fc1",))
    assert plan.fp8_sites == ("fc0", "fc2")
    assert plan.decision("fc1").reason.startswith("kept in bf16 by 'fc1'; KL 0.00357 %")
    assert "fc1" not in plan_of(model, {}, "fp8-all", keep=("fc1",)).fp8_sites
    plan = plan_of(model, {"fc1": kl_of(1.0)}, force=("fc1", "d*"))
    assert plan.fp8_sites == ("fc0", "fc1", "dot", "fc2")
    assert plan.decision("fc1").verdict is Verdict.UNSAFE
    assert plan.decision("fc1").reason.startswith("forced by 'fc1'; KL 100 %")
    assert plan.decision("dot").weight_scale == (SCALE,)
    assert plan.predicted_kl["ctr"] == pytest.approx(1.0)


def test_the_untouched_plan_is_for_the_exported_model_in_fp16_where_it_fits(model, tmp_path):
    wide = artifact_of(
        tmp_path / "exported.onnx",
        """(float[batch,32] x) => (float[batch,1] ctr) {
            [first] h = MatMul(x, w0)
            [ln] n = LayerNormalization(h, g)
            [twice] m = Add(n, n)
            [thin] ctr = MatMul(m, w1)
        }""",
        {"w0": np.ones((32, 64)), "w1": np.ones((64, 1)), "g": np.ones(64)},
    )
    known = replace(profile_of(model, {}), tensors=magnitudes_of(wide))

    def untouched(profile=known, **changes):
        options = PlanOptions(plans=("fp32", "untouched"), exported=wide, **changes)
        return make_plans(model, profile, (CTR,), [PER_CHANNEL_WEIGHT], options).plan("untouched")

    plan = untouched()
    assert (plan.untouched, plan.model_digest, plan.base) == (True, wide.digest, Precision.FP16)
    assert [(d.site, d.precision) for d in plan.decisions] == [
        (site, Precision.FP16) for site in ("first", "ln", "thin")
    ]
    assert (plan.quantized_sites, plan.wide, plan.predicted_us) == ((), (), {})
    # Named in the exported model: a norm and a node, in FP32; a product stays in the base precision.
    kept = untouched(keep=("ln", "twice", "first"))
    assert {d.site for d in kept.decisions if d.precision is Precision.FP32} == {"ln"}
    assert [item.node for item in kept.wide] == ["twice"]
    # What does not fit stays in FP32.
    huge = known.tensors | {"m": TensorRange(1e6, 0.5)}
    assert {item.node for item in untouched(replace(known, tensors=huge)).wide} == {"twice"}
    # No magnitudes are known: BF16.
    assert untouched(replace(known, tensors={})).base is Precision.BF16
    assert serde.loads(PlanSet, serde.dumps(PlanSet((plan,)))).plans == (plan,)


@pytest.mark.parametrize(("plan_id", "keep", "force", "code", "evidence"), [
    ("fp8-safe", ("dott",), (), "E0706", "the nearest of 6 sites is 'dot'"),
    ("fp8-safe", ("fc*",), ("*2",), "E0705", "plan.keep has 'fc*', plan.force has '*2'"),
    ("fp8-most", (), (), "E0707", "known are fp32, bf16, fp16, fp8-all, "),
])  # fmt: skip
def test_what_cannot_be_is_refused(model, plan_id, keep, force, code, evidence):
    with pytest.raises(ConfigError) as caught:
        plan_of(model, {}, plan_id, keep=keep, force=force)
    assert caught.value.code == code and caught.value.evidence.startswith(evidence)


SITES = (
    linear("bottom.fc1"),
    replace(linear("experts.0.fc1+63_more"), merged_from=("experts.0.fc1", "experts.17.fc1")),
    linear("tower.calibrator.fc"),
    linear("head"),
)
NODES = ("bottom/relu", "tower.scale/mul", "tower.scale/add", "/div")


@pytest.mark.parametrize(("pattern", "sites", "nodes"), [
    ("*.fc1", ["bottom.fc1", "experts.0.fc1+63_more"], []),
    ("bottom", ["bottom.fc1"], []),
    ("*.calibrator", ["tower.calibrator.fc"], []),
    # A name from before the mods.
    ("experts.17.fc1", ["experts.0.fc1+63_more"], []),
    ("experts.17", ["experts.0.fc1+63_more"], []),
    ("tower*", ["tower.calibrator.fc"], []),
    # A pattern that names no site names nodes.
    ("tower.scale", [], ["tower.scale/mul", "tower.scale/add"]),
    ("*.scale/mul", [], ["tower.scale/mul"]),
    ("/div", [], ["/div"]),
    ("*relu", [], ["bottom/relu"]),
])  # fmt: skip
def test_sites_and_nodes(pattern, sites, nodes):
    named = named_places((pattern, "head"), SITES, NODES, "plan.keep")
    assert named.sites == dict.fromkeys(sites, pattern) | {"head": "head"}
    assert named.nodes == dict.fromkeys(nodes, pattern)


@pytest.mark.parametrize("pattern", ["fc1", "experts.18.fc1", "tow", "scale", "tower.scale/m"])
def test_what_is_near_is_named_in_the_refusal(pattern):
    with pytest.raises(ConfigError) as caught:
        named_places((pattern,), SITES, NODES, "plan.keep")
    assert caught.value.code == "E0706" and pattern in caught.value.what
    if pattern == "experts.18.fc1":
        assert caught.value.evidence == "the nearest of 4 sites is 'experts.17.fc1'"


GONE = "decides nothing: mods removed all that it names in the exported model"


@dataclass(frozen=True)
class Models:
    exported: ModelArtifact
    modified: ModelArtifact


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A linear, its BatchNorm `tower/bn`, a ReLU and a head; the BatchNorm is folded into the linear."""
    folder = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(0)
    constants = {"w0": random.normal(size=(32, 16)), "w1": random.normal(size=(16, 1))}
    constants |= {"gain": np.ones(16), "shift": np.ones(16), "mean": np.zeros(16), "variance": np.ones(16)}
    exported = artifact_of(folder / "exported.onnx", "(float[batch,32] x) => (float[batch,1] ctr) {"
        "[fc0] h = MatMul(x, w0) [tower__bn] n = BatchNormalization(h, gain, shift, mean, variance)"
        " [act] a = Relu(n) [head] ctr = MatMul(a, w1) }", constants)  # fmt: skip
    rows = {"x": random.normal(size=(8, 32)).astype(np.float32)}
    modified = apply_mods(exported, [rows], folder / "modified.onnx", [FoldBatchNorm()]).model
    assert "tower/bn" not in {node.name for node in GraphModel.load(modified.path).nodes}
    return Models(exported, modified)


def plans_of(model: ModelArtifact, options: PlanOptions) -> PlanSet:
    return make_plans(model, profile_of(model, {}), (CTR,), [PER_CHANNEL_WEIGHT], options)


@pytest.mark.parametrize("pattern", ["tower/bn", "tower", "*/bn"])
def test_what_mods_removed_is_told(models, pattern):
    with pytest.raises(ConfigError):
        plans_of(models.modified, PlanOptions(keep=(pattern,)))
    plans = plans_of(models.modified, PlanOptions(keep=(pattern, "fc0"), exported=models.exported))
    assert plans.notes == (f"'{pattern}' of plan.keep {GONE}",)
    assert plans.plan("fp8-all").decision("fc0").reason.startswith("kept in bf16 by 'fc0'")
    assert serde.loads(PlanSet, serde.dumps(plans)) == plans


def test_a_forced_site_that_mods_removed_is_told_but_not_a_node_nor_what_neither_model_has(models):
    with pytest.raises(ConfigError) as caught:
        plans_of(models.modified, PlanOptions(keep=("tower/bn", "haed"), exported=models.exported))
    assert "'haed'" in caught.value.what and "'head'" in caught.value.evidence
    (fc0, head) = models.exported.sites
    exported = replace(models.exported, sites=(fc0, replace(head, name="folded.fc"), head))
    options = PlanOptions(force=("folded.fc",), exported=exported)
    assert plans_of(models.modified, options).notes == (f"'folded.fc' of plan.force {GONE}",)
    with pytest.raises(ConfigError) as caught:
        plans_of(models.modified, PlanOptions(force=("tower/bn",), exported=exported))
    assert (caught.value.code, caught.value.where) == ("E0706", "plan.force")
