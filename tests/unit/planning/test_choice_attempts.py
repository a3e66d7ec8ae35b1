"""What misses on certification goes one rung back, twice at most; then comes the exact model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from choice_cases import BEYOND, BF16, FP32, PLANS, SPLITS, UNDECIDED, WITHIN, Candidate, plan

from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus
from loka_onnx.core.evaluation import Choice, EvaluationSet, TargetChoice, Why
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet
from loka_onnx.planning.choice import choose, not_certified

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
