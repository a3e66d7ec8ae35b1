"""Built engines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from operator import not_
from typing import Annotated, ClassVar

from pydantic import Field

from loka_onnx.core.rewrite import Part
from loka_onnx.core.serde import STRICT, Component, InsidePath


class BuildStatus(StrEnum):
    """State of a candidate's build."""

    READY = "built and run here"
    BUILT_NOT_RUN = "built, not run"
    """The engine is for a device that this host lacks."""
    DECLINED = "declined"
    """The backend reports beforehand that it cannot honour the plan: a result, not a failure."""
    FAILED = "failed"
    WAITING = "waiting for its build job"
    """This host cannot build it; a job for another host is written, without a result yet."""
    RUN_ELSEWHERE = "built and run on another host"
    """Result of a build job with rows: judged on the outputs that came back."""


@dataclass(frozen=True)
class SitePrecision:
    """A planned site in a built engine: element types of its operands there, and if it honours the plan."""

    site: str
    planned: str
    operands: tuple[str, ...]
    engaged: bool
    evidence: str


@dataclass(frozen=True)
class EngineArtifact:
    """One engine: a backend's build of one plan for one device of the run file (`target`).

    Attributes:
        architecture: Device architecture as the backend names it (``sm89``, ``cpu``).
        simulated: FP8 is simulated: accuracy counts, latency is not meaningful.
        path: Relative to the run directory; None when not built.
        bytes: Size of all of its files.
        digest: SHA-256 of the engine file; over all of its files when weights are beside it.
        detail: Failure with its evidence, or why it was declined or not run.
        portability: Where the engine file may be loaded.
        instructions: Instruction set of the host that it was built on, where its values depend on that, as in
            ``avx512_vnni``; else empty.
        remarks: Fusions that its maker does elsewhere but not here, with place and reason.
    """

    SCHEMA: ClassVar[str] = "engine/2"
    __pydantic_config__ = STRICT

    backend: Component
    plan: Component
    target: Component
    architecture: Component
    status: BuildStatus
    simulated: bool
    path: InsidePath | None
    bytes: int
    digest: str
    backend_version: str
    sites: tuple[SitePrecision, ...]
    build_seconds: float
    detail: str = ""
    portability: str = ""
    part: Part = Part.WHOLE
    remarks: tuple[str, ...] = ()
    instructions: Annotated[str, Field(exclude_if=not_)] = ""

    @property
    def id(self) -> str:
        """``<target>-<backend>-<architecture>-<plan>``."""
        return f"{self.target}-{self.backend}-{self.architecture}-{self.plan}"

    @property
    def is_built(self) -> bool:
        """True if there is an engine, run here or not."""
        return self.status in {BuildStatus.READY, BuildStatus.BUILT_NOT_RUN, BuildStatus.RUN_ELSEWHERE}

    @property
    def was_run(self) -> bool:
        """True if it gave outputs on the judged rows, here or elsewhere."""
        return self.status in {BuildStatus.READY, BuildStatus.RUN_ELSEWHERE}

    @property
    def fallbacks(self) -> tuple[SitePrecision, ...]:
        """Planned sites that the engine does not run as planned."""
        return tuple(s for s in self.sites if not s.engaged)


@dataclass(frozen=True)
class EngineSet:
    """Every candidate of a run, declined and failed ones included."""

    SCHEMA: ClassVar[str] = "engines/2"
    __pydantic_config__ = STRICT

    engines: tuple[EngineArtifact, ...]
