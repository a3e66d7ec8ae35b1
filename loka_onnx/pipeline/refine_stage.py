"""Refining as a stage of a run: the bench that builds, times and judges; where further plans come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.engine import BuildStatus, EngineArtifact, EngineSet
from loka_onnx.core.evaluation import Evaluation
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.profile import Profile
from loka_onnx.core.refined_run import REFINED_NAME, RefinedRun
from loka_onnx.core.refinement import Refinement
from loka_onnx.core.rewrite import RewriteLogs
from loka_onnx.errors import UserError
from loka_onnx.evaluation.latency import Interleaved
from loka_onnx.pipeline.candidates import EngineBuilder
from loka_onnx.pipeline.directory import keyed
from loka_onnx.pipeline.engine_times import counts_here
from loka_onnx.pipeline.recipes import planned_recipes
from loka_onnx.pipeline.refining import RefineLimits, refine
from loka_onnx.pipeline.splitting import source_of
from loka_onnx.pipeline.steps import Steps
from loka_onnx.planning.ladder import Ladder, Reverted
from loka_onnx.planning.policy import start_ladder

REFINEMENT = "refinement.json"


@dataclass(frozen=True)
class RefineInputs:
    """Inputs of refining.

    Attributes:
        exported: The FP32 model that engines are judged against.
        modified: The model that plans are of.
        profile: Its profile.
        plans: Plans of the run file.
        engines: Their engines.
        corrections: Constants that were fitted to them.
        sample: ``.npz`` of generated inputs for first inferences.
    """

    exported: ModelArtifact
    modified: ModelArtifact
    profile: Profile
    plans: PlanSet
    engines: EngineSet
    corrections: CorrectionSet
    sample: Path


@dataclass(frozen=True)
class RefineResult:
    """A run with what refining added.

    Attributes:
        plans: Every plan.
        engines: Every engine.
        corrections: Constants of every plan.
        added: What was added.
        document: Every step.
    """

    plans: PlanSet
    engines: EngineSet
    corrections: CorrectionSet
    added: RefinedRun
    document: Refinement


def refine_engines(steps: Steps, inputs: RefineInputs) -> RefineResult:
    """Rounds of further plans on devices here that run FP8 → `refinement.json`, `refined.json`."""
    root, settings = steps.directory.path, steps.config.refine
    if settings.rounds == 0 or not _is_worth(inputs):
        steps.directory.forget("refine")
        return _with(inputs, RefinedRun(), Refinement())
    documents = (root / REFINEMENT, root / REFINED_NAME)

    def produce() -> Sequence[Path]:
        bench = RunBench(steps, inputs)
        limits = RefineLimits(settings.rounds, settings.plans, settings.seconds)
        found = refine(inputs.engines.engines, inputs.plans, bench, RunProposals(steps, inputs), limits)
        added = RefinedRun(found.plans, found.engines, bench.corrections, bench.rewrites, found.evaluations)
        serde.write(found.document, documents[0])
        serde.write(added, documents[1])
        return [*documents, *bench.files]

    def load() -> RefineResult:
        return _with(inputs, serde.read(RefinedRun, documents[1]), serde.read(Refinement, documents[0]))

    reads = {
        "exported": inputs.exported,
        "plans": inputs.plans,
        "engines": [[e.id, e.status, e.digest or e.detail] for e in inputs.engines.engines],
        "corrections": inputs.corrections,
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
    again = _counts_now(documents[1], inputs)
    return steps.directory.stage("refine", keyed(reads), produce, load, again=again)


def _counts_now(document: Path, inputs: RefineInputs) -> bool:
    """Return True if this machine has a target whose plans were refined on another device."""
    if not document.is_file():
        return False
    try:
        return counts_here(serde.read(RefinedRun, document).evaluations.evaluations, inputs.engines.engines)
    except UserError:
        return False


def _is_worth(inputs: RefineInputs) -> bool:
    """Return True if an engine on this machine runs FP8 unsimulated."""
    return any(
        engine.status is BuildStatus.READY
        and not engine.simulated
        and inputs.plans.plan(engine.plan).fp8_sites
        for engine in inputs.engines.engines
    )


def _with(inputs: RefineInputs, added: RefinedRun, document: Refinement) -> RefineResult:
    plans, engines, corrections = inputs.plans, inputs.engines, inputs.corrections
    return RefineResult(
        replace(plans, plans=(*plans.plans, *added.plans)),
        replace(engines, engines=(*engines.engines, *added.engines)),
        replace(corrections, plans=(*corrections.plans, *added.corrections.plans)),
        added,
        document,
    )


class RunBench:
    """Builds, times and judges with the means of a run (`refining.Bench`).

    Attributes:
        corrections: Constants that were fitted to the plans that were built.
        rewrites: What was written into their models.
        files: Files of their engines and models.
    """

    def __init__(self, steps: Steps, inputs: RefineInputs) -> None:
        self._steps, self._inputs = steps, inputs
        self.corrections = CorrectionSet()
        self.rewrites = RewriteLogs({})
        self.files: list[Path] = []

    def build(self, plans: Sequence[PrecisionPlan], like: EngineArtifact) -> Sequence[EngineArtifact]:
        """One engine for each plan, by the backend and for the architecture of another engine."""
        steps, inputs = self._steps, self._inputs
        wanted = PlanSet(tuple(plans))
        fitted = steps.fit_corrections(inputs.exported, inputs.modified, wanted)
        self.corrections = replace(self.corrections, plans=(*self.corrections.plans, *fitted.plans))
        builder = EngineBuilder(steps.config, steps.directory, inputs.sample, steps.progress, fitted)
        prefix = f"{like.target}-{like.backend}-{like.architecture}"
        builder.only = frozenset(f"{prefix}-{plan.id}" for plan in plans)
        builder.is_addition = True
        built = builder.build(source_of(inputs.modified, wanted, steps.split))
        self.rewrites = RewriteLogs({**self.rewrites.logs, **built.rewrites.logs})
        self.files += builder.files(built)
        by_plan = {engine.plan: engine for engine in built.engines.engines}
        return [by_plan[plan.id] for plan in plans]

    def time(self, engines: Sequence[EngineArtifact]) -> Interleaved:
        """Latencies by engine id, all timed in turns, and what ended those that failed."""
        return self._steps.judging.time_engines(engines)

    def judge(self, engines: Sequence[EngineArtifact]) -> Sequence[Evaluation]:
        """Each engine on the selection split."""
        return self._steps.judging.judge_on_selection(self._inputs.exported, engines)


class RunProposals:
    """Further plans of a run (`refining.Proposals`)."""

    def __init__(self, steps: Steps, inputs: RefineInputs) -> None:
        self._steps, self._inputs = steps, inputs

    @cached_property
    def _searched(self) -> Sequence[PrecisionPlan]:
        return self._steps.search_plans(self._inputs.modified, self._inputs.profile)

    @cached_property
    def _ladder(self) -> Ladder:
        inputs, steps = self._inputs, self._steps
        recipes, options = planned_recipes(steps.config.plan), steps.plan_options(inputs.modified)
        return start_ladder(inputs.modified, inputs.profile, steps.specs, recipes, options).ladder

    def from_search(self, target: str) -> Sequence[PrecisionPlan]:
        """Plans for a target that kernel times propose."""
        return [plan for plan in self._searched if plan.device == target]

    def revert_sites(self, plan: PrecisionPlan, evaluation: Evaluation, target: str) -> Reverted | None:
        """A plan with fewer sites in FP8."""
        return self._ladder.revert_sites(plan, evaluation, target)
