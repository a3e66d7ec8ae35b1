"""What is emitted where what would be chosen cannot be: it missed the budget, failed, or ran elsewhere."""

from __future__ import annotations

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
from loka_onnx.core.evaluation import Choice, Evaluation, EvaluationSet, TargetChoice, Why
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet
from loka_onnx.errors import PlanningError
from loka_onnx.planning.choice import MEASURED, OTHER_DEVICE, PROVISIONAL, choose, not_certified

NOTHING = "no engine of 'gpu' can be emitted"


def refused(*candidates: Candidate) -> str:
    """The evidence of the error that nothing can be emitted."""
    with pytest.raises(PlanningError, match=NOTHING) as caught:
        chosen(*candidates)
    return caught.value.evidence


def test_what_was_seen_outside_the_budget_is_never_emitted() -> None:
    failed = Candidate("fp32", None, (), BuildStatus.FAILED, detail="out of memory")
    fp8, bf16 = Candidate("fp8-safe", 100, (BEYOND,)), Candidate("bf16", 200, (UNDECIDED,))
    assert refused(failed, fp8, bf16) == (
        "gpu-trt-sm90-fp8-safe: beyond the budget on selection; "
        "gpu-trt-sm90-bf16: undecided against the budget on selection"
    )
    assert refused(Candidate("fp8-all", 1, simulated=True)) == (
        "gpu-trt-sm90-fp8-all: simulated, inside the budget"
    )
    assert refused(fp8) == "gpu-trt-sm90-fp8-safe: beyond the budget on selection"
    # The exact model is what a run falls back on, whatever its own rounding was judged as.
    assert only(fp8, bf16, Candidate("fp32", 400, (UNDECIDED,))).plan == "fp32"


def test_what_missed_on_certification_is_not_what_it_falls_back_on() -> None:
    fp8, bf16, fp16 = Candidate("fp8-all", 100), BF16, Candidate("fp16", 210)
    bad_fp8, bad_bf16, bad_fp16 = (Candidate(c.plan, c.us, (BEYOND,)) for c in (fp8, bf16, fp16))
    for selection, certification in (
        ([bf16], [bad_bf16]),
        ([fp8], [bad_fp8]),
        ([fp8, bf16], [bad_fp8, bad_bf16]),
        # FP16 is more exact and was looked at; BF16 in its place would be chosen by what only certifies.
        ([fp8, bf16, fp16], [bad_fp8, bf16, bad_fp16]),
    ):
        with pytest.raises(PlanningError, match=NOTHING) as caught:
            on_both(selection, certification)
        assert f"{selection[0].engine().id}: beyond the budget on certification" in caught.value.evidence
    target = on_both([fp8, bf16, fp16], [bad_fp8, bad_bf16, fp16])
    assert target.plan == "fp16"
    # The exact model stays what it is.
    assert on_both([FP32], [Candidate("fp32", 400, (BEYOND,))]).plan == "fp32"


def failing(candidate: Candidate, latencies: str = "", status: str = "") -> tuple[Evaluation, ...]:
    """On both splits, of an engine that failed while it was timed, or while it was judged."""
    whole = (candidate.evaluation(split) for split in ("selection", "certification"))
    if status:
        return tuple(replace(e, outputs=(), latencies=(), status=status) for e in whole)
    return tuple(replace(e, latencies=(), latency_failure=latencies) for e in whole)


def test_an_engine_that_failed_after_its_build_lost_by_that() -> None:
    fp8, fp16 = Candidate("fp8-all", 10), Candidate("fp16", 20)
    timed = failing(fp8, "at batch 2048: the worker died\n  evidence: signal 11")
    judged = failing(fp16, status="failed on selection: out of memory")
    good = [c.evaluation(split) for c in (FP32, BF16) for split in ("selection", "certification")]
    candidates = [FP32, BF16, fp8, fp16]
    (target,) = choose(
        [c.engine() for c in candidates], EvaluationSet((*good, *timed, *judged)), PLANS
    ).targets
    assert target.plan == "bf16"
    assert {loser.engine: (loser.why, loser.reason) for loser in target.losers[1:]} == {
        fp8.engine().id: (
            Why.FAILED,
            "failed while it was timed: at batch 2048: the worker died\n  evidence: signal 11; "
            "accuracy inside the budget",
        ),
        fp16.engine().id: (Why.FAILED, "failed on selection: out of memory"),
    }


