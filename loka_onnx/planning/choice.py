"""Which engine is emitted: the fastest whose accuracy is inside the budget.

Accuracy is judged by the upper end of the interval, speed on latencies measured on the target. The selection
split decides; certification is looked at once, to hold what was chosen against the budget on rows that took
no part in choosing it. An engine that misses there gives way to the exact model, not to the runner-up:
choosing again would make certification a second selection. High precision always competes: when FP8 is
slower, or outside the budget, the best high-precision engine is emitted, and FP32 when nothing is inside.
Where no engine could run on this host nothing was judged on its own outputs; the choice then is provisional
and says what it rests on.

One choice for each piece of hardware. A target is one piece of hardware, on which all its engines compete:
backends name the same device differently (``cuda``, ``sm90``). Only where one backend builds a target for
several architectures does the target stand for as many pieces of hardware, with a choice for each; the engine
of another backend whose architecture is none of those competes on every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import BudgetStatus, Choice, Evaluation, EvaluationSet, Loser, TargetChoice
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet
from loka_onnx.errors import PlanningError

MEASURED = "measured on the target"
PROVISIONAL = "provisional: accuracy simulated here, speed not measured"

_FASTER_FIRST = (Precision.BF16, Precision.FP16, Precision.FP32)
"""What is expected to be faster where nothing was measured."""


def choose(
    engines: Sequence[EngineArtifact],
    evaluations: EvaluationSet,
    plans: PlanSet,
) -> Choice:
    """Choose one engine for each piece of hardware.

    Args:
        engines: Every candidate, declined and failed ones included.
        evaluations: What was measured.
        plans: The plans that the candidates run.

    Raises:
        PlanningError: A target has no engine that could be emitted.
    """
    evidence = _Evidence(_of_split(evaluations, "selection"), _of_split(evaluations, "certification"), plans)
    return Choice(
        tuple(
            _choose_one(rivals, evidence)
            for target in dict.fromkeys(engine.target for engine in engines)
            for rivals in group_by_hardware([e for e in engines if e.target == target])
        )
    )


def group_by_hardware(engines: Sequence[EngineArtifact]) -> list[list[EngineArtifact]]:
    """Engines of one target that compete with one another, one group for each piece of hardware."""
    architectures: dict[str, dict[str, None]] = {}
    for engine in engines:
        architectures.setdefault(engine.backend, {})[engine.architecture] = None
    hardware = dict.fromkeys(name for names in architectures.values() if len(names) > 1 for name in names)
    if not hardware:
        return [list(engines)]
    return [
        [e for e in engines if e.architecture == name or e.architecture not in hardware] for name in hardware
    ]


def _of_split(evaluations: EvaluationSet, split: str) -> dict[str, Evaluation]:
    return {e.engine: e for e in evaluations.evaluations if e.split == split}


@dataclass(frozen=True)
class _Evidence:
    """What the engines are judged on.

    Attributes:
        by_engine: Evaluation on the selection split by engine id.
        certified: Evaluation on the certification split by engine id.
        plans: The plans of the engines.
    """

    by_engine: Mapping[str, Evaluation]
    certified: Mapping[str, Evaluation]
    plans: PlanSet

    def is_certified(self, engine: EngineArtifact) -> bool:
        """Whether the engine's own outputs are inside the budget on the certification split."""
        evaluation = self.certified.get(engine.id)
        return evaluation is not None and evaluation.is_within_budget

    def is_within_budget(self, engine: EngineArtifact) -> bool:
        """Whether the engine's own outputs were judged inside the budget."""
        evaluation = self.by_engine.get(engine.id)
        return evaluation is not None and evaluation.is_within_budget

    def latency_us(self, engine: EngineArtifact) -> float | None:
        """Mean over batch sizes of the median latency per row; None where no speed on the target is known."""
        evaluation = self.by_engine.get(engine.id)
        if engine.simulated or evaluation is None or not evaluation.latencies:
            return None
        if not all(latency.counts_for_choice for latency in evaluation.latencies):
            return None
        return fmean(latency.p50_us / latency.batch for latency in evaluation.latencies)

    def plan_status(self, plan: str) -> bool | None:
        """Whether every engine of the plan that was judged here was inside the budget; None without any."""
        both = (*self.by_engine.values(), *self.certified.values())
        judged = [e.is_within_budget for e in both if e.plan == plan and e.outputs]
        return all(judged) if judged else None

    def has_fp8(self, engine: EngineArtifact) -> bool:
        """Whether the engine's plan has sites in FP8."""
        return bool(self.plans.plan(engine.plan).fp8_sites)

    def base(self, engine: EngineArtifact) -> Precision:
        """Precision of what is not FP8."""
        return self.plans.plan(engine.plan).base


