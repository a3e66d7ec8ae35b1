"""Climbing the ladder of plans as a stage: rungs judged on the selection split, in simulation.

One switchable model (`calibration.effects.switchable`) holds every site that may run in FP8, exact and
rounded. A rung is one pass of it over the selection split: nothing is built. What is not FP8 stays in FP32
there. Constants are as an engine will have them (`correcting`): the mean error of a site depends on no other
site, and is taken out of each; what restores the mean score of the rung is added where the upper bound is
lower with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.corrections.biases import fit_biases
from loka_onnx.calibration.corrections.means import MeanRows, mean_scores
from loka_onnx.calibration.effects.switchable import Switch, SwitchableModel, write_switchable
from loka_onnx.config import PlanId
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.evaluation import OutputEvaluation
from loka_onnx.core.plan import Climb, PrecisionPlan
from loka_onnx.core.profile import Profile
from loka_onnx.data import Dataset
from loka_onnx.evaluation.accuracy import Units, evaluate_outputs
from loka_onnx.evaluation.corrections import Simulated
from loka_onnx.evaluation.predictions import predict
from loka_onnx.graph.biases import expose_scores
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.intervals import CONFIDENCE
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.correcting import mean_rows
from loka_onnx.pipeline.directory import Stage
from loka_onnx.pipeline.plans import plan_options, planned_recipes
from loka_onnx.planning.climbing import Goal, Judged, climb, design_spread
from loka_onnx.planning.policy import LadderStart, start_ladder

LADDER = Stage("ladder", "ladder.json", Climb)
SCRATCH = "calibration/instrumented/ladder.onnx"


def start_ladder_of(
    context: Context, modified: ModelArtifact, profile: Profile, plan: PrecisionPlan | None = None
) -> LadderStart:
    """Start the ladder of a plan; of all sites that may run in FP8 where there is none."""
    recipes, options = planned_recipes(context.config.plan), plan_options(context, modified)
    return start_ladder(modified, profile, context.specs, recipes, options, plan)


def climb_ladder(context: Context, modified: ModelArtifact, profile: Profile) -> Climb | None:
    """The sites of `fp8-safe` or `int8-safe` → `ladder.json`; None where none competes."""
    config, splits = context.config, context.splits
    options, chosen = plan_options(context, modified), config.plan
    if not {PlanId.FP8_SAFE, PlanId.INT8_SAFE} & {*options.plans}:
        context.directory.forget(LADDER.name)
        return None
    reads = {
        "exported": context.exported,
        "model": modified,
        "profile": profile,
        "keep": [chosen.keep, chosen.force, chosen.protect],
        "confidence": options.confidence,
        "timings": [known.key for known in options.devices],
        "data": [splits.selection, splits.certification.rows],
        "outputs": config.outputs,
        "group": config.data.group,
        "looks": context.looks,
        "corrections": chosen.corrections,
        "calibration": splits.calibration,
    }
    return context.directory.document(LADDER, reads, Climbing(context, modified, profile).climb)


@dataclass(frozen=True)
class Climbing:
    """Judges rungs of one model, whose profile is known."""

    context: Context
    modified: ModelArtifact
    profile: Profile

    @cached_property
    def _rows(self) -> MeanRows:
        return mean_rows(self.context)

    def climb(self) -> Climb:
        """Return the highest rung of all sites that may run in FP8, for the first attempt."""
        start = self._start()
        return self._climbed(start, start.rungs, 0)

    def lower(self, plan: PrecisionPlan, attempt: int) -> PrecisionPlan | None:
        """Return a plan with fewer sites in FP8 for an attempt (from 0); None if no site would be left."""
        start = self._start(plan)
        sites = self._climbed(start, start.rungs[:-1], attempt).sites
        return start.ladder.plan_of(plan, sites, plan.device) if sites else None

    def _start(self, plan: PrecisionPlan | None = None) -> LadderStart:
        return start_ladder_of(self.context, self.modified, self.profile, plan)

    def _climbed(self, start: LadderStart, rungs: Sequence[frozenset[str]], attempt: int) -> Climb:
        goal = Goal.of(attempt, (1.0 - CONFIDENCE) / self.context.looks)
        if len(rungs) < 2:
            # There is nothing to judge.
            return Climb(0, tuple(sorted(next(iter(rungs), ()))), goal.confidence, goal.chance, ())
        judge = partial(self._judge, self._corrected(start))
        return climb(start.ladder, rungs, judge, goal, self.context.judged_rows)

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
            if site.name in start.sites and (recipe := recipes[site.name]) is not None
        ]
        file = write_switchable(graph, switches, self.profile.scales, path, biases=biases)
        return _Rungs(file.open(self.context.threads), scores, exact)

    def _judge(self, rungs: _Rungs, rung: Collection[str]) -> Judged:
        context, split = self.context, self.context.selection
        specs = context.specs
        names = tuple(dict.fromkeys((*(spec.name for spec in specs), *rungs.scores.values())))
        task = f"judge {len(rung)} sites in FP8 on {split.name}"
        run = partial(rungs.model.run, on=tuple(rung), outputs=names)
        found = predict(
            run, split.batches(), names, progress=lambda done: context.progress(task, done, split.rows)
        )
        constants = rungs.constants(mean_scores(run, rungs.scores, specs, self._rows) if rungs.exact else {})
        known = context.reference(split)
        columns, grouping = known.predictions.columns, known.units.grouping

        def judged(variant: Mapping[str, npt.NDArray[Any]], units: Units) -> tuple[OutputEvaluation, ...]:
            return evaluate_outputs(known.predictions.outputs, variant, columns, specs, units)

        variant, outputs = dict(found.outputs), judged(found.outputs, Units(grouping))
        if constants:
            simulated = Simulated(found, rungs.scores, constants)
            moved = {spec.name: simulated.with_constant(spec) for spec in specs}
            pairs = tuple(zip(outputs, judged(moved, Units(grouping)), strict=True))
            variant |= {after.output: moved[after.output] for before, after in pairs if _helps(before, after)}
            outputs = tuple(after if _helps(before, after) else before for before, after in pairs)
        if grouping is None:
            rows = context.judged_rows
            spread = sqrt(rows["selection"] / rows["certification"])
            return Judged(outputs, {output.output: spread for output in outputs})
        return Judged(
            outputs,
            {
                ours.output: design_spread(_half(alone), _half(ours), *self._sizes)
                for ours, alone in zip(outputs, judged(variant, Units()), strict=True)
            },
        )

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
    """The model that any rung is run with."""

    model: SwitchableModel
    scores: Mapping[str, str]
    exact: Mapping[str, float]

    def constants(self, means: Mapping[str, float]) -> dict[str, float]:
        """Constants that restore the mean score of FP32, by output."""
        return {name: self.exact[name] - mean for name, mean in means.items() if name in self.exact}


def _helps(before: OutputEvaluation, after: OutputEvaluation) -> bool:
    if before.difference is None or after.difference is None:
        return False
    return after.difference.judged.upper < before.difference.judged.upper


def _half(output: OutputEvaluation) -> float:
    if output.difference is None:
        return 0.0
    return output.difference.judged.upper - output.difference.judged.value
