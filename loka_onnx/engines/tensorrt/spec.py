"""TensorRT and TensorRT for RTX as backends declare themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka_onnx.core.backends import ACTIVATIONS, ARITHMETIC, MOVEMENTS, Fusions
from loka_onnx.core.devices import NVIDIA
from loka_onnx.core.formats import E4M3FN, INT8
from loka_onnx.engines.tensorrt.session import open_engine
from loka_onnx.errors import MissingPackage
from loka_onnx.sessions import cuda
from loka_onnx.sessions.backends import BackendSpec
from loka_onnx.sessions.onnx_session import SessionOptions
from loka_onnx.sessions.runner import Runner


@dataclass(frozen=True)
class TensorRtSpec(BackendSpec):
    """A backend on the TensorRT API; `package` is its library's on PyPI."""

    package: str = ""

    def open(self, engine: Path, architecture: str, version: str, options: SessionOptions | None) -> Runner:
        """See `BackendSpec.open`; a child process opens it first."""
        return open_engine(self, engine, architecture, version, is_new=True)

    def device_obstacle(self, architecture: str) -> str:
        """See `BackendSpec.device_obstacle`."""
        return cuda.why_no_gpu(architecture)

    def load_library(self) -> Any:
        """See `BackendSpec.load_library`; Python takes a directory of that name on its path for a package."""
        module = super().load_library()
        if hasattr(module, "__version__"):
            return module
        places = ", ".join(getattr(module, "__path__", ()))
        evidence = f"'{self.modules[0]}' is not the library but {places}"
        raise MissingPackage(f"E2809 {self.title} is not installed", evidence=evidence, remedy=self.install)


TENSORRT = TensorRtSpec(
    name="tensorrt",
    title="TensorRT",
    modules=("tensorrt",),
    package="tensorrt",
    install="pip install 'loka-onnx[tensorrt]'",
    use="engines for NVIDIA data-centre GPUs",
    maker="loka_onnx.engines.tensorrt.backend:TensorRtBackend",
    triton="loka_onnx.engines.tensorrt.triton:triton_form",
    devices=NVIDIA,
    formats=(E4M3FN, INT8),
    fusions=Fusions(
        frozenset({"Add", "Relu"}),
        frozenset(),
        frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}),
        "NVIDIA's documentation of explicit quantization: Q is computed with a sum, or the activation of a "
        "product, in front of it, and DQ moves forward through what moves values; not read from engines",
    ),
)
TENSORRT_RTX = TensorRtSpec(
    name="tensorrt_rtx",
    title="TensorRT for RTX",
    modules=("tensorrt_rtx",),
    package="tensorrt-rtx-cu13",
    install="pip install 'loka-onnx[tensorrt-rtx]' (Linux x86-64 and Windows)",
    use="engines for RTX GPUs",
    maker="loka_onnx.engines.tensorrt.backend:TensorRtRtxBackend",
    no_triton="Triton's TensorRT backend does not load engines of TensorRT for RTX, which is another "
    "library: build for backend 'tensorrt'",
    devices={
        "nvidia-rtx-turing": ("sm75",),
        "nvidia-rtx-ampere": ("sm86",),
        "nvidia-rtx-ada": ("sm89",),
        "nvidia-rtx-blackwell": ("sm120",),
        "nvidia-gb10": ("sm121",),
        "nvidia-rtx": ("sm89", "sm120"),
    },
    formats=(E4M3FN, INT8),
    fusions=Fusions(
        frozenset({*ACTIVATIONS, *ARITHMETIC, "LayerNormalization", "RMSNormalization"}),
        frozenset({"LayerNormalization", "RMSNormalization"}),
        frozenset(MOVEMENTS),
        "read from compiled graphs of TensorRT for RTX 1.7.1 for sm89 (tests/contract/test_fusions.py)",
    ),
)
