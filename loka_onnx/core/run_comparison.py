"""What differs between two runs, read from their reports.

Nothing is run and nothing is measured again: `comparison` asks two deployments for the same rows, this holds
against one another what two runs recorded. Everything is new against old.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from loka_onnx.core.evaluation import InputPlace
from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT


@dataclass(frozen=True)
class ComparedRun:
    """One side.

    Attributes:
        path: As it was given.
        title: Title of its report.
        digest: SHA-256 of its report.json.
        model_digest: Digest of its exported model.
        modified_digest: Digest of the model after mods.
        label_rule: What its labels mean.
        synthetic: Whether any of its rows was generated.
        candidates: Engines that competed, failures included.
        sites: Sites of the model after mods.
    """

    path: str
    title: str
    digest: str
    model_digest: str
    modified_digest: str
    label_rule: str
    synthetic: bool
    candidates: int
    sites: int


@dataclass(frozen=True)
class EmittedEngine:
    """The engine that a run emits for a target; of several, the main one.

    Attributes:
        engine: Its id.
        plan: Its plan.
        backend: What made it.
        backend_version: Version of that.
        architecture: Architecture that it is for.
        digest: SHA-256 of the engine.
        bytes: Size of its files.
        simulated: Its FP8 is simulated.
        fp8_sites: Sites that its plan has in FP8.
        fp8_share: Their share of the FP8-able FLOPs.
        routes: How many engines share the requests of the target, by batch size; 1 where one takes all.
        reason: Why it was chosen.
        basis: What the choice rests on.
    """

    engine: str
    plan: str
    backend: str
    backend_version: str
    architecture: str
    digest: str
    bytes: int
    simulated: bool
    fp8_sites: int
    fp8_share: float
    routes: int
    reason: str
    basis: str


class Change(StrEnum):
    """What became of something from the old run to the new one."""

    SAME = "the same"
    CHANGED = "changed"
    APPEARED = "appeared"
    VANISHED = "vanished"


@dataclass(frozen=True)
class TargetDifference:
    """What is emitted for one target.

    Attributes:
        target: Its name.
        change: Whether it is another engine: another backend, architecture or plan. An engine that was built
            anew from the same plan is the same, though its digest may differ.
        old: What the old run emits; None where it has no such target.
        new: What the new run emits.
    """

    target: str
    change: Change
    old: EmittedEngine | None
    new: EmittedEngine | None


@dataclass(frozen=True)
class JudgedOutput:
    """One output of an emitted engine on one split.

    Attributes:
        engine: Id of the engine.
        rows: Rows of the split.
        name: What is judged: ΔNE, or KL where there are no labels.
        judged: Its interval; None for the FP32 reference.
        budget: Largest accepted loss.
        status: How it stands to the budget.
        normalized_entropy: Of the engine; None without labels.
        auc: Of the engine; None where there is none.
    """

    engine: str
    rows: int
    name: str
    judged: Interval | None
    budget: float
    status: str
    normalized_entropy: float | None
    auc: float | None


@dataclass(frozen=True)
class AccuracyChange:
    """What an emitted engine costs, in both runs.

    Attributes:
        target: Name of the target.
        output: Name of the output.
        split: On which split.
        old: In the old run; None where it was not measured.
        new: In the new run.
        difference: New estimate less old one; None where one is missing, or they are not of one kind.
        overlap: Whether the intervals have a value in common; None where `difference` is None. Intervals of
            one and the same rows are not independent: where they overlap the costs may differ all the same.
        remark: Why the two cannot be compared, or what they have not in common; empty for nothing.
    """

    target: str
    output: str
    split: str
    old: JudgedOutput | None
    new: JudgedOutput | None
    difference: float | None
    overlap: bool | None
    remark: str = ""


@dataclass(frozen=True)
class MedianLatency:
    """What an emitted engine took at one batch size.

    Attributes:
        engine: Id of the engine that takes such requests.
        device: What it was measured on, as its driver names it.
        p50_us: Median, microseconds.
        p99_us: 99th percentile, microseconds.
        repeats: Measured requests.
        counts_for_choice: Whether it was measured on the target.
    """

    engine: str
    device: str
    p50_us: float
    p99_us: float
    repeats: int
    counts_for_choice: bool


@dataclass(frozen=True)
class LatencyChange:
    """Median latency at one batch size, in both runs.

    Attributes:
        target: Name of the target.
        batch: Rows of a request.
        inputs: Where the inputs lay.
        old: In the old run; None where it was not measured.
        new: In the new run.
        ratio: New median over old one; None where they are not comparable. The two were measured at different
            times and not in turns, so that it has no interval.
        remark: Why there is no ratio; empty where there is one.
    """

    target: str
    batch: int
    inputs: InputPlace
    old: MedianLatency | None
    new: MedianLatency | None
    ratio: float | None
    remark: str = ""


@dataclass(frozen=True)
class GainChange:
    """How much faster each emitted engine is than one baseline of its own run, timed in turns with it.

    Attributes:
        target: Name of the target.
        baseline: Plan of the baseline; of several engines, the fastest.
        old: Latency of the baseline over that of the emitted engine, in the old run; None where not measured.
        new: The same in the new run.
        overlap: Whether the intervals have a value in common; None where one is missing.
    """

    target: str
    baseline: str
    old: Interval | None
    new: Interval | None
    overlap: bool | None


@dataclass(frozen=True)
class SiteDecision:
    """What a plan decides on a site.

    Attributes:
        plan: Id of the plan.
        precision: What the site runs in.
        recipe: Id of the recipe; empty unless FP8.
        verdict: Accuracy verdict.
        reason: Why.
    """

    plan: str
    precision: str
    recipe: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class SiteChange:
    """A site of both runs with another precision, recipe or verdict.

    Attributes:
        where: Which plans are compared: a plan that both have, or what is emitted for a target.
        site: Name of the site.
        old: In the old run.
        new: In the new run.
    """

    where: str
    site: str
    old: SiteDecision
    new: SiteDecision


@dataclass(frozen=True)
class SitePresence:
    """A site that only one of both models has.

    Attributes:
        site: Its name.
        change: `APPEARED` or `VANISHED`.
        kind: What it computes.
        k: Length of the contraction.
        n: Columns of the product.
        merged_from: Sites of the exported model that it replaces.
    """

    site: str
    change: Change
    kind: str
    k: int
    n: int
    merged_from: tuple[str, ...]


@dataclass(frozen=True)
class PlanSummary:
    """One plan of one run.

    Attributes:
        base: Precision of what is not FP8.
        fp8_sites: Sites in FP8.
        fp8_share: Their share of the FP8-able FLOPs.
    """

    base: str
    fp8_sites: int
    fp8_share: float


@dataclass(frozen=True)
class PlanChange:
    """A plan of either run.

    Attributes:
        plan: Its id.
        old: In the old run; None where it has none of that id.
        new: In the new run.
        moved: Sites of both models with another precision in it; 0 where one has no such plan.
    """

    plan: str
    old: PlanSummary | None
    new: PlanSummary | None
    moved: int


@dataclass(frozen=True)
class RewriteOutcome:
    """What a transform did at a place.

    Attributes:
        outcome: ``applied``, ``declined`` or ``rolled back``.
        what: What it did, or why not.
    """

    outcome: str
    what: str


@dataclass(frozen=True)
class RewriteChange:
    """A place that a transform treated differently.

    Attributes:
        sequence: Name of the sequence of transforms.
        transform: Name of the transform.
        at: Node, site or tensor.
        old: In the old run; None where it was not looked at.
        new: In the new run.
    """

    sequence: str
    transform: str
    at: str
    old: RewriteOutcome | None
    new: RewriteOutcome | None


@dataclass(frozen=True)
class SplitRows:
    """Rows of one split.

    Attributes:
        name: What they were read from.
        rows: How many.
        digest: Digest of the rows, or of the file when `rule` says which of its rows.
        rule: Which rows, in words.
    """

    name: str
    rows: int
    digest: str
    rule: str


@dataclass(frozen=True)
class SplitChange:
    """One split of the data.

    Attributes:
        split: Its name.
        old: In the old run; None where it was not read.
        new: In the new run.
        is_same: Whether both are the same rows: the same digest and rule.
    """

    split: str
    old: SplitRows | None
    new: SplitRows | None
    is_same: bool


@dataclass(frozen=True)
class ValueChange:
    """A version or a setting that differs.

    Attributes:
        name: Name of the package; path of the setting in the run file.
        old: In the old run, settings as JSON; None where it has none.
        new: In the new run.
    """

    name: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class RunComparison:
    """Everything that differs between two runs.

    Attributes:
        old: What is compared with.
        new: What is compared.
        targets: What is emitted, of every target of either.
        accuracy: What that costs.
        latency: What it takes, by batch size.
        gains: How much faster it is than the baselines of its own run.
        sites: Sites that are treated differently.
        presence: Sites that only one model has.
        plans: Every plan of either.
        rewrites: Places that transforms treated differently.
        splits: Whether the rows are the same.
        versions: Libraries of another version.
        settings: Settings with another value.
        notes: What a reader must know, each a sentence without its full stop.
    """

    SCHEMA: ClassVar[str] = "run-comparison/1"
    __pydantic_config__ = STRICT

    old: ComparedRun
    new: ComparedRun
    targets: tuple[TargetDifference, ...]
    accuracy: tuple[AccuracyChange, ...]
    latency: tuple[LatencyChange, ...]
    gains: tuple[GainChange, ...]
    sites: tuple[SiteChange, ...]
    presence: tuple[SitePresence, ...]
    plans: tuple[PlanChange, ...]
    rewrites: tuple[RewriteChange, ...]
    splits: tuple[SplitChange, ...]
    versions: tuple[ValueChange, ...]
    settings: tuple[ValueChange, ...]
    notes: tuple[str, ...] = ()

    @property
    def has_same_rows(self) -> bool:
        """Whether every split has the same rows in both."""
        return all(split.is_same for split in self.splits)

    def split(self, name: str) -> SplitChange | None:
        """The split of that name, None where neither run read it."""
        return next((split for split in self.splits if split.split == name), None)
