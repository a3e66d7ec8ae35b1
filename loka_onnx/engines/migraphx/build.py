"""Build of an engine: the model in the dialect, a program for each batch size, and their manifest."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from loka_onnx.core import serde
from loka_onnx.core.devices import CPU
from loka_onnx.engines.migraphx import api
from loka_onnx.engines.migraphx.api import parse_onnx, reread_float8, save_program, version_of
from loka_onnx.engines.migraphx.dialect import FORMS, Float8Form, write_dialect
from loka_onnx.engines.migraphx.session import MigraphxEngine, ProgramFile, ProgramInput, ProgramOutput
from loka_onnx.engines.request import BatchRange
from loka_onnx.errors import ModelError
from loka_onnx.graph.storage import INLINE_LIMIT_BYTES, link_or_copy
from loka_onnx.sessions.model_files import data_locations

ENGINE_FILE = "engine.json"
DIALECT_FILE = "dialect.onnx"


@dataclass(frozen=True)
class BuildSettings:
    """Settings of a build.

    Attributes:
        architecture: LLVM target, for example ``gfx942``, or ``cpu`` for the reference target.
        batch: Rows per request; each served size gets a program.
        exhaustive_tune: Whether to time every kernel for each product, which takes minutes.
        fast_math: Whether functions may be approximated (the library's default).
        problem_cache: File with results of tuning, for the device and version in its name.
    """

    architecture: str
    batch: BatchRange
    exhaustive_tune: bool = False
    fast_math: bool = True
    holds_float8: bool = True
    problem_cache: Path | None = None


def build_engine(migraphx: Any, model: Path, settings: BuildSettings, into: Path) -> Path:
    """Build and write the programs and their manifest, and return the manifest."""
    if settings.exhaustive_tune and settings.problem_cache is not None:
        settings.problem_cache.parent.mkdir(parents=True, exist_ok=True)
        # A user's setting takes precedence; this process builds one engine and ends.
        os.environ.setdefault(api.PROBLEM_CACHE, os.fspath(settings.problem_cache))
    folder = into / "dialect"
    folder.mkdir()
    planned = onnx.load(os.fspath(model), load_external_data=False)
    inputs = inputs_of(planned)
    form = FORMS.get(settings.architecture, Float8Form.FNUZ)
    target = api.REFERENCE if settings.architecture == CPU else api.GPU
    written = save_dialect(write_dialect(planned, model.parent, form), model.parent, folder)
    programs = []
    for rows in settings.batch.sizes:
        program = parse_onnx(migraphx, written, {spec.name: (rows, *spec.shape) for spec in inputs})
        if settings.holds_float8 and form is Float8Form.CARRIER:
            program = reread_float8(migraphx, program)
        api.compile_program(
            migraphx,
            program,
            target,
            exhaustive_tune=settings.exhaustive_tune,
            fast_math=settings.fast_math,
        )
        file = into / f"rows-{rows}.mxr"
        save_program(migraphx, program, file)
        print(f"compiled for {rows} rows: {file.stat().st_size / 1e6:.1f} MB", flush=True)
        programs.append(ProgramFile(rows, file.name))
    shutil.rmtree(folder)
    document = MigraphxEngine(
        settings.architecture, version_of(migraphx), tuple(programs), inputs, outputs_of(planned)
    )
    serde.write(document, into / ENGINE_FILE)
    return into / ENGINE_FILE


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


def outputs_of(model: onnx.ModelProto) -> tuple[ProgramOutput, ...]:
    """Outputs of a model; one with a dynamic first axis follows the batch."""
    first = ((output.name, output.type.tensor_type.shape.dim[:1]) for output in model.graph.output)
    return tuple(
        ProgramOutput(name, bool(dims) and not dims[0].HasField("dim_value")) for name, dims in first
    )


def save_dialect(model: onnx.ModelProto, source: Path, folder: Path) -> Path:
    """Write a model of the dialect into an empty folder, with links to its external data."""
    for name in data_locations(model):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(Path(os.path.realpath(source / name)), place)
    target = folder / DIALECT_FILE
    inline = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if inline > INLINE_LIMIT_BYTES:
        data = f"{DIALECT_FILE}.data"
        onnx.save(model, os.fspath(target), save_as_external_data=True, location=data, size_threshold=1024)
    else:
        onnx.save(model, os.fspath(target))
    return target
