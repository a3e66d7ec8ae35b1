"""Refining as a stage of a run: the bench that builds, times and judges; where further plans come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Evaluation
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.refined_run import REFINED_NAME, RefinedRun
from loka_onnx.core.refinement import Refinement
from loka_onnx.core.rewrite import RewriteLogs
from loka_onnx.evaluation.latency import Interleaved
from loka_onnx.pipeline.directory import Stage
from loka_onnx.pipeline.emission import Results
from loka_onnx.pipeline.engine_times import counts_here
from loka_onnx.pipeline.recipes import planned_recipes
from loka_onnx.pipeline.refining import RefineLimits, refine
from loka_onnx.pipeline.splitting import source_of
from loka_onnx.pipeline.steps import Steps
from loka_onnx.planning.ladder import Ladder, Reverted
from loka_onnx.planning.policy import start_ladder


@dataclass(frozen=True)
class Rounds:
    """Every step of refining, and what it added to the run."""

    document: Refinement
    added: RefinedRun


REFINE = Stage("refine", {"document": "refinement.json", "added": REFINED_NAME}, Rounds)


def refine_engines(steps: Steps, results: Results, sample: Path) -> Results:
    """Rounds of further plans on devices here that run FP8 → `refinement.json`, `refined.json`.

    Args:
        sample: ``.npz`` of generated inputs for first inferences.

    Returns:
        The results with what was added, and with what was judged of any engine on selection.
    """
    settings, engines = steps.config.refine, results.engines.engines
    if settings.rounds == 0 or not _is_worth(results):
        steps.directory.forget(REFINE.name)
        return results
    bench = RunBench(steps, results, sample)

    def make() -> Rounds:
        limits = RefineLimits(settings.rounds, settings.plans, settings.seconds)
        refined = refine(engines, results.plans, bench, RunProposals(steps, results), limits)
        added = RefinedRun(
            refined.plans, refined.engines, bench.corrections, bench.rewrites, refined.evaluations
        )
        return Rounds(refined.document, added)

    reads = {
        "exported": results.exported,
        "plans": results.plans,
        "engines": [[e.id, e.status, e.digest or e.detail] for e in engines],
        "corrections": results.corrections,
        "split": () if steps.split is None else steps.split.digests,
        "data": [steps.splits.calibration, steps.splits.selection],
        "outputs": steps.config.outputs,
        "group": steps.config.data.group,
        "slices": steps.config.data.slices,
        "batch": steps.config.batch,
        "refine": settings,
        "inputs": steps.config.serving.inputs,
        "plan": steps.config.plan,
    }
    earlier = steps.directory.earlier(REFINE)
    # Plans that were refined on another device are refined again on a target's own.
    again = earlier is not None and counts_here(earlier.added.evaluations.evaluations, engines)
    rounds = steps.directory.document(
        REFINE, reads, make, lambda written: [*written, *bench.files], again=again
    )
    return replace(results.with_added(rounds.added), refinement=rounds.document)


def _is_worth(results: Results) -> bool:
    """Return True if an engine on this machine runs FP8 unsimulated."""
    return any(
        engine.status is BuildStatus.READY
        and not engine.simulated
        and results.plans.plan(engine.plan).fp8_sites
        for engine in results.engines.engines
    )


class RunBench:
    """Builds, times and judges with the means of a run (`refining.Bench`).

    Attributes:
        corrections: Constants that were fitted to the plans that were built.
        rewrites: What was written into their models.
        files: Files of their engines and models.
    """

    def __init__(self, steps: Steps, results: Results, sample: Path) -> None:
        self._steps, self._results, self._sample = steps, results, sample
        self.corrections = CorrectionSet()
        self.rewrites = RewriteLogs({})
        self.files: list[Path] = []

    def build(self, plans: Sequence[PrecisionPlan], like: EngineArtifact) -> Sequence[EngineArtifact]:
        """One engine for each plan, by the backend and for the architecture of another engine."""
        steps, results = self._steps, self._results
        wanted = PlanSet(tuple(plans))
        fitted = steps.fit_corrections(results.exported, results.modified, wanted)
        self.corrections = replace(self.corrections, plans=(*self.corrections.plans, *fitted.plans))
        prefix = f"{like.target}-{like.backend}-{like.architecture}"
        only = [f"{prefix}-{plan.id}" for plan in plans]
        builder = steps.builder(self._sample, fitted, only, is_addition=True)
        built = builder.build(source_of(results.modified, wanted, steps.split))
        self.rewrites = RewriteLogs({**self.rewrites.logs, **built.rewrites.logs})
        self.files += builder.files(built)
        by_plan = {engine.plan: engine for engine in built.engines.engines}
        return [by_plan[plan.id] for plan in plans]

    def time(self, engines: Sequence[EngineArtifact]) -> Interleaved:
        """Latencies by engine id, all timed in turns, and what ended those that failed."""
        return self._steps.judging.time_engines(engines)

    def judge(self, engines: Sequence[EngineArtifact]) -> Sequence[Evaluation]:
        """Each engine on the selection split."""
        return self._steps.judging.judge_on_selection(self._results.exported, engines)


class RunProposals:
    """Further plans of a run (`refining.Proposals`)."""

    def __init__(self, steps: Steps, results: Results) -> None:
        self._steps, self._results = steps, results

    @cached_property
    def _searched(self) -> Sequence[PrecisionPlan]:
        return self._steps.search_plans(self._results.modified, self._results.profile)

    @cached_property
    def _ladder(self) -> Ladder:
        results, steps = self._results, self._steps
        recipes, options = planned_recipes(steps.config.plan), steps.plan_options(results.modified)
        return start_ladder(results.modified, results.profile, steps.specs, recipes, options).ladder

    def from_search(self, target: str) -> Sequence[PrecisionPlan]:
        """Plans for a target that kernel times propose."""
        return [plan for plan in self._searched if plan.device == target]

    def revert_sites(self, plan: PrecisionPlan, evaluation: Evaluation, target: str) -> Reverted | None:
        """A plan with fewer sites in FP8."""
        return self._ladder.revert_sites(plan, evaluation, target)
