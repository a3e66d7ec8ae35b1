"""Differences between models, plans, rewrites, rows and settings of two runs: parts of `run_comparison`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Change(StrEnum):
    """Presence in the new run against the old one."""

    SAME = "the same"
    CHANGED = "changed"
    APPEARED = "appeared"
    VANISHED = "vanished"


@dataclass(frozen=True)
class SiteDecision:
    """Decision of a plan on a site.

    Attributes:
        recipe: Id of the recipe; empty unless FP8.
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
        where: Compared plans: a plan of both runs, or a target's selected plan.
        old: None where the old plan does not name the site.
    """

    where: str
    site: str
    old: SiteDecision | None
    new: SiteDecision | None


@dataclass(frozen=True)
class SitePresence:
    """A site of only one model.

    Attributes:
        change: `APPEARED` or `VANISHED`.
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
    """Kind and size of a site.

    Attributes:
        k: Length of the contraction.
        n: Columns of the product.
    """

    kind: str
    k: int
    n: int


@dataclass(frozen=True)
class SiteReshape:
    """A site of both models that differs in kind or size."""

    site: str
    old: SiteShape
    new: SiteShape


@dataclass(frozen=True)
class PlanSummary:
    """One plan of one run.

    Attributes:
        base: Precision outside FP8.
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
        old: None where the old run lacks it.
        moved: Sites of both models with another precision in it; 0 where one run lacks the plan.
    """

    plan: str
    old: PlanSummary | None
    new: PlanSummary | None
    moved: int


@dataclass(frozen=True)
class RewriteOutcome:
    """Outcome of a transform at a place.

    Attributes:
        outcome: ``applied``, ``declined`` or ``rolled back``.
        what: Action, or the reason for none.
    """

    outcome: str
    what: str


@dataclass(frozen=True)
class RewriteChange:
    """A place with another outcome of a transform.

    Attributes:
        at: Node, site or tensor.
        old: None where the old run did not evaluate it.
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
        name: Source of the rows.
        digest: Digest of the file's content, the selected rows, and the columns of the model's inputs.
        rule: Selected rows, in words.
    """

    name: str
    rows: int
    digest: str
    rule: str


@dataclass(frozen=True)
class SplitChange:
    """One split of the data.

    Attributes:
        old: None where it was not read.
        is_same: Whether both are certainly the same rows: same digest and rule. When false, the file's bytes,
            the row selection or the input columns differ; rows may still be the same.
    """

    split: str
    old: SplitRows | None
    new: SplitRows | None
    is_same: bool


@dataclass(frozen=True)
class ValueChange:
    """A version or a setting that differs.

    Attributes:
        name: Package, or path of the setting in the run file.
        old: Settings as JSON; None where missing.
    """

    name: str
    old: str | None
    new: str | None
