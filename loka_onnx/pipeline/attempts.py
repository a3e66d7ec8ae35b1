"""Further attempts at certification: a lower rung for what was selected and missed.

Which rung that is follows from the selection split (`planning.climbing`); certification says only that there
is a further attempt. The plan is built wherever the one that missed was, and judged by the same means, with
its own part of certification's error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loka_onnx.core.evaluation import EvaluationSet
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.refinement import RefinedRun
from loka_onnx.pipeline.candidates import results_of_jobs
from loka_onnx.pipeline.directory import Stage
from loka_onnx.pipeline.emission import Results, choice_options
from loka_onnx.pipeline.job_results import choosable
from loka_onnx.pipeline.jobs import JOBS
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.ladder_stage import Climbing
from loka_onnx.pipeline.refine_stage import Additions
from loka_onnx.planning.choice import not_certified
from loka_onnx.planning.climbing import SHARES


def attempt_again(judging: Judging, results: Results) -> Results:
    """Lower rungs, one after the other, as long as what was selected misses → `attempt-<n>.json`."""
    options = choice_options(judging.context.config)
    for number in range(1, len(SHARES)):
        engines = choosable(results.engines.engines)
        missed = not_certified(engines, results.evaluations, results.plans, options)
        # Several targets may have selected one plan.
        plans = tuple(dict.fromkeys(engine.plan for engine in missed))
        added = _attempt(judging, results, number, plans) if plans else RefinedRun()
        if not added.plans:
            return results
        results = results.with_added(added)
    return results


def _attempt(judging: Judging, results: Results, number: int, missed: Sequence[str]) -> RefinedRun:
    """Plans with fewer sites, with their engines and evaluations; nothing where none would be left."""
    context, additions = judging.context, Additions(judging, results)
    climbing = Climbing(context, results.modified, results.profile)

    def lower(plan: PrecisionPlan) -> PrecisionPlan | None:
        lowered = climbing.lower(plan, number)
        root = plan.id.removesuffix(f"-attempt-{number}")
        return lowered and replace(lowered, id=f"{root}-attempt-{number + 1}", instead_of=plan.id)

    def make() -> RefinedRun:
        lowered = {name: plan for name in missed if (plan := lower(results.plans.plan(name))) is not None}
        if not lowered:
            return RefinedRun()
        only = [
            f"{e.target}-{e.backend}-{e.architecture}-{lowered[e.plan].id}"
            for e in results.engines.engines
            if e.plan in lowered
        ]
        plans = tuple(lowered.values())
        engines = additions.build(plans, only)
        evaluations = EvaluationSet(judging.judge_attempt(engines, number))
        return RefinedRun(plans, engines, additions.corrections, additions.rewrites, evaluations)

    reads = {
        "missed": missed,
        "plans": results.plans,
        "engines": results.engines,
        "evaluations": results.evaluations,
        "results": results_of_jobs(context.path(JOBS)),
    }
    stage = Stage(f"attempt {number + 1}", f"attempt-{number + 1}.json", RefinedRun)
    return context.directory.document(stage, reads, make, lambda written: [*written, *additions.files])
