"""What is emitted where what would be chosen cannot be: it missed the budget, failed, or ran elsewhere."""

from dataclasses import replace

import pytest
from choice_cases import (
    BEYOND,
    BF16,
    FP32,
    PLANS,
    SPLITS,
    UNDECIDED,
    WITHIN,
    Candidate,
    chosen,
    on_both,
    only,
    plan,
    reasons,
)

from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus
from loka_onnx.core.evaluation import Choice, Evaluation, EvaluationSet, Why
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet
from loka_onnx.errors import PlanningError
from loka_onnx.planning.choice import MEASURED, OTHER_DEVICE, PROVISIONAL, choose, not_certified


@pytest.mark.parametrize(("candidates", "evidence"), [
    ((Candidate("fp32", None, (), BuildStatus.FAILED, detail="out of memory"), Candidate("fp8-safe", 100, (
        BEYOND,)), Candidate("bf16", 200, (UNDECIDED,))),
        "gpu-trt-sm90-fp8-safe: beyond the budget on selection; "
        "gpu-trt-sm90-bf16: undecided against the budget on selection"),
    ((Candidate("fp8-all", 1, simulated=True),), "gpu-trt-sm90-fp8-all: simulated, inside the budget"),
    ((Candidate("fp8-safe", 1, (BEYOND,)),), "gpu-trt-sm90-fp8-safe: beyond the budget on selection"),
])  # fmt: skip
def test_what_was_seen_outside_the_budget_is_never_emitted(candidates, evidence):
    with pytest.raises(PlanningError) as caught:
        chosen(*candidates)
    assert (caught.value.code, caught.value.evidence) == ("E0703", evidence)
    # The exact model is what a run falls back on, whatever its own rounding was judged as.
    assert only(*candidates[1:], Candidate("fp32", 400, (UNDECIDED,))).plan == "fp32"


def test_what_missed_on_certification_is_not_what_it_falls_back_on():
    fp8, bf16, fp16 = Candidate("fp8-all", 100), BF16, Candidate("fp16", 210)
    bad_fp8, bad_bf16, bad_fp16 = (Candidate(c.plan, c.us, (BEYOND,)) for c in (fp8, bf16, fp16))
    for selection, certification in (
        ([bf16], [bad_bf16]),
        ([fp8], [bad_fp8]),
        ([fp8, bf16], [bad_fp8, bad_bf16]),
        # FP16 is more exact and was looked at; BF16 in its place would be chosen by what only certifies.
        ([fp8, bf16, fp16], [bad_fp8, bf16, bad_fp16]),
    ):
        with pytest.raises(PlanningError) as caught:
            on_both(selection, certification)
        assert caught.value.code == "E0703"
        assert f"{selection[0].engine().id}: beyond the budget on certification" in caught.value.evidence
    assert on_both([fp8, bf16, fp16], [bad_fp8, bad_bf16, fp16]).plan == "fp16"
    # The exact model stays what it is.
    assert on_both([FP32], [Candidate("fp32", 400, (BEYOND,))]).plan == "fp32"


def test_an_engine_that_failed_after_its_build_lost_by_that():
    fp8, fp16 = Candidate("fp8-all", 10), Candidate("fp16", 20)
    died, crashed = "at batch 2048: the worker died", "failed on selection: out of memory"
    evaluations: list[Evaluation] = []
    for split in SPLITS:
        evaluations += [c.evaluation(split) for c in (FP32, BF16)]
        evaluations.append(replace(fp8.evaluation(split), latencies=(), latency_failure=died))
        evaluations.append(replace(fp16.evaluation(split), outputs=(), latencies=(), status=crashed))
    engines = [candidate.engine() for candidate in (FP32, BF16, fp8, fp16)]
    (target,) = choose(engines, EvaluationSet(tuple(evaluations)), PLANS).targets
    assert target.plan == "bf16"
    assert {loser.engine: (loser.why, loser.reason) for loser in target.losers[1:]} == {
        engines[2].id: (Why.FAILED, f"failed while it was timed: {died}; accuracy inside the budget"),
        engines[3].id: (Why.FAILED, crashed),
    }


def on_h200(plan_id: str, us: float, accuracy: str = WITHIN) -> Candidate:
    """The H200 is sm90 like the H100, and loads what was built for it."""
    return Candidate(plan_id, us, (accuracy,), counts=False)


