"""Which sites go, in which order, and how many, by figures of hand; how much of its error one may keep."""

from dataclasses import replace
from itertools import pairwise
from math import sqrt

import numpy as np
import pytest
from planned_models import CTR, CVR, FLOPS, group, kl_of, profile_of

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact, OutputKind
from loka_onnx.core.evaluation import (
    BudgetStatus,
    Evaluation,
    OutputEvaluation,
    PairedDifference,
    TaskMetrics,
)
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import Decision, PrecisionPlan, SiteSpeed, SpeedVerdict, Verdict
from loka_onnx.core.profile import Profile, SiteProfile
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR
from loka_onnx.core.refinement import Returned
from loka_onnx.planning.climbing import Goal, affordable_kl
from loka_onnx.planning.high_error_channels import LEAST, MOST, SURE, errors_to_leave
from loka_onnx.planning.ladder import ROOM, Ladder
from loka_onnx.planning.policy import PlanOptions

KL = {"fc0": kl_of(1e-4), "fc1": kl_of(4e-4), "fc2": kl_of(1e-4)}
"""Of a budget of 1e-3, of which half is allowed to KL. For each operation fc1 costs most, fc2 least."""


def plan(model: ModelArtifact, *fp8: str) -> PrecisionPlan:
    decisions = tuple(
        Decision(site.name, Precision.FP8, PER_TENSOR, Verdict.SAFE, "far inside", 1.0, (1.0,))
        if site.name in fp8
        else Decision(site.name, Precision.BF16, None, Verdict.NOT_JUDGED, "")
        for site in model.sites
    )
    share = sum(FLOPS[name] for name in fp8) / sum(FLOPS.values())
    return PrecisionPlan("fp8-all", model.digest, Precision.BF16, decisions, {"ctr": 6e-4}, share)


def measured(kl: float, upper: float, output: str = "ctr", budget: float = CTR.budget) -> OutputEvaluation:
    judged = Interval((kl + upper) / 2, kl, upper, 0.95, 1000)
    difference = PairedDifference(
        "loss", judged, Interval(kl, kl, kl, 0.95, 1000), judged, None, None, 0.0, 0.0
    )
    metrics = TaskMetrics(0.5, 0.9, 0.8, 1.0)
    return OutputEvaluation(output, OutputKind.LOGIT, metrics, difference, budget, BudgetStatus.BEYOND, None)


def evaluation(*outputs: OutputEvaluation) -> Evaluation:
    return Evaluation("e", "trt", "fp8-all", "gpu", "selection", 1000, outputs, (), "measured")


ALL = ("fc0", "fc1", "fc2")


def test_the_worst_goes_first_and_no_more_than_needed(model):
    assert ROOM * CTR.budget == pytest.approx(9e-4)
    assert 4e-4 + 8e-4 * sqrt(1 / 3) < 9e-4
    giving = Ladder(model, profile_of(model, KL), (CTR,), ())
    found = giving.revert_sites(plan(model, *ALL), evaluation(measured(1.2e-3, 2e-3)), "gpu")
    assert [each.sites for each in found.returned] == [("fc1",)]
    # 4e-4 of the 5e-4 that are allowed to KL; no times are known.
    assert (found.returned[0].kl, found.returned[0].saved_us) == (pytest.approx(0.8), None)
    assert found.plan.fp8_sites == ("fc0", "fc2")
    assert found.plan.fp8_share == pytest.approx((FLOPS["fc0"] + FLOPS["fc2"]) / sum(FLOPS.values()))
    assert found.plan.predicted_kl == {"ctr": pytest.approx(2e-4)}
    decision = found.plan.decision("fc1")
    assert (decision.precision, decision.recipe, decision.activation_scale) == (Precision.BF16, None, None)
    assert decision.reason == "given back: the engine of 'fp8-all' is not inside the budget; far inside"
    assert serde.loads(PrecisionPlan, serde.dumps(found.plan)) == found.plan


def speed(site: str, saved_us: float, tensor: str, quantize_us: float = 0.0) -> SiteSpeed:
    verdict = SpeedVerdict.FAST if saved_us > 0 else SpeedVerdict.SLOW
    return SiteSpeed(site, "gpu", verdict, {"10": saved_us}, {"10": quantize_us}, tensor, True, "")


