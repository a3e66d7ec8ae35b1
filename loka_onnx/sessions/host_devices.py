"""Devices of this machine by architecture.

An architecture determines where an engine can be loaded, but not its latency: an H100 and an H200 are both
``sm90`` and differ in memory, clocks and speed. Timings therefore belong to a device by its full name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loka_onnx.core.devices import ACCELERATORS, CPU, device_called
from loka_onnx.sessions.cuda import CudaDevice, list_cuda_devices

KFD_NODES, DRM_CARDS = Path("/sys/class/kfd/kfd/topology/nodes"), Path("/sys/class/drm")
"""Linux's directories of the AMD driver's devices, and of graphics cards."""
CPUINFO = Path("/proc/cpuinfo")
"""Linux's description of the processor."""
INTEGER_INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni", "i8mm", "asimddp")
"""Instruction sets that add products of eight-bit integers in 32 bits, the fastest first."""


def instruction_sets(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Instruction sets of this processor, as Linux names them; none where they are not known."""
    lines = _text_of(cpuinfo).splitlines()
    flags = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(flags, "").split())


def integer_instructions(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """Those of `INTEGER_INSTRUCTIONS` that this processor has; none where it is not known."""
    return tuple(name for name in INTEGER_INSTRUCTIONS if name in instruction_sets(cpuinfo))


def device_of_architecture(architecture: str) -> str:
    """Driver's name of the first device of an architecture; ``cpu`` for the processor, empty for none."""
    if architecture == CPU:
        return CPU
    devices: tuple[CudaDevice | AmdDevice, ...] = (*list_cuda_devices(), *list_amd_devices())
    return next((device.name for device in devices if device.architecture == architecture), "")


def is_target(target: str, architecture: str) -> bool:
    """True if latencies measured here hold for a target of the run file: always on the processor, and where
    the target, or the driver's name of the device here, is unknown.
    """
    if architecture == CPU or target not in ACCELERATORS:
        return True
    return device_called(device_of_architecture(architecture), architecture) in {"", target}


@dataclass(frozen=True)
class AmdDevice:
    """An AMD GPU of this machine: its product, else its numbers on the PCI bus, and its LLVM target."""

    name: str
    architecture: str


def list_amd_architectures(nodes: Path = KFD_NODES) -> tuple[str, ...]:
    """LLVM target of each AMD GPU, in the driver's order."""
    return tuple(device.architecture for device in list_amd_devices(nodes))


def list_amd_devices(nodes: Path = KFD_NODES, cards: Path = DRM_CARDS) -> tuple[AmdDevice, ...]:
    """AMD GPUs in the driver's order; empty without a driver or a GPU.

    The driver writes ``gfx_target_version`` as major·10000 + minor·100 + stepping, 0 for a CPU (Linux,
    `drivers/gpu/drm/amd/amdkfd/kfd_topology.c`); LLVM spells minor and stepping in hexadecimal, a digit each.
    The name is ``product_name`` of the card (Linux, "AMDGPU Misc Information").
    """
    devices = []
    for node in sorted(nodes.glob("*/properties"), key=lambda path: int(path.parent.name)):
        lines = _text_of(node).splitlines()
        pairs = dict(line.split(maxsplit=1) for line in lines if " " in line)
        version = int(pairs.get("gfx_target_version", "0"))
        if version:
            architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            card = cards / f"renderD{pairs.get('drm_render_minor', '')}" / "device" / "product_name"
            numbers = (int(pairs.get(key, "0")) for key in ("vendor_id", "device_id"))
            name = _text_of(card).strip() or "PCI {:04x}:{:04x}".format(*numbers)
            devices.append(AmdDevice(name, architecture))
    return tuple(devices)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
