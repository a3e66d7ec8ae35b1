"""What a host must have for an engine, beside a device of its architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping

from loka_onnx.core.devices import CPU
from loka_onnx.core.manifest import Need, Requirement
from loka_onnx.engines.onnxruntime.providers import ONNXRUNTIME, ONNXRUNTIME_TENSORRT, provider_for
from loka_onnx.errors import ConfigError

LEAST_DRIVER: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""Least Linux driver of the host for programs of each major version of the CUDA toolkit.

NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1; CUDA Toolkit Release Notes, table 2.
"""

_LIBRARIES: Mapping[str, tuple[str, Need]] = {
    "tensorrt": ("TensorRT", Need.EXACTLY),
    "tensorrt_rtx": ("TensorRT for RTX", Need.EXACTLY),
    "migraphx": ("MIGraphX", Need.EXACTLY),
    "inductor": ("PyTorch", Need.RELEASE),
}
"""Library that loads the engines of a backend, and which version of it does: what the sessions check."""


def requirements_of(backend: str, version: str, architecture: str) -> tuple[Requirement, ...]:
    """Libraries and drivers that an engine needs.

    Args:
        backend: The backend that built it.
        version: Version of the library that built it.
        architecture: Its device architecture, as the backend names it.
    """
    library = _library(backend, version, architecture)
    if architecture == CPU:
        return (library,)
    if not architecture.startswith("sm"):
        return (library, Requirement("AMD GPU driver", Need.NOT_STATED))
    toolkit = re.search(r"\+cu(\d+)\d$", version)
    least = LEAST_DRIVER.get(int(toolkit.group(1))) if toolkit else None
    if least is None:
        return (library, Requirement("NVIDIA driver", Need.NOT_STATED))
    return (library, Requirement("NVIDIA driver", Need.AT_LEAST, least))


def _library(backend: str, version: str, architecture: str) -> Requirement:
    if backend in {ONNXRUNTIME, ONNXRUNTIME_TENSORRT}:
        # Graphs are compiled where they are loaded; the operators that they need are in their opset.
        is_exact = _compiles(backend, architecture) and bool(version)
        return Requirement("ONNX Runtime", *((Need.EXACTLY, version) if is_exact else (Need.NOT_STATED, "")))
    name, need = _LIBRARIES.get(backend, (backend, Need.NOT_STATED))
    if need is Need.NOT_STATED or not version:
        return Requirement(name, Need.NOT_STATED)
    shown = ".".join(version.split(".")[:2]) if need is Need.RELEASE else version
    return Requirement(name, need, shown)


def _compiles(backend: str, architecture: str) -> bool:
    try:
        return provider_for(backend, architecture).compiles
    except ConfigError:
        return False
