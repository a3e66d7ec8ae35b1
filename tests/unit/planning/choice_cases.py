"""Engines, evaluations and plans that a choice is made among."""

from dataclasses import dataclass

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
    TargetChoice,
    TaskMetrics,
)
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.planning.choice import choose

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
        known = (self.backend, self.plan, self.target, self.architecture, self.status, self.simulated)
        sites = tuple(SitePrecision(f"s{i}", "fp8", (), False, "") for i in range(self.fallbacks))
        return EngineArtifact(*known, None, 0, "", "", sites, build_seconds=0.0, detail=self.detail)

    def evaluation(self, split: str) -> Evaluation:
        outputs = tuple(map(output, self.accuracy)) if self.status is BuildStatus.READY else ()
        latencies = () if self.us is None else (latency(self.us, self.counts),)
        known = (self.engine().id, self.backend, self.plan, self.target, split, 1000)
        return Evaluation(*known, outputs, latencies, "measured")


SPLITS = ("selection", "certification")


def output(status: str) -> OutputEvaluation:
    metrics = TaskMetrics(0.5, 0.9, 0.8, 1.0)
    return OutputEvaluation("ctr", OutputKind.LOGIT, metrics, None, 2e-4, status, None)


def latency(us: float, counts: bool = True, batch: int = 100) -> Latency:
    return Latency(batch, us, us, us, 100, "device", counts)


def chosen(*candidates: Candidate) -> Choice:
    judged = [c for c in candidates if c.accuracy]
    evaluations = EvaluationSet(tuple(c.evaluation(split) for split in SPLITS for c in judged))
    return choose([c.engine() for c in candidates], evaluations, PLANS)


def only(*candidates: Candidate) -> TargetChoice:
    choice = chosen(*candidates)
    (target,) = choice.targets
    ids = [c.engine().id for c in candidates]
    # Every candidate but the winner is a loser, once, with a reason.
    assert sorted([target.engine, *(loser.engine for loser in target.losers)]) == sorted(ids)
    assert all(loser.reason for loser in target.losers)
    assert serde.loads(Choice, serde.dumps(choice)) == choice
    return target


def on_both(selection: list[Candidate], certification: list[Candidate]) -> TargetChoice:
    judged = [
        c.evaluation(s) for s, seen in zip(SPLITS, (selection, certification), strict=True) for c in seen
    ]
    return choose([c.engine() for c in selection], EvaluationSet(tuple(judged)), PLANS).targets[0]


def reasons(target: TargetChoice) -> dict[str, str]:
    """Reasons by plan."""
    return {loser.engine.split("-", 3)[3]: loser.reason for loser in target.losers}


FP32, BF16 = Candidate("fp32", 400), Candidate("bf16", 200)
FASTEST = "fastest of {} engines inside the budget"
ONLY = "the only engine inside the budget whose speed counts"