def test_what_another_device_takes_does_not_choose():
    exact, fp8, slow = on_h200("fp32", 400), on_h200("fp8-all", 1), on_h200("bf16", 900)
    target = only(exact, slow, fp8)
    assert (target.plan, target.basis) == ("fp8-all", OTHER_DEVICE)
    assert {loser.why for loser in target.losers} == {Why.OTHER_DEVICE}
    # Fewer sites in FP8 would be faster by these times; they say nothing.
    assert only(exact, on_h200("fp8-safe", 1), on_h200("fp8-all", 900)).plan == "fp8-all"
    fallen = only(exact, slow, on_h200("fp8-all", 1, BEYOND))
    assert (fallen.plan, fallen.basis) == ("bf16", OTHER_DEVICE)
    # One that was timed on the target decides alone.
    mixed = only(FP32, fp8)
    assert (mixed.plan, mixed.basis) == ("fp32", MEASURED)
    assert mixed.losers[0].why is Why.OTHER_DEVICE


def test_a_batch_size_that_every_engine_fails_at_is_not_forgotten():
    """What was timed at the smaller sizes would be fast, and answers no request of the largest."""
    bf16, fp8, exact = Candidate("bf16", 20), Candidate("fp8-all", 10), Candidate("fp32")
    died = [
        replace(c.evaluation(split), latency_failure="at batch 2048: out of memory")
        for split in SPLITS
        for c in (bf16, fp8)
    ]
    engines = [bf16.engine(), fp8.engine()]
    with pytest.raises(PlanningError) as caught:
        choose(engines, EvaluationSet(tuple(died)), PLANS)
    assert all(f"{engine.id}: failed while it was timed" in caught.value.evidence for engine in engines)
    # An engine without a speed that failed nowhere is better than those.
    known = EvaluationSet((*died, *(exact.evaluation(split) for split in SPLITS)))
    (target,) = choose([*engines, exact.engine()], known, PLANS).targets
    assert target.plan == "fp32"
    assert [loser.why for loser in target.losers] == [Why.FAILED, Why.FAILED]


def test_a_simulation_is_not_emitted_for_want_of_speeds_and_must_hold_on_both_splits():
    real = Candidate("fp8-all", 10, counts=False, fallbacks=1)
    simulation = Candidate("fp8-all", 1, counts=False, simulated=True, backend="ort")
    target = only(on_h200("fp32", 400), simulation, real)
    assert (target.engine, target.basis) == (real.engine().id, OTHER_DEVICE)
    assert {loser.engine: loser.why for loser in target.losers}[simulation.engine().id] is Why.SIMULATED
    # In simulation alone it is inside the budget, and there is no engine for it.
    assert only(on_h200("fp32", 400), simulation).plan == "fp32"
    built = [absent("bf16").engine(), absent("fp8-all").engine()]
    good, bad = simulated("fp8-all"), simulated("fp8-all", BEYOND)
    for first, second, expected in ((good, good, "fp8-all"), (good, bad, "bf16"), (bad, good, "bf16")):
        evaluations = EvaluationSet((first.evaluation("selection"), second.evaluation("certification")))
        assert choose(built, evaluations, PLANS).targets[0].plan == expected


SECOND = replace(plan("fp8-safe-attempt-2", Precision.BF16, 0.5), instead_of="fp8-safe")
THIRD = replace(plan("fp8-safe-attempt-3", Precision.BF16, 0.3), instead_of="fp8-safe-attempt-2")
WITH_LOWER = PlanSet((*PLANS.plans, SECOND, THIRD))
ATTEMPTS = (Candidate("fp8-safe", 100), Candidate(SECOND.id, 110), Candidate(THIRD.id, 120))


def judged(candidates, certified, others):
    """The choice on the GPU, and plans that a further attempt is due for; all others certify as selected."""
    second = [replace(c, accuracy=(found,)) for c, found in zip(candidates, certified, strict=True)]
    evaluations = [c.evaluation(SPLITS[0]) for c in (*candidates, *others)]
    evaluations += [c.evaluation(SPLITS[1]) for c in (*second, *others)]
    engines, known = [c.engine() for c in (*candidates, *others)], EvaluationSet(tuple(evaluations))
    choice = choose(engines, known, WITH_LOWER)
    assert serde.loads(Choice, serde.dumps(choice)) == choice
    target = next(target for target in choice.targets if target.target == "gpu")
    return target, [engine.plan for engine in not_certified(engines, known, WITH_LOWER)]


