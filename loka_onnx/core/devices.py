"""Devices that a run file can name, and their architectures as compilers name them.

Sources: NVIDIA's table of compute capabilities; AMD's table of LLVM targets. Each backend says which of these
it builds for.
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
FLOAT8_FROM = 89
"""Least NVIDIA compute capability whose tensor cores multiply FP8, major and minor digits together."""


def capability(architecture: str) -> int:
    """Digits of an NVIDIA architecture: 90 of ``sm90``.

    Args:
        architecture: ``sm`` and digits.
    """
    return int(architecture.removeprefix("sm"))
