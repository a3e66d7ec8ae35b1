"""ONNX Runtime's backends: the CPU, CUDA and MIGraphX providers, and TensorRT's under its own name.

The engine is the planned ONNX file with its external data. On a GPU, a small document beside it says how to
load it (`io_binding_settings`), and what a provider compiled is in a directory beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from loka_onnx.core import serde
from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.base import Availability, Backend
from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.engines.onnxruntime.io_binding_session import BoundSession, open_bound
from loka_onnx.engines.onnxruntime.io_binding_settings import (
    PROGRAMS,
    SETTINGS_FILE,
    BoundSettings,
    settings_beside,
)
from loka_onnx.engines.onnxruntime.model_files import copy_model, model_files
from loka_onnx.engines.onnxruntime.pointwise import write_convolutions
from loka_onnx.engines.onnxruntime.provider_settings import (
    CUDA_GRAPH,
    EXHAUSTIVE_TUNE,
    OPTIMIZATION_LEVEL,
    settings_for,
    why_declined,
    without_graphs,
)
from loka_onnx.engines.onnxruntime.providers import (
    CPU,
    TENSORRT,
    Provider,
    device_of,
    provider_for,
    why_no_provider,
    why_not_here,
)
from loka_onnx.engines.onnxruntime.site_precision import Graphs, Placement, dump_optimized, site_precision
from loka_onnx.engines.onnxruntime.spec import ONNXRUNTIME, ONNXRUNTIME_TENSORRT
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import LokaError, MissingPackage
from loka_onnx.sessions.backends import BackendSpec
from loka_onnx.sessions.onnx_session import OnnxSession, import_onnxruntime
from loka_onnx.sessions.runner import Runner

LOADED_EXACTLY = "load FP8 at ORT_ENABLE_BASIC or below, with session.disable_quant_qdq=1"


class OnnxRuntimeBackend(Backend):
    """ONNX Runtime on the provider of the architecture: CPU, CUDA for ``sm…``, MIGraphX for ``gfx…``."""

    spec: ClassVar[BackendSpec] = ONNXRUNTIME
    options: ClassVar[Mapping[str, range]] = {CUDA_GRAPH: range(2), EXHAUSTIVE_TUNE: range(2)}
    times_kernels = True

    def availability(self) -> Availability:
        """Report ONNX Runtime; its providers determine the devices."""
        try:
            version = str(import_onnxruntime().__version__)
        except MissingPackage as error:
            return Availability(False, "", False, False, (), error.what, error.remedy)
        return Availability(True, version, True, True, self._devices_here(), "", "")

    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        """Decline plans that the provider runs in another precision, or whose sites it does not report."""
        return why_declined(self.provider(architecture), plan)

    def base_precision(self, plan: PrecisionPlan) -> Precision:
        """The plan's base; FP32 for a plan with FP8, to isolate the error of FP8."""
        return Precision.FP32 if plan.fp8_sites else plan.base

    def is_simulated(self, plan: PrecisionPlan, architecture: str) -> bool:
        """FP8 is simulated on every provider that does not decline it."""
        return bool(plan.fp8_sites)

    def why_not_here(self, architecture: str) -> str:
        """Placement is read from a loaded engine, so that a build needs the provider and its GPU."""
        return why_not_here(self.provider(architecture), architecture)

    def portability(self, architecture: str) -> str:
        """An ONNX file runs wherever ONNX Runtime has the provider; compiled programs do not."""
        provider = self.provider(architecture)
        if provider.key == CPU.key:
            return f"any host with ONNX Runtime that reads this opset; {LOADED_EXACTLY}"
        if not provider.compiles:
            return (
                f"a GPU of {architecture} and ONNX Runtime with {provider.name}; {LOADED_EXACTLY}; "
                f"{SETTINGS_FILE} says the rest"
            )
        return (
            f"a GPU of {architecture}, and the versions of ONNX Runtime and of the library behind "
            f"{provider.name} that compiled it; {SETTINGS_FILE} says how to load it"
        )

    def why_not_run(self, architecture: str) -> str:
        """Every host runs the CPU provider; another needs its GPU and its build of ONNX Runtime."""
        return self.spec.device_obstacle(architecture)

    def load(self, engine: Path, architecture: str) -> Runner:
        """Open a session, never above BASIC for FP8."""
        if self.provider(architecture).key == CPU.key:
            return OnnxSession(engine)
        return open_bound(engine, self.name, architecture)

    def files(self, engine: Path) -> tuple[Path, ...]:
        """The ONNX file, its external data, its settings and compiled programs."""
        return (*model_files(engine), *(engine.parent / name for name in settings_beside(engine)))

    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Copy the model and, for a GPU, determine settings that load.

        Raises:
            ModelError: External data is missing or outside the model's directory, or ONNX Runtime refuses the
                model.
            EngineError: The provider does not start, or fails on a batch.
        """
        engine = copy_model(request.model, into)
        provider = self.provider(request.architecture)
        if provider.key == CPU.key:
            write_convolutions(engine)
            return engine
        settings = settings_for(provider, request, str(import_onnxruntime().__version__))
        if settings.programs:
            (into / PROGRAMS).mkdir()
        loaded = _first_that_loads(engine, settings, device_of(provider, request.architecture))
        serde.write(loaded, engine.with_name(SETTINGS_FILE))
        return engine

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Read the operands of each planned site from the loaded graph, and the provider that runs it."""
        provider = self.provider(request.architecture)
        if provider.key == CPU.key:
            return self._read_optimized(request, engine, provider, None)
        with open_bound(engine, self.name, request.architecture) as session:
            placement = Placement(provider, session.placement())
        print(placement.describe(), flush=True)
        if not provider.compiles:
            return self._read_optimized(request, engine, provider, placement)
        name = f"the graph whose types {provider.name} keeps"
        graph = OperandReader(engine)
        return _read_sites(request, Graphs(graph, graph, False, name), placement)

    def provider(self, architecture: str) -> Provider:
        """Provider of an architecture's engines."""
        return provider_for(self.name, architecture)

    def _read_optimized(
        self, request: BuildRequest, engine: Path, provider: Provider, placement: Placement | None
    ) -> tuple[SitePrecision, ...]:
        is_fp32 = provider.key == CPU.key or bool(request.plan.fp8_sites)
        with tempfile.TemporaryDirectory(prefix="optimized-", dir=engine.parent) as folder:
            optimized = Path(folder) / "optimized.onnx"
            dump_optimized(engine, optimized, provider, device_of(provider, request.architecture))
            graphs = Graphs(OperandReader(engine), OperandReader(optimized), is_fp32)
            return _read_sites(request, graphs, placement)

    def _devices_here(self) -> tuple[str, ...]:
        return tuple(
            device
            for device, architectures in self.devices.items()
            if any(not self.why_not_run(architecture) for architecture in architectures)
        )


