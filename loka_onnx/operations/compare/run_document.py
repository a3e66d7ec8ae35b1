"""The difference of two runs as a document, read from their reports: new against old."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import ClassVar

from loka_onnx.core.evaluation import InputPlace
from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT

# In every class below `old` and `new` are the sides; None where a run has nothing of the kind.


class Change(StrEnum):
    """Change of something from the old run to the new one."""

    SAME = "the same"
    CHANGED = "changed"
    APPEARED = "appeared"
    VANISHED = "vanished"


@dataclass(frozen=True)
class ComparedRun:
    """One side: digests are SHA-256 of its report.json, its exported model, and that model after mods.

    `synthetic`: some of its rows were generated. `candidates` counts engines, failures included; `sites`
    those of the model after mods.
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


# Engines ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnHardware:
    """Something about one target; `architecture` is empty unless the target has engines for several."""

    target: str
    architecture: str

    @property
    def hardware(self) -> str:
        """Target, and architecture where there are several: ``rtx (sm120)``."""
        return named(self.target, self.architecture)


def named(target: str, architecture: str) -> str:
    """Target, and architecture where there are several: ``rtx (sm120)``."""
    return f"{target} ({architecture})" if architecture else target


@dataclass(frozen=True)
class EmittedRoute:
    """Engine for requests to `batch` rows; the last route takes larger requests too."""

    batch: int
    engine: str
    plan: str


@dataclass(frozen=True)
class EmittedEngine:
    """The engine selected for a target; of several, the main one.

    Attributes:
        bytes: Size of its files.
        simulated: Its FP8 is simulated.
        fp8_share: Share of `fp8_sites` in the FP8-able FLOPs.
        routes: Engines by the size of requests, ascending; empty where this one takes all.
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
    routes: tuple[EmittedRoute, ...]
    reason: str
    basis: str

    @property
    def routing(self) -> tuple[tuple[int | None, str], ...]:
        """Largest requests, None for the rest, with their engine; sizes of one engine are joined."""
        routes = self.routes or (EmittedRoute(0, self.engine, self.plan),)
        ends = [
            (route.batch, route.engine)
            for route, following in pairwise(routes)
            if route.engine != following.engine
        ]
        return (*ends, (None, routes[-1].engine))


@dataclass(frozen=True)
class TargetDifference(OnHardware):
    """Engines emitted for one target.

    They are the same where backend, architecture, plan and the routing of requests are: an engine that was
    built anew from the same plan is the same, though its digest may differ.
    """

    change: Change
    old: EmittedEngine | None
    new: EmittedEngine | None


@dataclass(frozen=True)
class JudgedOutput:
    """One output of a selected engine on one split.

    Attributes:
        name: What is judged: ΔNE, or KL where there are no labels.
        judged: Its interval; None for the FP32 reference.
        budget: Largest accepted loss.
        status: A value of `BudgetStatus`.
        normalized_entropy: Of the engine; None without labels.
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
class AccuracyChange(OnHardware):
    """Cost of two emitted engines that answer requests of one size, on one output and split.

    Attributes:
        difference: New estimate less old one; None where one is missing, or they are not of one kind.
        overlap: Whether the intervals have a value in common; None where `difference` is None. Intervals of
            the same rows are not independent: where they overlap the costs may differ all the same.
        is_same_basis: Whether rows and exported model are the same.
        remark: Why they are not compared, or what they have not in common.
    """

    output: str
    split: str
    old: JudgedOutput | None
    new: JudgedOutput | None
    difference: float | None
    overlap: bool | None
    is_same_basis: bool
    remark: str = ""

    @property
    def is_worse(self) -> bool:
        """True if the new cost is certainly larger."""
        return self.is_same_basis and self.overlap is False and (self.difference or 0.0) > 0.0


@dataclass(frozen=True)
class MedianLatency:
    """Latency of an emitted engine at one batch size, in microseconds over `repeats` requests.

    Attributes:
        device: As its driver names it.
        counts_for_choice: Whether it was measured on the target.
        spread: The median over loads of the engine with its interval; None where there were too few loads.
    """

    engine: str
    device: str
    p50_us: float
    p99_us: float
    repeats: int
    counts_for_choice: bool
    spread: Interval | None


