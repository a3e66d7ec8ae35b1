"""Evidence on engines: accuracy on two splits, speed, and precision."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from scipy.special import stdtrit

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import (
    LEAST_UNITS,
    BudgetStatus,
    Evaluation,
    EvaluationSet,
    OutputEvaluation,
    PredictedTime,
)
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.planning.expected_latency import expected_us, why_not_expected
from loka_onnx.planning.speed import Speed, rivals

FASTER_FIRST = (Precision.BF16, Precision.FP16, Precision.FP32)
"""Base precisions by expected speed, the fastest first, and by precision, the lowest first."""


@dataclass(frozen=True)
class Evidence:
    """Measurements of the engines of a run, and their plans."""

    evaluations: EvaluationSet
    plans: PlanSet

    @cached_property
    def by_engine(self) -> Mapping[str, Evaluation]:
        """Evaluation on the selection split by engine id."""
        return self._of_split("selection")

    @cached_property
    def certified(self) -> Mapping[str, Evaluation]:
        """Evaluation on the certification split by engine id."""
        return self._of_split("certification")

    def _of_split(self, split: str) -> dict[str, Evaluation]:
        return {e.engine: e for e in self.evaluations.evaluations if e.split == split}

    def is_certified(self, engine: EngineArtifact, together: int = 1) -> bool:
        """True if its outputs are inside the budget on certification; `together` engines share the error."""
        evaluation = self.certified.get(engine.id)
        if evaluation is None or not evaluation.is_within_budget:
            return False
        return together < 2 or all(
            output.is_within(_widening(output, together)) for output in evaluation.outputs
        )

    def is_within_budget(self, engine: EngineArtifact) -> bool:
        """True if the engine's own outputs were judged inside the budget."""
        evaluation = self.by_engine.get(engine.id)
        return evaluation is not None and evaluation.is_within_budget

    def upper(self, engine: EngineArtifact) -> float | None:
        """Return the worst upper bound over its limit on selection, guards included; None where unknown."""
        evaluation = self.by_engine.get(engine.id)
        return None if evaluation is None else evaluation.upper

    def speed(self, engine: EngineArtifact) -> Speed | None:
        """Return the engine's speed on the target; None where unknown."""
        return Speed.of(self.by_engine.get(engine.id), engine.simulated)

    def was_elsewhere(self, engine: EngineArtifact) -> bool:
        """True if the engine was timed, but only where that tells nothing of its target."""
        evaluation = self.by_engine.get(engine.id)
        if evaluation is None or engine.simulated or not evaluation.latencies:
            return False
        return not any(latency.counts_for_choice for latency in evaluation.latencies)

    def failure(self, engine: EngineArtifact) -> str:
        """Return the error that ended the engine while it was timed or judged; empty for none."""
        evaluations = [split[engine.id] for split in (self.by_engine, self.certified) if engine.id in split]
        timed = [f"failed while it was timed: {e.latency_failure}" for e in evaluations if e.latency_failure]
        judged = [e.status for e in evaluations if e.has_failed]
        return next(iter((*timed, *judged)), "")

    def speeds(self, engines: Collection[EngineArtifact]) -> dict[str, Speed]:
        """Return speeds by id; without engines that failed at a batch size, which must not serve it."""
        by_id = {e.id: speed for e in engines if (speed := self.speed(e)) is not None}
        sizes = {batch for speed in by_id.values() for batch in speed.batches}
        return rivals({name: speed for name, speed in by_id.items() if set(speed.batches) == sizes})

    def plan_status(self, plan: str, split: str = "selection") -> bool | None:
        """True if every engine of a plan judged on a split was inside the budget; None without any."""
        of_plan = (e for e in self.evaluations.evaluations if e.plan == plan and e.split == split)
        judged = [e.is_within_budget for e in of_plan if e.outputs]
        return all(judged) if judged else None

    def plan(self, engine: EngineArtifact) -> PrecisionPlan:
        """Return the engine's plan."""
        return self.plans.plan(engine.plan)

    def is_quantized(self, engine: EngineArtifact) -> bool:
        """True if the engine's plan has sites in FP8 or INT8."""
        return bool(self.plan(engine).quantized_sites)

    def is_exact(self, engine: EngineArtifact) -> bool:
        """True if the engine's plan is the exact model: FP32 throughout."""
        return self.plan(engine).base is Precision.FP32 and not self.is_quantized(engine)

    def competes(self, engine: EngineArtifact) -> bool:
        """True if the engine may be selected; a plan that stands in for another that missed may not."""
        return not self.plan(engine).instead_of

    def attempts(self, selected: EngineArtifact, among: Collection[EngineArtifact]) -> list[EngineArtifact]:
        """Return the selected engine and its replacements by the same backend and architecture, in order."""
        made_by = (selected.backend, selected.architecture)
        instead_of = {
            self.plan(e).instead_of: e
            for e in reversed(tuple(among))  # the first one counts
            if (e.backend, e.architecture) == made_by
        }
        engines = [selected]
        while (after := instead_of.get(engines[-1].plan)) is not None:
            engines.append(after)
        return engines

    def standing(self, engine: EngineArtifact) -> str:
        """Return the verdict on an engine in a few words, for a message."""
        failure = self.failure(engine)
        if failure or not engine.is_built:
            return failure or f"{engine.status}: {engine.detail}"
        for name, evaluations in (("selection", self.by_engine), ("certification", self.certified)):
            evaluation = evaluations.get(engine.id)
            if evaluation is None or not evaluation.outputs:
                return f"not judged on {name}"
            if not evaluation.is_within_budget:
                against = "" if evaluation.worst_status == BudgetStatus.BEYOND else "against "
                return f"{evaluation.worst_status} {against}the budget on {name}"
        return "simulated, inside the budget" if engine.simulated else "inside the budget"

    def exactness(self, engine: EngineArtifact) -> tuple[bool, float, int]:
        """Return a sort key, the most exact engine first: no eight bits, fewer of them, a wider base."""
        return (
            self.is_quantized(engine),
            self.plan(engine).fp8_share,
            -FASTER_FIRST.index(self.plan(engine).base),
        )

    def predictions(
        self, engines: Collection[EngineArtifact]
    ) -> tuple[tuple[PredictedTime, ...], dict[str, str]]:
        """Return predicted and measured times of quantized engines; and by engine id why there are none.

        A plan's prediction covers its products; the rest is taken from one in high precision of the same
        backend and base precision (`expected_latency.expected_us`).
        """
        times, why_not = [], {}
        for engine, exact in self._pairs(engines):
            speed, measured = self.speed(engine), self.speed(exact)
            if speed is None:
                continue
            ours, theirs = self.plan(engine), self.plan(exact)
            if why := why_not_expected(ours, theirs, engine.target):
                why_not[engine.id] = why
            known = {} if measured is None else {b: x.p50_us for b, x in measured.latencies.items()}
            for batch, us in expected_us(ours, theirs, known, engine.target).items():
                if batch in speed.latencies:
                    taken = speed.latencies[batch].p50_us
                    times.append(PredictedTime(engine.id, engine.plan, batch, us, taken))
        return tuple(times), why_not

    def _pairs(self, engines: Collection[EngineArtifact]) -> Iterator[tuple[EngineArtifact, EngineArtifact]]:
        """Yield quantized engines, each with the first one that differs in that alone."""

        def kind(engine: EngineArtifact) -> tuple[str, str, str, Precision]:
            return (engine.target, engine.backend, engine.architecture, self.plan(engine).base)

        exact = {kind(engine): engine for engine in reversed(tuple(engines)) if not self.is_quantized(engine)}
        for engine in engines:
            if self.is_quantized(engine) and kind(engine) in exact:
                yield engine, exact[kind(engine)]


def _widening(output: OutputEvaluation, together: int) -> float:
    """Return the factor of an interval's width at a divided error, by Student's t over the fewest units."""
    if output.difference is None:
        return 1.0
    tail = (1.0 - output.difference.judged.confidence) / 2.0
    return float(stdtrit(LEAST_UNITS - 1, 1.0 - tail / together) / stdtrit(LEAST_UNITS - 1, 1.0 - tail))
