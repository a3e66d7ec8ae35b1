"""Devices of this machine by architecture.

An architecture determines where an engine can be loaded, but not its latency: an H100 and an H200 are both
``sm90`` and differ in memory, clocks and speed. Timings therefore belong to a device by its full name.
"""

from __future__ import annotations

from loka_onnx.core.devices import ACCELERATORS, CPU, device_called
from loka_onnx.sessions.cuda import list_cuda_devices
from loka_onnx.sessions.providers import list_amd_devices


def device_of_architecture(architecture: str) -> str:
    """Driver's name of the first device here that loads engines of an architecture.

    Returns:
        For example ``NVIDIA H100 80GB HBM3``; ``cpu`` for the processor, empty where there is none.
    """
    if architecture == CPU:
        return CPU
    devices = [(device.architecture, device.name) for device in list_cuda_devices()]
    devices += [(device.architecture, device.name) for device in list_amd_devices()]
    return next((name for found, name in devices if found == architecture), "")


def is_target(target: str, architecture: str) -> bool:
    """Tell whether latencies on this machine hold for a target.

    A target that is not a known device, or a device here whose driver name is unknown, is assumed to match.

    Args:
        target: Device as named in the run file.
        architecture: Architecture of the engine, as its backend names it.
    """
    if architecture == CPU or target not in ACCELERATORS:
        return True
    return device_called(device_of_architecture(architecture), architecture) in {"", target}
