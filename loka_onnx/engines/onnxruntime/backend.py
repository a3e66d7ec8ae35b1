"""ONNX Runtime's backends: the CPU, CUDA and MIGraphX providers, and TensorRT's under its own name.

The engine is the planned ONNX file with its external data; on a GPU, its settings (`io_binding_settings`)
and what the provider compiled are beside it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
from onnx.external_data_helper import uses_external_data

from loka_onnx.core import serde
from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.base import Availability, Backend
from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.engines.onnxruntime.cpu_form import (
    IntegerProducts,
    SplitProducts,
    write_convolutions,
    write_norm_sums,
    write_outer_products,
)
from loka_onnx.engines.onnxruntime.faster_products import FasterProducts, write_fp32
from loka_onnx.engines.onnxruntime.io_binding_session import IoBindingSession, open_io_binding
from loka_onnx.engines.onnxruntime.io_binding_settings import (
    CUDA_GRAPH,
    EXHAUSTIVE_TUNE,
    OPTIMIZATION_LEVEL,
    PROGRAMS,
    SETTINGS_FILE,
    IoBindingSettings,
    settings_beside,
    settings_for,
    why_declined,
    without_graphs,
)
from loka_onnx.engines.onnxruntime.providers import (
    CPU,
    TENSORRT,
    Provider,
    gpu_index,
    host_blocker,
    provider_for,
    why_no_provider,
)
from loka_onnx.engines.onnxruntime.site_precision import (
    SLOWER,
    Graphs,
    NodePlacement,
    dump_optimized,
    site_precision,
)
from loka_onnx.engines.onnxruntime.spec import ONNXRUNTIME, ONNXRUNTIME_TENSORRT
from loka_onnx.engines.onnxruntime.tables import TABLE_REMARK, write_tables
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import LokaError, MissingPackage, ModelError
from loka_onnx.graph.storage import Stored, link_or_copy, move_outside, read_external
from loka_onnx.sessions.backends import BackendSpec
from loka_onnx.sessions.host_devices import INTEGER_INSTRUCTIONS, integer_instructions
from loka_onnx.sessions.model_files import data_locations, read_model
from loka_onnx.sessions.onnx_session import import_onnxruntime

ENGINE_FILE = "engine.onnx"
TIME_PRODUCTS = "time_products"
"""Option: 1 (the default) to keep INT8 products of the CPU in FP32 where that is faster here; 0 for none."""
INT8_TABLES = "int8_tables"
"""Option: 1 to store embedding tables of the CPU in INT8 in every plan but FP32; 0 (the default) for none."""
LOADED_EXACTLY = "load FP8 at ORT_ENABLE_BASIC or below, with session.disable_quant_qdq=1"


class OnnxRuntimeBackend(Backend):
    """ONNX Runtime on the provider of the architecture: CPU, CUDA for ``sm…``, MIGraphX for ``gfx…``."""

    spec: ClassVar[BackendSpec] = ONNXRUNTIME
    options: ClassVar[Mapping[str, range]] = {
        CUDA_GRAPH: range(2),
        EXHAUSTIVE_TUNE: range(2),
        TIME_PRODUCTS: range(2),
        INT8_TABLES: range(2),
    }
    times_kernels = True

    def availability(self) -> Availability:
        """Report ONNX Runtime; its providers determine the devices."""
        try:
            version = str(import_onnxruntime().__version__)
        except MissingPackage as error:
            return Availability.missing(error)
        devices = tuple(
            device
            for device, architectures in self.devices.items()
            if any(not self.why_not_run(architecture) for architecture in architectures)
        )
        return Availability(True, version, True, True, devices)

    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        """Decline plans that run otherwise or whose sites are not reported, and INT8 where sums saturate."""
        reason = why_declined(self.provider(architecture), plan) or self.foreign_format(plan, architecture)
        if reason or not plan.int8_sites or integer_instructions():
            return reason
        return (
            "INT8: this processor adds products of UINT8 and INT8 in 16 bits, which saturate (it has none of "
            f"{', '.join(INTEGER_INSTRUCTIONS)})"
        )

    def instructions(self, plan: PrecisionPlan, architecture: str) -> str:
        """The fastest integer instructions here, for a plan with INT8."""
        return next(iter(integer_instructions()), "") if plan.int8_sites else ""

    def base_precision(self, plan: PrecisionPlan) -> Precision:
        """The plan's base; FP32 for a quantized plan, to isolate the error of FP8, and of INT8 on the CPU."""
        return Precision.FP32 if plan.quantized_sites else plan.base

    def is_simulated(self, plan: PrecisionPlan, architecture: str) -> bool:
        """FP8 is simulated on every provider that does not decline it."""
        return bool(plan.fp8_sites)

    def build_blocker(self, architecture: str) -> str:
        """Placement is read from a loaded engine, so that a build needs the provider and its GPU."""
        return host_blocker(self.provider(architecture), architecture)

    def portability(self, architecture: str) -> str:
        """An ONNX file runs wherever ONNX Runtime has the provider; compiled programs do not."""
        provider = self.provider(architecture)
        if provider.key == CPU.key:
            return f"any host with ONNX Runtime that reads this opset; {LOADED_EXACTLY}"
        if not provider.compiles:
            where = f"a GPU of {architecture} and ONNX Runtime with {provider.name}"
            return f"{where}; {LOADED_EXACTLY}; {SETTINGS_FILE} says the rest"
        return (
            f"a GPU of {architecture}, and the versions of ONNX Runtime and of the library behind "
            f"{provider.name} that compiled it; {SETTINGS_FILE} says how to load it"
        )

    def why_not_run(self, architecture: str) -> str:
        """Every host runs the CPU provider; another needs its GPU and its build of ONNX Runtime."""
        return self.spec.device_obstacle(architecture)

    def files(self, engine: Path) -> tuple[Path, ...]:
        """The ONNX file, its external data, settings and programs; a file of another kind alone."""
        data: tuple[str, ...] = ()
        with suppress(ModelError):
            data = data_locations(read_model(engine))
        return (engine, *(engine.parent / name for name in (*data, *settings_beside(engine))))

    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Copy the model and, for a GPU, determine settings that load."""
        engine = _copy_model(request.model, into)
        provider = self.provider(request.architecture)
        if provider.key == CPU.key:
            model = read_model(engine)
            if request.options.get(INT8_TABLES) and request.plan.id != Precision.FP32:
                _store_tables(model, engine)
            write_convolutions(model)
            write_norm_sums(model)
            write_outer_products(model)
            SplitProducts(model, OperandReader(engine)).write()
            if request.plan.int8_sites:
                onnx.save(model, os.fspath(engine))
                _write_integers(model, engine, request)
            onnx.save(model, os.fspath(engine))
            return engine
        settings = settings_for(provider, request, str(import_onnxruntime().__version__))
        if settings.programs:
            (into / PROGRAMS).mkdir()
        loaded = _first_that_loads(engine, settings, gpu_index(provider, request.architecture))
        serde.write(loaded, engine.with_name(SETTINGS_FILE))
        return engine

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Read the operands of each planned site from the loaded graph, and the provider that runs it."""
        provider, placement = self.provider(request.architecture), None
        if provider.key != CPU.key:
            with open_io_binding(engine, self.name, request.architecture) as session:
                placement = NodePlacement(provider, session.placement())
            print(placement.describe(), flush=True)
        with tempfile.TemporaryDirectory(prefix="optimized-", dir=engine.parent) as folder:
            graphs = _graphs(request, engine, provider, Path(folder))
            return tuple(
                site_precision(site.name, precision, graphs, placement) for site, precision in request.planned
            )

    def read_remarks(self, log: str) -> tuple[str, ...]:
        """See `Backend.read_remarks`: tables that stay in FP32."""
        return tuple(line for line in log.splitlines() if line.startswith(TABLE_REMARK))

    def provider(self, architecture: str) -> Provider:
        """Provider of an architecture's engines."""
        return provider_for(self.name, architecture)


