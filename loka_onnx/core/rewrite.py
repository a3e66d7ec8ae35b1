"""Applied and declined rewrites of a transform."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from loka_onnx.core.serde import STRICT


@dataclass(frozen=True)
class Applied:
    """One rewrite at a node, site or tensor.

    `origins` has, by name of a new site, the sites it replaces; one whose operands hold other values replaces
    itself.
    """

    at: str
    what: str
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Declined:
    """A look-alike node, site or tensor that was not rewritten; `at` is empty for the whole model."""

    at: str
    reason: str


@dataclass(frozen=True)
class RewriteRecord:
    """The result of one transform.

    Attributes:
        max_abs: Largest change of any output on the check rows; None when not checked (precision transforms
            change outputs on purpose).
        tolerance: Limit of `max_abs`.
        rolled_back: Whether the result was discarded: an output moved too far, or the transform failed.
        seconds: Wall time of matching and rewriting.
        check_seconds: Wall time of the check on data.
    """

    transform: str
    applied: tuple[Applied, ...]
    declined: tuple[Declined, ...]
    max_abs: float | None = None
    tolerance: float | None = None
    rolled_back: bool = False
    seconds: float = 0.0
    check_seconds: float = 0.0


@dataclass(frozen=True)
class RewriteLog:
    """The records of a sequence of transforms."""

    SCHEMA: ClassVar[str] = "rewrites/1"
    __pydantic_config__ = STRICT

    records: tuple[RewriteRecord, ...]


@dataclass(frozen=True)
class RewriteLogs:
    """The logs of a run: the mods, and the precision of each planned model."""

    SCHEMA: ClassVar[str] = "rewrite-logs/1"
    __pydantic_config__ = STRICT

    logs: dict[str, RewriteLog]


@dataclass(frozen=True)
class HighErrorChannels:
    """Request for the split of high-error channels, which a refresh repeats: the share of its FP8 error that
    each site may keep, by name; other sites stay whole.
    """

    SCHEMA: ClassVar[str] = "loud-channels/1"

    __pydantic_config__ = STRICT

    left: dict[str, float]