def test_what_another_device_takes_does_not_choose() -> None:
    """The H200 is sm90 like the H100, and loads what was built for it."""

    def on_h200(candidate: Candidate) -> Candidate:
        return replace(candidate, counts=False)

    fp8, slow = on_h200(Candidate("fp8-all", 1)), on_h200(Candidate("bf16", 900))
    target = only(on_h200(FP32), slow, fp8)
    assert (target.plan, target.basis) == ("fp8-all", OTHER_DEVICE)
    assert {loser.why for loser in target.losers} == {Why.OTHER_DEVICE}
    # Fewer sites in FP8 would be faster by these times; they say nothing.
    more, less = on_h200(Candidate("fp8-all", 900)), on_h200(Candidate("fp8-safe", 1))
    assert only(on_h200(FP32), less, more).plan == "fp8-all"
    fallen = only(on_h200(FP32), slow, on_h200(Candidate("fp8-all", 1, (BEYOND,))))
    assert (fallen.plan, fallen.basis) == ("bf16", OTHER_DEVICE)
    # One that was timed on the target decides alone.
    mixed = only(FP32, fp8)
    assert (mixed.plan, mixed.basis) == ("fp32", MEASURED)
    assert mixed.losers[0].why is Why.OTHER_DEVICE


def test_a_batch_size_that_every_engine_fails_at_is_not_forgotten() -> None:
    """What was timed at the smaller sizes would be fast, and answers no request of the largest."""
    whole = [
        Candidate(plan, us).evaluation(s) for s in SPLITS for plan, us in (("bf16", 20), ("fp8-all", 10))
    ]
    died = EvaluationSet(tuple(replace(e, latency_failure="at batch 2048: out of memory") for e in whole))
    engines = [Candidate(plan).engine() for plan in ("bf16", "fp8-all")]
    with pytest.raises(PlanningError, match=NOTHING) as caught:
        choose(engines, died, PLANS)
    assert all(f"{engine.id}: failed while it was timed" in caught.value.evidence for engine in engines)
    # An engine without a speed that failed nowhere is better than those.
    engines.append(Candidate("fp32").engine())
    kept = [Candidate("fp32").evaluation(split) for split in SPLITS]
    (target,) = choose(engines, EvaluationSet((*died.evaluations, *kept)), PLANS).targets
    assert target.plan == "fp32"
    assert [loser.why for loser in target.losers] == [Why.FAILED, Why.FAILED]


def test_a_simulation_is_not_emitted_because_no_speed_is_known() -> None:
    real = Candidate("fp8-all", 10, counts=False, fallbacks=1)
    simulation = Candidate("fp8-all", 1, counts=False, simulated=True, backend="ort")
    target = only(replace(FP32, counts=False), simulation, real)
    assert (target.engine, target.basis) == (real.engine().id, OTHER_DEVICE)
    assert {loser.engine: loser.why for loser in target.losers}[simulation.engine().id] is Why.SIMULATED
    # In simulation alone it is inside the budget, and there is no engine for it.
    target = only(replace(FP32, counts=False), simulation)
    assert target.plan == "fp32"


# What misses on certification goes one rung back, twice at most; then comes the exact model


SECOND = replace(plan("fp8-safe-attempt-2", Precision.BF16, 0.5), instead_of="fp8-safe")
THIRD = replace(plan("fp8-safe-attempt-3", Precision.BF16, 0.3), instead_of="fp8-safe-attempt-2")
WITH_LOWER = PlanSet((*PLANS.plans, SECOND, THIRD))
SAFE, LOWER, LOWEST = (
    Candidate("fp8-safe", 100),
    Candidate("fp8-safe-attempt-2", 110),
    Candidate("fp8-safe-attempt-3", 120),
)
MISSED = (UNDECIDED,)


