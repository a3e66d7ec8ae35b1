"""The facts of a report; `report.json` is exactly this, in full precision."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import (
    Choice,
    Evaluation,
    EvaluationSet,
    Latency,
    OutputEvaluation,
    Rejection,
    TargetChoice,
)
from loka_onnx.core.lineage import StageRecord
from loka_onnx.core.model_graph import ModelGraph
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.profile import Profile
from loka_onnx.core.refinement import Refinement
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.core.serde import STRICT
from loka_onnx.core.throughput import ThroughputSet
from loka_onnx.numerics.intervals import CONFIDENCE

SELECTION = "selection"
CERTIFICATION = "certification"
BASELINES = ("fp32", "bf16", "fp16")
"""Plans that a gain is measured over."""


@dataclass(frozen=True)
class SplitDescription:
    """One split of the data; its digest (`data.dataset.Dataset.digest`) is of what is read of `file`."""

    __pydantic_config__ = STRICT

    split: str
    name: str
    rows: int
    digest: str
    rule: str
    file: str = ""


@dataclass(frozen=True)
class DataDescription:
    """Data behind every number of the report; `synthetic` if any row was generated."""

    __pydantic_config__ = STRICT

    splits: tuple[SplitDescription, ...]
    label_rule: str
    synthetic: bool


@dataclass(frozen=True)
class ReportData:
    """Everything that a report shows; `profile` and `plans` are of the model `modified` by mods.

    `rewrites` are by the name of the sequence (``mods``, …). `engines` are all candidates, failures included;
    `evaluations` may hold the FP32 reference, which need not be one of them. `refinement` has plans tried on
    a device beside those of the run file. `graph` is of `modified`; None without a drawing.
    """

    SCHEMA: ClassVar[str] = "report/8"
    __pydantic_config__ = STRICT

    title: str
    exported: ModelArtifact
    modified: ModelArtifact
    profile: Profile
    plans: PlanSet
    rewrites: dict[str, RewriteLog]
    engines: tuple[EngineArtifact, ...]
    evaluations: EvaluationSet
    choice: Choice
    data: DataDescription
    versions: dict[str, str]
    lineage: tuple[StageRecord, ...] = ()
    corrections: CorrectionSet = field(default_factory=CorrectionSet)
    notes: tuple[str, ...] = ()
    refinement: Refinement = field(default_factory=Refinement)
    throughput: ThroughputSet = field(default_factory=ThroughputSet)
    graph: ModelGraph | None = None

    @property
    def is_synthetic(self) -> bool:
        """True if any number rests on generated data."""
        return self.data.synthetic or self.profile.synthetic

    @property
    def splits(self) -> tuple[str, ...]:
        """Evaluated splits, selection first."""
        evaluated = {e.split for e in self.evaluations.evaluations}
        first = [s for s in (SELECTION, CERTIFICATION) if s in evaluated]
        return (*first, *sorted(evaluated - set(first)))

    @property
    def judged_split(self) -> str:
        """Split on which every candidate was judged: selection, else the first; empty for none."""
        return next(iter(self.splits), "")

    @property
    def references(self) -> tuple[str, ...]:
        """Evaluated ids without a candidate: the FP32 reference."""
        known = {e.id for e in self.engines}
        ids = (e.engine for e in self.evaluations.evaluations if e.engine not in known)
        return tuple(dict.fromkeys(ids))

    def evaluation(self, engine: str, split: str) -> Evaluation | None:
        """Return the evaluation of an engine on a split; None for none."""
        same = (e for e in self.evaluations.evaluations if (e.engine, e.split) == (engine, split))
        return next(same, None)

    def outputs(self, engine: str, split: str) -> tuple[OutputEvaluation, ...]:
        """Return the outputs of an engine that were judged on a split."""
        evaluation = self.evaluation(engine, split)
        return () if evaluation is None else evaluation.outputs

    def evaluations_of(self, engine: str) -> list[Evaluation]:
        """Return the evaluations of an engine, that of the last split (certification) first."""
        evaluations = (self.evaluation(engine, split) for split in reversed(self.splits))
        return [evaluation for evaluation in evaluations if evaluation is not None]

    def latencies(self, engine: str) -> tuple[Latency, ...]:
        """Return the latencies of an engine: it is timed once, and the evaluation of each split has them."""
        return next((e.latencies for e in self.evaluations_of(engine) if e.latencies), ())

    def target_latencies(self, engine: EngineArtifact) -> list[Latency]:
        """Return the latencies of an engine on its target; none of a simulation."""
        timed = () if engine.simulated else self.latencies(engine.id)
        return [latency for latency in timed if latency.counts_for_choice]

    def losers(self, choice: TargetChoice, plans: Collection[str]) -> list[Rejection]:
        """Return the rejected engines of some plans, the fastest first; those without a time come last."""
        of_plans = {engine.id for engine in self.engines if engine.plan in plans}
        losers = (loser for loser in choice.losers if loser.engine in of_plans)
        return sorted(losers, key=lambda loser: loser.times.value if loser.times else math.inf)

    def plan(self, plan_id: str) -> PrecisionPlan | None:
        """Return the plan of that id; None for none."""
        return next((plan for plan in self.plans.plans if plan.id == plan_id), None)

    def engine(self, engine_id: str) -> EngineArtifact | None:
        """Return the candidate of that id; None for none."""
        return next((e for e in self.engines if e.id == engine_id), None)

    def is_simulated(self, engine_id: str) -> bool:
        """Return whether FP8 is simulated in the candidate of that id."""
        engine = self.engine(engine_id)
        return engine is not None and engine.simulated

    def chosen(self, engine_id: str) -> TargetChoice | None:
        """Return the choice that selects an engine; None if not selected."""
        return next((t for t in self.choice.targets if engine_id in t.engines), None)


def confidence_text(data: ReportData, split: str) -> str:
    """Return the confidence of the judged intervals on a split, and of all slices together: ``95 %``."""
    outputs = (o for e in data.evaluations.evaluations if e.split == split for o in e.outputs)
    levels = {output.difference.judged.confidence for output in outputs if output.difference is not None}
    return f"{100 * min(levels, default=CONFIDENCE):g} %"