@pytest.mark.parametrize(("certified", "chosen_plan", "missed", "due"), [
    ([WITHIN], "fp8-safe", 0, []),
    ([UNDECIDED, WITHIN], SECOND.id, 1, []),
    ([UNDECIDED, BEYOND], "fp32", 2, [SECOND.id]),
    ([UNDECIDED, BEYOND, WITHIN], THIRD.id, 2, []),
    ([UNDECIDED, BEYOND, UNDECIDED], "fp32", 3, [THIRD.id]),
])  # fmt: skip
def test_attempts(certified, chosen_plan, missed, due):
    tried = list(ATTEMPTS[: len(certified)])
    target, more = judged(tried, certified, [FP32, BF16])
    assert (target.plan, more) == (chosen_plan, due)
    assert target.missed == tuple(c.engine().id for c in tried[:missed])
    why = {loser.engine: loser.why for loser in target.losers}
    assert {why[engine] for engine in target.missed} <= {Why.NOT_CERTIFIED}


def test_a_lower_rung_that_selection_does_not_take_is_no_attempt_and_it_never_competes():
    beyond = replace(ATTEMPTS[1], accuracy=(BEYOND,))
    target, due = judged([ATTEMPTS[0], beyond], [UNDECIDED, UNDECIDED], [FP32, BF16])
    assert (target.plan, target.missed) == ("fp32", (ATTEMPTS[0].engine().id,))
    assert due == [SECOND.id]
    # It may be faster by luck: it was not among those that selection chose from.
    fast = replace(ATTEMPTS[1], us=50.0)
    target, _ = judged([ATTEMPTS[0], fast], [WITHIN, WITHIN], [FP32, BF16])
    assert target.plan == "fp8-safe"


@pytest.mark.parametrize("lower", [False, True])
def test_attempts_where_the_device_is_elsewhere(lower):
    """The plan's simulation on this host is held against certification."""
    tried = ATTEMPTS[: 1 + lower]
    here = {"target": "cpu", "backend": "ort", "architecture": "cpu"}
    simulated = [replace(c, **here, simulated=True) for c in tried]
    built = [absent(c.plan, backend="rtx") for c in (*tried, FP32)]
    certified = [UNDECIDED, WITHIN][: 1 + lower]
    target, due = judged(simulated, certified, [replace(FP32, **here), *built])
    assert (target.plan, due) == ((SECOND.id, []) if lower else ("fp32", ["fp8-safe"]))
    assert len(target.missed) == 1


def absent(plan_id: str, **more: object) -> Candidate:
    return Candidate(plan_id, None, (), BuildStatus.BUILT_NOT_RUN, **more)  # type: ignore[arg-type]


def simulated(plan_id: str, accuracy: str = WITHIN) -> Candidate:
    return Candidate(
        plan_id, 1, (accuracy,), backend="ort", architecture="cpu", simulated=plan_id != "fp32", target="cpu"
    )


EVERY = ("fp32", "bf16", "fp8-all", "fp8-safe")
REAL = Candidate("fp8-all", 1, (BEYOND,), target="cpu", backend="other", architecture="cpu")


@pytest.mark.parametrize(("engines", "here", "expected", "why"), [
    # The most FP8 whose simulation is inside.
    (EVERY, [simulated("fp8-all", BEYOND), simulated("fp8-safe")], "fp8-safe", "is not inside the budget"),
    (EVERY, [simulated("fp8-safe", UNDECIDED)], "bf16", "was not simulated"),
    # One engine here saw the plan beyond the budget.
    (("bf16", "fp8-all"), [simulated("fp8-all"), REAL], "bf16", "is not inside the budget"),
])  # fmt: skip
def test_choice_by_simulation(engines, here, expected, why):
    choice = chosen(*map(absent, engines), simulated("fp32"), *here)
    assert [target.target for target in choice.targets] == ["gpu", "cpu"]
    target = choice.targets[0]
    assert (target.plan, target.basis, len(target.losers)) == (expected, PROVISIONAL, len(engines) - 1)
    assert why in reasons(target)["fp8-all"]


@pytest.mark.parametrize("fp32_here", [WITHIN, BEYOND])
@pytest.mark.parametrize("bf16_here", [WITHIN, None])
@pytest.mark.parametrize("order", [1, -1])
def test_the_exact_model_comes_last_whatever_was_seen_of_it(fp32_here, bf16_here, order):
    seen = {"fp32": fp32_here} | ({"bf16": bf16_here} if bf16_here else {})
    here = [Candidate(p, 1, (s,), backend="ort", architecture="cpu", target="cpu") for p, s in seen.items()]
    choice = chosen(*[absent("fp32"), absent("bf16"), absent("fp16")][::order], *here)
    assert choice.targets[0].plan == "bf16"
