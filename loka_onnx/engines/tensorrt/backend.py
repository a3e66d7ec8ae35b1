"""TensorRT, and TensorRT for RTX: FP8 and INT8 engines for NVIDIA GPUs.

TensorRT's builder times tactics on the GPU that the engine is for: it gets the device alone, and its timings
are kept for the next build (`build`). TensorRT for RTX builds without a GPU, and compiles kernels when it
loads. FP8 and INT8 sites are read from each engine, because both fall back silently (`site_precision`).

Compiled graphs of TensorRT for RTX 1.7.1 for sm89 and sm120, base BF16, FP16 or FP32 (tests repeat it):

==========================================================  =============================================
site                                                        compiled product
==========================================================  =============================================
weight scale per tensor or per output channel               FP8 × FP8; channels' scales in the next kernel
weight scale along K; Q/DQ missing on one operand           **fallback**: converted, base × base
activations of rank 3, W·X, interactions with Q/DQ on both  FP8 × FP8
several sites on one Q/DQ                                   FP8 × FP8, merged into one product
N = 1, K = 8, K = 13, sizes not multiples of 16             FP8 × FP8, padded
Transpose or Flatten between DQ and product                 FP8 × FP8
LayerNormalization → Q                                      Q is part of the norm's kernel
==========================================================  =============================================

The same holds for INT8 with zero point 0, also on sm75 (FP16) and sm86; UINT8 and other zero points fail.

* An FP8 product is a kernel of its own: bias, activation and the next Q form a second one, which a BF16
  product absorbs (``FcAddRelu``). A small FP8 site therefore costs another pass over its output.
* Q directly behind a product becomes part of it. Several merged sites then write their sums in FP8 and
  rescale them: one rounding more than in the ONNX graph, as the evidence of such sites says.
* BF16 attention is one kernel; FP8 attention is separate products.
* `dialect` keeps tables from being stored twice, and merged queries, keys and values in FP8.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from loka_onnx.core.devices import FLOAT8_FROM, capability
from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.base import Availability, Backend
from loka_onnx.engines.request import BuildRequest
from loka_onnx.engines.tensorrt.build import (
    OPTIONS,
    BuildSettings,
    build_engine,
    known_capabilities,
    timing_cache_file,
)
from loka_onnx.engines.tensorrt.compiled_graph import ANY_ARCHITECTURE, read_compiled_graphs
from loka_onnx.engines.tensorrt.inspector import read_layers
from loka_onnx.engines.tensorrt.session import open_engine
from loka_onnx.engines.tensorrt.site_precision import layer_precisions, site_precisions
from loka_onnx.engines.tensorrt.spec import TENSORRT, TENSORRT_RTX, TensorRtSpec
from loka_onnx.errors import EngineError, MissingPackage
from loka_onnx.sessions.cuda import CudaContext, first_gpu, list_cuda_devices, why_no_gpu
from loka_onnx.sessions.runner import Runner

ENGINE_FILE = "engine.trt"
BF16_FROM = 80
"""Lowest compute capability with BF16 tensor cores, and with FP32 products in TensorRT for RTX."""


class TensorRtFamily(Backend):
    """A backend on the TensorRT API."""

    spec: ClassVar[TensorRtSpec]
    options: ClassVar[Mapping[str, range]] = OPTIONS
    builds_anywhere: ClassVar[bool]

    @abstractmethod
    def settings(self, trt: Any, request: BuildRequest) -> BuildSettings:
        """Choose profiles and timing cache for a request; `trt` is the loaded library."""

    @abstractmethod
    def architectures_of(self, trt: Any) -> Iterable[str]:
        """Architectures that the library builds for."""

    def availability(self) -> Availability:
        """Report the library, and the GPUs here that run its engines."""
        try:
            trt = self.spec.load_library()
        except MissingPackage as error:
            return Availability.missing(error)
        version, known = str(trt.__version__), sorted(self.architectures_of(trt))
        gpus = tuple(
            f"{gpu.name} ({gpu.architecture})" for gpu in list_cuda_devices() if gpu.architecture in known
        )
        if gpus:
            return Availability(True, version, True, True, gpus)
        reason, remedy = (
            ("engines are built but cannot run: no GPU of a supported architecture here", "run them")
            if self.builds_anywhere
            else ("TensorRT builds on the GPU that its engine is for, and none is here", "build")
        )
        remedy = f"{remedy} on a machine with one of {', '.join(known)}"
        return Availability(True, version, self.builds_anywhere, False, (), reason, remedy)

    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        """See `Backend.decline`: FP8 in E4M3FN needs sm89 or later, BF16 sm80; INT8 has zero point 0."""
        number = capability(architecture)
        if plan.fp8_sites and number < FLOAT8_FROM:
            return f"{architecture} has no FP8 products (sm{FLOAT8_FROM} is the first that has)"
        if plan.base is Precision.BF16 and number < BF16_FROM:
            return (
                f"{architecture} has no BF16 products (sm{BF16_FROM} is the first that has): set "
                "`plan.base: fp16`"
            )
        return self.foreign_format(plan, architecture)

    def portability(self, architecture: str) -> str:
        """One architecture, one version, one operating system."""
        version = self.availability().version
        return f"one GPU architecture ({architecture}), one {self.spec.title} version ({version}), one OS"

    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Build the serialized engine."""
        engine = into / ENGINE_FILE
        trt = self.spec.load_library()
        build_engine(trt, request.model, self.settings(trt, request), engine)
        return engine

    def load(self, engine: Path, architecture: str) -> Runner:
        """Deserialize the engine on the first GPU of its architecture."""
        return open_engine(self.spec, engine, architecture)


