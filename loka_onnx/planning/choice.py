"""Which engine is emitted: the fastest whose accuracy is inside the budget.

Accuracy is judged on the certification split by the upper end of the interval, speed on latencies measured
on the target. High precision always competes: when FP8 is slower, or outside the budget, the best
high-precision engine is emitted. Where an engine could not run on this host nothing was judged on its own
outputs; the choice then is provisional and says what it rests on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import BudgetStatus, Choice, Evaluation, EvaluationSet, Loser, TargetChoice
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.errors import PlanningError

MEASURED = "measured on the target"
PROVISIONAL = "provisional: accuracy simulated here, speed not measured"


def choose(
    engines: Sequence[EngineArtifact],
    evaluations: EvaluationSet,
    plans: PlanSet,
    split: str = "certification",
) -> Choice:
    """Choose one engine per target.

    Args:
        engines: Every candidate, failures included.
        evaluations: What was measured.
        plans: The plans that the candidates run.
        split: The split whose intervals decide.

    Raises:
        PlanningError: A target has no engine at all.
    """
    by_engine = {e.engine: e for e in evaluations.evaluations if e.split == split}
    targets = dict.fromkeys((engine.target, engine.architecture) for engine in engines)
    return Choice(
        tuple(
            _choose_target(
                [e for e in engines if (e.target, e.architecture) == key], by_engine, plans, evaluations
            )
            for key in targets
        )
    )


def _choose_target(
    engines: Sequence[EngineArtifact],
    by_engine: Mapping[str, Evaluation],
    plans: PlanSet,
    evaluations: EvaluationSet,
) -> TargetChoice:
    target = engines[0].target
    built = [e for e in engines if e.status is not BuildStatus.FAILED]
    if not built:
        raise PlanningError(
            f"no engine could be built for '{target}'",
            evidence="; ".join(f"{e.id}: {e.detail}" for e in engines),
            remedy="`loka-onnx doctor` says what this machine can build",
        )
    ready = [e for e in built if e.status is BuildStatus.READY]
    if not ready:
        return _provisional(target, engines, built, plans, evaluations)
    inside = [e for e in ready if _is_eligible(e, by_engine) and by_engine[e.id].is_within_budget]
    if inside:
        winner = min(inside, key=lambda e: _latency(by_engine[e.id]))
        reason = f"fastest of {len(inside)} engines whose upper bound is inside the budget"
    else:
        fp32 = [e for e in ready if e.plan == "fp32"]
        winner = fp32[0] if fp32 else ready[0]
        reason = "no engine's upper bound is inside the budget: the exact model is emitted"
    losers = tuple(Loser(e.id, _why_not(e, winner, by_engine)) for e in engines if e is not winner)
    return TargetChoice(target, winner.id, winner.plan, reason, MEASURED, losers)


def _provisional(
    target: str,
    engines: Sequence[EngineArtifact],
    built: Sequence[EngineArtifact],
    plans: PlanSet,
    evaluations: EvaluationSet,
) -> TargetChoice:
    """A target whose engines cannot run on this host: rest on the simulation of the same plan."""
    simulated = {e.plan for e in evaluations.evaluations if e.split == "certification" and e.is_within_budget}

    def rank(engine: EngineArtifact) -> tuple[float, int]:
        plan = plans.plan(engine.plan)
        return (plan.fp8_share, -len(engine.fallbacks))

    fp8 = [e for e in built if e.plan in simulated and plans.plan(e.plan).fp8_sites]
    if fp8:
        winner = max(fp8, key=rank)
        reason = (
            f"the simulated accuracy of '{winner.plan}' is inside the budget; "
            "evaluate it on the device before deploying"
        )
    else:
        winner = _highest_precision(built, plans)
        reason = "no FP8 plan is inside the budget in simulation: high precision"
    losers = tuple(
        Loser(e.id, _why_not_provisional(e, winner, simulated)) for e in engines if e is not winner
    )
    return TargetChoice(target, winner.id, winner.plan, reason, PROVISIONAL, losers)


def _highest_precision(built: Sequence[EngineArtifact], plans: PlanSet) -> EngineArtifact:
    order = {Precision.BF16: 0, Precision.FP16: 1, Precision.FP32: 2}

    def rank(engine: EngineArtifact) -> tuple[bool, int]:
        plan: PrecisionPlan = plans.plan(engine.plan)
        return (bool(plan.fp8_sites), order.get(plan.base, 3))

    return min(built, key=rank)


def _is_eligible(engine: EngineArtifact, by_engine: Mapping[str, Evaluation]) -> bool:
    """Whether speed and accuracy of the engine were measured and its speed means something."""
    evaluation = by_engine.get(engine.id)
    return (
        not engine.simulated
        and evaluation is not None
        and bool(evaluation.latencies)
        and all(latency.counts_for_choice for latency in evaluation.latencies)
    )


def _latency(evaluation: Evaluation) -> float:
    """Mean over batch sizes of the median latency per row, µs."""
    return fmean(latency.p50_us / latency.batch for latency in evaluation.latencies)


def _why_not(engine: EngineArtifact, winner: EngineArtifact, by_engine: Mapping[str, Evaluation]) -> str:
    if engine.status is BuildStatus.FAILED:
        return f"failed: {engine.detail}"
    evaluation = by_engine.get(engine.id)
    if evaluation is None or not evaluation.outputs:
        return f"not measured: {engine.detail or engine.status}"
    statuses = {output.budget_status for output in evaluation.outputs}
    accuracy = (
        "accuracy inside the budget"
        if statuses == {BudgetStatus.WITHIN}
        else f"accuracy {', '.join(sorted(statuses - {BudgetStatus.WITHIN}))} the budget"
    ).replace("undecided the budget", "undecided against the budget")
    if engine.simulated:
        return f"{accuracy}; FP8 is simulated here, its speed never counts"
    if statuses != {BudgetStatus.WITHIN}:
        return accuracy
    ratio = _latency(evaluation) / _latency(by_engine[winner.id])
    return f"{accuracy}; {ratio:.2f}× the latency of the chosen engine"


def _why_not_provisional(engine: EngineArtifact, winner: EngineArtifact, simulated: set[str]) -> str:
    if engine.status is BuildStatus.FAILED:
        return f"failed: {engine.detail}"
    if engine.plan not in simulated and engine.plan.startswith("fp8"):
        return "the simulated accuracy of its plan is not inside the budget"
    return f"built, not run: '{winner.plan}' has more in FP8 at an accuracy inside the budget"
