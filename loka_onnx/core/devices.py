"""Devices that a run file can name, with their architectures as compilers name them.

Sources: NVIDIA's table of compute capabilities; AMD's table of LLVM targets.
"""

from __future__ import annotations

from collections.abc import Mapping

CPU = "cpu"
NVIDIA: Mapping[str, tuple[str, ...]] = {
    "nvidia-a100": ("sm80",),
    "nvidia-rtx-ada": ("sm89",),
    "nvidia-l4": ("sm89",),
    "nvidia-l40s": ("sm89",),
    "nvidia-h100": ("sm90",),
    "nvidia-h200": ("sm90",),
    "nvidia-b200": ("sm100",),
    "nvidia-rtx-blackwell": ("sm120",),
}
"""Compute capability of each NVIDIA device."""
AMD: Mapping[str, tuple[str, ...]] = {
    "amd-mi300x": ("gfx942",),
    "amd-mi325x": ("gfx942",),
    "amd-mi350x": ("gfx950",),
    "amd-mi355x": ("gfx950",),
    "amd-radeon-rx9070": ("gfx1201",),
}
"""LLVM target of each AMD device."""
ACCELERATORS: Mapping[str, tuple[str, ...]] = {**NVIDIA, **AMD}
"""Architectures of each device that is not the processor."""
FLOAT8_FROM = 89
"""Least NVIDIA compute capability with FP8 tensor cores, major and minor digits together."""


def capability(architecture: str) -> int:
    """Return the digits of an NVIDIA architecture: 90 of ``sm90``."""
    return int(architecture.removeprefix("sm"))


SLICE = "mig-slice"
"""Result of `device_called` for a slice of any GPU. No run file names it: its latency is not the device's."""


def device_called(name: str, architecture: str) -> str:
    """Return the run-file name of a device as its driver names it; "" where unknown, `SLICE` for a slice."""
    words = name.upper().replace("-", " ").split()
    # NVIDIA's driver adds the profile to the name of the GPU: "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
    if "MIG" in words:
        return SLICE
    # A generation of several models has no number of its own: it follows from the architecture.
    generations = {device for device in NVIDIA if "-rtx-" in device}
    for device in ACCELERATORS:
        if device not in generations and device.rpartition("-")[2].upper() in words:
            return device
    matching = (device for device in sorted(generations) if architecture in NVIDIA[device])
    return next(matching, "") if {"RTX", "GEFORCE"} & {*words} else ""