def judged(*pairs: tuple[Candidate, tuple[str, ...]]) -> tuple[TargetChoice, tuple[str, ...]]:
    """The choice, and plans that a further attempt is due for; accuracy on certification beside each."""
    first, second = SPLITS
    evaluations = EvaluationSet(
        (
            *(candidate.evaluation(first) for candidate, _ in pairs),
            *(replace(candidate, accuracy=found).evaluation(second) for candidate, found in pairs),
        )
    )
    engines = [candidate.engine() for candidate, _ in pairs]
    choice = choose(engines, evaluations, WITH_LOWER)
    assert serde.loads(Choice, serde.dumps(choice)) == choice
    (target,) = choice.targets
    due = not_certified(engines, evaluations, WITH_LOWER)
    return target, tuple(engine.plan for engine in due)


OTHERS = ((FP32, (WITHIN,)), (BF16, (WITHIN,)))


def test_what_holds_is_the_first_attempt() -> None:
    target, due = judged((SAFE, (WITHIN,)), *OTHERS)
    assert (target.plan, target.missed, due) == ("fp8-safe", (), ())


def test_a_miss_goes_one_rung_back_and_not_to_the_exact_model() -> None:
    target, due = judged((SAFE, MISSED), (LOWER, (WITHIN,)), *OTHERS)
    assert (target.plan, due) == ("fp8-safe-attempt-2", ())
    assert target.missed == (SAFE.engine().id,)
    why = {loser.engine: loser.why for loser in target.losers}
    assert why[SAFE.engine().id] is Why.NOT_CERTIFIED


def test_the_third_attempt_is_the_last_and_then_comes_the_exact_model() -> None:
    target, due = judged((SAFE, MISSED), (LOWER, (BEYOND,)), *OTHERS)
    assert (target.plan, due) == ("fp32", ("fp8-safe-attempt-2",))
    target, _ = judged((SAFE, MISSED), (LOWER, (BEYOND,)), (LOWEST, (WITHIN,)), *OTHERS)
    assert target.plan == "fp8-safe-attempt-3"
    assert target.missed == (SAFE.engine().id, LOWER.engine().id)
    target, _ = judged((SAFE, MISSED), (LOWER, (BEYOND,)), (LOWEST, MISSED), *OTHERS)
    assert target.plan == "fp32"
    assert len(target.missed) == 3


def test_a_lower_rung_that_selection_does_not_take_is_no_attempt() -> None:
    beyond = replace(LOWER, accuracy=(BEYOND,))
    target, due = judged((SAFE, MISSED), (beyond, ()), *OTHERS)
    assert (target.plan, target.missed) == ("fp32", (SAFE.engine().id,))
    assert due == ("fp8-safe-attempt-2",)


def test_a_lower_rung_never_competes_with_what_it_stands_in_for() -> None:
    """It may be faster by luck: it was not among those that selection chose from."""
    fast = replace(LOWER, us=50.0)
    target, _ = judged((SAFE, (WITHIN,)), (fast, (WITHIN,)), *OTHERS)
    assert target.plan == "fp8-safe"