class TensorRtBackend(TensorRtFamily):
    """TensorRT 10 and 11."""

    spec: ClassVar[TensorRtSpec] = TENSORRT
    times_kernels: ClassVar[bool] = True
    builds_anywhere: ClassVar[bool] = False

    def architectures_of(self, trt: Any) -> Iterable[str]:
        """Those of the devices in run files."""
        return {architecture for several in self.devices.values() for architecture in several}

    def build_blocker(self, architecture: str) -> str:
        """A GPU of the architecture must be present for timing tactics."""
        return super().build_blocker(architecture) or why_no_gpu(architecture)

    def settings(self, trt: Any, request: BuildRequest) -> BuildSettings:
        """A profile for each served size, and the timing cache of this device and version."""
        device = first_gpu(request.architecture)
        cache = timing_cache_file(trt.__name__, str(trt.__version__), device.name, device.architecture)
        return _asked(request, timing_cache=cache, profile_each_size=True, rtx_dialect=False)

    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Build the serialized engine on the first GPU of the architecture."""
        with _on_gpu(request):
            return super().compile(request, into)

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Read the engine inspector; an `EngineError` where the engine does not load or is not described."""
        trt = self.spec.load_library()
        with _on_gpu(request) as device:
            runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
            loaded = runtime.deserialize_cuda_engine(engine.read_bytes())
            if loaded is None:
                raise EngineError(f"E0888 {trt.__name__} does not load the engine it has just built")
            layers = read_layers(trt, loaded, device.stream)
            del loaded, runtime
        return layer_precisions(layers, request.planned)


class TensorRtRtxBackend(TensorRtFamily):
    """TensorRT for RTX."""

    spec: ClassVar[TensorRtSpec] = TENSORRT_RTX
    builds_anywhere: ClassVar[bool] = True

    def architectures_of(self, trt: Any) -> Iterable[str]:
        """Names `trt` can select (``sm89``)."""
        return known_capabilities(trt)

    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        """See `TensorRtFamily.decline`: its compiler takes no FP32 product for sm75 either."""
        if plan.base is Precision.FP32 and capability(architecture) < BF16_FROM:
            return (
                f"{self.spec.title} compiles no FP32 products for {architecture} (sm{BF16_FROM} is the first "
                'with any; "FP32 GEMM is not supported"): FP16 plans build there'
            )
        return super().decline(plan, architecture)

    def settings(self, trt: Any, request: BuildRequest) -> BuildSettings:
        """One profile and no timing cache: kernels are timed only when the engine is loaded."""
        return _asked(request)

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Read the compiled graph in the engine; an `EngineError` where it is for another architecture."""
        graphs = read_compiled_graphs(engine)
        compiled_for = {architecture for graph in graphs for architecture in graph.architectures}
        if others := compiled_for - {request.architecture, ANY_ARCHITECTURE}:
            raise EngineError(
                "E0889 the engine was compiled for another architecture",
                evidence=f"asked for {request.architecture}, found {', '.join(sorted(others))}",
            )
        return site_precisions(graphs, request.planned)


def _asked(request: BuildRequest, **more: Any) -> BuildSettings:
    """Options of a request are named like the settings."""
    settings: dict[str, Any] = {**request.options, **more}
    return BuildSettings(request.architecture, request.batch, **settings)


def _on_gpu(request: BuildRequest) -> closing[CudaContext]:
    return closing(CudaContext(first_gpu(request.architecture).index))
