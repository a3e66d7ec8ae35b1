"""Engines of a bundle that this host can run, and their order of trial.

No engine is opened for this, and no vendor's library is imported for an engine with another obstacle.

Order: engines built for this very device, by its driver's name (to which timings belong); then for the
architecture of an accelerator here; then for the processor. Among equals, those built by the installed
version of their library; then in the manifest's order, which is the order of choice. The FP32 model is always
last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loka_onnx.core.devices import CPU, device_called
from loka_onnx.core.manifest import INSTRUCTIONS, EngineEntry, Manifest
from loka_onnx.core.rewrite import Part
from loka_onnx.errors import MissingPackage
from loka_onnx.runtime.health import Cause, Skipped
from loka_onnx.sessions.backends import get_spec, has_spec, in_phrase
from loka_onnx.sessions.host_devices import device_of_architecture, integer_instructions


def is_program(entry: EngineEntry) -> bool:
    """True if loading an engine runs code in it."""
    return get_spec(entry.backend).is_program(entry.architecture)


def obstacle(entry: EngineEntry, wanted: Part, *, is_trusted: bool) -> Skipped | None:
    """Why an engine is not tried on this host for a part of the model; None where it is."""
    obstacles = list(_before_the_library(entry, wanted, is_trusted=is_trusted))
    if obstacles:
        cause = obstacles[0][0]
        return Skipped(entry.id, "; ".join(reason for each, reason in obstacles), cause)
    if not is_program(entry):
        return None
    # Programs belong to one version. Last, as only the library knows its version, and is imported for it.
    spec = get_spec(entry.backend)
    try:
        here = spec.version()
    except MissingPackage as error:
        return Skipped(entry.id, in_phrase(error), Cause.LIBRARY)
    if spec.loads(entry.version, here):
        return None
    reason = (
        f"the engine was built by another version of {spec.title}: by {entry.version}, this host has {here}; "
        "install that one, or build the engine again"
    )
    return Skipped(entry.id, reason, Cause.VERSION)


def _before_the_library(entry: EngineEntry, wanted: Part, *, is_trusted: bool) -> Iterator[tuple[Cause, str]]:
    """Yield obstacles that are known without importing a vendor's library."""
    backend, architecture = entry.backend, entry.architecture
    if wanted is Part.DENSE and entry.part is not Part.DENSE:
        yield (
            Cause.PART,
            "this engine takes ids, not looked-up rows; load the whole, or build with "
            "`model.split_sparse: true`",
        )
        return
    try:
        is_known = has_spec(backend) and get_spec(backend).knows(architecture)
    except MissingPackage as error:
        yield Cause.LIBRARY, in_phrase(error)
        return
    if not is_known:
        yield Cause.BACKEND, f"this loader runs no engine of {backend} on {architecture}"
        return
    if is_program(entry) and not is_trusted:
        yield (
            Cause.UNTRUSTED,
            f"this engine of {backend} on {architecture} is a program: loading it runs the code in it, and a "
            "digest does not say who made it; pass `keys=[…]` with the public key of who signs your bundles, "
            "or `trust=True` when this one comes from who may run code here",
        )
        return
    spec = get_spec(backend)
    if reason := spec.library_obstacle():
        yield Cause.LIBRARY, reason
    if architecture != CPU and (reason := spec.device_obstacle(architecture)):
        yield Cause.DEVICE, f"cannot run here: {reason}"
    needed = [requirement.version for requirement in entry.requires if requirement.name == INSTRUCTIONS]
    here = integer_instructions() if needed else ()
    if not {*needed} <= {*here}:
        yield (
            Cause.DEVICE,
            f"its INT8 sums were certified with {', '.join(needed)}, and this processor has "
            f"{', '.join(here) or 'no such instructions'}: they may saturate differently",
        )


def in_order(manifest: Manifest, usable: Sequence[EngineEntry]) -> tuple[EngineEntry, ...]:
    """Sort usable engines, given in the manifest's order, into the order of trial (see the module)."""

    def rank(entry: EngineEntry) -> tuple[int, int]:
        if entry == manifest.fallback:
            return (3, 0)
        differs = int(entry.version != get_spec(entry.backend).version())
        if entry.architecture == CPU:
            return (2, differs)
        name = device_called(device_of_architecture(entry.architecture), entry.architecture)
        return (0 if name == entry.target else 1, differs)

    return tuple(sorted(usable, key=rank))
