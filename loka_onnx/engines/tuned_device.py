"""The accelerator for timing kernels: its names and clocks."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import version

from loka_onnx.core.devices import CPU, SLICE, device_called
from loka_onnx.core.distributions import versions_of
from loka_onnx.errors import ConfigError, MissingPackage

CUDA = "cuda"
"""Torch's name of an accelerator, including AMD's."""
_QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"


def torch_device(device: str | None) -> str:
    """Torch's name of a device: `CUDA` or ``cpu``.

    Args:
        device: Device as run files name it; None for the accelerator if there is one, else the CPU.

    Raises:
        MissingPackage: torch is not installed.
        ConfigError: The device is an accelerator, and torch sees none.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingPackage(
            "kernels are timed with torch, which is not installed",
            evidence=str(error),
            remedy="pip install 'loka-onnx[export]'",
        ) from error
    if device == CPU or (device is None and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        raise ConfigError(
            f"this machine has no '{device}'",
            evidence=f"torch {torch.__version__} sees no GPU",
            remedy="tune on that device, and bring its times with --export and --import",
        )
    return CUDA


def device_to_time(device: str | None) -> str:
    """Device for timing kernels, as run files name it.

    Raises:
        MissingPackage: torch is not installed.
        ConfigError: This machine has another device, a slice, or one without a name in run files.
    """
    if torch_device(device) == CPU:
        return CPU
    found = device_here()
    if found == SLICE:
        raise ConfigError(
            "this GPU is a slice, and what kernels take on it is no time of the device",
            evidence=f"its driver calls it '{device_name()}'",
            remedy="tune on a whole GPU, and bring its times with --export and --import",
        )
    if not (device or found):
        raise ConfigError(
            "this GPU has no name that run files know",
            evidence=f"its driver calls it '{device_name()}'",
            remedy="name it with --device",
        )
    if device and found and device != found:
        raise ConfigError(
            f"this machine has no '{device}'",
            evidence=f"it has '{found}'",
            remedy="tune on that device, and bring its times with --export and --import",
        )
    return device or found


def device_here() -> str:
    """Accelerator of this machine as run files name it; empty where it is unknown."""
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability(0)
    return device_called(device_name(), "" if torch.version.hip else f"sm{major}{minor}")


def device_name(torch_device: str = CUDA) -> str:
    """Driver's name of the accelerator; the processor's for ``cpu`` or without an accelerator."""
    import torch

    if torch_device != CPU and torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return platform.processor() or platform.machine()


def library_versions() -> dict[str, str]:
    """Versions of the software that runs the kernels."""
    own = {"python": platform.python_version(), "loka-onnx": version("loka-onnx")}
    return own | versions_of(("torch", "triton"))


def clocks() -> str:
    """Clocks, their limits and the driver, from nvidia-smi; empty where it is unavailable."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{_QUERY}: {done.stdout.strip()}"
