"""Base of all backends: checks, isolation, timing and clean-up of builds.

A concrete `Backend` says what it can do (`spec`, `availability`, `decline`, `base_precision`) and fills
three hooks that run in the child process (`compile`, `read_precision`, `load`). It never sees
limits, staging directories or half-written output.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from loka_onnx.core import serde
from loka_onnx.core.digests import digest_file, digest_files
from loka_onnx.core.engine import BuildStatus, EngineArtifact, SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.installation import versions_of
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.isolation import Ending, interrupts_held, replace_directory, run_child, staged, tail
from loka_onnx.engines.request import (
    ENGINE,
    PHASE,
    REQUEST,
    RESPONSE,
    WAITING,
    WORKER,
    BuildRequest,
    BuildResponse,
)
from loka_onnx.errors import ConfigError, EngineError, MissingPackage, ModelError, UserError, nearest
from loka_onnx.sessions.backends import BackendSpec
from loka_onnx.sessions.runner import Runner


@dataclass(frozen=True)
class Availability:
    """Abilities of a backend on this machine; `reason` says why it cannot build or run. `can_run`: this
    machine has `devices` of at least one of its architectures.
    """

    installed: bool
    version: str
    can_build: bool
    can_run: bool
    devices: tuple[str, ...]
    reason: str = ""
    remedy: str = ""

    @classmethod
    def missing(cls, error: MissingPackage) -> Availability:
        """Abilities without the library."""
        return cls(False, "", False, False, (), error.what, error.remedy)


class Backend(ABC):
    """An engine maker."""

    spec: ClassVar[BackendSpec]
    """Its declaration."""
    options: ClassVar[Mapping[str, range]] = {}
    """Settings of `BuildRequest.options`, and their ranges."""
    untouched: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Settings of a plan of the exported model without this project's fusions; empty: there is none."""
    times_kernels: ClassVar[bool] = False
    """True if `compile` times kernels on the device, for which it gets the device alone."""

    @property
    def name(self) -> str:
        """As run files name it."""
        return self.spec.name

    @property
    def devices(self) -> Mapping[str, tuple[str, ...]]:
        """Architectures of each device that a run file can name."""
        return self.spec.devices

    @abstractmethod
    def availability(self) -> Availability:
        """Abilities of this backend on this machine; never raises."""

    @abstractmethod
    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        """Reason why no machine can honour a plan on an architecture with this backend; None when one can."""

    def base_precision(self, plan: PrecisionPlan) -> Precision:
        """Precision of everything that is not quantized in the graph for `build`."""
        return plan.base

    @abstractmethod
    def portability(self, architecture: str) -> str:
        """Hosts that can load an engine for an architecture, for the manifest."""

    @abstractmethod
    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Hook in the child process: build the engine below `into` and return its main file."""

    @abstractmethod
    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Hook in the child process: precision of each planned site, read from the engine."""

    def load(self, engine: Path, architecture: str) -> Runner:
        """Hook: load an engine of this backend that can run here."""
        return self.spec.open(engine, architecture, "", None)

    def why_not_run(self, architecture: str) -> str:
        """Reason why an engine for an architecture cannot run on this machine; empty when it can."""
        reason = self.spec.device_obstacle(architecture)
        return f"{reason}; latency and accuracy not measured" if reason else ""

    def foreign_format(self, plan: PrecisionPlan, architecture: str) -> str | None:
        """The first site of a plan in a format, or with a zero point, that is not multiplied, as a reason."""
        formats = self.spec.formats_on(architecture)
        for decision in plan.decisions:
            recipe = decision.recipe
            if recipe is not None and recipe.format not in formats:
                known = ", ".join(map(str, formats))
                return f"site '{decision.site}' asks for {recipe.format}; {self.name} takes {known} only"
            for zero in (decision.activation_zero_point, decision.weight_zero_point):
                if recipe is not None and not recipe.format.has_zero(zero):
                    return f"site '{decision.site}' has the zero point {zero}, which {recipe.format} has not"
        return None

    def versions(self) -> dict[str, str]:
        """Versions of the distributions that determine the engine; without one, the library's own version."""
        versions, own = versions_of(self.spec.modules), self.availability().version
        return {**versions, self.name: own} if own and own not in versions.values() else versions

    def read_remarks(self, log: str) -> tuple[str, ...]:
        """Optimizations that the maker declined, from the child's output: a sentence each, with reason."""
        return ()

    def fused_sites(self, model: Path, base: Precision) -> dict[str, str]:
        """Linear sites that a larger kernel computes in the base precision, with that kernel's name. FP8
        would split the kernel and cost more than it saves: plans for speed leave these sites out.
        """
        return {}

    def build_blocker(self, architecture: str) -> str:
        """Reason why this machine cannot build for an architecture, though another may; empty when it can."""
        availability = self.availability()
        return "" if availability.can_build else f"{availability.reason}; {availability.remedy}"

    def is_simulated(self, plan: PrecisionPlan, architecture: str) -> bool:
        """True if FP8 is simulated there: accuracy is meaningful, latency is not."""
        return False

    def instructions(self, plan: PrecisionPlan, architecture: str) -> str:
        """Instruction set of this host that an engine's values depend on; empty where they do not."""
        return ""

    def files(self, engine: Path) -> tuple[Path, ...]:
        """All files of an engine, the main file first."""
        return (engine,)

    def architectures(self, device: str) -> tuple[str, ...]:
        """Architectures of a device in this backend's names; a `ConfigError` for an unknown device."""
        if device in self.devices:
            return self.devices[device]
        raise ConfigError(
            f"E0801 backend '{self.name}' builds nothing for device '{device}'",
            evidence=f"it knows {', '.join(sorted(self.devices))}",
            remedy=nearest(device, self.devices) or "name one of these, or another backend",
        )

    def build(self, request: BuildRequest) -> EngineArtifact:
        """Build one engine in a child process, run its first batches if this machine can, and publish it.

        `request.output` is replaced as a whole, or stays; the child's log (``.log``) is beside it. The
        artifact is READY, BUILT_NOT_RUN or DECLINED with the reason, or FAILED with the evidence.

        Raises:
            ModelError: The model or the sample is missing.
            ConfigError: An option is unknown or out of range, or no device has the architecture.
            OutputError: The output cannot be written.
        """
        started = time.monotonic()
        self._check(request)
        reason = self.decline(request.plan, request.architecture) or self.build_blocker(request.architecture)
        if reason:
            return self.declined_artifact(request.plan, request.target, request.architecture, reason)
        log = request.output.with_name(f"{request.output.name}.log")
        with staged(request.output) as staging:
            response, detail = self._build_isolated(request, staging, log)
            if response is None:
                seconds = time.monotonic() - started
                return self.failed_artifact(
                    request.plan, request.target, request.architecture, detail, seconds
                )
            artifact = self._publish(request, response, staging)
            # Someone may have removed the log of a valid engine.
            text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
            return replace(artifact, remarks=self.read_remarks(text))

    def failed_artifact(
        self, plan: PrecisionPlan, target: str, architecture: str, detail: str, seconds: float = 0.0
    ) -> EngineArtifact:
        """Artifact without an engine, FAILED with the evidence; the start of every other one."""
        return EngineArtifact(
            backend=self.name,
            plan=plan.id,
            target=target,
            architecture=architecture,
            status=BuildStatus.FAILED,
            simulated=self.is_simulated(plan, architecture),
            path=None,
            bytes=0,
            digest="",
            backend_version=self.availability().version,
            sites=(),
            build_seconds=seconds,
            detail=detail,
        )

    def declined_artifact(
        self, plan: PrecisionPlan, target: str, architecture: str, reason: str
    ) -> EngineArtifact:
        """Artifact of a plan that the backend cannot honour."""
        return replace(self.failed_artifact(plan, target, architecture, reason), status=BuildStatus.DECLINED)

    def open(self, artifact: EngineArtifact, path: Path) -> Runner:
        """Load a built engine; an `EngineError` where there is none, it was altered, or cannot run here."""
        where = f"engine '{artifact.id}'"
        if artifact.backend != self.name or not artifact.is_built:
            raise EngineError(
                "E0802 there is no such engine to load",
                where=where,
                evidence=f"backend {artifact.backend}, status {artifact.status}",
                remedy="see the build's detail in the report",
            )
        reason = self.why_not_run(artifact.architecture)
        if reason:
            raise EngineError(f"E0803 cannot run here: {reason}", where=where, remedy=artifact.portability)
        files = self.files(path) if path.is_file() else (path,)
        if not all(file.is_file() for file in files) or _digest(files) != artifact.digest:
            raise EngineError(
                "E0804 the engine file is missing or is not the one that was built",
                where=where,
                evidence=f"'{path}' does not have digest {artifact.digest}",
                remedy="build the engine again",
            )
        return self.load(path, artifact.architecture)

    def _check(self, request: BuildRequest) -> None:
        for path, what in ((request.model, "model"), (request.sample, "sample")):
            if not path.is_file():
                raise ModelError(f"E0805 the {what} to build from is missing", where=str(path))
        known = {architecture for several in self.devices.values() for architecture in several}
        if request.architecture not in known:
            raise ConfigError(
                f"E0806 backend '{self.name}' has no architecture '{request.architecture}'",
                evidence=f"it builds for {', '.join(sorted(known))}",
            )
        self.check_options(request.options, f"options for target '{request.target}'")

    def check_options(self, options: Mapping[str, int], where: str = "") -> None:
        """Check that options are known and in range, with a `ConfigError` that names their source."""
        for option, value in options.items():
            if option not in self.options:
                known = [f"{name} ({r.start} to {r.stop - 1})" for name, r in sorted(self.options.items())]
                raise ConfigError(
                    f"E0807 backend '{self.name}' has no option '{option}'",
                    where=where,
                    evidence=f"it takes {', '.join(known) or 'none'}",
                    remedy=nearest(option, self.options) or "leave it out",
                )
            allowed = self.options[option]
            if value not in allowed:
                raise ConfigError(
                    f"E0808 option '{option}' of backend '{self.name}' is out of range",
                    where=where,
                    evidence=f"it is {value}",
                    remedy=f"give {allowed.start} to {allowed.stop - 1}, or leave it out for the default",
                )

    def _build_isolated(
        self, request: BuildRequest, staging: Path, log: Path
    ) -> tuple[BuildResponse | None, str]:
        """Return the child's response, or None and the reason."""
        # The first use of a document type compiles its schema, which would turn an interrupt into an error.
        with interrupts_held():
            serde.write(request, staging / REQUEST)
        arguments = [f"{type(self).__module__}:{type(self).__qualname__}", str(staging)]
        outcome = run_child(WORKER, arguments, log, request.limits, staging / WAITING)
        phase_file = staging / PHASE
        phase = phase_file.read_text(encoding="utf-8") if phase_file.is_file() else "starting"
        evidence = "the build process"
        if outcome.ending is Ending.EXITED and outcome.code == 0:
            try:
                with interrupts_held():
                    response = serde.read(BuildResponse, staging / RESPONSE)
                if not response.error:
                    return response, ""
                return None, f"{self.name} failed while {phase}: {response.error}\n  log: {log}"
            except UserError as error:
                evidence = f"the build process left no valid response: {error}"
        detail = f"{self.name} failed while {phase}: {evidence} {outcome.describe(request.limits)}"
        shown = "\n    ".join(tail(log).splitlines()) or "(empty)"
        return None, f"{detail}\n  log: {log}, its end:\n    {shown}"

    def _publish(self, request: BuildRequest, response: BuildResponse, staging: Path) -> EngineArtifact:
        files = tuple(staging / ENGINE / name for name in response.files)
        size, digest = sum(file.stat().st_size for file in files), _digest(files)
        replace_directory(staging / ENGINE, request.output, staging)
        engine = request.output / response.engine
        return replace(
            self.failed_artifact(request.plan, request.target, request.architecture, response.not_run),
            status=BuildStatus.BUILT_NOT_RUN if response.not_run else BuildStatus.READY,
            path=engine.relative_to(request.relative_to or request.output),
            bytes=size,
            digest=digest,
            backend_version=response.version,
            sites=response.sites,
            build_seconds=response.build_seconds,
            portability=self.portability(request.architecture),
            instructions=self.instructions(request.plan, request.architecture),
        )


def _digest(files: tuple[Path, ...]) -> str:
    return digest_file(files[0]) if len(files) == 1 else digest_files(files)
