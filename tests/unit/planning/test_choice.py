"""Which engine is emitted, and the reason that every other one gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from choice_cases import (
    BEYOND,
    BF16,
    FASTEST,
    FP32,
    ONLY,
    PLANS,
    UNDECIDED,
    WITHIN,
    Candidate,
    chosen,
    latency,
    on_both,
    only,
    reasons,
)

from loka_onnx.core.engine import BuildStatus
from loka_onnx.core.evaluation import Evaluation, EvaluationSet, Latency
from loka_onnx.errors import PlanningError
from loka_onnx.planning.choice import MEASURED, ChoiceOptions, choose, group_by_hardware

NOT_INSIDE = "; not inside on selection: "
EXACT = "no engine with a measured speed is inside the budget: the exact model, fp32"
INSIDE, OUTSIDE = "accuracy inside the budget; ", "accuracy beyond the budget; "
SIMULATED = "FP8 is simulated here, its speed never counts"
ABSENT = Candidate("fp8-all", None, (), BuildStatus.BUILT_NOT_RUN, "rtx", "sm89", detail="no sm89 here")

TABLE = {
    "fp8_faster_and_inside": (
        (FP32, BF16, Candidate("fp8-safe", 100)),
        ("fp8-safe", FASTEST.format(3)),
        {"fp32": INSIDE + "slower by 300.0 %", "bf16": INSIDE + "slower by 100.0 %"},
    ),
    "fp8_slower": (
        (FP32, BF16, Candidate("fp8-safe", 250)),
        ("bf16", FASTEST.format(3) + "; FP8 is slower"),
        {"fp8-safe": INSIDE + "slower by 25.0 %"},
    ),
    "fp8_beyond": (
        (FP32, BF16, Candidate("fp8-all", 50, (BEYOND,))),
        ("bf16", FASTEST.format(2) + NOT_INSIDE + "fp8-all"),
        {"fp8-all": OUTSIDE + "faster by 75.0 %"},
    ),
    "fp8_undecided": (
        (FP32, Candidate("fp8-all", 50, (WITHIN, UNDECIDED))),
        ("fp32", ONLY + NOT_INSIDE + "fp8-all"),
        {"fp8-all": "accuracy undecided: the budget lies inside the interval; faster by 87.5 %"},
    ),
    "beyond_outweighs_undecided": (
        (FP32, Candidate("fp8-all", 50, (UNDECIDED, BEYOND))),
        ("fp32", ONLY + NOT_INSIDE + "fp8-all"),
        {"fp8-all": OUTSIDE + "faster by 87.5 %"},
    ),
    "none_inside": (
        (Candidate("bf16", 200, (BEYOND,)), Candidate("fp32", 400, (UNDECIDED,))),
        ("fp32", EXACT),
        {"bf16": OUTSIDE + "faster by 50.0 %"},
    ),
    "a_simulation_never_wins_on_speed": (
        (FP32, Candidate("fp8-all", 1, simulated=True), Candidate("fp8-safe", 1, (BEYOND,), simulated=True)),
        ("fp32", ONLY + "; inside but simulated: fp8-all" + NOT_INSIDE + "fp8-safe"),
        {"fp8-all": INSIDE + SIMULATED, "fp8-safe": OUTSIDE + SIMULATED},
    ),
    "a_latency_that_does_not_count": (
        (FP32, Candidate("fp8-all", 1, counts=False)),
        ("fp32", ONLY + "; inside, of unknown speed: fp8-all"),
        {"fp8-all": INSIDE + "timed on device, which is not the target: its speed does not count"},
    ),
    "no_latency": (
        (FP32, Candidate("fp8-all", None)),
        ("fp32", ONLY + "; inside, of unknown speed: fp8-all"),
        {"fp8-all": INSIDE + "its speed on the target was not measured"},
    ),
    "never_evaluated": (
        (FP32, Candidate("fp8-all", None, (), detail="the first inference timed out")),
        ("fp32", ONLY + "; not measured: fp8-all"),
        {"fp8-all": "not measured: the first inference timed out"},
    ),
    "failed": (
        (FP32, Candidate("fp8-all", None, (), BuildStatus.FAILED, detail="signal 11 (SIGSEGV)")),
        ("fp32", ONLY + "; failed: fp8-all"),
        {"fp8-all": "failed: signal 11 (SIGSEGV)"},
    ),
    "declined": (
        (FP32, Candidate("bf16", None, (), BuildStatus.DECLINED, detail="no BF16 products")),
        ("fp32", ONLY + "; declined: bf16"),
        {"bf16": "declined: no BF16 products"},
    ),
    "one_that_cannot_run_beside_one_that_can": (
        (FP32, ABSENT),
        ("fp32", ONLY + "; not measured: fp8-all (rtx)"),
        {"fp8-all": "not measured: no sm89 here"},
    ),
    "nothing_measured": (
        (Candidate("bf16", None, ()), Candidate("fp32", None, ())),
        ("fp32", EXACT),
        {"bf16": "not measured: built and run here"},
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_engines_that_ran_here(case: str) -> None:
    candidates, expected, others = TABLE[case]
    target = only(*candidates)
    assert (target.plan, target.reason, target.basis) == (*expected, MEASURED)
    assert reasons(target).items() >= others.items()


def test_the_faster_fp32_engine_is_the_fallback_and_a_target_without_any_is_an_error():
    slow, fast = Candidate("fp32", 400, (UNDECIDED,)), Candidate("fp32", 300, (UNDECIDED,), backend="ort")
    assert only(slow, fast, Candidate("bf16", 1, (BEYOND,))).engine == fast.engine().id
    failed = Candidate("fp32", None, (), BuildStatus.FAILED, detail="no memory")
    with pytest.raises(PlanningError) as caught:
        chosen(failed, Candidate("bf16", None, (), BuildStatus.DECLINED, detail="no BF16 products"))
    assert caught.value.code == "E0702" and "gpu-trt-sm90-fp32 failed: no memory" in caught.value.evidence


def test_what_selection_chose_must_hold_on_certification() -> None:
    fp8, spoiled = Candidate("fp8-all", 100), Candidate("fp8-all", 100, (BEYOND,))
    target = on_both([FP32, BF16, fp8], [FP32, BF16, spoiled])
    # Not the runner-up: certification is looked at once and does not choose.
    assert target.plan == "fp32"
    assert target.reason == (
        "'fp8-all' was selected and is not inside the budget on certification: fp32 instead"
    )
    assert reasons(target) == {
        "bf16": INSIDE + "faster by 50.0 %; certification does not choose among the others",
        "fp8-all": "selected; on certification accuracy beyond the budget",
    }
    for selection, certification, plan in (
        ([FP32, spoiled], [FP32, fp8], "fp32"),
        ([FP32, fp8], [FP32, fp8], "fp8-all"),
        ([FP32, fp8], [FP32], "fp32"),  # never certified
    ):
        assert on_both(selection, certification).plan == plan


def test_a_simulation_that_misses_on_certification_is_not_told_as_inside() -> None:
    holds, spoiled = (
        Candidate("fp8-all", 1, verdicts, simulated=True) for verdicts in ((WITHIN,), (UNDECIDED,))
    )
    missed = on_both([FP32, holds], [FP32, spoiled])
    assert missed.reason == ONLY + "; inside on selection, but not on certification: fp8-all"
    assert on_both([FP32, holds], [FP32, holds]).reason == ONLY + "; inside but simulated: fp8-all"


def test_speed_is_the_mean_time_per_row_over_the_batch_sizes() -> None:
    """10 µs at 10 rows weigh as much as 100 µs at 100."""

    def evaluation(candidate: Candidate, *latencies: Latency) -> Evaluation:
        return replace(candidate.evaluation("selection"), latencies=latencies)

    at_small = evaluation(BF16, latency(10, batch=10), latency(130, batch=100))
    at_large = evaluation(FP32, latency(15, batch=10), latency(100, batch=100))
    certified = (BF16.evaluation("certification"), FP32.evaluation("certification"))
    evaluations = EvaluationSet((at_small, at_large, *certified))
    choice = choose([FP32.engine(), BF16.engine()], evaluations, PLANS, ChoiceOptions(by_batch=False))
    assert choice.targets[0].plan == "bf16"
    assert choice.targets[0].losers[0].reason.endswith("slower by 8.7 %")


@pytest.mark.parametrize(
    ("engines", "groups"),
    [
        ("trt:sm90", ["trt:sm90"]),
        # Backends name one device differently.
        ("ort:cuda trt:sm90", ["ort:cuda trt:sm90"]),
        ("rtx:sm89 rtx:sm120", ["rtx:sm89", "rtx:sm120"]),
        # A general engine competes everywhere, one for an architecture there.
        ("rtx:sm89 rtx:sm120 ort:cuda", ["rtx:sm89 ort:cuda", "rtx:sm120 ort:cuda"]),
        ("rtx:sm89 rtx:sm120 trt:sm120", ["rtx:sm89", "rtx:sm120 trt:sm120"]),
        ("rtx:sm89 trt:sm89 rtx:sm120 trt:sm120", ["rtx:sm89 trt:sm89", "rtx:sm120 trt:sm120"]),
    ],
)
def test_one_choice_for_each_piece_of_hardware(engines: str, groups: list[str]) -> None:
    names = (name.split(":") for name in engines.split())
    found = group_by_hardware([Candidate("fp32", backend=b, architecture=a).engine() for b, a in names])
    assert [" ".join(f"{e.backend}:{e.architecture}" for e in group) for group in found] == groups
    choice = chosen(FP32, Candidate("fp32", 1, target="cpu"), BF16)
    assert [(t.target, t.plan) for t in choice.targets] == [("gpu", "bf16"), ("cpu", "fp32")]