SPEEDS = (speed("fc0", 2.0, "x", 1.0), speed("fc1", 50.0, "n"), speed("fc2", 4.0, "f"))


def test_known_times_decide_what_is_worth_its_cost_and_the_predicted_time_follows(model):
    giving = Ladder(model, profile_of(model, KL), (CTR,), SPEEDS)
    found = giving.revert_sites(plan(model, *ALL), evaluation(measured(1e-3, 1.05e-3)), "gpu")
    assert [each.sites for each in found.returned] == [("fc0",)]
    assert found.returned[0].saved_us == pytest.approx(0.1)
    # Times of another device say nothing of this one.
    other = giving.revert_sites(plan(model, *ALL), evaluation(measured(1e-3, 1.05e-3)), "another")
    assert [each.sites for each in other.returned] == [("fc1",)]
    giving = Ladder(model, profile_of(model, KL), (CTR,), SPEEDS)
    known = replace(plan(model, *ALL), predicted_us={"gpu": {"10": 100.0}, "b": {"10": 7.0}}, device="gpu")
    found = giving.revert_sites(known, evaluation(measured(1e-3, 1.05e-3)), "gpu")
    # What fc0 saved is put back, and its quantize step is not needed any more.
    assert found.plan.predicted_us == {"gpu": {"10": pytest.approx(100.0 + 2.0 - 1.0)}}
    shared = (speed("fc0", 2.0, "x", 1.0), speed("fc1", 50.0, "x", 1.0), SPEEDS[2])
    kept = Ladder(model, profile_of(model, KL), (CTR,), shared)
    still = kept.revert_sites(known, evaluation(measured(1e-3, 1.05e-3)), "gpu")
    # Who else reads the tensor still needs the step.
    assert still.returned == (Returned(("fc0",), pytest.approx(0.2), 0.2),)
    assert still.plan.predicted_us == {"gpu": {"10": pytest.approx(102.0)}}


def test_sites_that_share_a_tensor_go_together_and_what_the_user_forced_stays(model):
    profile = replace(profile_of(model, KL), groups=(group("x", ("fc0", "fc1"), {"ctr": kl_of(4.5e-4)}),))
    quick = (speed("fc0", 2.0, "x", 1.0), speed("fc1", 2.0, "x", 1.0), SPEEDS[2])
    giving = Ladder(model, profile, (CTR,), quick)
    # Together they cost 4.5e-4 of 5.5e-4: 2/11 is left.
    found = giving.revert_sites(plan(model, *ALL), evaluation(measured(1.1e-3, 1.5e-3)), "gpu")
    assert [each.sites for each in found.returned] == [("fc0", "fc1")]
    # Where nothing is timed, no step is shared.
    assert giving.rungs(ALL, "another")[1:] == tuple(map(frozenset, (("fc2",), ("fc0", "fc2"), ALL)))
    assert found.returned[0].kl == pytest.approx(0.9)
    assert found.plan.predicted_kl == {"ctr": pytest.approx(1e-4)}
    giving = Ladder(model, profile_of(model, KL), (CTR,), (), forced=("fc1",))
    missed = evaluation(measured(6e-4, 1.05e-3))
    found = giving.revert_sites(plan(model, *ALL), missed, "gpu")
    assert "fc1" in found.plan.fp8_sites
    assert giving.revert_sites(plan(model, "fc1"), missed, "gpu") is None
    rungs = giving.rungs(ALL)
    assert rungs[0] == {"fc1"} and len(rungs) == 3


def test_every_output_must_fit_and_what_takes_the_whole_budget_stands_behind_all_others(model):
    giving = Ladder(model, profile_of(model, KL, (CTR, CVR)), (CTR, CVR), ())
    both = evaluation(measured(1e-4, 2e-4), measured(1.2e-3, 2.4e-3, "cvr"))
    found = giving.revert_sites(plan(model, *ALL), both, "gpu")
    # The output that is inside alone would need nothing.
    assert [each.sites for each in found.returned] == [("fc1",), ("fc0",)]
    # For each operation fc2 costs less than fc1, and no rung with it fits.
    kl = {"fc0": kl_of(1e-5), "fc1": kl_of(5e-4), "fc2": kl_of(1.1 * CTR.budget)}
    assert 1.1 * CTR.budget / FLOPS["fc2"] < 5e-4 / FLOPS["fc1"]
    rungs = Ladder(model, profile_of(model, kl), (CTR,), ()).rungs(ALL)
    assert rungs == tuple(map(frozenset, ((), ("fc0",), ("fc0", "fc1"), ALL)))


