"""Differences between two runs, read from their reports; new against old.

Nothing is run again; `comparison` runs two deployments on the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from loka_onnx.core.evaluation import InputPlace
from loka_onnx.core.intervals import Interval
from loka_onnx.core.model_changes import (
    Change,
    PlanChange,
    RewriteChange,
    SiteChange,
    SitePresence,
    SiteReshape,
    SplitChange,
    ValueChange,
)
from loka_onnx.core.serde import STRICT


@dataclass(frozen=True)
class ComparedRun:
    """One side.

    Attributes:
        path: As given.
        digest: SHA-256 of its report.json.
        candidates: Competing engines, failures included.
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
class OnHardware:
    """Base of differences on one piece of hardware.

    Attributes:
        architecture: Where the target has engines for several; else empty.
    """

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
    """Engine for requests of some sizes.

    Attributes:
        batch: Most rows; the last route takes larger requests too.
    """

    batch: int
    engine: str
    plan: str


@dataclass(frozen=True)
class EmittedEngine:
    """The engine selected for a target; of several, the main one.

    Attributes:
        bytes: Size of its files.
        simulated: Its FP8 is simulated.
        fp8_sites: Number of sites in FP8.
        fp8_share: Their share of the FP8-able FLOPs.
        routes: Engine for each request size, ascending; empty where this one takes all.
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
    """Selected engines for one target.

    Attributes:
        change: Whether another engine was selected: another backend, architecture, plan or route. A rebuilt
            engine of the same plan is the same, though its digest may differ.
        old: None where the old run lacks the target.
    """

    change: Change
    old: EmittedEngine | None
    new: EmittedEngine | None


@dataclass(frozen=True)
class JudgedOutput:
    """One output of a selected engine on one split.

    Attributes:
        name: Judged quantity: ΔNE, or KL where there are no labels.
        judged: Its interval; None for the FP32 reference.
        budget: Largest accepted loss.
        status: A value of `BudgetStatus`.
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
class AccuracyChange(OnHardware):
    """Accuracy cost of a selected engine, in both runs.

    With several engines by request size, there is one for each pair that answers a common size.

    Attributes:
        old: None where not measured.
        difference: New estimate less old one; None where one is missing, or they differ in kind.
        overlap: Whether the intervals overlap; None where `difference` is None. Intervals of the same rows
            are not independent: overlapping costs may differ all the same.
        is_same_basis: Whether both costs are against the same FP32 model on the same rows.
        remark: Why the two cannot be compared, or how they differ; else empty.
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
        """Whether the new cost is certainly larger."""
        return self.is_same_basis and self.overlap is False and (self.difference or 0.0) > 0.0


@dataclass(frozen=True)
class MedianLatency:
    """Latency of a selected engine at one batch size.

    Attributes:
        engine: Id of the engine for such requests.
        p50_us: Median, microseconds.
        p99_us: 99th percentile, microseconds.
        repeats: Measured requests.
        counts_for_choice: Whether it was measured on the target.
        spread: The median over loads of the engine, with its interval. None with too few loads.
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
    """Median latency at one batch size, in both runs.

    Attributes:
        batch: Rows of a request.
        old: None where not measured.
        ratio: New median over old one; None where they are not comparable. They were not measured in turns,
            so it has no interval.
        is_slower: Whether the new one took longer by more than 1 % and by more than the medians varied while
            measured (`MedianLatency.spread`); None where there is no ratio. The cause may be a difference
            between the days.
        remark: Why there is no ratio; else empty.
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
    """Speedup of each selected engine over one baseline of its own run, timed in turns.

    Of several selected engines it is the main one, over all batch sizes.

    Attributes:
        baseline: Plan of the baseline; of several engines, the fastest.
        old: Latency of the baseline over that of the selected engine, in the old run; None where not
            measured.
        overlap: Whether the intervals overlap; None where one is missing.
        remark: How the intervals differ; else empty.
    """

    baseline: str
    old: Interval | None
    new: Interval | None
    overlap: bool | None
    remark: str = ""


@dataclass(frozen=True)
class RunComparison:
    """Everything that differs between two runs.

    Attributes:
        targets: Selected engines, of every target of either.
        accuracy: Their cost.
        latency: By batch size.
        gains: Speedup over baselines of the same run.
        presence: Sites that only one model has.
        reshaped: Sites of both with another kind or size.
        rewrites: Places with another outcome.
        settings: Settings with another value; None without the run files.
        notes: Cautions, each a sentence without its full stop.
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
        """Whether every split certainly has the same rows in both."""
        return all(split.is_same for split in self.splits)

    def split(self, name: str) -> SplitChange | None:
        """Return the split of that name; None where neither run read it."""
        return next((split for split in self.splits if split.split == name), None)
