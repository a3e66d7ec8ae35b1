"""Which engine is emitted, and the reason that every other one gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from loka_onnx.core import serde
from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.engine import BuildStatus, EngineArtifact, SitePrecision
from loka_onnx.core.evaluation import (
    BudgetStatus,
    Choice,
    Evaluation,
    EvaluationSet,
    Latency,
    OutputEvaluation,
    PairedDifference,
    TargetChoice,
    TaskMetrics,
    Why,
)
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.errors import PlanningError
from loka_onnx.planning.choice import MEASURED, PROVISIONAL, ChoiceOptions, choose, group_by_hardware

WITHIN, BEYOND, UNDECIDED = BudgetStatus.WITHIN, BudgetStatus.BEYOND, BudgetStatus.UNDECIDED


def plan(name: str, base: Precision, share: float) -> PrecisionPlan:
    precision = Precision.FP8 if share else base
    decision = Decision("fc", precision, PER_TENSOR if share else None, Verdict.SAFE, "", 1.0, (1.0,))
    return PrecisionPlan(name, "digest", base, (decision,), {}, share)


PLANS = PlanSet(
    (
        plan("fp32", Precision.FP32, 0.0),
        plan("bf16", Precision.BF16, 0.0),
        plan("fp16", Precision.FP16, 0.0),
        plan("fp8-all", Precision.BF16, 1.0),
        plan("fp8-safe", Precision.BF16, 0.6),
        # What is FP8 is not told by the name.
        plan("refined-1", Precision.BF16, 0.4),
    )
)


@dataclass(frozen=True)
class Candidate:
    """An engine and what was measured of it; `us` is the median latency at a batch of 100 rows."""

    plan: str
    us: float | None = None
    accuracy: tuple[str, ...] = (WITHIN,)
    status: BuildStatus = BuildStatus.READY
    backend: str = "trt"
    architecture: str = "sm90"
    simulated: bool = False
    counts: bool = True
    fallbacks: int = 0
    target: str = "gpu"
    detail: str = ""

    def engine(self) -> EngineArtifact:
        sites = tuple(SitePrecision(f"s{i}", "fp8", (), False, "") for i in range(self.fallbacks))
        return EngineArtifact(
            backend=self.backend,
            plan=self.plan,
            target=self.target,
            architecture=self.architecture,
            status=self.status,
            simulated=self.simulated,
            path=None,
            bytes=0,
            digest="",
            backend_version="",
            sites=sites,
            build_seconds=0.0,
            detail=self.detail,
        )

    def evaluation(self, split: str) -> Evaluation:
        measured = self.status is BuildStatus.READY
        outputs = tuple(output(status) for status in self.accuracy) if measured else ()
        latencies = () if self.us is None else (latency(self.us, self.counts),)
        return Evaluation(
            self.engine().id,
            self.backend,
            self.plan,
            self.target,
            split,
            1000,
            outputs,
            latencies,
            "measured",
        )


SPLITS = ("selection", "certification")


def output(status: str) -> OutputEvaluation:
    return OutputEvaluation(
        "ctr", OutputKind.LOGIT, TaskMetrics(0.5, 0.9, 0.8, 1.0), None, 2e-4, status, None
    )


def latency(us: float, counts: bool = True, batch: int = 100) -> Latency:
    return Latency(batch, us, us, us, 100, "device", counts)


def chosen(*candidates: Candidate) -> Choice:
    judged = [c for c in candidates if c.accuracy]
    evaluations = EvaluationSet(tuple(c.evaluation(split) for split in SPLITS for c in judged))
    return choose([c.engine() for c in candidates], evaluations, PLANS)


def only(*candidates: Candidate) -> TargetChoice:
    choice = chosen(*candidates)
    assert len(choice.targets) == 1
    target = choice.targets[0]
    ids = [c.engine().id for c in candidates]
    # Every candidate but the winner is a loser, once, with a reason.
    assert sorted([target.engine, *(loser.engine for loser in target.losers)]) == sorted(ids)
    assert all(loser.reason for loser in target.losers)
    assert serde.loads(Choice, serde.dumps(choice)) == choice
    return target


def reasons(target: TargetChoice) -> dict[str, str]:
    """Reasons by plan."""
    return {loser.engine.split("-", 3)[3]: loser.reason for loser in target.losers}


FP32, BF16 = Candidate("fp32", 400), Candidate("bf16", 200)
FASTEST = "fastest of {} engines whose upper bound is inside the budget"

TABLE = {
    "fp8_faster_and_inside": (
        (FP32, BF16, Candidate("fp8-safe", 100)),
        "fp8-safe",
        FASTEST.format(3),
        {
            "fp32": "accuracy inside the budget; slower by 300.0 %",
            "bf16": "accuracy inside the budget; slower by 100.0 %",
        },
    ),
    "fp8_slower": (
        (FP32, BF16, Candidate("fp8-safe", 250)),
        "bf16",
        FASTEST.format(3) + "; FP8 is slower",
        {"fp8-safe": "accuracy inside the budget; slower by 25.0 %"},
    ),
    "fp8_beyond": (
        (FP32, BF16, Candidate("fp8-all", 50, (BEYOND,))),
        "bf16",
        FASTEST.format(2) + "; none of them runs FP8",
        {"fp8-all": "accuracy beyond the budget; faster by 75.0 %"},
    ),
    "fp8_undecided": (
        (FP32, BF16, Candidate("fp8-all", 50, (WITHIN, UNDECIDED))),
        "bf16",
        FASTEST.format(2) + "; none of them runs FP8",
        {"fp8-all": "accuracy undecided: the budget lies inside the interval; faster by 75.0 %"},
    ),
    "beyond_outweighs_undecided": (
        (FP32, Candidate("fp8-all", 50, (UNDECIDED, BEYOND))),
        "fp32",
        FASTEST.format(1) + "; none of them runs FP8",
        {"fp8-all": "accuracy beyond the budget; faster by 87.5 %"},
    ),
    "only_fp32_inside": (
        (FP32, Candidate("bf16", 200, (BEYOND,)), Candidate("fp8-safe", 100, (BEYOND,))),
        "fp32",
        FASTEST.format(1) + "; none of them runs FP8",
        {
            "bf16": "accuracy beyond the budget; faster by 50.0 %",
            "fp8-safe": "accuracy beyond the budget; faster by 75.0 %",
        },
    ),
    "none_inside": (
        (Candidate("bf16", 200, (BEYOND,)), Candidate("fp32", 400, (UNDECIDED,))),
        "fp32",
        "no engine with a measured speed is inside the budget: the exact model, fp32",
        {"bf16": "accuracy beyond the budget; faster by 50.0 %"},
    ),
    "none_inside_and_no_fp32": (
        (Candidate("fp8-safe", 100, (BEYOND,)), Candidate("bf16", 200, (BEYOND,))),
        "bf16",
        "no engine is inside the budget, and FP32 was not built: the most exact engine",
        {"fp8-safe": "accuracy beyond the budget; faster by 50.0 %"},
    ),
    "fp32_failed": (
        (
            Candidate("fp32", None, (), BuildStatus.FAILED, detail="out of memory"),
            Candidate("fp8-safe", 100, (BEYOND,)),
            Candidate("fp16", 210, (BEYOND,)),
            Candidate("bf16", 200, (BEYOND,)),
        ),
        "fp16",  # 11 significant bits, BF16 has 8
        "no engine is inside the budget, and FP32 was not built: the most exact engine",
        {"fp32": "failed: out of memory"},
    ),
    "a_simulation_never_wins_on_speed": (
        (FP32, Candidate("fp8-all", 1, simulated=True), Candidate("fp8-safe", 1, (BEYOND,), simulated=True)),
        "fp32",
        FASTEST.format(1) + "; none of them runs FP8",
        {
            "fp8-all": "accuracy inside the budget; FP8 is simulated here, its speed never counts",
            "fp8-safe": "accuracy beyond the budget; FP8 is simulated here, its speed never counts",
        },
    ),
    "a_latency_that_does_not_count": (
        (FP32, Candidate("fp8-all", 1, counts=False)),
        "fp32",
        FASTEST.format(1) + "; none of them runs FP8",
        {"fp8-all": "accuracy inside the budget; its speed on the target was not measured"},
    ),
    "no_latency": (
        (FP32, Candidate("fp8-all", None)),
        "fp32",
        FASTEST.format(1) + "; none of them runs FP8",
        {"fp8-all": "accuracy inside the budget; its speed on the target was not measured"},
    ),
    "never_evaluated": (
        (FP32, Candidate("fp8-all", None, (), detail="the first inference timed out")),
        "fp32",
        FASTEST.format(1) + "; none of them runs FP8",
        {"fp8-all": "not measured: the first inference timed out"},
    ),
    "failed": (
        (FP32, Candidate("fp8-all", None, (), BuildStatus.FAILED, detail="signal 11 (SIGSEGV)")),
        "fp32",
        FASTEST.format(1) + "; none of them runs FP8",
        {"fp8-all": "failed: signal 11 (SIGSEGV)"},
    ),
    "declined": (
        (FP32, Candidate("bf16", None, (), BuildStatus.DECLINED, detail="no BF16 products")),
        "fp32",
        FASTEST.format(1) + "; none of them runs FP8",
        {"bf16": "declined: no BF16 products"},
    ),
    "one_that_cannot_run_beside_one_that_can": (
        (
            FP32,
            Candidate("fp8-all", None, (), BuildStatus.BUILT_NOT_RUN, "rtx", "sm89", detail="no sm89 here"),
        ),
        "fp32",
        FASTEST.format(1) + "; none of them runs FP8",
        {"fp8-all": "not measured: no sm89 here"},
    ),
    "nothing_measured": (
        (Candidate("bf16", None, ()), Candidate("fp32", None, ())),
        "fp32",
        "no engine with a measured speed is inside the budget: the exact model, fp32",
        {"bf16": "not measured: built and run here"},
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_engines_that_ran_here(case: str) -> None:
    candidates, winner, reason, others = TABLE[case]
    target = only(*candidates)
    assert (target.plan, target.reason, target.basis) == (winner, reason, MEASURED)
    assert reasons(target).items() >= others.items()


def test_the_faster_of_two_fp32_engines_is_the_fallback() -> None:
    slow, fast = Candidate("fp32", 400, (UNDECIDED,)), Candidate("fp32", 300, (UNDECIDED,), backend="ort")
    assert only(slow, fast, Candidate("bf16", 1, (BEYOND,))).engine == fast.engine().id


def test_only_simulations_cannot_be_emitted() -> None:
    with pytest.raises(PlanningError) as caught:
        chosen(Candidate("fp8-all", 1, simulated=True))
    assert str(caught.value) == (
        "no engine of 'gpu' can be emitted\n"
        "  evidence: every engine that runs here simulates FP8, and none of another kind was built\n"
        "  remedy: add fp32 to `plan.plans`"
    )


def test_a_target_without_any_engine_is_an_error() -> None:
    failed = Candidate("fp32", None, (), BuildStatus.FAILED, detail="no memory")
    with pytest.raises(PlanningError) as caught:
        chosen(failed, Candidate("bf16", None, (), BuildStatus.DECLINED, detail="no BF16 products"))
    assert str(caught.value) == (
        "no engine could be built for 'gpu'\n"
        "  evidence: gpu-trt-sm90-fp32 failed: no memory; gpu-trt-sm90-bf16 declined: no BF16 products\n"
        "  remedy: `loka-onnx doctor` says what this machine can build"
    )


def on_both(selection: list[Candidate], certification: list[Candidate]) -> TargetChoice:
    evaluations = EvaluationSet(
        (
            *(c.evaluation("selection") for c in selection),
            *(c.evaluation("certification") for c in certification),
        )
    )
    return choose([c.engine() for c in selection], evaluations, PLANS).targets[0]


def test_what_selection_chose_must_hold_on_certification() -> None:
    fp8, spoiled = Candidate("fp8-all", 100), Candidate("fp8-all", 100, (BEYOND,))
    target = on_both([FP32, BF16, fp8], [FP32, BF16, spoiled])
    # Not the runner-up: certification is looked at once and does not choose.
    assert target.plan == "fp32"
    assert target.reason == (
        "'fp8-all' was selected and is not inside the budget on certification: fp32 instead"
    )
    assert reasons(target) == {
        "bf16": "accuracy inside the budget; faster by 50.0 %; "
        "certification does not choose among the others",
        "fp8-all": "selected; on certification accuracy beyond the budget",
    }
    assert on_both([FP32, spoiled], [FP32, fp8]).plan == "fp32"
    assert on_both([FP32, fp8], [FP32, fp8]).plan == "fp8-all"


def test_what_was_never_certified_is_not_emitted() -> None:
    assert on_both([FP32, Candidate("fp8-all", 100)], [FP32]).plan == "fp32"


def test_speed_is_the_mean_time_per_row_over_the_batch_sizes() -> None:
    """10 µs at 10 rows weigh as much as 100 µs at 100."""

    def evaluation(candidate: Candidate, *latencies: Latency) -> Evaluation:
        whole = candidate.evaluation("selection")
        return Evaluation(
            whole.engine, "trt", whole.plan, "gpu", whole.split, 1000, whole.outputs, latencies, "measured"
        )

    at_small = evaluation(BF16, latency(10, batch=10), latency(130, batch=100))
    at_large = evaluation(FP32, latency(15, batch=10), latency(100, batch=100))
    certified = (BF16.evaluation("certification"), FP32.evaluation("certification"))
    evaluations = EvaluationSet((at_small, at_large, *certified))
    choice = choose([FP32.engine(), BF16.engine()], evaluations, PLANS, ChoiceOptions(by_batch=False))
    assert choice.targets[0].plan == "bf16"
    assert choice.targets[0].losers[0].reason.endswith("slower by 8.7 %")


# Noise, batch sizes -----------------------------------------------------------------------------------

JITTER = (0.97, 1.03, 0.98, 1.02, 0.99, 1.01, 1.0, 1.0, 0.995, 1.005)


def timed(candidate: Candidate, spread: float = 0.0, **us: float) -> Evaluation:
    """Judged inside the budget, with medians by batch size (``b8=120.0``) whose parts spread."""
    whole = candidate.evaluation("selection")
    # Turned by the candidate, so that the jitter of two engines does not cancel.
    turned = JITTER[len(candidate.plan) % 10 :] + JITTER[: len(candidate.plan) % 10]
    latencies = tuple(
        replace(
            latency(value, batch=int(name[1:])),
            parts_us=tuple(value * (1 + spread * (factor - 1)) for factor in turned),
        )
        for name, value in us.items()
    )
    return replace(whole, latencies=latencies)


def by_size(
    evaluations: dict[Candidate, Evaluation],
    certified: tuple[str, ...] | None = None,
    options: ChoiceOptions | None = None,
) -> TargetChoice:
    """The choice; plans in `certified` are inside the budget there, all of them by default."""
    second = [
        candidate.evaluation("certification")
        if certified is None or candidate.plan in certified
        else replace(candidate, accuracy=(BEYOND,)).evaluation("certification")
        for candidate in evaluations
    ]
    found = choose(
        [candidate.engine() for candidate in evaluations],
        EvaluationSet((*evaluations.values(), *second)),
        PLANS,
        options,
    )
    assert serde.loads(Choice, serde.dumps(found)) == found
    return found.targets[0]


FP8_SAFE, FP8_ALL = Candidate("fp8-safe"), Candidate("fp8-all")


def test_within_noise_the_higher_precision_wins() -> None:
    noisy = {BF16: timed(BF16, 1.0, b8=100), FP8_SAFE: timed(FP8_SAFE, 1.0, b8=98.5)}
    target = by_size(noisy)
    assert target.plan == "bf16"
    assert target.reason == (
        "within noise of the fastest of 2 engines whose upper bound is inside the budget, 'fp8-safe', "
        "and more exact; FP8 is no faster"
    )
    (loser,) = target.losers
    assert loser.why is Why.WITHIN_NOISE
    assert loser.reason.startswith("accuracy inside the budget; faster by 1.5 % (")
    assert loser.reason.endswith("): within noise of an engine in higher precision")
    assert loser.times is not None and loser.times.lower < 0.985 < loser.times.upper
    # The same medians, measured without spread, are a difference; less than 1 % never is.
    steady = {BF16: timed(BF16, b8=100), FP8_SAFE: timed(FP8_SAFE, b8=98.5)}
    assert by_size(steady).plan == "fp8-safe"
    close = {BF16: timed(BF16, b8=100), FP8_SAFE: timed(FP8_SAFE, b8=99.5)}
    assert by_size(close).plan == "bf16"
    assert by_size(close, options=ChoiceOptions(noise=0.001)).plan == "fp8-safe"


def test_of_two_alike_the_one_with_less_fp8_wins() -> None:
    alike = {BF16: timed(BF16, b8=200), FP8_ALL: timed(FP8_ALL, b8=100), FP8_SAFE: timed(FP8_SAFE, b8=100.5)}
    assert by_size(alike).plan == "fp8-safe"


def test_a_surely_slower_engine_is_not_taken_for_its_precision() -> None:
    apart = {BF16: timed(BF16, 1.0, b8=110), FP8_SAFE: timed(FP8_SAFE, 1.0, b8=98)}
    target = by_size(apart)
    assert target.plan == "fp8-safe"
    assert [loser.why for loser in target.losers] == [Why.SLOWER]


BOTH_SIZES = {BF16: timed(BF16, b8=50, b512=1000), FP8_SAFE: timed(FP8_SAFE, b8=60, b512=700)}


def test_each_batch_size_gets_its_engine_where_that_pays() -> None:
    target = by_size(BOTH_SIZES)
    # Over both sizes: (6.25 + 1.95)/2 µs a row against (7.5 + 1.37)/2.
    assert target.plan == "bf16"
    assert [(route.batch, route.plan) for route in target.routes] == [(8, "bf16"), (512, "fp8-safe")]
    assert target.routes[0].times is None
    gain = target.routes[1].times
    assert gain is not None and gain.value == pytest.approx(1000 / 700)
    assert target.reason.endswith("; 2 engines by batch size, each faster there by more than 3 %")
    assert target.engines == (BF16.engine().id, FP8_SAFE.engine().id)
    assert target.plans == ("bf16", "fp8-safe")
    assert target.losers == ()
    # A request between sizes goes to the next larger's, one above all of them to the largest's.
    for rows, plan_id in ((1, "bf16"), (8, "bf16"), (9, "fp8-safe"), (512, "fp8-safe"), (4096, "fp8-safe")):
        assert target.route(rows).endswith(plan_id)


def test_one_engine_serves_where_the_gain_is_inside_margin_or_spread() -> None:
    assert by_size(BOTH_SIZES, options=ChoiceOptions(by_batch=False)).routes == ()
    assert by_size(BOTH_SIZES, options=ChoiceOptions(margin=0.5)).routes == ()
    little = {BF16: timed(BF16, b8=50, b512=1000), FP8_SAFE: timed(FP8_SAFE, b8=60, b512=975)}
    assert by_size(little).routes == ()
    # 5 % at the median, but the spread reaches below 3 %.
    noisy = {BF16: timed(BF16, 1.0, b8=50, b512=1000), FP8_SAFE: timed(FP8_SAFE, 1.0, b8=60, b512=952)}
    assert by_size(noisy).routes == ()
    steady = {BF16: timed(BF16, b8=50, b512=1000), FP8_SAFE: timed(FP8_SAFE, b8=60, b512=952)}
    assert len(by_size(steady).routes) == 2


def test_an_engine_that_is_best_nowhere_does_not_lead() -> None:
    """The best over all sizes may be second at each of them."""
    three = {
        FP32: timed(FP32, b1=10, b2=40),
        BF16: timed(BF16, b1=11, b2=22),
        FP8_SAFE: timed(FP8_SAFE, b1=30, b2=20),
    }
    target = by_size(three)
    assert [(route.batch, route.plan) for route in target.routes] == [(1, "fp32"), (2, "fp8-safe")]
    # 15 µs a row over both sizes against 20.
    assert target.plan == "fp32"
    (loser,) = target.losers
    assert (loser.engine, loser.why) == (BF16.engine().id, Why.SLOWER)
    assert loser.reason == (
        "accuracy inside the budget; faster by 26.7 % over all batch sizes; "
        "at each of them another is as fast or faster"
    )


def test_a_routed_engine_that_misses_on_certification_gives_its_sizes_back() -> None:
    target = by_size(BOTH_SIZES, certified=("bf16",))
    assert (target.plan, target.routes) == ("bf16", ())
    assert target.reason.endswith(
        "'fp8-safe' gave its batch sizes back: it is not inside the budget on certification"
    )
    (loser,) = target.losers
    assert (loser.why, loser.reason) == (
        Why.NOT_CERTIFIED,
        "selected; on certification accuracy beyond the budget",
    )
    # The main engine missing leaves nothing that selection chose.
    both = {**BOTH_SIZES, FP32: timed(FP32, b8=100, b512=2000)}
    fallen = by_size(both, certified=("fp8-safe", "fp32"))
    assert (fallen.plan, fallen.routes) == ("fp32", ())
    assert {loser.engine: loser.why for loser in fallen.losers} == {
        BF16.engine().id: Why.NOT_CERTIFIED,
        FP8_SAFE.engine().id: Why.NOT_SELECTED,
    }


def test_an_engine_that_failed_at_a_served_size_is_not_emitted() -> None:
    partly = {BF16: timed(BF16, b8=50, b512=1000), FP8_SAFE: timed(FP8_SAFE, b8=10)}
    target = by_size(partly)
    assert (target.plan, target.routes) == ("bf16", ())
    (loser,) = target.losers
    assert (loser.why, loser.reason) == (
        Why.NO_SPEED,
        "accuracy inside the budget; it was timed at batch 8 only, and failed beyond",
    )


def test_the_upper_bound_of_losers_is_told() -> None:
    spoiled = judged(4e-4, BEYOND)
    far = replace(Candidate("fp8-all", 50, (BEYOND,)).evaluation("selection"), outputs=(spoiled,))
    near = replace(BF16.evaluation("selection"), outputs=(judged(5e-5, WITHIN),))
    found = choose(
        [FP8_ALL.engine(), BF16.engine()],
        EvaluationSet((far, near, replace(near, split="certification"))),
        PLANS,
    )
    (loser,) = found.targets[0].losers
    assert (loser.why, loser.upper) == (Why.BEYOND, pytest.approx(2.0))
    assert loser.reason == "accuracy beyond the budget, upper bound 2.00× the budget; faster by 75.0 %"


def judged(upper: float, status: str) -> OutputEvaluation:
    """An output with an upper end, against the budget of 2e-4."""
    change = Interval(upper / 2, 0.0, upper, 0.95, 1000)
    return replace(
        output(status), difference=PairedDifference("loss", change, change, change, None, None, 0.0, 0.0)
    )


def test_margins_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="margins are at least 0"):
        ChoiceOptions(margin=-0.1)


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
    assert target.reason == (
        "the simulated accuracy of 'fp8-safe' is inside the budget; "
        "evaluate it on the device before deploying"
    )
    assert reasons(target) == {
        "fp32": "built, not run: 'fp8-safe' has no less in FP8, at a simulated accuracy inside the budget",
        "bf16": "built, not run: 'fp8-safe' has no less in FP8, at a simulated accuracy inside the budget",
        "fp8-all": "built, not run: the accuracy of its plan on this host is not inside the budget",
    }


def test_what_was_not_simulated_is_not_chosen() -> None:
    target = provisional(EVERY, [simulated("fp8-safe", UNDECIDED)])
    assert target.plan == "bf16"
    assert target.reason.startswith("no FP8 plan is inside the budget in simulation: high precision")
    assert reasons(target) == {
        "fp32": "built, not run: bf16 is expected to be faster",
        "fp8-all": "built, not run: the accuracy of its plan was not simulated",
        "fp8-safe": "built, not run: the accuracy of its plan on this host is not inside the budget",
    }


def test_a_plan_that_one_engine_here_saw_beyond_the_budget_is_not_chosen() -> None:
    real = Candidate("fp8-all", 1, (BEYOND,), target="cpu", backend="other", architecture="cpu")
    target = provisional([absent("bf16"), absent("fp8-all")], [simulated("fp8-all"), real])
    assert target.plan == "bf16"


def test_fp8_is_told_by_the_plan_and_not_by_its_name() -> None:
    engines = [absent("bf16"), absent("refined-1")]
    assert provisional(engines, [simulated("refined-1")]).plan == "refined-1"
    assert provisional(engines, [simulated("refined-1", BEYOND)]).plan == "bf16"


def test_a_high_precision_plan_seen_beyond_the_budget_gives_way() -> None:
    engines = [absent("fp32"), absent("bf16")]
    seen = Candidate("bf16", 1, (BEYOND,), target="cpu", backend="ort", architecture="cpu")
    target = provisional(engines, [seen])
    assert target.plan == "fp32"
    assert reasons(target)["bf16"].endswith("on this host is not inside the budget")


def test_the_engine_with_fewer_fallbacks_wins() -> None:
    engines = [absent("fp8-all", fallbacks=2), absent("fp8-all", backend="rtx", fallbacks=1)]
    target = provisional(engines, [simulated("fp8-all")])
    assert target.engine == engines[1].engine().id
    assert target.losers[0].reason.startswith("built, not run: the same plan as 'gpu-rtx-sm90-fp8-all'")


@pytest.mark.parametrize("status", [BuildStatus.FAILED, BuildStatus.DECLINED])
def test_an_engine_that_was_not_built_keeps_its_reason(status: BuildStatus) -> None:
    # Its simulation is inside the budget: only what was built is chosen all the same.
    missing = Candidate("fp8-all", None, (), status, detail="refused sm80")
    target = provisional([absent("bf16"), missing], [simulated("fp8-all")])
    assert target.plan == "bf16"
    assert reasons(target)["fp8-all"] == f"{status}: refused sm80"


def test_a_simulation_must_hold_on_both_splits() -> None:
    built = [absent("bf16").engine(), absent("fp8-all").engine()]
    good, bad = simulated("fp8-all"), simulated("fp8-all", BEYOND)
    for first, second, plan in ((good, good, "fp8-all"), (good, bad, "bf16"), (bad, good, "bf16")):
        evaluations = EvaluationSet((first.evaluation("selection"), second.evaluation("certification")))
        assert choose(built, evaluations, PLANS).targets[0].plan == plan


# One choice for each piece of hardware ----------------------------------------------------------------

GROUPS: dict[str, tuple[list[tuple[str, str]], list[list[str]]]] = {
    "one_backend": ([("trt", "sm90")], [["trt sm90"]]),
    "two_backends_that_name_it_differently": (
        [("ort", "cuda"), ("trt", "sm90")],
        [["ort cuda", "trt sm90"]],
    ),
    "one_backend_for_two_architectures": (
        [("rtx", "sm89"), ("rtx", "sm120")],
        [["rtx sm89"], ["rtx sm120"]],
    ),
    "a_general_engine_competes_everywhere": (
        [("rtx", "sm89"), ("rtx", "sm120"), ("ort", "cuda")],
        [["rtx sm89", "ort cuda"], ["rtx sm120", "ort cuda"]],
    ),
    "an_engine_for_one_of_them_competes_there": (
        [("rtx", "sm89"), ("rtx", "sm120"), ("trt", "sm120")],
        [["rtx sm89"], ["rtx sm120", "trt sm120"]],
    ),
    "two_backends_for_the_same_two": (
        [("rtx", "sm89"), ("trt", "sm89"), ("rtx", "sm120"), ("trt", "sm120")],
        [["rtx sm89", "trt sm89"], ["rtx sm120", "trt sm120"]],
    ),
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups(case: str) -> None:
    made, expected = GROUPS[case]
    engines = [Candidate("fp32", backend=b, architecture=a).engine() for b, a in made]
    found = [[f"{e.backend} {e.architecture}" for e in group] for group in group_by_hardware(engines)]
    assert found == expected


def test_two_backends_of_one_device_give_one_choice() -> None:
    ort = Candidate("fp8-safe", 300, backend="ort", architecture="cuda")
    target = only(FP32, BF16, ort, Candidate("fp8-safe", 150))
    assert target.engine == "gpu-trt-sm90-fp8-safe"


def test_targets_do_not_compete_with_one_another() -> None:
    choice = chosen(FP32, Candidate("fp32", 1, target="cpu"), BF16)
    assert [(t.target, t.plan) for t in choice.targets] == [("gpu", "bf16"), ("cpu", "fp32")]