@pytest.mark.parametrize("lower", [(), ((LOWER, (WITHIN,)),)])
def test_attempts_where_the_device_is_elsewhere(lower: tuple[tuple[Candidate, tuple[str, ...]], ...]) -> None:
    """The plan's simulation on this host is held against certification."""
    away = {"status": BuildStatus.BUILT_NOT_RUN, "us": None, "backend": "rtx"}
    here = {"target": "cpu", "backend": "ort", "architecture": "cpu"}
    pairs = [(SAFE, MISSED), *lower, (FP32, (WITHIN,))]
    first, second = SPLITS
    simulated = [(replace(c, **here, simulated=c.plan != "fp32"), found) for c, found in pairs]
    built = [replace(c, **away) for c, _ in pairs]
    evaluations = EvaluationSet(
        (
            *(c.evaluation(first) for c, _ in simulated),
            *(replace(c, accuracy=found).evaluation(second) for c, found in simulated),
        )
    )
    engines = [c.engine() for c in (*(c for c, _ in simulated), *built)]
    target = next(t for t in choose(engines, evaluations, WITH_LOWER).targets if t.target == "gpu")
    due = [engine.plan for engine in not_certified(engines, evaluations, WITH_LOWER)]
    if lower:
        assert (target.plan, due) == ("fp8-safe-attempt-2", [])
    else:
        assert (target.plan, due) == ("fp32", ["fp8-safe"])
    assert len(target.missed) == 1


# The choice for hardware that is not here


# Hardware that is not here ----------------------------------------------------------------------------


def absent(plan_id: str, **more: object) -> Candidate:
    return Candidate(plan_id, None, (), BuildStatus.BUILT_NOT_RUN, **more)  # type: ignore[arg-type]


def simulated(plan_id: str, accuracy: str = WITHIN) -> Candidate:
    return Candidate(
        plan_id, 1, (accuracy,), backend="ort", architecture="cpu", simulated=plan_id != "fp32", target="cpu"
    )


def provisional(engines: list[Candidate], here: list[Candidate]) -> TargetChoice:
    candidates = [*engines, simulated("fp32"), *here]
    choice = chosen(*candidates)
    assert [target.target for target in choice.targets] == ["gpu", "cpu"]
    target = choice.targets[0]
    assert target.basis == PROVISIONAL
    assert len(target.losers) == len(engines) - 1
    return target


EVERY = [absent(p) for p in ("fp32", "bf16", "fp8-all", "fp8-safe")]


def test_the_most_fp8_whose_simulation_is_inside_is_chosen_provisionally() -> None:
    target = provisional(EVERY, [simulated("fp8-all", BEYOND), simulated("fp8-safe")])
    assert target.plan == "fp8-safe"
    assert "is not inside the budget" in reasons(target)["fp8-all"]


def test_what_was_not_simulated_is_not_chosen() -> None:
    target = provisional(EVERY, [simulated("fp8-safe", UNDECIDED)])
    assert target.plan == "bf16"
    assert "was not simulated" in reasons(target)["fp8-all"]


def test_a_plan_that_one_engine_here_saw_beyond_the_budget_is_not_chosen() -> None:
    real = Candidate("fp8-all", 1, (BEYOND,), target="cpu", backend="other", architecture="cpu")
    target = provisional([absent("bf16"), absent("fp8-all")], [simulated("fp8-all"), real])
    assert target.plan == "bf16"


@pytest.mark.parametrize("fp32_here", [WITHIN, BEYOND])
@pytest.mark.parametrize("bf16_here", [WITHIN, None])
@pytest.mark.parametrize("order", [1, -1])
def test_the_exact_model_comes_last_whatever_was_seen_of_it(
    fp32_here: str, bf16_here: str | None, order: int
) -> None:
    seen = {"fp32": fp32_here} | ({"bf16": bf16_here} if bf16_here else {})
    here = [Candidate(p, 1, (s,), backend="ort", architecture="cpu", target="cpu") for p, s in seen.items()]
    choice = chosen(*[absent("fp32"), absent("bf16"), absent("fp16")][::order], *here)
    assert choice.targets[0].plan == "bf16"


def test_a_simulation_must_hold_on_both_splits() -> None:
    built = [absent("bf16").engine(), absent("fp8-all").engine()]
    good, bad = simulated("fp8-all"), simulated("fp8-all", BEYOND)
    for first, second, expected in ((good, good, "fp8-all"), (good, bad, "bf16"), (bad, good, "bf16")):
        evaluations = EvaluationSet((first.evaluation("selection"), second.evaluation("certification")))
        assert choose(built, evaluations, PLANS).targets[0].plan == expected
