"""Compile a planned ONNX graph to one AOTInductor package.

In order: fusions of the ONNX graph (`fusions`), lowering to PyTorch (`lowering`), on a GPU the choice of a
kernel for each fused product (`choosing`), export with a batch that may vary, compilation ahead of time,
packaging. The package holds its manifest (`package`), which says what the exported programs multiply.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch.export.pt2_archive._package import package_pt2

from loka_onnx.core import serde
from loka_onnx.core.devices import CPU
from loka_onnx.core.job import BatchSizes
from loka_onnx.engines.device_lock import device_alone
from loka_onnx.engines.inductor.backend import Compilers, Settings
from loka_onnx.engines.inductor.choosing import Chooser, Recorder
from loka_onnx.engines.inductor.fusions import FusionReport, fuse
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.inductor.lowering.model import lower
from loka_onnx.engines.inductor.lowering.strategies import ProductStrategy, ScaledMatMul
from loka_onnx.engines.inductor.package import (
    RECORD,
    CompiledSite,
    InductorEngine,
    InputPort,
    OutputPort,
    Program,
    vector_instructions,
)
from loka_onnx.engines.inductor.site_precision import entering_types, output_types, products_of
from loka_onnx.engines.request import WAITING, BuildRequest
from loka_onnx.errors import DataError, EngineError, LokaError, ModelError
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.cuda import list_cuda_devices

PACKAGE = "engine.pt2"
_INT32 = 1 << 31
_NUMPY_TYPES = {"float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}


@dataclass(frozen=True)
class Build:
    """Values that the programs of one engine share; `scratch` is a directory for temporary files."""

    request: BuildRequest
    settings: Settings
    compilers: Compilers
    inputs: tuple[InputPort, ...]
    outputs: tuple[OutputPort, ...]
    scratch: Path


def compile_engine(request: BuildRequest, into: Path, compilers: Compilers) -> Path:
    """Build a package, in a child process (PyTorch may crash it) with the variables of the compilers. Raises
    ModelError if an input or output has a type or shape that requests cannot hold, EngineError if an operator
    has no lowering, or PyTorch cannot export or compile the model.
    """
    # Otherwise TF32 would round the factors of FP32 products to 10 bits.
    torch.set_float32_matmul_precision("highest")
    settings = Settings.of(request)
    model = planned_graph(request.model, fuses=settings.fuse)
    ids = id_bounds(GraphModel.load(request.model))
    ports = input_ports(model.source, ids), output_ports(model.source)
    build = Build(request, settings, compilers, *ports, into.parent / "scratch")
    strategy_for = chosen_strategy(build, model)
    programs, files, lowered = [], {}, []
    waiting = into.parent / WAITING
    for program in batch_programs(request.batch, static=settings.static):
        served = [size for size in request.batch.sizes if program.minimum <= size <= program.maximum]
        module = lower(model, strategy_for(served)).to(torch_device(request.architecture)).eval()
        # Other builds choose their kernels between two programs.
        times = settings.max_autotune or settings.search_launches
        with device_alone(request.architecture, waiting) if times else nullcontext():
            done, files[program.name] = _compile_program(build, module, program)
        programs.append(done)
        lowered.append(module.sites)
    engine = InductorEngine(
        torch=str(torch.__version__),
        architecture=request.architecture,
        instruction_sets=vector_instructions(),
        inputs=build.inputs,
        outputs=build.outputs,
        minimum=request.batch.minimum,
        maximum=request.batch.maximum,
        sizes=request.batch.sizes,
        programs=tuple(programs),
        sites=compiled_sites(lowered),
        options={name: int(value) for name, value in asdict(settings).items()},
    )
    package = into / PACKAGE
    package_pt2(os.fspath(package), aoti_files=files, extra_files={RECORD: serde.dumps(engine)})
    return package


def planned_graph(model: Path, *, fuses: bool) -> PlannedGraph:
    """Read the planned model and fuse it; prints fused and declined matches."""
    graph = PlannedGraph.load(model)
    report = fuse(graph) if fuses else FusionReport({}, {})
    for name, reasons in report.declined.items():
        print(f"{name}: declined {'; '.join(reasons)}", flush=True)
    for name, matches in report.fused.items():
        print(f"{name}: {', '.join(match.name for match in matches)}", flush=True)
    return graph


def chosen_strategy(build: Build, model: PlannedGraph) -> Callable[[Sequence[int]], ProductStrategy]:
    """Return a function from the served batch sizes of a program to its strategy. With `choose` and `fuse` on
    a GPU, this call times kernels of the fused products; else all are the library's.
    """
    request, settings = build.request, build.settings
    library = ScaledMatMul(settings.fast_accumulation)
    device = torch_device(request.architecture)
    if not settings.choose or not settings.fuse or device.type == CPU:
        return lambda sizes: library
    recorder, rows = Recorder(), request.batch.serve
    examples = example_rows(request.sample, build.inputs, rows)
    module = lower(model, recorder).to(device).eval()
    chooser = Chooser(rows, tuple(request.batch.sizes), settings.fast_accumulation)
    with torch.no_grad():
        module(*(each.to(device) for each in examples))
        chooser.compile(recorder.seen)
        # Programs compile in parallel, but timing needs the device alone.
        with device_alone(request.architecture, build.scratch.parent / WAITING):
            chosen = chooser.choose(recorder.seen)
    for each in chosen.measured:
        times = ", ".join(f"{us:.2f} µs at batch {n}" for n, us in each.us.items())
        print(f"{each.site}: {each.kernel}: {times or each.obstacle}; error {each.error:.2g}", flush=True)
    return chosen.strategy


def batch_programs(batch: BatchSizes, *, static: bool) -> tuple[Program, ...]:
    """Programs to compile, still empty: one for all sizes, or one for each served size."""
    if static or batch.minimum == batch.maximum:
        return tuple(Program(f"rows{size}", size, size) for size in batch.sizes)
    return (Program("rows", batch.minimum, batch.maximum),)


def input_ports(graph: onnx.GraphProto, ids: Mapping[str, Sequence[range | None]]) -> tuple[InputPort, ...]:
    """Inputs of a graph, of bounded ids (`id_bounds`); refuses open axes but the batch, and unknown types."""
    ports = []
    for value in graph.input:
        kind = value.type.tensor_type
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        shape = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim)
        if not shape or None in shape[1:]:
            raise ModelError(
                f"E0811 input '{value.name}' has a dynamic axis besides the batch",
                evidence=f"shape {shape}",
                remedy="fix every axis but axis 0 when exporting",
            )
        if dtype not in _NUMPY_TYPES:
            raise ModelError(
                f"E0812 requests cannot hold input '{value.name}'",
                evidence=f"its type is {dtype}",
                remedy=f"cast it inside the model from one of {', '.join(sorted(_NUMPY_TYPES))}",
            )
        bounds = ids.get(value.name) or (None,)
        fits = all(bound is not None and bound.start >= -_INT32 and bound.stop <= _INT32 for bound in bounds)
        ports.append(
            InputPort(value.name, dtype, tuple(size or 0 for size in shape[1:]), fits and dtype == "int64")
        )
    return tuple(ports)


def output_ports(graph: onnx.GraphProto) -> tuple[OutputPort, ...]:
    """Outputs of a graph; those with a dynamic first axis follow the batch."""
    first = {value.name: value.type.tensor_type.shape.dim[:1] for value in graph.output}
    return tuple(
        OutputPort(name, not all(dim.HasField("dim_value") for dim in d)) for name, d in first.items()
    )


def torch_device(architecture: str) -> torch.device:
    """Device to compile on: the first GPU of an architecture, or the CPU."""
    if architecture == CPU:
        return torch.device("cpu")
    for gpu in list_cuda_devices():
        if gpu.architecture == architecture:
            # PyTorch compiles for, and tunes on, the current device.
            torch.cuda.set_device(gpu.index)
            return torch.device("cuda", gpu.index)
    raise EngineError(f"E0813 there is no GPU of architecture {architecture} here to compile on")


def compiled_sites(lowered: Sequence[Mapping[str, CompiledSite]]) -> tuple[CompiledSite, ...]:
    """Merge the lowered products of all programs by node; programs may use different kernels."""
    sites = []
    for name, site in lowered[0].items():
        variants = [each[name] for each in lowered]
        # A site counts as quantized only if every program multiplies eight bits.
        shown = next((each for each in variants if not each.engaged), site)
        kernels = ", ".join(dict.fromkeys(each.kernel for each in variants))
        reason = shown.reason or next((each.reason for each in variants if each.reason), "")
        sites.append(replace(shown, kernel=kernels, reason=reason))
    return tuple(sites)


def example_rows(sample: Path, inputs: Sequence[InputPort], rows: int) -> tuple[Any, ...]:
    """Example tensors of `rows` rows for export; the rows of the sample repeat."""
    examples = []
    with np.load(sample, allow_pickle=False) as arrays:
        for port in inputs:
            value = arrays[port.name] if port.name in arrays.files else np.empty((0,))
            if not len(value):
                raise DataError(f"E0814 the sample has no rows of input '{port.name}'", where=str(sample))
            taken = np.take(value, np.arange(rows) % len(value), axis=0).astype(port.dtype, copy=False)
            examples.append(torch.from_numpy(np.ascontiguousarray(taken)))
    return tuple(examples)


def inductor_options(
    settings: Settings, compilers: Compilers, output: Path, architecture: str = CPU
) -> dict[str, Any]:
    """Settings of Inductor (`torch._inductor.config`); files and weights go to `output`."""
    return {
        "aot_inductor.package": True,
        "aot_inductor.output_path": os.fspath(output),
        "cpp.cxx": (None, compilers.cxx),
        # The serving host may have fewer cores.
        "cpp.dynamic_threads": True,
        # A GPU program runs nothing on the CPU. The probe of vector instructions compiles and starts
        # programs: 7 of the first 13 seconds of a build on two cores.
        "cpp.vec_isa_ok": None if architecture == CPU else False,
        "max_autotune": settings.max_autotune,
        "coordinate_descent_tuning": settings.search_launches,
    }


def _compile_program(build: Build, module: Any, program: Program) -> tuple[Program, list[Any]]:
    """Compile a program; return it with its products, and its files."""
    exported = _export(build, module, program)
    for output, dtype in zip(build.outputs, output_types(exported.graph), strict=True):
        if dtype not in _NUMPY_TYPES:
            raise ModelError(
                f"E0815 answers cannot hold output '{output.name}'",
                evidence=f"its type is {dtype}",
                remedy="cast it inside the model to float32",
            )
    scratch = build.scratch / program.name
    options = inductor_options(build.settings, build.compilers, scratch, build.request.architecture)
    callable_ = exported.module(check_guards=False)
    files: Any = torch._inductor.aot_compile(callable_, *exported.example_inputs, options=options)
    entering = entering_types(exported.graph, {site.name for site in build.request.planned_sites})
    return replace(program, products=products_of(exported.graph), entering=entering), list(files)


def _export(build: Build, module: Any, program: Program) -> Any:
    """`torch.export.ExportedProgram` of the module for the batch sizes of a program."""
    request = build.request
    device, rows, shapes = torch_device(request.architecture), program.minimum, None
    if program.minimum != program.maximum:
        # Launch parameters are tuned for the served size; but export treats an axis of length 1 as broadcast.
        rows = max(2, request.batch.serve)
        shapes = module.dynamic_shapes(torch.export.Dim("batch", min=program.minimum, max=program.maximum))
    examples = tuple(each.to(device) for each in example_rows(request.sample, build.inputs, rows))
    try:
        # Without this, export drops the names of nodes (`torch.fx.traceback`).
        with torch.no_grad(), torch.fx.traceback.preserve_node_meta():
            return torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)
    except LokaError:
        raise
    except Exception as error:
        # torch.export raises errors of unrelated types.
        raise EngineError(
            "E0816 PyTorch cannot export the lowered model",
            where=f"for {program.minimum} to {program.maximum} rows",
            evidence=str(error)[:600],
            remedy="shapes must follow from the batch alone; let another backend build this model",
        ) from error
