"""Plans, and what users may ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned_models import CTR, FLOPS, kl_of, profile_of, write_model

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import RatioMoments
from loka_onnx.core.plan import PlanSet, PrecisionPlan, Verdict
from loka_onnx.core.profile import Sampling
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT
from loka_onnx.errors import ConfigError
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.planning.costs import LABELLED_ALLOWANCE
from loka_onnx.planning.judging import NORM_ALLOWANCE
from loka_onnx.planning.policy import PlanOptions, make_plans, open_verdicts

ALLOWED = CTR.budget * (1 - LABELLED_ALLOWANCE)
TOTAL = sum(FLOPS.values())
SCALE = 0.0078125
"""Of every activation in `profile_of`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelArtifact:
    return write_model(tmp_path_factory.mktemp("model"))


def plan_of(
    model: ModelArtifact, kl: dict[str, RatioMoments], plan_id: str = "fp8-safe", **options: object
) -> PrecisionPlan:
    chosen = PlanOptions(plans=(plan_id,), **options)  # type: ignore[arg-type]
    return make_plans(model, profile_of(model, kl), (CTR,), [PER_CHANNEL_WEIGHT], chosen).plan(plan_id)


def share(name: str) -> float:
    """KL that a site may spend whatever the others do."""
    return ALLOWED * FLOPS[name] / TOTAL


# Verdicts ---------------------------------------------------------------------------------------------


def test_harmless_sites_are_safe(model: ModelArtifact) -> None:
    plan = plan_of(model, {})
    assert plan.fp8_sites == ("fc0", "fc1", "fc2")
    assert plan.decision("fc0").verdict is Verdict.SAFE
    assert plan.fp8_share == 1.0


def test_the_shares_follow_the_operations_and_sum_to_the_budget_less_the_allowance(
    model: ModelArtifact,
) -> None:
    almost = {name: kl_of(share(name) * (1 - 1e-9)) for name in FLOPS}
    assert sum(kl.value for kl in almost.values()) == pytest.approx(ALLOWED)
    assert plan_of(model, almost).fp8_sites == tuple(FLOPS)
    # Three products and a norm, of which all are shown at once.
    assert "at 99.375 %, corrected for 4 bounds" in plan_of(model, almost).decision("fc1").reason


def test_a_site_beyond_what_the_others_leave_is_unsafe(model: ModelArtifact) -> None:
    decision = plan_of(model, {"fc1": kl_of(2 * ALLOWED, 0.2 * ALLOWED)}).decision("fc1")
    assert (decision.verdict, decision.precision) == (Verdict.UNSAFE, Precision.BF16)
    assert "beyond the 0.05 % that the others leave" in decision.reason
    assert (decision.recipe, decision.activation_scale, decision.weight_scale) == (None, None, ())


@pytest.mark.parametrize("plan_id", ["bf16", "fp16"])
def test_an_unsafe_norm_stays_in_fp32_in_every_plan(model: ModelArtifact, plan_id: str) -> None:
    plan = plan_of(model, {"ln": kl_of(1.0)}, plan_id)
    assert plan.decision("ln").precision is Precision.FP32
    assert plan.decision("ln").reason.endswith("; measured in bf16") is (plan_id == "fp16")
    assert plan.decision("fc0").precision is plan.base


# Open verdicts ----------------------------------------------------------------------------------------


def test_verdicts_are_open_where_more_rows_could_change_them(model: ModelArtifact) -> None:
    astride, norm = kl_of(ALLOWED, 1e-5), kl_of(NORM_ALLOWANCE * ALLOWED, 1e-5)
    kl = {"fc1": astride, "fc2": kl_of(1.0, 1e-3), "ln": norm, "thin": astride, "dot": astride}
    profile = profile_of(model, kl)
    # Neither what is decided nor what does not compete; in the model's order.
    assert open_verdicts(model, profile, (CTR,)) == ("ln", "fc1")
    assert open_verdicts(model, profile, (CTR,), PlanOptions(keep=("l*",))) == ("fc1",)
    assert open_verdicts(model, profile_of(model, {}), (CTR,)) == ()


def test_verdicts_close_as_rows_come_in(model: ModelArtifact) -> None:
    """The same spread of rows at four times as many rows, again and again: a standard error half as large."""
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


# Plans ------------------------------------------------------------------------------------------------


