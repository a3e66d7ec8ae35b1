"""Refining as a stage of a run: the bench that builds, times and judges; where further plans come from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Evaluation
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.refinement import REFINED_NAME, RefinedRun, Refinement
from loka_onnx.core.rewrite import RewriteLogs
from loka_onnx.evaluation.latency import Interleaved
from loka_onnx.pipeline.candidates import EngineBuilder
from loka_onnx.pipeline.correcting import Correcting
from loka_onnx.pipeline.directory import Stage
from loka_onnx.pipeline.emission import Results
from loka_onnx.pipeline.engine_times import counts_here
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.ladder_stage import start_ladder_of
from loka_onnx.pipeline.plans import search_plans
from loka_onnx.pipeline.refining import RefineLimits, refine
from loka_onnx.pipeline.splitting import source_of
from loka_onnx.planning.ladder import Ladder, Reverted


@dataclass(frozen=True)
class Rounds:
    """Every step of refining, and what it added to the run."""

    document: Refinement
    added: RefinedRun


REFINE = Stage("refine", {"document": "refinement.json", "added": REFINED_NAME}, Rounds)


def refine_engines(judging: Judging, results: Results) -> Results:
    """Rounds of further plans on devices here that run FP8 → `refinement.json`, `refined.json`.

    Returns:
        The results with what was added, and with what was judged of any engine on selection.
    """
    context, config = judging.context, judging.context.config
    settings, engines = config.refine, results.engines.engines
    if settings.rounds == 0 or not _is_worth(results):
        context.directory.forget(REFINE.name)
        return results
    bench = RunBench(judging, results)

    def make() -> Rounds:
        limits = RefineLimits(settings.rounds, settings.plans, settings.seconds)
        refined = refine(engines, results.plans, bench, limits)
        added = RefinedRun(
            refined.plans,
            refined.engines,
            bench.additions.corrections,
            bench.additions.rewrites,
            refined.evaluations,
        )
        return Rounds(refined.document, added)

    reads = {
        **judging.reads(results.engines),
        "plans": results.plans,
        "corrections": results.corrections,
        "data": [context.splits.calibration, context.splits.selection],
        "refine": settings,
        "plan": config.plan,
    }
    rounds = context.directory.document(
        REFINE,
        reads,
        make,
        lambda written: [*written, *bench.additions.files],
        # Plans that were refined on another device are refined again on a target's own.
        again=lambda earlier: counts_here(earlier.added.evaluations.evaluations, engines),
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


@dataclass
class Additions:
    """Engines of further plans, beside those of a run.

    Attributes:
        corrections: Constants that were fitted to the plans that were built.
        rewrites: Changes in their models.
        files: Files of their engines and models.
    """

    judging: Judging
    results: Results
    corrections: CorrectionSet = field(default_factory=CorrectionSet)
    rewrites: RewriteLogs = field(default_factory=lambda: RewriteLogs({}))
    files: list[Path] = field(default_factory=list)

    def build(self, plans: Sequence[PrecisionPlan], only: Collection[str]) -> tuple[EngineArtifact, ...]:
        """Fit the constants of plans and build the engines of these names."""
        judging, model = self.judging, self.results.modified
        fitted = Correcting(judging.context, model).fit(plans)
        builder = EngineBuilder(judging, fitted, only, is_addition=True)
        built = builder.build(source_of(model, PlanSet(tuple(plans)), judging.split))
        self.corrections = replace(self.corrections, plans=(*self.corrections.plans, *fitted.plans))
        self.rewrites = RewriteLogs({**self.rewrites.logs, **built.rewrites.logs})
        self.files += builder.files(built)
        return built.engines.engines


class RunBench:
    """Builds, times and judges with the means of a run, and finds further plans (`refining.Bench`)."""

    def __init__(self, judging: Judging, results: Results) -> None:
        self._judging, self._results = judging, results
        self.additions = Additions(judging, results)

    def build(self, plans: Sequence[PrecisionPlan], like: EngineArtifact) -> Sequence[EngineArtifact]:
        """One engine for each plan, by the backend and for the architecture of another engine."""
        prefix = f"{like.target}-{like.backend}-{like.architecture}"
        built = self.additions.build(plans, [f"{prefix}-{plan.id}" for plan in plans])
        by_plan = {engine.plan: engine for engine in built}
        return [by_plan[plan.id] for plan in plans]

    def time(self, engines: Sequence[EngineArtifact]) -> Interleaved:
        """Latencies by engine id, all timed in turns, and what ended those that failed."""
        return self._judging.time_engines(engines)

    def judge(self, engines: Sequence[EngineArtifact]) -> Sequence[Evaluation]:
        """Each engine on the selection split."""
        return self._judging.judge_on_selection(engines)

    @cached_property
    def _searched(self) -> Sequence[PrecisionPlan]:
        return search_plans(self._judging.context, self._results.modified, self._results.profile)

    @cached_property
    def _ladder(self) -> Ladder:
        results = self._results
        return start_ladder_of(self._judging.context, results.modified, results.profile).ladder

    def from_search(self, target: str) -> Sequence[PrecisionPlan]:
        """Plans for a target that kernel times propose, the most telling first."""
        return [plan for plan in self._searched if plan.device == target]

    def revert_sites(self, plan: PrecisionPlan, evaluation: Evaluation, target: str) -> Reverted | None:
        """A plan with fewer sites in FP8, for one whose engine misses the budget; None for none."""
        return self._ladder.revert_sites(plan, evaluation, target)