def _choose_one(engines: Sequence[EngineArtifact], evidence: _Evidence) -> TargetChoice:
    built = [e for e in engines if e.is_built]
    if not built:
        raise PlanningError(
            f"no engine could be built for '{engines[0].target}'",
            evidence="; ".join(f"{e.id} {e.status}: {e.detail}" for e in engines),
            remedy="`loka-onnx doctor` says what this machine can build",
        )
    if any(e.status is BuildStatus.READY for e in built):
        return _choose_measured(engines, evidence)
    return _choose_provisional(engines, built, evidence)


# Engines that ran here --------------------------------------------------------------------------------


def _choose_measured(engines: Sequence[EngineArtifact], evidence: _Evidence) -> TargetChoice:
    ready = [e for e in engines if e.status is BuildStatus.READY]
    latencies = {e.id: latency for e in ready if (latency := evidence.latency_us(e)) is not None}
    inside = [e for e in ready if e.id in latencies and evidence.is_within_budget(e)]
    if inside:
        winner = min(inside, key=lambda e: latencies[e.id])
        reason = f"fastest of {len(inside)} engines whose upper bound is inside the budget"
        if not any(evidence.has_fp8(e) for e in inside):
            reason += "; none of them runs FP8"
        elif not evidence.has_fp8(winner):
            reason += "; FP8 is slower"
        if not evidence.is_certified(winner):
            return _fall_back(engines, winner, latencies, evidence)
    else:
        winner = _most_exact([e for e in ready if not e.simulated], evidence, engines[0].target)
        reason = f"no engine with a measured speed is inside the budget: the exact model, {winner.plan}"
        if evidence.base(winner) is not Precision.FP32:
            reason = "no engine is inside the budget, and FP32 was not built: the most exact engine"
    losers = tuple(
        Loser(e.id, _why_not_measured(e, winner, latencies, evidence)) for e in engines if e is not winner
    )
    return TargetChoice(winner.target, winner.id, winner.plan, reason, MEASURED, losers)


def _fall_back(
    engines: Sequence[EngineArtifact],
    missed: EngineArtifact,
    latencies: Mapping[str, float],
    evidence: _Evidence,
) -> TargetChoice:
    """What was selected misses the budget on certification: the exact model."""
    others = [e for e in engines if e.status is BuildStatus.READY and not e.simulated and e is not missed]
    winner = _most_exact(others or [missed], evidence, missed.target)
    certified = evidence.certified.get(missed.id)
    why_missed = f"selected; on certification {_accuracy(certified) if certified else 'not measured'}"
    losers = tuple(
        Loser(e.id, why_missed if e is missed else _why_not_measured(e, winner, latencies, evidence))
        for e in engines
        if e is not winner
    )
    reason = (
        f"'{missed.plan}' was selected and is not inside the budget on certification: {winner.plan} instead"
    )
    return TargetChoice(winner.target, winner.id, winner.plan, reason, MEASURED, losers)


def _most_exact(engines: Sequence[EngineArtifact], evidence: _Evidence, target: str) -> EngineArtifact:
    """The engine that departs least from the exact model; the faster of two alike."""
    if not engines:
        raise PlanningError(
            f"no engine of '{target}' can be emitted",
            evidence="every engine that runs here simulates FP8, and none of another kind was built",
            remedy="add fp32 to `plan.plans`",
        )

    def rank(engine: EngineArtifact) -> tuple[bool, int, float]:
        latency = evidence.latency_us(engine)
        return (
            evidence.has_fp8(engine),
            -_FASTER_FIRST.index(evidence.base(engine)),
            float("inf") if latency is None else latency,
        )

    return min(engines, key=rank)