class OnnxRuntimeTensorRtBackend(OnnxRuntimeBackend):
    """ONNX Runtime with TensorRT's provider, and CUDA's for operators that it does not support. Precision
    flags stay off, so that networks are strongly typed by the planned graph.
    """

    spec: ClassVar[BackendSpec] = ONNXRUNTIME_TENSORRT
    options: ClassVar[Mapping[str, range]] = {CUDA_GRAPH: range(2), OPTIMIZATION_LEVEL: range(6)}

    def availability(self) -> Availability:
        """Report ONNX Runtime with TensorRT's provider, and a GPU for it."""
        availability = super().availability()
        if not availability.installed or availability.devices:
            return availability
        reason = why_no_provider(TENSORRT) or "this host has no NVIDIA GPU"
        remedy = "build on a host with an NVIDIA GPU, TensorRT and a build of ONNX Runtime with its provider"
        return Availability(False, availability.version, False, False, (), reason, remedy)


def _store_tables(model: onnx.ModelProto, engine: Path) -> None:
    """Store the tables of a model that is `engine` on disk in INT8; no FP32 file of them stays."""
    before = {*data_locations(model)}
    stored = write_tables(model, OperandReader(engine))
    for name in stored.written:
        print(f"table '{name}' in INT8", flush=True)
    for name, reason in stored.declined.items():
        print(f"{TABLE_REMARK}'{name}' stays in FP32: {reason}", flush=True)
    for tensor in model.graph.initializer:
        if uses_external_data(tensor) and Stored.of(tensor).location in stored.locations:
            read_external(tensor, engine.parent)
    move_outside(model, engine)
    onnx.save(model, os.fspath(engine))
    for location in before.difference(data_locations(model)):
        (engine.parent / location).unlink()


