"""What a transform did, and what it declined to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from loka_onnx.core.serde import STRICT


@dataclass(frozen=True)
class Applied:
    """One place a transform rewrote.

    Attributes:
        at: Node, site or tensor.
        what: What was done.
        origins: By name of a site that is new, the names of the sites that it replaces; a site whose operands
            hold other values replaces itself.
    """

    at: str
    what: str
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Declined:
    """One place that a transform looked at and left alone.

    Attributes:
        at: Node, site or tensor; empty for the whole model.
        reason: Why.
    """

    at: str
    reason: str


@dataclass(frozen=True)
class RewriteRecord:
    """The result of one transform.

    Attributes:
        transform: Name of the transform.
        applied: What it rewrote.
        declined: What it left alone, and why.
        max_abs: Largest change of any output on the check rows; None when it was not checked (precision
            transforms change the output on purpose).
        tolerance: What `max_abs` was held against.
        rolled_back: Whether the result was discarded: it moved the output too far, or the transform failed.
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
    """What the split of high-error channels was asked for; a refresh asks for the same.

    Attributes:
        left: Part of its FP8 error that each site may keep, by its name; the others stay whole.
    """

    SCHEMA: ClassVar[str] = "loud-channels/1"

    __pydantic_config__ = STRICT

    left: dict[str, float]
