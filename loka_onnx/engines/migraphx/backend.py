"""AMD MIGraphX 2.15 and 2.16: FP8 and INT8 engines for Instinct and Radeon GPUs.

An engine is one program per served batch size, each with its own copy of the weights, and a manifest with
their GPU and release. Compiling needs the GPU. `dialect` states the form in which FP8 is passed and why;
`site_precision`, how it is read back. Kernels on GPUs were never run.

The device ``cpu`` compiles for MIGraphX's reference target: operator by operator, FP8 and INT8 as Q/DQ around
a product in FP32. Such an engine is a simulation. Plans in BF16 and FP16 are declined there, because that
target truncates where GPUs round, which biases every output.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import onnx

from loka_onnx.core import serde
from loka_onnx.core.devices import CPU
from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.installation import cache_directory
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.base import Availability, Backend
from loka_onnx.engines.migraphx import api
from loka_onnx.engines.migraphx.api import import_migraphx, version_of, why_no_target
from loka_onnx.engines.migraphx.dialect import FORMS, Float8Form, write_dialect
from loka_onnx.engines.migraphx.session import (
    MigraphxEngine,
    ProgramFile,
    ProgramInput,
    ProgramOutput,
    read_engine,
    why_not_run,
)
from loka_onnx.engines.migraphx.site_precision import parse_program, site_precisions
from loka_onnx.engines.migraphx.spec import MIGRAPHX
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import EngineError, MissingPackage, ModelError
from loka_onnx.graph.storage import link_or_copy, move_outside
from loka_onnx.sessions.backends import BackendSpec
from loka_onnx.sessions.host_devices import list_amd_architectures
from loka_onnx.sessions.model_files import batched_outputs, data_locations, read_model

ENGINE_FILE, DIALECT_FILE = "engine.json", "dialect.onnx"


class MigraphxBackend(Backend):
    """MIGraphX."""

    spec: ClassVar[BackendSpec] = MIGRAPHX
    options: ClassVar[Mapping[str, range]] = {"exhaustive_tune": range(2), "fast_math": range(2)}
    """Time every kernel for each product, which takes minutes (0); approximate functions (1)."""
    times_kernels: ClassVar[bool] = True

    def availability(self) -> Availability:
        """Report the library, and the GPUs here that it builds for and runs on."""
        try:
            migraphx = import_migraphx()
        except MissingPackage as error:
            return Availability.missing(error)
        gpus = () if why_no_target(migraphx, api.GPU) else list_amd_architectures()
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
        missing = why_not_run(architecture) or why_no_target(import_migraphx(), api.GPU)
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
        """Write the model in the dialect, a program of it for each batch size, and their manifest."""
        migraphx, architecture = import_migraphx(), request.architecture
        version, tunes = version_of(migraphx), bool(request.options.get("exhaustive_tune", 0))
        if tunes:
            cache = cache_directory() / "timing" / f"migraphx-{version}" / f"{architecture}.json"
            cache.parent.mkdir(parents=True, exist_ok=True)
            # A user's setting takes precedence; this process builds one engine and ends.
            os.environ.setdefault(api.PROBLEM_CACHE, os.fspath(cache))
        planned = read_model(request.model)
        inputs, form = inputs_of(planned), FORMS.get(architecture, Float8Form.FNUZ)
        source, folder = request.model.parent, into / "dialect"
        folder.mkdir()
        written = save_dialect(write_dialect(planned, source, form), source, folder)
        programs = []
        for rows in request.batch.sizes:
            program = api.parse_onnx(migraphx, written, {spec.name: (rows, *spec.shape) for spec in inputs})
            if request.plan.fp8_sites and form is Float8Form.CARRIER:
                program = api.reread_float8(migraphx, program)
            api.compile_program(
                migraphx,
                program,
                api.REFERENCE if architecture == CPU else api.GPU,
                exhaustive_tune=tunes,
                fast_math=bool(request.options.get("fast_math", 1)),
            )
            file = into / f"rows-{rows}.mxr"
            api.save_program(migraphx, program, file)
            print(f"compiled for {rows} rows: {file.stat().st_size / 1e6:.1f} MB", flush=True)
            programs.append(ProgramFile(rows, file.name))
        shutil.rmtree(folder)
        batched = batched_outputs(planned)
        outputs = tuple(ProgramOutput(each.name, each.name in batched) for each in planned.graph.output)
        engine = MigraphxEngine(architecture, version, tuple(programs), inputs, outputs)
        serde.write(engine, into / ENGINE_FILE)
        return into / ENGINE_FILE

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Read the compiled programs."""
        migraphx = import_migraphx()
        files = (engine.parent / each.file for each in read_engine(engine).programs)
        programs = [parse_program(str(api.load_program(migraphx, file))) for file in files]
        return site_precisions(programs, request.planned)

    def files(self, engine: Path) -> tuple[Path, ...]:
        """Return the manifest and its programs, or an invalid file alone."""
        with suppress(EngineError):
            return (engine, *(engine.parent / program.file for program in read_engine(engine).programs))
        return (engine,)


def inputs_of(model: onnx.ModelProto) -> tuple[ProgramInput, ...]:
    """Inputs of a model; a `ModelError` where one has no batch axis, or another dynamic axis."""
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = []
    for value in model.graph.input:
        if value.name in constants:
            continue
        kind = value.type.tensor_type
        fixed = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
        shape = tuple(dim for dim in fixed[1:] if dim is not None)
        if not fixed or len(shape) < len(fixed) - 1:
            raise ModelError(
                f"E0848 input '{value.name}' has a dynamic axis besides the batch, or no batch",
                evidence=f"shape {tuple(fixed)}; MIGraphX compiles fixed shapes",
                remedy="fix every axis but axis 0 when exporting",
            )
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        inputs.append(ProgramInput(value.name, str(dtype), shape))
    return tuple(inputs)


def save_dialect(model: onnx.ModelProto, source: Path, folder: Path) -> Path:
    """Write a model of the dialect into an empty folder, with links to its external data."""
    for name in data_locations(model):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(Path(os.path.realpath(source / name)), place)
    target = folder / DIALECT_FILE
    move_outside(model, target)
    onnx.save(model, os.fspath(target))
    return target