def _write_integers(model: onnx.ModelProto, engine: Path, request: BuildRequest) -> None:
    """Write the INT8 products of a model that is `engine` on disk; slower ones in FP32, with a note each."""
    reader = OperandReader(engine)
    if request.options.get(TIME_PRODUCTS, 1):
        with np.load(request.sample, allow_pickle=False) as arrays:
            sample = {name: np.asarray(arrays[name]) for name in arrays.files}
        slower = FasterProducts(model, engine).slower(sample, request.batch.sizes)
        write_fp32(model, slower, reader)
        for product, note in slower.items():
            model.metadata_props.add(key=f"{SLOWER}{product}", value=note)
    IntegerProducts(model, reader).write()


def _first_that_loads(engine: Path, settings: IoBindingSettings, device: int) -> IoBindingSettings:
    """Return the settings, without CUDA graphs if a node on the CPU or an allocation prevents recording."""
    simpler = without_graphs(settings)
    try:
        IoBindingSession(engine, settings, device=device, writes=True).close()
    except LokaError as error:
        if simpler == settings:
            raise
        print(f"no CUDA graphs: {error}", flush=True)
    else:
        return settings
    IoBindingSession(engine, simpler, device=device, writes=True).close()
    return simpler


def _graphs(request: BuildRequest, engine: Path, provider: Provider, folder: Path) -> Graphs:
    """Graphs from which the precision of sites is read; optimized ones are written into a folder."""
    before, integers = OperandReader(engine), None
    if provider.compiles:
        return Graphs(before, before, False, f"the graph whose types {provider.name} keeps")
    optimized, fused = folder / "optimized.onnx", folder / "integers.onnx"
    dump_optimized(engine, optimized, provider, gpu_index(provider, request.architecture))
    if request.plan.int8_sites:
        dump_optimized(engine, fused, provider, keeps_float8=False)
        integers = OperandReader(fused)
    is_fp32 = provider.key == CPU.key or bool(request.plan.fp8_sites)
    return Graphs(before, OperandReader(optimized), is_fp32, integers=integers)


def _copy_model(model: Path, into: Path) -> Path:
    """Copy a model as `ENGINE_FILE`, with links to its external data, which must be beside it."""
    engine = into / ENGINE_FILE
    shutil.copyfile(model, engine)
    source = Path(os.path.realpath(model.parent))
    for location in data_locations(read_model(model)):
        data = Path(os.path.realpath(source / location))
        if not data.is_relative_to(source) or not data.is_file() or Path(location).name == ENGINE_FILE:
            raise ModelError(
                "E0866 external data is missing, or outside the model's directory",
                where=str(model),
                evidence=f"location '{location}'",
                remedy="export the model again",
            )
        place = into / location
        place.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(data, place)
    return engine
