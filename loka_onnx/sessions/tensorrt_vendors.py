"""Libraries of the TensorRT family, and this machine's GPUs for their engines."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from loka_onnx.errors import EngineError, MissingPackage
from loka_onnx.sessions.cuda import CudaDevice, list_cuda_devices


@dataclass(frozen=True)
class Vendor:
    """A library of the TensorRT family."""

    module: str
    title: str
    package: str
    extra: str

    def load(self) -> Any:
        """Import the module.

        Raises:
            MissingPackage: It is not installed, or its libraries do not load.
        """
        try:
            module = importlib.import_module(self.module)
            if not hasattr(module, "__version__"):
                # Python imports a directory of that name on its path as a package.
                places = ", ".join(getattr(module, "__path__", ()))
                raise ImportError(f"'{self.module}' is not the library but {places}")
            return module
        except (ImportError, OSError) as error:
            raise MissingPackage(
                f"{self.title} is not installed",
                evidence=str(error),
                remedy=f"pip install 'loka-onnx[{self.extra}]'",
            ) from error


TENSORRT = Vendor("tensorrt", "TensorRT", "tensorrt", "tensorrt")
TENSORRT_RTX = Vendor("tensorrt_rtx", "TensorRT for RTX", "tensorrt-rtx-cu13", "tensorrt-rtx")


def why_no_gpu(architecture: str) -> str:
    """Reason why this host cannot run an engine for an architecture; empty when it has such a GPU."""
    devices = list_cuda_devices()
    if any(device.architecture == architecture for device in devices):
        return ""
    here = ", ".join(f"{device.name} ({device.architecture})" for device in devices) or "no NVIDIA GPU"
    return f"the engine is for {architecture} and this host has {here}"


def first_gpu(architecture: str) -> CudaDevice:
    """Return the first GPU of an architecture.

    Raises:
        EngineError: There is none.
    """
    for device in list_cuda_devices():
        if device.architecture == architecture:
            return device
    raise EngineError(f"cannot run here: {why_no_gpu(architecture)}")
