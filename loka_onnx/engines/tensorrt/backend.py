"""TensorRT: FP8 engines for NVIDIA GPUs, each built on a GPU of its architecture.

The builder times tactics, so that it gets the device alone, and its timings are kept for the next build
(`timing_cache`). FP8 sites are read from each engine (`layer_precision`), not assumed: some versions accept
scales per output channel but fall back. The graph is the plan's own: `dialect` and `merged_heads` are known
to help only TensorRT for RTX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from loka_onnx.core.engine import SitePrecision
from loka_onnx.engines.base import Availability
from loka_onnx.engines.request import BuildRequest
from loka_onnx.engines.tensorrt.build import BuildSettings
from loka_onnx.engines.tensorrt.family import TensorRtFamily, asked_settings
from loka_onnx.engines.tensorrt.inspector import read_layers
from loka_onnx.engines.tensorrt.layer_precision import layer_precisions
from loka_onnx.engines.tensorrt.spec import TENSORRT, TensorRtSpec
from loka_onnx.engines.tensorrt.timing_cache import timing_cache_file
from loka_onnx.errors import EngineError, MissingPackage
from loka_onnx.sessions.cuda import CudaContext, first_gpu, list_cuda_devices, why_no_gpu


class TensorRtBackend(TensorRtFamily):
    """TensorRT 10 and 11."""

    spec: ClassVar[TensorRtSpec] = TENSORRT
    times_kernels: ClassVar[bool] = True

    def availability(self) -> Availability:
        """Report the library, and the GPUs here that it builds for."""
        try:
            trt = self.spec.load_library()
        except MissingPackage as error:
            return Availability(False, "", False, False, (), error.what, error.remedy)
        version = str(trt.__version__)
        known = {architecture for several in self.devices.values() for architecture in several}
        gpus = [gpu for gpu in list_cuda_devices() if gpu.architecture in known]
        if gpus:
            names = tuple(f"{gpu.name} ({gpu.architecture})" for gpu in gpus)
            return Availability(True, version, True, True, names, "", "")
        return Availability(
            True,
            version,
            False,
            False,
            (),
            "TensorRT builds on the GPU that its engine is for, and none is here",
            f"build on a machine with one of {', '.join(sorted(known))}",
        )

    def why_not_here(self, architecture: str) -> str:
        """A GPU of the architecture must be present for timing tactics."""
        return super().why_not_here(architecture) or why_no_gpu(architecture)

    def settings(self, trt: Any, request: BuildRequest) -> BuildSettings:
        """A profile for each served size, and the timing cache of this device and version."""
        device = first_gpu(request.architecture)
        cache = timing_cache_file(trt.__name__, str(trt.__version__), device.name, device.architecture)
        return asked_settings(request, timing_cache=cache, profile_each_size=True, rtx_dialect=False)

    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Build the serialized engine on the first GPU of the architecture."""
        device = CudaContext(first_gpu(request.architecture).index)
        try:
            return super().compile(request, into)
        finally:
            device.close()

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Read the engine inspector.

        Raises:
            EngineError: The engine does not load, or its layers are not described.
        """
        trt = self.spec.load_library()
        device = CudaContext(first_gpu(request.architecture).index)
        try:
            runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
            loaded = runtime.deserialize_cuda_engine(engine.read_bytes())
            if loaded is None:
                raise EngineError(f"{trt.__name__} does not load the engine it has just built")
            layers = read_layers(trt, loaded, device.stream)
            del loaded, runtime
        finally:
            device.close()
        planned = {decision.site: decision.precision for decision in request.plan.decisions}
        return layer_precisions(layers, [(site, planned[site.name]) for site in request.planned_sites])