def _why_not_measured(
    engine: EngineArtifact, winner: EngineArtifact, latencies: Mapping[str, float], evidence: _Evidence
) -> str:
    if not engine.is_built:
        return f"{engine.status}: {engine.detail}"
    evaluation = evidence.by_engine.get(engine.id)
    if evaluation is None or not evaluation.outputs:
        return f"not measured: {engine.detail or (evaluation.status if evaluation else engine.status)}"
    accuracy = _accuracy(evaluation)
    if engine.simulated:
        return f"{accuracy}; FP8 is simulated here, its speed never counts"
    if not evaluation.is_within_budget or winner.id not in latencies:
        return accuracy
    if engine.id not in latencies:
        return f"{accuracy}; its speed on the target was not measured"
    return f"{accuracy}; {latencies[engine.id] / latencies[winner.id]:.2f}× the latency of the chosen engine"


def _accuracy(evaluation: Evaluation) -> str:
    """How the engine stands to the budget; beyond on one output outweighs undecided on another."""
    statuses = {output.budget_status for output in evaluation.outputs}
    if BudgetStatus.BEYOND in statuses:
        return "accuracy beyond the budget"
    if BudgetStatus.UNDECIDED in statuses:
        return "accuracy undecided: the budget lies inside the interval"
    return "accuracy inside the budget"


# Engines for hardware that is not here ----------------------------------------------------------------


def _choose_provisional(
    engines: Sequence[EngineArtifact], built: Sequence[EngineArtifact], evidence: _Evidence
) -> TargetChoice:
    """Rest on what was judged of the same plans on this host."""
    fp8 = [e for e in built if evidence.has_fp8(e) and evidence.plan_status(e.plan)]
    if fp8:
        winner = max(fp8, key=lambda e: _fp8_rank(e, evidence))
        reason = (
            f"the simulated accuracy of '{winner.plan}' is inside the budget; "
            "evaluate it on the device before deploying"
        )
    else:
        winner = min(built, key=lambda e: _high_precision_rank(e, evidence))
        reason = (
            "no FP8 plan is inside the budget in simulation: high precision; "
            "evaluate it on the device before deploying"
        )
    losers = tuple(Loser(e.id, _why_not_provisional(e, winner, evidence)) for e in engines if e is not winner)
    return TargetChoice(winner.target, winner.id, winner.plan, reason, PROVISIONAL, losers)


def _fp8_rank(engine: EngineArtifact, evidence: _Evidence) -> tuple[float, int]:
    """More in FP8 is expected to be faster; then, fewer sites where the engine departs from its plan."""
    return (evidence.plans.plan(engine.plan).fp8_share, -len(engine.fallbacks))


def _high_precision_rank(engine: EngineArtifact, evidence: _Evidence) -> tuple[bool, bool, int]:
    """No FP8; then, nothing that was seen outside the budget; then, what is expected to be faster."""
    return (
        evidence.has_fp8(engine),
        evidence.plan_status(engine.plan) is False,
        _FASTER_FIRST.index(evidence.base(engine)),
    )


def _why_not_provisional(engine: EngineArtifact, winner: EngineArtifact, evidence: _Evidence) -> str:
    if not engine.is_built:
        return f"{engine.status}: {engine.detail}"
    status = evidence.plan_status(engine.plan)
    if status is False:
        return "built, not run: the accuracy of its plan on this host is not inside the budget"
    if evidence.has_fp8(engine) and status is None:
        return "built, not run: the accuracy of its plan was not simulated"
    if engine.plan == winner.plan:
        return f"built, not run: the same plan as '{winner.id}', which has no more fallbacks"
    if not evidence.has_fp8(winner):
        return f"built, not run: {evidence.base(winner)} is expected to be faster"
    return f"built, not run: '{winner.plan}' has no less in FP8, at a simulated accuracy inside the budget"