def random_kl(seed: int, largest: float = 9e-4) -> dict[str, float]:
    random = np.random.default_rng(seed)
    return dict(zip(ALL, (largest * random.random(len(ALL))).tolist(), strict=True))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("device", ["gpu", "another"])
def test_rungs_are_nested_and_each_site_is_worth_more_than_the_next(model, seed, device):
    kl = random_kl(seed)
    ladder = Ladder(model, profile_of(model, {n: kl_of(v) for n, v in kl.items()}), (CTR,), SPEEDS)
    rungs = ladder.rungs(ALL, device)
    assert rungs[0] == frozenset() and rungs[-1] == frozenset(ALL) and len(rungs) == len(ALL) + 1
    assert all(lower < higher for lower, higher in pairwise(rungs))
    saved = {"fc0": 1.0, "fc1": 50.0, "fc2": 4.0} if device == "gpu" else FLOPS
    order = [min(higher - lower) for lower, higher in pairwise(rungs)]
    assert order == sorted(ALL, key=lambda name: kl[name] / saved[name])


@pytest.mark.parametrize("seed", range(4))
def test_no_label_moves_a_site(model, seed):
    """Other labels are other labelled parts, and the same KL."""
    profile = profile_of(model, {name: kl_of(value) for name, value in random_kl(seed).items()})
    random = np.random.default_rng(seed)

    def relabelled(entry: SiteProfile) -> SiteProfile:
        parts = (replace(s, labelled_moments=kl_of(float(random.normal()))) for s in entry.sensitivities)
        return replace(entry, sensitivities=tuple(parts))

    other = replace(profile, sites=tuple(map(relabelled, profile.sites)))
    assert other != profile
    for device in ("gpu", "another"):
        before, after = (Ladder(model, p, (CTR,), SPEEDS).rungs(ALL, device) for p in (profile, other))
        assert before == after


ROWS = {"selection": 100_000, "certification": 100_000}
AFFORDABLE = affordable_kl(CTR.budget, Goal.of(0, 0.05), ROWS)
"""KL of all products together that certification should pass."""
SURE_TO_PASS = 0.99 * affordable_kl(CTR.budget, replace(Goal.of(0, 0.05), chance=SURE), ROWS)
"""And one that it is all but sure to pass."""


def left_of(model: ModelArtifact, profile: Profile, *keep: str) -> dict[str, float]:
    return errors_to_leave(model, profile, (CTR,), (PER_CHANNEL_WEIGHT,), PlanOptions(keep=keep), ROWS)


def test_sites_that_do_not_fit_share_a_part_of_what_the_others_leave(model):
    kl = {"fc0": kl_of(5 * AFFORDABLE), "fc1": kl_of(0.2 * AFFORDABLE), "fc2": kl_of(20 * AFFORDABLE)}
    left = left_of(model, profile_of(model, kl))
    assert left == pytest.approx({"fc0": 0.8 / 2 / 5, "fc2": 0.8 / 2 / 20})
    # Where little is left, a part of all is shared.
    kl = {"fc0": kl_of(5 * AFFORDABLE), "fc1": kl_of(SURE_TO_PASS)}
    room = max(LEAST, 1.0 - SURE_TO_PASS / AFFORDABLE)
    assert left_of(model, profile_of(model, kl)) == pytest.approx({"fc0": room / 5})
    # A site that would only just pass is cut down.
    profile = profile_of(model, {"fc0": kl_of(SURE_TO_PASS), "fc1": kl_of(0.98 * AFFORDABLE - SURE_TO_PASS)})
    assert list(left_of(model, profile).values()) == [MOST]


def test_fitting_kept_and_thin_sites_are_left_out(model):
    harm = kl_of(5 * AFFORDABLE)
    profile = profile_of(model, {"fc0": harm, "thin": harm, "dot": harm})
    assert set(left_of(model, profile)) == {"fc0"}
    assert left_of(model, profile, "fc0") == {}
    assert left_of(model, profile_of(model, {})) == {}
