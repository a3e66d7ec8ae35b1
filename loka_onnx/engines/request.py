"""Request to and response from the child process of a build, and the names of their files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.serde import STRICT
from loka_onnx.core.site import Site
from loka_onnx.errors import ConfigError

GIB = 1 << 30

WORKER = "loka_onnx.engines.worker"
"""Module of the child process."""
REQUEST, RESPONSE, PHASE, ENGINE = "request.json", "response.json", "phase", "engine"
"""Names in the directory that parent and child share."""
WAITING = "waiting"
"""File there while the child waits for the device."""


@dataclass(frozen=True)
class BuildLimits:
    """Positive limits at which a build is ended."""

    seconds: float = 900.0
    memory_bytes: int = 32 * GIB

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.memory_bytes <= 0:
            raise ConfigError(
                "E0887 a limit of a build must be positive",
                where="limits",
                evidence=f"seconds {self.seconds}, memory_bytes {self.memory_bytes}",
                remedy="leave it out for the default",
            )


@dataclass(frozen=True)
class BuildRequest:
    """One engine to build.

    `model` has named sites, Q/DQ at quantized sites, the rest in `Backend.base_precision`, and may have
    external data beside it; `target` is a device of the run file; `output` is a directory that a successful
    build replaces; `sample` is an ``.npz`` with one array per input, rows on axis 0. `EngineArtifact.path` is
    relative to `relative_to` (the run directory), None: to `output`.
    """

    SCHEMA: ClassVar[str] = "build-request/1"
    __pydantic_config__ = STRICT

    model: Path
    plan: PrecisionPlan
    sites: tuple[Site, ...]
    target: str
    architecture: str
    batch: BatchSizes
    output: Path
    sample: Path
    relative_to: Path | None = None
    limits: BuildLimits = field(default_factory=BuildLimits)
    options: dict[str, int] = field(default_factory=dict)

    @property
    def planned(self) -> tuple[tuple[Site, Precision], ...]:
        """Sites that the plan decides, with their precision, in the model's order."""
        precisions = {decision.site: decision.precision for decision in self.plan.decisions}
        return tuple((site, precisions[site.name]) for site in self.sites if site.name in precisions)

    @property
    def planned_sites(self) -> tuple[Site, ...]:
        """Sites that the plan decides, in the model's order."""
        return tuple(site for site, _ in self.planned)


@dataclass(frozen=True)
class BuildResponse:
    """Answer of the child process of a build; `error` is the reason of a failure, which makes the other
    fields meaningless. `files` are relative to its build directory, the engine first; `sites` are read from
    the engine; `not_run` is the reason why the engine was not run here, empty when it was.
    """

    SCHEMA: ClassVar[str] = "build-response/1"
    __pydantic_config__ = STRICT

    engine: str = ""
    files: tuple[str, ...] = ()
    sites: tuple[SitePrecision, ...] = ()
    not_run: str = ""
    build_seconds: float = 0.0
    version: str = ""
    error: str = ""
