"""ONNX Runtime, and its TensorRT provider, as backends declare themselves."""

from __future__ import annotations

from pathlib import Path

from loka_onnx.core.backends import Fusions
from loka_onnx.core.devices import AMD, CPU, NVIDIA
from loka_onnx.core.formats import INT8, UINT8, NumberFormat
from loka_onnx.core.manifest import Need
from loka_onnx.engines.onnxruntime.io_binding_session import open_io_binding
from loka_onnx.engines.onnxruntime.io_binding_settings import settings_beside
from loka_onnx.engines.onnxruntime.providers import host_blocker, provider_for
from loka_onnx.errors import ConfigError, MissingPackage
from loka_onnx.sessions import onnx_session
from loka_onnx.sessions.backends import BackendSpec, in_phrase
from loka_onnx.sessions.onnx_session import INSTALL, SessionOptions
from loka_onnx.sessions.runner import Runner


class OnnxRuntimeSpec(BackendSpec):
    """A backend whose engines ONNX Runtime runs: an ONNX file, and on a GPU the settings beside it."""

    def open(self, engine: Path, architecture: str, version: str, options: SessionOptions | None) -> Runner:
        """See `BackendSpec.open`; on the CPU with all `options`, elsewhere with their number of threads."""
        if provider_for(self.name, architecture).key == CPU:
            return onnx_session.OnnxSession(engine, options)
        threads = 0 if options is None else options.threads
        return open_io_binding(engine, self.name, architecture, version, threads)

    def knows(self, architecture: str) -> bool:
        """Tell whether a provider runs its engines for an architecture."""
        try:
            provider_for(self.name, architecture)
        except ConfigError:
            return False
        return True

    def formats_on(self, architecture: str) -> tuple[NumberFormat, ...]:
        """See `BackendSpec.formats_on`: integers on the CPU only."""
        return (*self.formats, UINT8, INT8) if architecture == CPU else self.formats

    def is_program(self, architecture: str) -> bool:
        """Tell whether the provider compiles: graphs are data, compiled programs are not."""
        return provider_for(self.name, architecture).compiles

    def device_obstacle(self, architecture: str) -> str:
        """See `BackendSpec.device_obstacle`; the provider must be there too."""
        return host_blocker(provider_for(self.name, architecture), architecture)

    def files_beside(self, engine: Path) -> tuple[str, ...]:
        """Settings, and programs that a provider compiled."""
        return settings_beside(engine)

    def library_obstacle(self) -> str:
        """See `BackendSpec.library_obstacle`; the library is light, and every host has it."""
        try:
            self.version()
        except MissingPackage as error:
            return in_phrase(error)
        return ""

    def requirement(self, version: str, architecture: str) -> tuple[Need, str]:
        """Exact for what a provider compiled; a graph is compiled where it is loaded."""
        is_exact = self.knows(architecture) and self.is_program(architecture) and bool(version)
        return (Need.EXACTLY, version) if is_exact else (Need.NOT_STATED, "")


ONNXRUNTIME = OnnxRuntimeSpec(
    name="onnxruntime",
    title="ONNX Runtime",
    modules=("onnxruntime",),
    install=INSTALL,
    use="calibration, evaluation, every run",
    maker="loka_onnx.engines.onnxruntime.backend:OnnxRuntimeBackend",
    triton="loka_onnx.engines.onnxruntime.triton:triton_form",
    devices={CPU: (CPU,), **NVIDIA, **AMD},
    fusions=Fusions(evidence="its CPU and CUDA providers run each Q and DQ alone: FP8 is simulated"),
    request_form=(CPU,),
)
ONNXRUNTIME_TENSORRT = OnnxRuntimeSpec(
    name="onnxruntime_tensorrt",
    title="ONNX Runtime",
    modules=("onnxruntime", "tensorrt"),
    install=INSTALL,
    use="calibration, evaluation, every run",
    maker="loka_onnx.engines.onnxruntime.backend:OnnxRuntimeTensorRtBackend",
    triton="loka_onnx.engines.onnxruntime.triton:triton_form",
    devices=NVIDIA,
    fusions=Fusions(evidence="declines FP8: what engages it cannot be read back"),
)
