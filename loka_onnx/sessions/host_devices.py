"""Which device of this machine runs the engines of an architecture.

An architecture says where an engine can be loaded; how long it takes there is a matter of the device. An
H100 and an H200 are both ``sm90``, and differ in memory, clocks and speed: whatever was timed belongs to the
device by its full name.
"""

from __future__ import annotations

from loka_onnx.core.devices import ACCELERATORS, CPU, device_called
from loka_onnx.sessions.cuda import list_cuda_devices
from loka_onnx.sessions.providers import list_amd_devices


def device_of_architecture(architecture: str) -> str:
    """The device that engines of an architecture are loaded on here, the first one, as its driver names it.

    Returns:
        For example ``NVIDIA H100 80GB HBM3``; ``cpu`` for the processor, empty where there is none.
    """
    if architecture == CPU:
        return CPU
    devices = [(device.architecture, device.name) for device in list_cuda_devices()]
    devices += [(device.architecture, device.name) for device in list_amd_devices()]
    return next((name for found, name in devices if found == architecture), "")


def is_target(target: str, architecture: str) -> bool:
    """Whether what an engine takes on this machine is what it takes on its target.

    Where the driver's name is none that run files have, the run file is believed: it named the device. So it
    is with a target that is not among the devices known by name.

    Args:
        target: Device as named in the run file.
        architecture: Architecture of the engine, as its backend names it.
    """
    if architecture == CPU or target not in ACCELERATORS:
        return True
    return device_called(device_of_architecture(architecture), architecture) in {"", target}
