"""What this machine can build and run, as values; `doctor` prints them. Never needs an optional package."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

import psutil

from loka_onnx.core.backends import backend_names
from loka_onnx.core.distributions import versions_of
from loka_onnx.engines.base import Availability
from loka_onnx.engines.inductor.operator_packages import PACKAGES, OperatorPackage, find_packages
from loka_onnx.engines.registry import get_backend
from loka_onnx.errors import MissingPackage
from loka_onnx.sessions.backends import BackendSpec, get_spec
from loka_onnx.sessions.cuda import list_cuda_devices


@dataclass(frozen=True)
class Package:
    """An optional package; without a version it cannot be used, and the remedy says how to get it."""

    name: str
    version: str
    use: str
    remedy: str


@dataclass(frozen=True)
class Machine:
    """The machine and its interpreter; memory in 10⁹ bytes, GPUs with their architecture."""

    system: str
    python: str
    loka_onnx: str
    cores: int
    memory_gb: float
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `doctor` tells; backends by name."""

    machine: Machine
    backends: dict[str, Availability]
    packages: tuple[Package, ...]


_PACKAGES = (
    # Distribution, module to import ("" when it is only read as data), use, remedy.
    ("onnxscript", "onnxscript", "export from PyTorch", "pip install 'loka-onnx[export]'"),
    ("safetensors", "safetensors", ".safetensors checkpoints", "pip install 'loka-onnx[export]'"),
    ("recbole", "", "the demo's data (only read)", "pip install --no-deps recbole==1.2.1"),
)


def diagnose() -> Diagnosis:
    """Look at this machine."""
    return Diagnosis(
        machine=_machine(),
        backends={name: _availability(name) for name in backend_names()},
        packages=(
            *_libraries(),
            *(_package(*row) for row in _PACKAGES),
            *map(_operator_package, PACKAGES),
        ),
    )


def _machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        loka_onnx=metadata.version("loka-onnx"),
        cores=cores,
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        gpus=tuple(f"{gpu.name} ({gpu.architecture})" for gpu in list_cuda_devices()),
    )


def _availability(name: str) -> Availability:
    """Return what a backend can do here; of a package that does not import, why not."""
    try:
        return get_backend(name).availability()
    except MissingPackage as error:
        return Availability(False, "", False, False, (), f"{error.what}: {error.evidence}", error.remedy)


def _libraries() -> Iterator[Package]:
    """The library of each backend that has one among packages, each once."""
    first: dict[str, BackendSpec] = {}
    for name in backend_names():
        with suppress(MissingPackage):
            if (spec := get_spec(name)).use:
                first.setdefault(spec.modules[0], spec)
    for spec in first.values():
        versions = versions_of(spec.modules[:1])
        yield _imported(spec.modules[0], next(iter(versions.values()), ""), spec.use, spec.install)


def _package(distribution: str, module: str, use: str, remedy: str) -> Package:
    version = _version(distribution)
    return (
        _imported(module, version, use, remedy)
        if module
        else Package(distribution, version, use, "" if version else remedy)
    )


def _imported(module: str, version: str, use: str, remedy: str) -> Package:
    if version:
        try:
            importlib.import_module(module)
        except Exception as error:
            # A package whose native libraries do not fit this machine raises whatever its loader raises.
            return Package(module, "", use, f"{version} is installed and does not import: {error}")
    return Package(module, version, use, "" if version else remedy)


def _operator_package(package: OperatorPackage) -> Package:
    use, here = "FP8 products that engines of inductor may choose", package.installed()
    if here is None:
        first = package.distributions[0]
        return Package(
            package.namespace, "", use, f"pip install {first}: the release that is built for your PyTorch"
        )
    (found,) = find_packages(_version("torch") or "none", [package])
    return Package(package.namespace, "" if found.obstacle else here.version, use, found.obstacle)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
