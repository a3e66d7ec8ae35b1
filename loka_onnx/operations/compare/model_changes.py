"""What differs between models, plans, rewrites, rows and settings of two runs: parts of `run_comparison`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Change(StrEnum):
    """What became of something from the old run to the new one."""

    SAME = "the same"
    CHANGED = "changed"
    APPEARED = "appeared"
    VANISHED = "vanished"


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
        old: In the old run; None where its plan says nothing of the site.
        new: In the new run.
    """

    where: str
    site: str
    old: SiteDecision | None
    new: SiteDecision | None


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
class SiteShape:
    """What a site computes.

    Attributes:
        kind: What it is.
        k: Length of the contraction.
        n: Columns of the product.
    """

    kind: str
    k: int
    n: int


@dataclass(frozen=True)
class SiteReshape:
    """A site of both models by its name that is not of one kind and size in both.

    Attributes:
        site: Its name.
        old: In the old model.
        new: In the new one.
    """

    site: str
    old: SiteShape
    new: SiteShape


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
        digest: Digest of the file's content, of which of its rows are read, and of the columns that the
            model's inputs are made of.
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
        is_same: Whether both are the same rows for certain: the same digest and rule. Where it is false the
            file's bytes, the selection of its rows or the columns of the inputs differ; rows may be the same.
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
