"""Engines of a bundle that this host can run, and their order of trial.

No engine is opened for this, and no vendor's library is imported for an engine with another obstacle.

Order: engines built for this very device, by its driver's name (to which timings belong); then for the
    architecture of
an accelerator here; then for the processor. Among equals, those built by the installed version of their
library; then in the manifest's order, which is the order of choice. The FP32 model is always last.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from loka_onnx.core.devices import CPU, device_called
from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.core.split import Part
from loka_onnx.errors import ConfigError, MissingPackage
from loka_onnx.runtime.health import Cause
from loka_onnx.sessions.host_devices import device_of_architecture
from loka_onnx.sessions.inductor_package import release
from loka_onnx.sessions.migraphx_api import import_migraphx, version_of
from loka_onnx.sessions.migraphx_session import why_not_run
from loka_onnx.sessions.onnx_session import import_onnxruntime
from loka_onnx.sessions.providers import ONNXRUNTIME, ONNXRUNTIME_TENSORRT, host_blocker, provider_for
from loka_onnx.sessions.tensorrt_vendors import TENSORRT, TENSORRT_RTX, why_no_gpu

BACKENDS = (ONNXRUNTIME, ONNXRUNTIME_TENSORRT, "tensorrt", "tensorrt_rtx", "inductor", "migraphx")
"""Backends whose engines this runtime runs."""
_VENDORS = {"tensorrt": TENSORRT, "tensorrt_rtx": TENSORRT_RTX}
_LIBRARIES = {
    **{
        name: (vendor.module, vendor.title, f"pip install 'loka-onnx[{vendor.extra}]'")
        for name, vendor in _VENDORS.items()
    },
    "inductor": ("torch", "PyTorch", "pip install 'loka-onnx[inductor]'"),
    "migraphx": ("migraphx", "MIGraphX", "install ROCm with its package `migraphx`"),
}
"""Module, title and installation of each backend's library other than ONNX Runtime."""


@dataclass(frozen=True)
class Obstacle:
    """Reason why an engine is not tried: its cause, and a sentence (without full stop) with the remedy."""

    cause: Cause
    reason: str


def is_program(entry: EngineEntry) -> bool:
    """Tell whether loading an engine runs code in it."""
    if entry.backend not in {ONNXRUNTIME, ONNXRUNTIME_TENSORRT}:
        return True
    return provider_for(entry.backend, entry.architecture).compiles


def obstacle(entry: EngineEntry, wanted: Part, *, is_trusted: bool) -> Obstacle | None:
    """Reason why an engine is not tried on this host; None where it is.

    Args:
        wanted: Part of the model that requests are for.
        is_trusted: Whether programs of the bundle may be loaded.
    """
    if wanted is Part.DENSE and entry.part is Part.WHOLE:
        return Obstacle(
            Cause.PART,
            "this engine takes ids, not looked-up rows; load the whole, or build with "
            "`model.split_sparse: true`",
        )
    if not _is_known(entry):
        return Obstacle(
            Cause.BACKEND, f"this loader runs no engine of {entry.backend} on {entry.architecture}"
        )
    if is_program(entry) and not is_trusted:
        return Obstacle(
            Cause.UNTRUSTED,
            f"this engine of {entry.backend} on {entry.architecture} is a program: loading it runs the code "
            "in it, and a digest does not say who made it; pass `keys=[…]` with the public key of who signs "
            "your bundles, or `trust=True` when this one comes from who may run code here",
        )
    found = [each for each in (_no_library(entry), _no_device(entry)) if each is not None]
    # Only the library knows its version, and is imported for it.
    if not found and (other := _other_version(entry)) is not None:
        found = [other]
    return Obstacle(found[0].cause, "; ".join(each.reason for each in found)) if found else None


def in_order(manifest: Manifest, usable: Sequence[EngineEntry]) -> tuple[EngineEntry, ...]:
    """Sort usable engines, given in the manifest's order, into the order of trial (see the module)."""
    return tuple(sorted(usable, key=lambda entry: _rank(manifest, entry)))


def _rank(manifest: Manifest, entry: EngineEntry) -> tuple[int, int]:
    if entry == manifest.fallback:
        return (3, 0)
    differs = int(entry.version != _version_here(entry.backend))
    if entry.architecture == CPU:
        return (2, differs)
    name = device_called(device_of_architecture(entry.architecture), entry.architecture)
    return (0 if name == entry.target else 1, differs)


def _is_known(entry: EngineEntry) -> bool:
    if entry.backend in {ONNXRUNTIME, ONNXRUNTIME_TENSORRT}:
        try:
            provider_for(entry.backend, entry.architecture)
        except ConfigError:
            return False
    return entry.backend in BACKENDS


def _no_library(entry: EngineEntry) -> Obstacle | None:
    """Obstacle of a missing library, without importing a vendor's."""
    if entry.backend in {ONNXRUNTIME, ONNXRUNTIME_TENSORRT}:
        try:
            import_onnxruntime()
        except MissingPackage as error:
            return Obstacle(Cause.LIBRARY, _in_line(error))
        return None
    module, title, remedy = _LIBRARIES[entry.backend]
    if _is_installed(module):
        return None
    return Obstacle(Cause.LIBRARY, f"{title} is not installed; {remedy}")


def _no_device(entry: EngineEntry) -> Obstacle | None:
    if entry.architecture == CPU:
        return None
    if entry.backend in {ONNXRUNTIME, ONNXRUNTIME_TENSORRT}:
        provider = provider_for(entry.backend, entry.architecture)
        reason = host_blocker(provider, entry.architecture)
    elif entry.backend == "migraphx":
        reason = why_not_run(entry.architecture)
    else:
        reason = why_no_gpu(entry.architecture)
    return Obstacle(Cause.DEVICE, f"cannot run here: {reason}") if reason else None


def _other_version(entry: EngineEntry) -> Obstacle | None:
    """Obstacle of a library version that does not load the engine: programs belong to one version."""
    if not is_program(entry):
        return None
    try:
        here = _version_here(entry.backend)
    except MissingPackage as error:
        return Obstacle(Cause.LIBRARY, _in_line(error))
    if here == entry.version or (entry.backend == "inductor" and release(here) == release(entry.version)):
        return None
    title = _LIBRARIES[entry.backend][1] if entry.backend in _LIBRARIES else "ONNX Runtime"
    return Obstacle(
        Cause.VERSION,
        f"the engine was built by another version of {title}: by {entry.version}, this host has {here}; "
        "install that one, or build the engine again",
    )


def _version_here(backend: str) -> str:
    """Version of the library that runs a backend's engines."""
    if backend in {ONNXRUNTIME, ONNXRUNTIME_TENSORRT}:
        return str(import_onnxruntime().__version__)
    if backend in _VENDORS:
        return str(_VENDORS[backend].load().__version__)
    if backend == "migraphx":
        return version_of(import_migraphx())
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError as error:
        raise MissingPackage("PyTorch is not installed", evidence=str(error)) from error


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _in_line(error: MissingPackage) -> str:
    return f"{error.what}; {error.remedy}" if error.remedy else error.what
