"""Which device runs an architecture, and whether it is the target."""

import pytest

from loka_onnx.sessions import host_devices
from loka_onnx.sessions.cuda import CudaDevice
from loka_onnx.sessions.host_devices import AmdDevice, device_of_architecture, integer_instructions, is_target

H100, H200, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA L4"


def having(patch: pytest.MonkeyPatch, *gpus: tuple[str, str], amd: tuple[str, str] | None = None) -> None:
    devices = tuple(CudaDevice(index, name, kind) for index, (name, kind) in enumerate(gpus))
    patch.setattr(host_devices, "list_cuda_devices", lambda: devices)
    patch.setattr(host_devices, "list_amd_devices", lambda: () if amd is None else (AmdDevice(*amd),))


def test_the_first_device_of_an_architecture_runs_its_engines(monkeypatch):
    having(monkeypatch, (L4, "sm89"), (H200, "sm90"), (H100, "sm90"), amd=("AMD Instinct MI300X", "gfx942"))
    expected = {"sm90": H200, "sm89": L4, "gfx942": "AMD Instinct MI300X", "cpu": "cpu", "sm120": ""}
    assert {architecture: device_of_architecture(architecture) for architecture in expected} == expected


@pytest.mark.parametrize(
    ("target", "device", "architecture", "expected"),
    [
        ("nvidia-h100", H100, "sm90", True),
        ("nvidia-h100", H200, "sm90", False),
        ("nvidia-h200", H200, "sm90", True),
        ("nvidia-h200", H100, "sm90", False),
        ("nvidia-l4", "NVIDIA L40S", "sm89", False),
        ("nvidia-rtx-ada", "NVIDIA GeForce RTX 4090", "sm89", True),
        ("nvidia-rtx-ada", L4, "sm89", False),
        # A slice is no device that a run file names, whichever it is of.
        ("nvidia-h100", f"{H100} MIG 1g.10gb", "sm90", False),
        ("nvidia-h200", "NVIDIA H200 MIG 7g.141gb", "sm90", False),
        ("nvidia-h200", "NVIDIA GH200 480GB MIG 1g.12gb", "sm90", False),
        # Unknown to run files: whoever wrote one for it knows what it is.
        ("nvidia-h200", "NVIDIA GH200 480GB", "sm90", True),
        ("our-own-box", H200, "sm90", True),
    ],
)
def test_a_target_is_a_device_and_not_an_architecture(target, device, architecture, expected, monkeypatch):
    having(monkeypatch, (device, architecture))
    assert is_target(target, architecture) is expected


def test_the_processor_is_its_own_target(monkeypatch):
    having(monkeypatch, (H200, "sm90"))
    assert is_target("cpu", "cpu") and is_target("amd-mi300x", "cpu")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("flags\t\t: fpu avx2 avx512_vnni avx_vnni\nbugs\t: a\n", ("avx512_vnni", "avx_vnni")),
        ("flags : amx_int8 avx512_vnni", ("amx_int8", "avx512_vnni")),
        ("Features\t: fp asimd asimddp i8mm", ("i8mm", "asimddp")),
        ("flags : fpu avx2", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_instructions_that_add_in_32_bits(tmp_path, text, found):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert integer_instructions(path) == found
