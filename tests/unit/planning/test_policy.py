"""Verdicts, plans, and what users may ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_models import CTR, CVR, FLOPS, around, bare_profile, linear, profile_of, write_model

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PlanSet, PrecisionPlan, Verdict
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.errors import ConfigError, PlanningError
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.numerics.scales import amax_scale
from loka_onnx.planning.policy import (
    LABELLED_ALLOWANCE,
    NORM_ALLOWANCE,
    PlanOptions,
    judge_norms,
    judge_products,
    make_plans,
)

ALLOWED = CTR.budget * (1 - LABELLED_ALLOWANCE)
TOTAL = sum(FLOPS.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelArtifact:
    return write_model(tmp_path_factory.mktemp("model"))


def plan_of(
    model: ModelArtifact, kl: dict[str, Interval], plan_id: str = "fp8-safe", **options: object
) -> PrecisionPlan:
    chosen = PlanOptions(plans=(plan_id,), **options)  # type: ignore[arg-type]
    return make_plans(model, profile_of(model, kl), (CTR,), [PER_CHANNEL_WEIGHT], chosen).plan(plan_id)


def share(name: str, *gone: str) -> float:
    """What a site may spend once others have left."""
    return ALLOWED * FLOPS[name] / (TOTAL - sum(FLOPS[g] for g in gone))


# Verdicts ---------------------------------------------------------------------------------------------


def test_harmless_sites_are_safe(model: ModelArtifact) -> None:
    plan = plan_of(model, {})
    assert plan.fp8_sites == ("fc0", "fc1", "fc2")
    assert plan.decision("fc0").verdict is Verdict.SAFE
    assert plan.fp8_share == 1.0


def test_the_shares_follow_the_operations_and_sum_to_the_budget_less_the_allowance(
    model: ModelArtifact,
) -> None:
    almost = {name: around(share(name) * (1 - 1e-9)) for name in FLOPS}
    assert sum(kl.upper for kl in almost.values()) == pytest.approx(ALLOWED)
    assert plan_of(model, almost).fp8_sites == tuple(FLOPS)
    reason = plan_of(model, almost).decision("fc1").reason
    assert reason == ("KL 0.00714 % (95 % upper 0.00714 %) of the loss of 'ctr', inside its share 0.00714 %")


def test_the_upper_end_decides(model: ModelArtifact) -> None:
    plan = plan_of(model, {"fc1": around(0.9 * share("fc1"), 0.2 * share("fc1"))})
    decision = plan.decision("fc1")
    assert decision.verdict is Verdict.UNDECIDED
    assert decision.precision is Precision.BF16
    assert "astride its share" in decision.reason


def test_a_site_beyond_its_share_is_unsafe(model: ModelArtifact) -> None:
    decision = plan_of(model, {"fc1": around(2 * share("fc1"), 0.5 * share("fc1"))}).decision("fc1")
    assert (decision.verdict, decision.precision) == (Verdict.UNSAFE, Precision.BF16)
    assert "beyond its share" in decision.reason
    assert (decision.recipe, decision.activation_scale, decision.weight_scale) == (None, None, ())


def test_the_share_of_a_site_that_leaves_goes_to_those_that_stay(model: ModelArtifact) -> None:
    """fc0 needs more than its first share, and gets it when fc1 goes."""
    between = around((share("fc0") + share("fc0", "fc1")) / 2)
    assert plan_of(model, {"fc0": between}).fp8_sites == ("fc1", "fc2")
    plan = plan_of(model, {"fc0": between, "fc1": around(10 * share("fc1"))})
    assert plan.fp8_sites == ("fc0", "fc2")
    assert "inside its share 0.0167 %" in plan.decision("fc0").reason


def test_the_site_that_oversteps_most_leaves_first(model: ModelArtifact) -> None:
    """Were fc0 to leave first, fc1 would stay, and less would run in FP8."""
    kl = {"fc0": around(1.05 * share("fc0")), "fc1": around(1.1 * share("fc1"))}
    assert plan_of(model, kl).fp8_sites == ("fc0", "fc2")


def test_every_output_is_judged_and_the_worst_is_named(model: ModelArtifact) -> None:
    strict = replace(CVR, budget=CTR.budget / 10)
    profile = profile_of(model, {"fc1": around(0.5 * share("fc1"))}, (CTR, strict))
    plans = make_plans(model, profile, (CTR, strict), [PER_CHANNEL_WEIGHT])
    decision = plans.plan("fp8-safe").decision("fc1")
    assert decision.verdict is Verdict.UNSAFE
    assert "of the loss of 'cvr'" in decision.reason


def test_norms_are_judged_against_a_small_share_of_their_own(model: ModelArtifact) -> None:
    allowed = NORM_ALLOWANCE * ALLOWED
    assert plan_of(model, {"ln": around(allowed)}).decision("ln").precision is Precision.BF16
    unsafe = plan_of(model, {"ln": around(1.01 * allowed)})
    assert unsafe.decision("ln").precision is Precision.FP32
    assert unsafe.decision("ln").verdict is Verdict.UNSAFE
    # The products do not pay for it.
    assert unsafe.fp8_sites == ("fc0", "fc1", "fc2")


def test_norms_share_equally() -> None:
    def norm(name: str) -> Site:
        return Site(
            name, SiteKind.NORM, "LayerNormalization", (Operand("x", 0, False, None, ()),), "y", 8, 0, 1
        )

    half = around(NORM_ALLOWANCE * ALLOWED / 2)
    profile = bare_profile({"a": {"ctr": half}, "b": {"ctr": around(half.value * 1.01)}})
    verdicts = judge_norms([norm("a"), norm("b")], profile, (CTR,))
    assert [verdicts[n].verdict for n in "ab"] == [Verdict.SAFE, Verdict.UNSAFE]


@pytest.mark.parametrize("plan_id", ["bf16", "fp16"])
def test_an_unsafe_norm_stays_in_fp32_in_every_plan(model: ModelArtifact, plan_id: str) -> None:
    plan = plan_of(model, {"ln": around(1.0)}, plan_id)
    assert plan.decision("ln").precision is Precision.FP32
    assert plan.decision("ln").reason.endswith("; measured in bf16") is (plan_id == "fp16")
    assert plan.decision("fc0").precision is plan.base


# Plans ------------------------------------------------------------------------------------------------


def test_fp8_all_takes_every_linear_site_and_no_interaction(model: ModelArtifact) -> None:
    plan = plan_of(model, {"fc0": around(1.0)}, "fp8-all")
    assert plan.fp8_sites == ("fc0", "fc1", "fc2", "thin")
    assert plan.decision("fc0").verdict is Verdict.UNSAFE
    assert plan.decision("dot").precision is Precision.BF16
    assert plan.decision("dot").reason.startswith("a product of two activations runs in FP8 only when forced")


def test_a_thin_site_is_left_out_of_fp8_safe_with_the_reason(model: ModelArtifact) -> None:
    decision = plan_of(model, {}).decision("thin")
    assert decision.precision is Precision.BF16
    assert decision.reason.startswith("K = 16, N = 1: FP8 kernels want both to be at least 16; KL 0 %")


@pytest.mark.parametrize(("plan_id", "base"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_plans_without_fp8(model: ModelArtifact, plan_id: str, base: str) -> None:
    plan = plan_of(model, {}, plan_id)
    assert (plan.base, plan.fp8_sites, plan.predicted_kl, plan.fp8_share) == (base, (), {}, 0.0)
    assert {decision.precision for decision in plan.decisions} == {Precision(base)}


def test_predicted_kl_sums_the_chosen_sites_and_the_share_counts_their_operations(
    model: ModelArtifact,
) -> None:
    kl = {"fc0": around(1e-5, 5e-6), "fc2": around(2e-5), "fc1": around(1.0), "thin": around(3e-5)}
    safe, every = plan_of(model, kl), plan_of(model, kl, "fp8-all")
    assert safe.predicted_kl == {"ctr": pytest.approx(3e-5)}
    assert every.predicted_kl == {"ctr": pytest.approx(1.0 + 6e-5)}
    assert safe.fp8_share == pytest.approx((FLOPS["fc0"] + FLOPS["fc2"]) / TOTAL)
    assert every.fp8_share == 1.0  # the thin site is not FP8-able


def test_scales_come_from_the_profile_and_the_weights(model: ModelArtifact) -> None:
    decision = plan_of(model, {}).decision("fc1")
    weight = values_of(GraphModel.load(model.path).node("fc1").inputs[1])
    assert decision.recipe == PER_CHANNEL_WEIGHT
    assert decision.activation_scale == amax_scale(3.0, PER_CHANNEL_WEIGHT.format)
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
    between = around((share("fc0") + share("fc0", "fc1")) / 2)
    plan = plan_of(model, {"fc0": between}, keep=("fc1",))
    assert plan.fp8_sites == ("fc0", "fc2")
    assert plan.decision("fc1").reason.startswith("kept in bf16 by 'fc1'; KL 0 %")
    assert "fc1" not in plan_of(model, {}, "fp8-all", keep=("fc1",)).fp8_sites


def test_a_kept_norm_stays_in_fp32(model: ModelArtifact) -> None:
    decision = plan_of(model, {}, keep=("l*",)).decision("ln")
    assert (decision.precision, decision.reason) == (Precision.FP32, "kept by 'l*'")


def test_a_forced_site_runs_in_fp8_whatever_its_verdict(model: ModelArtifact) -> None:
    plan = plan_of(model, {"fc1": around(1.0)}, force=("fc1", "d*"))
    assert plan.fp8_sites == ("fc0", "fc1", "dot", "fc2")
    assert plan.decision("fc1").verdict is Verdict.UNSAFE
    assert plan.decision("fc1").reason.startswith("forced by 'fc1'; KL 100 %")
    assert plan.decision("dot").weight_scale == (amax_scale(3.0, PER_CHANNEL_WEIGHT.format),)
    assert plan.predicted_kl["ctr"] == pytest.approx(1.0)


def test_a_pattern_that_matches_nothing_names_the_nearest_site(model: ModelArtifact) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(model, {}, keep=("dott",))
    assert str(caught.value) == (
        "plan.keep: pattern 'dott' matches no site\n"
        "  evidence: the nearest of 6 sites is 'dot'\n"
        "  remedy: `loka-onnx export` lists the sites of a model"
    )


def test_a_norm_cannot_be_forced(model: ModelArtifact) -> None:
    with pytest.raises(ConfigError, match=r"plan\.force: pattern 'ln' matches no site"):
        plan_of(model, {}, force=("ln",))
    assert "ln" not in plan_of(model, {}, force=("*",)).fp8_sites


def test_a_site_both_kept_and_forced_is_refused(model: ModelArtifact) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(model, {}, keep=("fc*",), force=("*2",))
    assert str(caught.value) == (
        "site 'fc2' is both kept and forced\n"
        "  evidence: plan.keep has 'fc*', plan.force has '*2'\n"
        "  remedy: make one of the patterns narrower"
    )


def test_an_unknown_plan_is_refused(model: ModelArtifact) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(model, {}, "fp8-most")
    assert str(caught.value) == (
        "plan.plans: unknown plan 'fp8-most'\n"
        "  evidence: known are fp32, bf16, fp16, fp8-all, fp8-safe\n"
        "  remedy: remove it, or correct its name"
    )


def test_a_profile_of_another_model_is_refused(model: ModelArtifact) -> None:
    profile = profile_of(model, {})
    short = replace(profile, sites=profile.sites[1:])
    with pytest.raises(PlanningError, match="the profile says nothing of site 'fc0' and output 'ctr'"):
        make_plans(model, short, (CTR,), [PER_CHANNEL_WEIGHT])


# Properties -------------------------------------------------------------------------------------------

uppers = st.one_of(st.just(0.0), st.floats(1e-9, 1e-2))


@st.composite
def judged(draw: st.DrawFn) -> tuple[list[Site], Profile]:
    count = draw(st.integers(1, 8))
    sizes = st.sampled_from([16, 32, 256, 1024])
    sites = [linear(f"s{i}", draw(sizes), draw(sizes), draw(st.integers(1, 3))) for i in range(count)]
    kl = {}
    for site in sites:
        kl[site.name] = {
            output: Interval(value / 2, 0.0, value, 0.95, 100)
            for output, value in (("ctr", draw(uppers)), ("cvr", draw(uppers)))
        }
    return sites, bare_profile(kl)


def upper(profile: Profile, site: str, output: str) -> float:
    return profile.site(site).sensitivity("r", output).kl.upper


def safe(sites: list[Site], profile: Profile, outputs: tuple[OutputSpec, ...]) -> set[str]:
    verdicts = judge_products(sites, sites, profile, outputs)
    return {name for name, judgement in verdicts.items() if judgement.verdict is Verdict.SAFE}


@given(judged(), st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2))
def test_the_chosen_set_is_inside_every_budget(
    drawn: tuple[list[Site], Profile], first: float, second: float
) -> None:
    sites, profile = drawn
    outputs = (replace(CTR, budget=first), replace(CVR, budget=second))
    chosen = safe(sites, profile, outputs)
    for spec in outputs:
        spent = sum(upper(profile, name, spec.name) for name in chosen)
        assert spent <= spec.budget * (1 - LABELLED_ALLOWANCE) * (1 + 1e-12)


@given(judged(), st.floats(1e-6, 1e-2), st.floats(1.0, 100.0))
def test_a_larger_budget_keeps_what_a_smaller_one_chose(
    drawn: tuple[list[Site], Profile], budget: float, factor: float
) -> None:
    """When the budgets of all outputs grow alike: the order in which sites leave does not depend on them."""
    sites, profile = drawn
    small = tuple(replace(spec, budget=budget) for spec in (CTR, CVR))
    large = tuple(replace(spec, budget=budget * factor) for spec in (CTR, CVR))
    assert safe(sites, profile, small) <= safe(sites, profile, large)


def test_a_larger_budget_of_one_output_alone_may_lose_a_site() -> None:
    """Who leaves first depends on the ratio of the budgets.

    With equal budgets b leaves first, for its cvr, and c then has room. With three times the budget for cvr
    it is c that leaves first, for its ctr, and b has room.
    """
    sites = [linear("a", 16, 16), linear("b", 16, 16), linear("c", 16, 16)]
    unit = CTR.budget * (1 - LABELLED_ALLOWANCE) / 3
    kl = {
        "a": {"ctr": around(0.1 * unit), "cvr": around(0.1 * unit)},
        "b": {"ctr": around(0.1 * unit), "cvr": around(4.0 * unit)},
        "c": {"ctr": around(1.4 * unit), "cvr": around(0.1 * unit)},
    }
    profile = bare_profile(kl)
    assert safe(sites, profile, (CTR, CVR)) == {"a", "c"}
    raised = safe(sites, profile, (CTR, replace(CVR, budget=3 * CVR.budget)))
    assert raised == {"a", "b"}


@given(judged(), st.randoms(use_true_random=False))
def test_the_order_of_the_sites_does_not_matter(drawn: tuple[list[Site], Profile], random: object) -> None:
    sites, profile = drawn
    shuffled = list(sites)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    outputs = (CTR, CVR)
    assert judge_products(sites, sites, profile, outputs) == judge_products(
        shuffled, shuffled, profile, outputs
    )


def test_ties_are_settled_by_name() -> None:
    sites = [linear("a", 16, 16), linear("b", 16, 16)]
    over = around(0.6 * CTR.budget * (1 - LABELLED_ALLOWANCE))
    profile = bare_profile({"a": {"ctr": over}, "b": {"ctr": over}})
    assert safe(sites, profile, (CTR,)) == safe(sites[::-1], profile, (CTR,)) == {"a"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_site_whose_kl_is_not_a_number_is_not_safe(value: float) -> None:
    sites = [linear("a", 16, 16), linear("b", 16, 16)]
    profile = bare_profile(
        {"a": {"ctr": Interval(value, value, value, 0.95, 10)}, "b": {"ctr": around(ALLOWED)}}
    )
    # A comparison with NaN is false, so the order of the sites could matter.
    assert safe(sites, profile, (CTR,)) == safe(sites[::-1], profile, (CTR,)) == {"b"}


def test_a_budget_of_zero_accepts_only_what_changes_nothing() -> None:
    nothing = OutputSpec("ctr", OutputKind.LOGIT, "clicked", budget=0.0)
    profile = bare_profile({"a": {"ctr": around(0.0)}, "b": {"ctr": around(1e-12)}})
    assert safe([linear("a", 16, 16), linear("b", 16, 16)], profile, (nothing,)) == {"a"}


def test_a_model_without_fp8_able_sites_has_verdicts_all_the_same() -> None:
    profile = bare_profile({"a": {"ctr": around(2 * ALLOWED)}})
    verdicts = judge_products([linear("a", 8, 8)], [], profile, (CTR,))
    assert verdicts["a"].verdict is Verdict.UNSAFE


def test_reading_a_profile_does_not_change_it(model: ModelArtifact, tmp_path: Path) -> None:
    profile = profile_of(model, {"fc0": around(1.0)})
    before = serde.dumps(profile)
    make_plans(model, profile, (CTR,), [PER_CHANNEL_WEIGHT])
    assert serde.dumps(profile) == before
