"""MIGraphX as a backend declares itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loka_onnx.core.backends import Fusions
from loka_onnx.core.devices import AMD, CPU
from loka_onnx.core.formats import E4M3FN, INT8
from loka_onnx.engines.migraphx.api import INSTALL, import_migraphx, version_of
from loka_onnx.engines.migraphx.session import open_migraphx, read_engine, why_not_run
from loka_onnx.sessions.backends import BackendSpec
from loka_onnx.sessions.onnx_session import SessionOptions
from loka_onnx.sessions.runner import Runner


class MigraphxSpec(BackendSpec):
    """Programs for Instinct and Radeon GPUs, and for the reference target on the CPU."""

    def open(self, engine: Path, architecture: str, version: str, options: SessionOptions | None) -> Runner:
        """See `BackendSpec.open`."""
        return open_migraphx(engine, architecture, version)

    def device_obstacle(self, architecture: str) -> str:
        """See `BackendSpec.device_obstacle`."""
        return why_not_run(architecture)

    def files_beside(self, engine: Path) -> tuple[str, ...]:
        """The programs that a manifest names; none beside a file of another kind."""
        return tuple(p.file for p in read_engine(engine).programs) if engine.suffix == ".json" else ()

    def load_library(self) -> Any:
        """See `BackendSpec.load_library`."""
        return import_migraphx()

    def version(self) -> str:
        """See `BackendSpec.version`."""
        return version_of(self.load_library())


MIGRAPHX = MigraphxSpec(
    name="migraphx",
    title="MIGraphX",
    modules=("migraphx",),
    install=INSTALL,
    use="",
    maker="loka_onnx.engines.migraphx.backend:MigraphxBackend",
    no_triton="Triton has no MIGraphX backend, and its ONNX Runtime backend no provider for it",
    devices={**AMD, CPU: (CPU,)},
    formats=(E4M3FN, INT8),
    fusions=Fusions(
        evidence="its kernels on GPUs were never seen, and it drops Q/DQ that are around no product"
    ),
)
