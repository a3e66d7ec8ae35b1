"""Engines of a bundle that this host can run, and their order of trial.

No engine is opened for this, and no vendor's library is imported for an engine with another obstacle.

Order: engines built for this very device, by its driver's name (to which timings belong); then for the
architecture of an accelerator here; then for the processor. Among equals, those built by the installed
version of their library; then in the manifest's order, which is the order of choice. The FP32 model is always
last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka_onnx.core.devices import CPU, device_called
from loka_onnx.core.manifest import INSTRUCTIONS, EngineEntry, Manifest
from loka_onnx.core.rewrite import Part
from loka_onnx.errors import MissingPackage
from loka_onnx.runtime.health import Cause
from loka_onnx.sessions.backends import get_spec, has_spec, in_line
from loka_onnx.sessions.host_devices import device_of_architecture, integer_instructions


@dataclass(frozen=True)
class Obstacle:
    """Reason why an engine is not tried: its cause, and a sentence (without full stop) with the remedy."""

    cause: Cause
    reason: str


def is_program(entry: EngineEntry) -> bool:
    """True if loading an engine runs code in it."""
    return get_spec(entry.backend).is_program(entry.architecture)


def obstacle(entry: EngineEntry, wanted: Part, *, is_trusted: bool) -> Obstacle | None:
    """Reason why an engine is not tried on this host for a part of the model; None where it is."""
    if wanted is Part.DENSE and entry.part is Part.WHOLE:
        return Obstacle(
            Cause.PART,
            "this engine takes ids, not looked-up rows; load the whole, or build with "
            "`model.split_sparse: true`",
        )
    try:
        is_known = has_spec(entry.backend) and get_spec(entry.backend).knows(entry.architecture)
    except MissingPackage as error:
        return Obstacle(Cause.LIBRARY, in_line(error))
    if not is_known:
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
    spec = get_spec(entry.backend)
    obstacles = []
    if reason := spec.library_obstacle():
        obstacles.append(Obstacle(Cause.LIBRARY, reason))
    if entry.architecture != CPU and (reason := spec.device_obstacle(entry.architecture)):
        obstacles.append(Obstacle(Cause.DEVICE, f"cannot run here: {reason}"))
    if reason := _lacks_instructions(entry):
        obstacles.append(Obstacle(Cause.DEVICE, reason))
    if obstacles:
        return Obstacle(obstacles[0].cause, "; ".join(each.reason for each in obstacles))
    # Last, as only the library knows its version, and is imported for it.
    return _other_version(entry)


def in_order(manifest: Manifest, usable: Sequence[EngineEntry]) -> tuple[EngineEntry, ...]:
    """Sort usable engines, given in the manifest's order, into the order of trial (see the module)."""
    return tuple(sorted(usable, key=lambda entry: _rank(manifest, entry)))


def _rank(manifest: Manifest, entry: EngineEntry) -> tuple[int, int]:
    if entry == manifest.fallback:
        return (3, 0)
    differs = int(entry.version != get_spec(entry.backend).version())
    if entry.architecture == CPU:
        return (2, differs)
    name = device_called(device_of_architecture(entry.architecture), entry.architecture)
    return (0 if name == entry.target else 1, differs)


def _lacks_instructions(entry: EngineEntry) -> str:
    """Reason why the processor is another than the one that the engine was certified on; empty otherwise."""
    needed = [requirement.version for requirement in entry.requires if requirement.name == INSTRUCTIONS]
    here = integer_instructions() if needed else ()
    if {*needed} <= {*here}:
        return ""
    return (
        f"its INT8 sums were certified with {', '.join(needed)}, and this processor has "
        f"{', '.join(here) or 'no such instructions'}: they may saturate differently"
    )


def _other_version(entry: EngineEntry) -> Obstacle | None:
    """Obstacle of a library version that does not load the engine: programs belong to one version."""
    if not is_program(entry):
        return None
    spec = get_spec(entry.backend)
    try:
        here = spec.version()
    except MissingPackage as error:
        return Obstacle(Cause.LIBRARY, in_line(error))
    if spec.loads(entry.version, here):
        return None
    return Obstacle(
        Cause.VERSION,
        f"the engine was built by another version of {spec.title}: by {entry.version}, this host has {here}; "
        "install that one, or build the engine again",
    )