@dataclass(frozen=True)
class LatencyChange(OnHardware):
    """Median latency at one batch size.

    Attributes:
        ratio: New median over old one; None where they are not comparable. The two were measured at different
            times and not in turns, so that it has no interval.
        is_slower: Whether the new one took longer by more than 1 % and than the medians wandered while they
            were measured (`MedianLatency.spread`); None where there is no ratio.
        remark: Why there is no ratio; empty where there is one.
    """

    batch: int
    inputs: InputPlace
    old: MedianLatency | None
    new: MedianLatency | None
    ratio: float | None
    is_slower: bool | None
    remark: str = ""


@dataclass(frozen=True)
class GainChange(OnHardware):
    """Latency of a baseline over that of the emitted engine of its own run, timed in turns.

    Of several emitted engines it is the main one, over all batch sizes; of several baselines of one plan the
    fastest. `overlap`: whether the intervals have a value in common; `remark`: what they have not in common.
    """

    baseline: str
    old: Interval | None
    new: Interval | None
    overlap: bool | None
    remark: str = ""


# Models, plans, rewrites --------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteDecision:
    """Decision of a plan on a site; `recipe` is empty unless FP8."""

    plan: str
    precision: str
    recipe: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class SiteChange:
    """A site of both runs with another precision, recipe or verdict; `where` names the compared plans."""

    where: str
    site: str
    old: SiteDecision | None
    new: SiteDecision | None


@dataclass(frozen=True)
class SitePresence:
    """A site (k × n) of one model only; `merged_from`: sites of the exported model that it replaces."""

    site: str
    change: Change
    kind: str
    k: int
    n: int
    merged_from: tuple[str, ...]


@dataclass(frozen=True)
class SiteShape:
    """Kind of a site, length of its contraction, and columns of its product."""

    kind: str
    k: int
    n: int


@dataclass(frozen=True)
class SiteReshape:
    """A site of both models by its name that is not of one kind and size in both."""

    site: str
    old: SiteShape
    new: SiteShape


@dataclass(frozen=True)
class PlanSummary:
    """Base precision of a plan, its sites in FP8, and their share of the FP8-able FLOPs."""

    base: str
    fp8_sites: int
    fp8_share: float


@dataclass(frozen=True)
class PlanChange:
    """A plan of either run; `moved` sites have another precision in it, 0 where one run has no such plan."""

    plan: str
    old: PlanSummary | None
    new: PlanSummary | None
    moved: int


@dataclass(frozen=True)
class RewriteOutcome:
    """Outcome of a transform at a place: ``applied``, ``declined`` or ``rolled back``; `what`: its words."""

    outcome: str
    what: str


@dataclass(frozen=True)
class RewriteChange:
    """A place (node, site or tensor) that a transform of a sequence treated differently."""

    sequence: str
    transform: str
    at: str
    old: RewriteOutcome | None
    new: RewriteOutcome | None


# Data and settings --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitRows:
    """Rows of one split.

    The digest is over the content of the file `name`, which of its rows are read (`rule`, in words), and the
    columns that the model's inputs are made of.
    """

    name: str
    rows: int
    digest: str
    rule: str


@dataclass(frozen=True)
class SplitChange:
    """One split; `is_same`: digest and rule are. Where they are not, rows may still be the same."""

    split: str
    old: SplitRows | None
    new: SplitRows | None
    is_same: bool


@dataclass(frozen=True)
class ValueChange:
    """A version of a package, or a setting (as JSON, by its path in the run file), that differs."""

    name: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class RunComparison:
    """The difference of two runs.

    Attributes:
        targets: Emitted engines of every target of either.
        accuracy: Cost of these.
        latency: Their latency by batch size.
        gains: How much faster they are than the baselines of their own run.
        sites: Sites that are treated differently.
        presence: Sites that only one model has.
        reshaped: Sites that both have, of another kind or size.
        plans: Every plan of either.
        rewrites: Places that transforms treated differently.
        settings: None where they were not compared: of one run only its report was given.
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
    reshaped: tuple[SiteReshape, ...]
    plans: tuple[PlanChange, ...]
    rewrites: tuple[RewriteChange, ...]
    splits: tuple[SplitChange, ...]
    versions: tuple[ValueChange, ...]
    settings: tuple[ValueChange, ...] | None
    notes: tuple[str, ...] = ()

    @property
    def has_same_rows(self) -> bool:
        """True if every split certainly has the same rows in both."""
        return all(split.is_same for split in self.splits)