def test_fp8_all_takes_every_linear_site_and_no_interaction(model: ModelArtifact) -> None:
    plan = plan_of(model, {"fc0": kl_of(1.0)}, "fp8-all")
    assert plan.fp8_sites == ("fc0", "fc1", "fc2", "thin")
    assert plan.decision("fc0").verdict is Verdict.UNSAFE
    assert plan.decision("dot").precision is Precision.BF16
    assert plan.decision("dot").reason.startswith("a product of two activations runs in FP8 only when forced")


def test_predicted_kl_sums_the_chosen_sites_and_the_share_counts_their_operations(
    model: ModelArtifact,
) -> None:
    kl = {"fc0": kl_of(1e-5, 5e-7), "fc2": kl_of(2e-5), "fc1": kl_of(1.0), "thin": kl_of(3e-5)}
    safe, every = plan_of(model, kl), plan_of(model, kl, "fp8-all")
    assert safe.predicted_kl == {"ctr": pytest.approx(3e-5)}
    assert every.predicted_kl == {"ctr": pytest.approx(1.0 + 6e-5)}
    assert safe.fp8_share == pytest.approx((FLOPS["fc0"] + FLOPS["fc2"]) / TOTAL)
    assert every.fp8_share == 1.0  # the thin site is not FP8-able


def test_scales_come_from_the_profile_and_the_weights(model: ModelArtifact) -> None:
    decision = plan_of(model, {}).decision("fc1")
    weight = values_of(GraphModel.load(model.path).node("fc1").inputs[1])
    assert decision.recipe == PER_CHANNEL_WEIGHT
    assert decision.activation_scale == SCALE
    assert len(decision.weight_scale) == weight.shape[1]
    for scale, column in zip(decision.weight_scale, weight.T, strict=True):
        assert 1 <= scale * 448 / abs(column).max() <= 1 + 2**-7


def test_the_default_plans_in_order_and_as_json(model: ModelArtifact) -> None:
    plans = make_plans(model, profile_of(model, {}), (CTR,), [PER_CHANNEL_WEIGHT])
    assert [plan.id for plan in plans.plans] == ["fp32", "bf16", "fp8-all", "fp8-safe"]
    assert {plan.model_digest for plan in plans.plans} == {model.digest}
    assert [d.site for d in plans.plans[0].decisions] == [s.name for s in model.sites]
    assert serde.loads(PlanSet, serde.dumps(plans)) == plans


# What users ask for -----------------------------------------------------------------------------------


def test_a_kept_site_stays_and_leaves_its_share_to_the_others(model: ModelArtifact) -> None:
    """fc0 and fc2 need all of what is allowed but fc1's share, and a little more."""
    kl = {
        "fc1": kl_of(share("fc1") / 2),
        "fc0": kl_of(share("fc0") * 0.99),
        "fc2": kl_of(share("fc2") * 1.16),
    }
    assert plan_of(model, kl).fp8_sites == ("fc0", "fc1")
    plan = plan_of(model, kl, keep=("fc1",))
    assert plan.fp8_sites == ("fc0", "fc2")
    assert plan.decision("fc1").reason.startswith("kept in bf16 by 'fc1'; KL 0.00357 %")
    assert "fc1" not in plan_of(model, {}, "fp8-all", keep=("fc1",)).fp8_sites


def test_a_forced_site_runs_in_fp8_whatever_its_verdict(model: ModelArtifact) -> None:
    plan = plan_of(model, {"fc1": kl_of(1.0)}, force=("fc1", "d*"))
    assert plan.fp8_sites == ("fc0", "fc1", "dot", "fc2")
    assert plan.decision("fc1").verdict is Verdict.UNSAFE
    assert plan.decision("fc1").reason.startswith("forced by 'fc1'; KL 100 %")
    assert plan.decision("dot").weight_scale == (SCALE,)
    assert plan.predicted_kl["ctr"] == pytest.approx(1.0)


def test_a_pattern_that_matches_nothing_names_the_nearest_site(model: ModelArtifact) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(model, {}, keep=("dott",))
    assert caught.value.evidence == "the nearest of 6 sites is 'dot'"


def test_a_site_both_kept_and_forced_is_refused(model: ModelArtifact) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(model, {}, keep=("fc*",), force=("*2",))
    assert caught.value.evidence == "plan.keep has 'fc*', plan.force has '*2'"


def test_an_unknown_plan_is_refused(model: ModelArtifact) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(model, {}, "fp8-most")
    assert "unknown plan 'fp8-most'" in caught.value.what
