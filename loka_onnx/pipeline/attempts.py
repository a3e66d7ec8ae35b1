"""Further attempts at certification: a lower rung for what was selected and missed.

Which rung that is follows from the selection split (`planning.climbing`); certification says only that there
is a further attempt. The plan is built wherever the one that missed was, and judged by the same means, with
its own part of certification's error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loka_onnx.core.evaluation import EvaluationSet
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.refined_run import RefinedRun
from loka_onnx.pipeline.candidates import results_of_jobs
from loka_onnx.pipeline.directory import Stage
from loka_onnx.pipeline.emission import Results, choice_options
from loka_onnx.pipeline.job_results import choosable
from loka_onnx.pipeline.jobs import JOBS
from loka_onnx.pipeline.ladder_stage import Climbing
from loka_onnx.pipeline.splitting import source_of
from loka_onnx.pipeline.steps import Steps
from loka_onnx.planning.choice import not_certified
from loka_onnx.planning.climbing import SHARES

DOCUMENT = "attempt-{}.json"


def attempt_again(steps: Steps, results: Results, sample: Path) -> Results:
    """Lower rungs, one after the other, as long as what was selected misses → `attempt-<n>.json`.

    Args:
        sample: ``.npz`` of generated inputs for first inferences.
    """
    for number in range(1, len(SHARES)):
        missed = not_certified(
            choosable(results.engines.engines), results.evaluations, results.plans, choice_options(steps)
        )
        # Several targets may have selected one plan.
        plans = tuple(dict.fromkeys(engine.plan for engine in missed))
        if not plans:
            return results
        added = _attempt(steps, results, sample, number, plans)
        if not added.plans:
            return results
        results = results.with_added(added)
    return results


def _attempt(steps: Steps, results: Results, sample: Path, number: int, missed: Sequence[str]) -> RefinedRun:
    directory, name = steps.directory, f"attempt {number + 1}"
    stage = Stage(name, DOCUMENT.format(number + 1), RefinedRun)
    attempt = _Attempt(steps, results, sample, number)
    reads = {
        "missed": missed,
        "plans": results.plans,
        "engines": results.engines,
        "evaluations": results.evaluations,
        "results": results_of_jobs(directory.path / JOBS),
    }
    plans = [results.plans.plan(plan) for plan in missed]
    return directory.document(
        stage, reads, lambda: attempt.run(plans), lambda written: [*written, *attempt.files]
    )


@dataclass
class _Attempt:
    """One attempt; its number counts from 0, and `files` are those of its engines and models."""

    steps: Steps
    results: Results
    sample: Path
    number: int
    files: tuple[Path, ...] = ()

    def run(self, missed: Sequence[PrecisionPlan]) -> RefinedRun:
        """Plans with fewer sites, with their engines and evaluations; nothing where none would be left."""
        steps, results = self.steps, self.results
        lower = {plan.id: made for plan in missed if (made := self._lower(plan)) is not None}
        if not lower:
            return RefinedRun()
        plans = PlanSet(tuple(lower.values()))
        fitted = steps.fit_corrections(results.exported, results.modified, plans)
        only = [
            f"{e.target}-{e.backend}-{e.architecture}-{lower[e.plan].id}"
            for e in results.engines.engines
            if e.plan in lower
        ]
        builder = steps.builder(self.sample, fitted, only, is_addition=True)
        built = builder.build(source_of(results.modified, plans, steps.split))
        self.files = builder.files(built)
        engines = built.engines.engines
        judged = steps.judging.judge_attempt(results.exported, engines, self.number)
        return RefinedRun(plans.plans, engines, fitted, built.rewrites, EvaluationSet(tuple(judged)))

    def _lower(self, plan: PrecisionPlan) -> PrecisionPlan | None:
        results = self.results
        climbing = Climbing(self.steps, results.exported, results.modified, results.profile)
        made = climbing.lower(plan, self.number)
        root = plan.id.removesuffix(f"-attempt-{self.number}")
        return made and replace(made, id=f"{root}-attempt-{self.number + 1}", instead_of=plan.id)