class OnnxRuntimeTensorRtBackend(OnnxRuntimeBackend):
    """ONNX Runtime with TensorRT's provider, and CUDA's for operators that it does not support.

    Precision flags stay off, so that networks are strongly typed by the planned graph.
    """

    spec: ClassVar[BackendSpec] = ONNXRUNTIME_TENSORRT
    options: ClassVar[Mapping[str, range]] = {CUDA_GRAPH: range(2), OPTIMIZATION_LEVEL: range(6)}

    def availability(self) -> Availability:
        """Report ONNX Runtime with TensorRT's provider, and a GPU for it."""
        found = super().availability()
        if not found.installed or found.devices:
            return found
        reason = why_no_provider(TENSORRT) or "this host has no NVIDIA GPU"
        remedy = "build on a host with an NVIDIA GPU, TensorRT and a build of ONNX Runtime with its provider"
        return Availability(False, found.version, False, False, (), reason, remedy)


def _first_that_loads(engine: Path, settings: BoundSettings, device: int) -> BoundSettings:
    """Return the settings, without CUDA graphs where those cannot be recorded.

    A node on the CPU, or one that allocates, prevents the recording.
    """
    simpler = without_graphs(settings)
    try:
        BoundSession(engine, settings, device=device, writes=True).close()
    except LokaError as error:
        if simpler == settings:
            raise
        print(f"no CUDA graphs: {error}", flush=True)
    else:
        return settings
    BoundSession(engine, simpler, device=device, writes=True).close()
    return simpler


def _read_sites(
    request: BuildRequest, graphs: Graphs, placement: Placement | None
) -> tuple[SitePrecision, ...]:
    planned = {decision.site: decision.precision for decision in request.plan.decisions}
    return tuple(
        site_precision(site.name, planned[site.name], graphs, placement) for site in request.planned_sites
    )
