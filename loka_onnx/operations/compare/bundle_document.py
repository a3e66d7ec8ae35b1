"""The difference of two bundles as a document."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from loka_onnx.core.serde import STRICT


class Section(StrEnum):
    """Subjects of differences, in the order of importance."""

    MODEL = "model"
    INTERFACE = "inputs and outputs"
    ENGINES = "engines"
    CHOICE = "choice"
    PLANS = "plans"
    SITES = "sites"
    ACCURACY = "accuracy as recorded"
    LATENCY = "latency as recorded"
    SIGNATURE = "signature"
    VERSIONS = "versions"
    FILES = "files"
    LINEAGE = "lineage"
    OTHER = "other fields"


class Kind(StrEnum):
    """Kinds of difference between two sides."""

    ADDED = "only in B"
    REMOVED = "only in A"
    CHANGED = "changed"


@dataclass(frozen=True)
class Change:
    """One difference: at the path of names `what` A says `a` and B says `b`, empty where it says nothing."""

    section: Section
    what: str
    kind: Kind
    a: str
    b: str

    def mirrored(self) -> Change:
        """The same with the sides exchanged."""
        kinds = {Kind.ADDED: Kind.REMOVED, Kind.REMOVED: Kind.ADDED, Kind.CHANGED: Kind.CHANGED}
        return replace(self, kind=kinds[self.kind], a=self.b, b=self.a)


@dataclass(frozen=True)
class PlanDifference:
    """Two plans, site by site.

    Attributes:
        why: Why these two are compared: ``same id``, or the target whose engines run them.
        sites: Sites that both decide.
        precision: How many of them run in another precision.
        recipe: Of those that are FP8 on both sides, how many are quantized by another recipe.
        scale: Of those that are FP8 by the same recipe, how many have another scale.
        largest_ratio: The scale of B over that of A that is farthest from 1; None where no scale differs.
        largest_at: Site and operand of it; empty where no scale differs.
    """

    plan_a: str
    plan_b: str
    why: str
    sites: int
    precision: int
    recipe: int
    scale: int
    largest_ratio: float | None
    largest_at: str


@dataclass(frozen=True)
class BundleIdentity:
    """One of the bundles.

    Attributes:
        model_digest: Digest of its exported model.
        engines: How many engines it has beside the fallback.
        files: How many files it lists, with `bytes` together.
        signed_with: Fingerprints of the keys that it claims to be signed with. They were not verified.
    """

    path: str
    created_by: str
    model_digest: str
    engines: int
    files: int
    bytes: int
    signed_with: tuple[str, ...]


@dataclass(frozen=True)
class BundleDifference:
    """Every difference of bundle B from bundle A, by section and name; of sites also the pairs of plans."""

    SCHEMA: ClassVar[str] = "bundle-difference/1"
    __pydantic_config__ = STRICT

    a: BundleIdentity
    b: BundleIdentity
    changes: tuple[Change, ...]
    plans: tuple[PlanDifference, ...]

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        return not self.changes

    def of(self, section: Section) -> tuple[Change, ...]:
        """The differences of a section, in their order."""
        return tuple(change for change in self.changes if change.section is section)
