"""Origin of every file of a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from loka_onnx.core.serde import STRICT, InsideFile


@dataclass(frozen=True)
class StageRecord:
    """One finished stage.

    Attributes:
        key: Digest of all inputs of the stage; a stage with an unchanged key is not run again.
        parents: For each stage before it, a digest over its files.
        files: SHA-256 of every file it wrote, by path relative to the run directory.
        seconds: Wall time.
    """

    stage: str
    key: str
    parents: dict[str, str]
    files: dict[InsideFile, str]
    seconds: float


@dataclass(frozen=True)
class RunRecord:
    """The lineage of a run directory (`run.json`).

    Attributes:
        config: The run file as it was understood.
        versions: Version of this package and of every library that took part.
        stages: Finished stages in order.
    """

    SCHEMA: ClassVar[str] = "run/1"
    __pydantic_config__ = STRICT

    config: dict[str, object]
    versions: dict[str, str]
    stages: tuple[StageRecord, ...]
    directory: Path
