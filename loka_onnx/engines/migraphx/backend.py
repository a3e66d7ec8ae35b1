"""AMD MIGraphX 2.15 and 2.16: FP8 engines for Instinct and Radeon GPUs.

An engine is one program per served batch size, each with its own copy of the weights, and a manifest with
their GPU and release. Compiling needs the GPU. `dialect` states the form in which FP8 is passed and why;
`site_precision`, how it is read back.

The device ``cpu`` compiles for MIGraphX's reference target: operator by operator, FP8 as Q/DQ around a
product in FP32. Such an engine is a simulation: its accuracy is meaningful, its latency is not. Plans in BF16
and FP16 are declined there, because that target truncates where GPUs round, which biases every output.

`dialect` lists observations of the library itself; kernels on GPUs were never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from loka_onnx.core.devices import CPU
from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.installation import cache_directory
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.base import Availability, Backend
from loka_onnx.engines.migraphx.api import (
    GPU,
    import_migraphx,
    load_program,
    text_of,
    version_of,
    why_no_target,
)
from loka_onnx.engines.migraphx.build import BuildSettings, build_engine
from loka_onnx.engines.migraphx.dialect import FORMS
from loka_onnx.engines.migraphx.program_text import parse_program
from loka_onnx.engines.migraphx.session import open_migraphx, read_engine, why_not_run
from loka_onnx.engines.migraphx.site_precision import site_precisions
from loka_onnx.engines.migraphx.spec import MIGRAPHX
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import EngineError, MissingPackage
from loka_onnx.sessions.backends import BackendSpec
from loka_onnx.sessions.host_devices import list_amd_architectures
from loka_onnx.sessions.runner import Runner


class MigraphxBackend(Backend):
    """MIGraphX."""

    spec: ClassVar[BackendSpec] = MIGRAPHX
    options: ClassVar[Mapping[str, range]] = {"exhaustive_tune": range(2), "fast_math": range(2)}
    times_kernels: ClassVar[bool] = True

    def availability(self) -> Availability:
        """Report the library, and the GPUs here that it builds for and runs on."""
        try:
            migraphx = import_migraphx()
        except MissingPackage as error:
            return Availability.missing(error)
        gpus = () if why_no_target(migraphx, GPU) else list_amd_architectures()
        return Availability(True, version_of(migraphx), True, True, (*gpus, CPU))

    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        """FP8 needs E4M3FN and an architecture that multiplies it; 16 bits need a GPU."""
        if architecture == CPU and plan.base is not Precision.FP32:
            return (
                f"the reference target truncates to {plan.base} where GPUs round to nearest: its accuracy "
                f"would not be that of plan '{plan.id}'"
            )
        if plan.fp8_sites and architecture not in FORMS:
            return f"{architecture} has no FP8 products: MIGraphX multiplies FP32 there without a word"
        return self.foreign_format(plan, architecture)

    def build_blocker(self, architecture: str) -> str:
        """The GPU must be present: the library compiles for the current one."""
        reason = super().build_blocker(architecture)
        if reason or architecture == CPU:
            return reason
        missing = why_not_run(architecture) or why_no_target(import_migraphx(), GPU)
        return f"MIGraphX compiles on the GPU that it compiles for: {missing}" if missing else ""

    def is_simulated(self, plan: PrecisionPlan, architecture: str) -> bool:
        """All engines of the reference target are simulations."""
        return architecture == CPU

    def portability(self, architecture: str) -> str:
        """One architecture, one version."""
        version = self.availability().version
        where = "any host" if architecture == CPU else f"one GPU architecture ({architecture})"
        return f"{where}, one MIGraphX version ({version}); programs for the batch sizes that were asked for"

    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Build a program for each batch size."""
        migraphx = import_migraphx()
        architecture = request.architecture
        cache = cache_directory() / "timing" / f"migraphx-{version_of(migraphx)}" / f"{architecture}.json"
        settings = BuildSettings(
            architecture,
            request.batch,
            exhaustive_tune=bool(request.options.get("exhaustive_tune", 0)),
            fast_math=bool(request.options.get("fast_math", 1)),
            holds_float8=bool(request.plan.fp8_sites),
            problem_cache=cache,
        )
        return build_engine(migraphx, request.model, settings, into)

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Read the compiled programs."""
        migraphx = import_migraphx()
        programs = [
            load_program(migraphx, engine.parent / each.file) for each in read_engine(engine).programs
        ]
        return site_precisions([parse_program(text_of(program)) for program in programs], request.planned)

    def load(self, engine: Path, architecture: str) -> Runner:
        """Load the programs."""
        return open_migraphx(engine, architecture)

    def files(self, engine: Path) -> tuple[Path, ...]:
        """Return the manifest and its programs, or an invalid file alone."""
        try:
            programs = read_engine(engine).programs
        except EngineError:
            return (engine,)
        return (engine, *(engine.parent / program.file for program in programs))
