"""Origin of every file of a run directory; effects of a retrained checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT, InsideFile


@dataclass(frozen=True)
class StageRecord:
    """One finished stage and its wall time.

    An unchanged `key`, the digest of all inputs, is not run again. `parents` are digests over the files of
    each stage before it, `files` SHA-256 of every file it wrote, by path relative to the run directory.
    """

    stage: str
    key: str
    parents: dict[str, str]
    files: dict[InsideFile, str]
    seconds: float


@dataclass(frozen=True)
class RunRecord:
    """The lineage of a run directory (`run.json`).

    `config` is the run file as it was understood; `versions` are of this package and every library that took
    part; `stages` are the finished ones in order. `reads` are inputs of each by name, to tell which changed:
    settings as JSON, others by their digest.
    """

    SCHEMA: ClassVar[str] = "run/1"
    __pydantic_config__ = STRICT

    config: dict[str, object]
    versions: dict[str, str]
    stages: tuple[StageRecord, ...]
    directory: Path
    reads: dict[str, dict[str, str]] = field(default_factory=dict)


REFRESH_NAME = "refresh.json"
LOOKS = 2
"""Certification attempts for one retrained model."""


@dataclass(frozen=True)
class SiteMove:
    """Change of a site in FP8: new over earlier scales (of several channels, the ratio farthest from 1).

    `kl_before` is KL over the loss by output, from the earlier profile; `kl_now` from few rows, hence wide.
    """

    site: str
    activation: float
    weight: float
    kl_before: dict[str, Interval]
    kl_now: dict[str, Interval]


@dataclass(frozen=True)
class OutputMove:
    """Judged quantity of a selected engine on certification, now and before (None where not measured)."""

    engine: str
    output: str
    judged: str
    before: Interval | None
    now: Interval
    budget: float
    status: str


@dataclass(frozen=True)
class Refresh:
    """A refresh (`refresh.json`) of the run in directory `earlier`, for a retrained `model` (a digest).

    Where the decisions of the earlier run fail on the certification rows, a full run follows, for the reason
    `fallback`, judged on the same rows. The two attempts share the error of 5 % (Bonferroni): each has
    intervals of 97.5 % (`confidence`; 95 % for a full run without an attempt before). `sites` are those in
    FP8, largest scale changes first. `seconds` of wall time include a full run, not the earlier one.
    """

    SCHEMA: ClassVar[str] = "refresh/2"
    __pydantic_config__ = STRICT

    earlier: Path
    earlier_model: str
    model: str
    sites: tuple[SiteMove, ...]
    outputs: tuple[OutputMove, ...]
    fallback: str
    confidence: float
    seconds: float
    earlier_seconds: float
