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
    Candidate,
    chosen,
    on_both,
    only,
)

from loka_onnx.core.engine import BuildStatus
from loka_onnx.core.evaluation import Evaluation, EvaluationSet, Why
from loka_onnx.errors import PlanningError
from loka_onnx.planning.choice import MEASURED, OTHER_DEVICE, choose

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
