"""What differs between two runs, read from their reports.

Nothing is run and nothing is measured again: `comparison` asks two deployments for the same rows, this holds
against one another what two runs recorded. Everything is new against old.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from loka_onnx.core.evaluation import InputPlace
from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT
from loka_onnx.operations.compare.model_changes import (
    Change,
    PlanChange,
    RewriteChange,
    SiteChange,
    SitePresence,
    SiteReshape,
    SplitChange,
    ValueChange,
)


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
class OnHardware:
    """Something about what is emitted for one piece of hardware.

    Attributes:
        target: Name of the target in the run file.
        architecture: Which of its architectures, where the target has engines for several; else empty.
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
    """Which engine takes requests of some sizes.

    Attributes:
        batch: Largest number of rows that it takes; the last route takes larger requests too.
        engine: Id of the engine.
        plan: Its plan.
    """

    batch: int
    engine: str
    plan: str


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
        routes: Which engine takes requests of which size, by ascending size; empty where this one takes all.
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
        """Largest requests, None for the rest, and what takes them; sizes of one engine are joined."""
        routes = self.routes or (EmittedRoute(0, self.engine, self.plan),)
        ends = [
            (route.batch, route.engine)
            for route, following in pairwise(routes)
            if route.engine != following.engine
        ]
        return (*ends, (None, routes[-1].engine))


@dataclass(frozen=True)
class TargetDifference(OnHardware):
    """What is emitted for one target.

    Attributes:
        change: Whether it is another engine: another backend, architecture or plan, of any engine that takes
            requests, or other sizes of requests that one takes. An engine that was built anew from the same
            plan is the same, though its digest may differ.
        old: What the old run emits; None where it has no such target.
        new: What the new run emits.
    """

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
class AccuracyChange(OnHardware):
    """What an emitted engine costs, in both runs.

    Where requests go to several engines by their size, there is one for each two that answer some size.

    Attributes:
        output: Name of the output.
        split: On which split.
        old: In the old run; None where it was not measured.
        new: In the new run.
        difference: New estimate less old one; None where one is missing, or they are not of one kind.
        overlap: Whether the intervals have a value in common; None where `difference` is None. Intervals of
            one and the same rows are not independent: where they overlap the costs may differ all the same.
        is_same_basis: Whether both are costs against the same FP32 model on the same rows.
        remark: Why the two cannot be compared, or what they have not in common; empty for nothing.
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
        """Whether the new one costs more for certain."""
        return self.is_same_basis and self.overlap is False and (self.difference or 0.0) > 0.0


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
        spread: The median over loads of the engine, with the interval that their spread leaves. None where
            there were too few loads.
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
        inputs: Where the inputs lay.
        old: In the old run; None where it was not measured.
        new: In the new run.
        ratio: New median over old one; None where they are not comparable. The two were measured at different
            times and not in turns, so that it has no interval.
        is_slower: Whether the new one took longer by more than 1 % and than the medians wandered while they
            were measured (`MedianLatency.spread`); None where there is no ratio. What differed between the
            days of the two runs may still be the cause.
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
    """How much faster each emitted engine is than one baseline of its own run, timed in turns with it.

    Of several emitted engines it is the main one, over all batch sizes.

    Attributes:
        baseline: Plan of the baseline; of several engines, the fastest.
        old: Latency of the baseline over that of the emitted engine, in the old run; None where not measured.
        new: The same in the new run.
        overlap: Whether the intervals have a value in common; None where one is missing.
        remark: What the intervals have not in common; empty for nothing.
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
        old: What is compared with.
        new: What is compared.
        targets: What is emitted, of every target of either.
        accuracy: What that costs.
        latency: What it takes, by batch size.
        gains: How much faster it is than the baselines of its own run.
        sites: Sites that are treated differently.
        presence: Sites that only one model has.
        reshaped: Sites that both have, of another kind or size.
        plans: Every plan of either.
        rewrites: Places that transforms treated differently.
        splits: Whether the rows are the same.
        versions: Libraries of another version.
        settings: Settings with another value; None where they were not compared, because of one run only its
            report was given.
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
        """Whether every split is of the same rows in both, for certain."""
        return all(split.is_same for split in self.splits)

    def split(self, name: str) -> SplitChange | None:
        """The split of that name, None where neither run read it."""
        return next((split for split in self.splits if split.split == name), None)
