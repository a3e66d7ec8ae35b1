"""Climbing the ladders of plans, and going down again if a selected plan misses on certification.

There is a ladder for each planned eight-bit precision, and one for both together (`mixed`). One switchable
model (`calibration.effects.switchable`) holds every site that may run in it, exact and rounded. A rung is one
pass of it over the selection split: nothing is built. What is not quantized stays in FP32 there. Constants
are as an engine will have them (`correcting`): the mean error of a site depends on no other site, and is
taken out of each; what restores the mean score of the rung is added where the upper bound is lower with it.

Which rung a further attempt takes follows from the selection split (`planning.climbing`); certification says
only that there is one. Its plan is built wherever the one that missed was, and judged by the same means, with
its own part of certification's error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.corrections.biases import fit_biases
from loka_onnx.calibration.corrections.means import MeanRows, mean_scores
from loka_onnx.calibration.effects.switchable import Switch, SwitchableModel, write_switchable
from loka_onnx.config import PlanId
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.evaluation import EvaluationSet, OutputEvaluation
from loka_onnx.core.plan import MIXED, Climb, Climbs, PrecisionPlan, plan_kind
from loka_onnx.core.profile import Profile
from loka_onnx.core.refinement import RefinedRun
from loka_onnx.data import Dataset
from loka_onnx.evaluation.accuracy import Units, evaluate_outputs
from loka_onnx.graph.biases import expose_scores
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.intervals import CONFIDENCE
from loka_onnx.pipeline.candidates import Additions, results_of_jobs
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.correcting import mean_rows, output_names, simulate
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.pipeline.emission import Results, choice_options
from loka_onnx.pipeline.job_results import choosable
from loka_onnx.pipeline.jobs import JOBS
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.plans import plan_options, planned_recipes
from loka_onnx.planning.choice import not_certified
from loka_onnx.planning.climbing import SHARES, Goal, Judged, climb, design_spread
from loka_onnx.planning.policy import LadderStart, Planner

LADDER = DocumentStage("ladder", "ladder.json", Climbs)
SCRATCH = "calibration/instrumented/ladder.onnx"


def climb_ladders(context: Context, modified: ModelArtifact, profile: Profile) -> Climbs:
    """The sites of `fp8-safe`, `int8-safe` and `mixed`, as far as they compete → `ladder.json`."""
    splits, chosen, options = context.splits, context.config.plan, plan_options(context, modified)
    safe = (PlanId.FP8_SAFE, PlanId.INT8_SAFE, PlanId.MIXED)
    wanted = [plan_kind(plan) for plan in safe if plan in options.plans]
    if not wanted:
        context.directory.forget(LADDER.name)
        return Climbs()
    reads = {
        "exported": context.exported,
        "model": modified,
        "profile": profile,
        "keep": [chosen.keep, chosen.force, chosen.protect],
        "confidence": options.confidence,
        "timings": [known.key for known in options.devices],
        "data": [splits.selection, splits.certification.rows],
        "outputs": context.config.outputs,
        "group": context.config.data.group,
        "looks": context.looks,
        "corrections": chosen.corrections,
        "plans": wanted,
        "calibration": splits.calibration,
    }
    climbing = Climbing(context, modified, profile)

    def make() -> Climbs:
        return Climbs({kind: climbed for kind in wanted if (climbed := climbing.climb(kind)) is not None})

    return context.directory.document(LADDER, reads, make)


def attempt_again(judging: Judging, results: Results) -> Results:
    """Lower rungs, one after the other, as long as the selected plan misses → `attempt-<n>.json`."""
    options = choice_options(judging.context.config)
    for number in range(1, len(SHARES)):
        engines = choosable(results.engines.engines)
        missed = not_certified(engines, results.evaluations, results.plans, options)
        # Several targets may have selected one plan.
        plans = tuple(dict.fromkeys(engine.plan for engine in missed))
        added = _attempt(judging, results, number, plans) if plans else RefinedRun()
        if not added.plans:
            break
        results = results.with_added(added)
    return results


def _attempt(judging: Judging, results: Results, number: int, missed: Sequence[str]) -> RefinedRun:
    """Plans with fewer sites, with their engines and evaluations; nothing where none would be left."""
    context, additions = judging.context, Additions(judging, results.modified)
    climbing = Climbing(context, results.modified, results.profile)

    def make() -> RefinedRun:
        lowered = {}
        for plan in map(results.plans.plan, missed):
            if (lower := climbing.lower(plan, number)) is not None:
                name = f"{plan.id.removesuffix(f'-attempt-{number}')}-attempt-{number + 1}"
                lowered[plan.id] = replace(lower, id=name, instead_of=plan.id)
        if not lowered:
            return RefinedRun()
        only = [
            f"{e.target}-{e.backend}-{e.architecture}-{lowered[e.plan].id}"
            for e in results.engines.engines
            if e.plan in lowered
        ]
        plans = tuple(lowered.values())
        engines = additions.build(plans, only)
        ids = {engine.id for engine in engines}
        judged = tuple(e for e in judging.judge_attempt(engines, number) if e.engine in ids)
        return additions.completed(RefinedRun(plans, engines, evaluations=EvaluationSet(judged)))

    reads = {
        "missed": missed,
        "plans": results.plans,
        "engines": results.engines,
        "evaluations": results.evaluations,
        "results": results_of_jobs(context.path(JOBS)),
    }
    stage = DocumentStage(f"attempt {number + 1}", f"attempt-{number + 1}.json", RefinedRun)
    return context.directory.document(stage, reads, make, lambda written: [*written, *additions.files])


@dataclass(frozen=True)
class Climbing:
    """Judges rungs of one model, whose profile is known."""

    context: Context
    modified: ModelArtifact
    profile: Profile

    def climb(self, kind: str) -> Climb | None:
        """Return the highest rung of all sites that may run in a kind of plan, for the first attempt.

        None if a mixed plan would have one format, which is left out, or is searched by kernel times.
        """
        planner = self._planner(kind)
        start = planner.start_ladder() if planner.has_ladder else None
        if start is None or (kind == MIXED and start.plan.kind != MIXED):
            return None
        return self._climbed(start, start.rungs, 0)

    def lower(self, plan: PrecisionPlan, attempt: int) -> PrecisionPlan | None:
        """Return a plan with fewer quantized sites for an attempt (from 0); None if no site would be left."""
        if not plan.quantized_sites:
            return None
        start = self.start(plan.kind, plan)
        sites = self._climbed(start, start.rungs[:-1], attempt).sites
        return start.ladder.plan_of(plan, sites, plan.device) if sites else None

    def start(self, kind: str, plan: PrecisionPlan | None = None) -> LadderStart:
        """Return the ladder of a plan; of all sites that may run in its kind where there is none."""
        return self._planner(kind).start_ladder(plan)

    def _planner(self, kind: str) -> Planner:
        context, recipes = self.context, planned_recipes(self.context.config)
        options = plan_options(context, self.modified)
        return Planner(self.modified, self.profile, context.specs, recipes, options, kind)

    def _climbed(self, start: LadderStart, rungs: Sequence[frozenset[str]], attempt: int) -> Climb:
        goal = Goal.of(attempt, (1.0 - CONFIDENCE) / self.context.looks)
        if len(rungs) < 2:
            # There is nothing to judge.
            return Climb(0, tuple(sorted(next(iter(rungs), ()))), goal.confidence, goal.chance, ())
        judge = partial(self._judge, self._corrected(start))
        return climb(start.ladder, rungs, judge, goal, self.context.judged_rows)

    @cached_property
    def _rows(self) -> MeanRows:
        return mean_rows(self.context)

    def _corrected(self, start: LadderStart) -> _Rungs:
        specs, path = self.context.specs, self.context.path(SCRATCH)
        path.parent.mkdir(parents=True, exist_ok=True)
        graph, scores, biases, exact = GraphModel.load(self.modified.path), {}, {}, {}
        if self.context.config.plan.corrections:
            means = path.with_name("ladder-means.onnx")
            fit = fit_biases(self.modified, [start.plan], specs, self._rows, means)
            biases, exact = fit.plans[start.plan.id].values, fit.exact.scores
            scores = expose_scores(graph, {spec.name: spec.kind for spec in specs})
        recipes = {decision.site: decision.recipe for decision in start.plan.decisions}
        switches = [
            Switch(site, recipe)
            for site in self.modified.sites
            if site.name in start.plan.quantized_sites and (recipe := recipes[site.name]) is not None
        ]
        file = write_switchable(graph, switches, self.profile.scales, path, biases=biases)
        return _Rungs(file.open(), scores, exact)

    def _judge(self, rungs: _Rungs, rung: Collection[str]) -> Judged:
        context, split, specs = self.context, self.context.selection, self.context.specs
        run = partial(rungs.model.run, on=tuple(rung), outputs=output_names(specs, rungs.scores))
        means = mean_scores(run, rungs.scores, specs, self._rows) if rungs.exact else {}
        task = f"judge {len(rung)} sites on {split.name}"
        simulated = simulate(context, run, split, rungs.scores, (rungs.exact, means), task)
        known = context.reference(split)
        columns, grouping = known.predictions.columns, known.units.grouping
        units = Units(grouping, metrics=False)

        def judged(variant: Mapping[str, npt.NDArray[Any]], units: Units) -> tuple[OutputEvaluation, ...]:
            return evaluate_outputs(known.predictions.outputs, variant, columns, specs, units)

        variant = dict(simulated.predictions.outputs)
        outputs = judged(variant, units)
        if simulated.constants:
            moved = {spec.name: simulated.with_constant(spec) for spec in specs}
            after = judged(moved, units)
            outputs = tuple(min(pair, key=_upper) for pair in zip(outputs, after, strict=True))
            variant |= {a.output: moved[a.output] for o, a in zip(outputs, after, strict=True) if o is a}
        if grouping is None:
            rows = context.judged_rows
            spread = sqrt(rows["selection"] / rows["certification"])
            return Judged(outputs, {output.output: spread for output in outputs})
        alone = judged(variant, replace(units, grouping=None))
        spreads = {
            ours.output: design_spread(_half(theirs), _half(ours), *self._sizes)
            for ours, theirs in zip(outputs, alone, strict=True)
        }
        return Judged(outputs, spreads)

    @cached_property
    def _sizes(self) -> tuple[list[int], list[int]]:
        """Rows of each group of selection and of certification; of certification nothing else is read."""
        splits = self.context.splits
        return self._sizes_of(splits.selection), self._sizes_of(splits.certification)

    def _sizes_of(self, data: Dataset) -> list[int]:
        group = str(self.context.config.data.group)
        counted: Counter[Any] = Counter()
        for values in self.context.read_columns(data, (group,)):
            ids, counts = np.unique(values[group], return_counts=True)
            counted.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
        return list(counted.values())


@dataclass(frozen=True)
class _Rungs:
    """The model that any rung is run with, the names of its scores, and their means in FP32 by output."""

    model: SwitchableModel
    scores: Mapping[str, str]
    exact: Mapping[str, float]


def _upper(output: OutputEvaluation) -> float:
    return inf if output.difference is None else output.difference.judged.upper


def _half(output: OutputEvaluation) -> float:
    judged = None if output.difference is None else output.difference.judged
    return 0.0 if judged is None else judged.upper - judged.value
