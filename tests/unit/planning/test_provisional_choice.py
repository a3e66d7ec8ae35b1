"""The choice for hardware that is not here."""

from __future__ import annotations

import pytest
from choice_cases import (
    BEYOND,
    PLANS,
    UNDECIDED,
    WITHIN,
    Candidate,
    chosen,
    reasons,
)

from loka_onnx.core.engine import BuildStatus
from loka_onnx.core.evaluation import (
    EvaluationSet,
    TargetChoice,
)
from loka_onnx.planning.choice import PROVISIONAL, choose

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
    for first, second, plan in ((good, good, "fp8-all"), (good, bad, "bf16"), (bad, good, "bf16")):
        evaluations = EvaluationSet((first.evaluation("selection"), second.evaluation("certification")))
        assert choose(built, evaluations, PLANS).targets[0].plan == plan
