"""A bare install imports every backend, and says what is missing."""

import subprocess
import sys

import pytest

from loka_onnx.core.backends import backend_names
from loka_onnx.engines.registry import get_backend
from loka_onnx.errors import EngineError
from loka_onnx.sessions import cuda

PROBE = """
import sys
sys.modules.update(dict.fromkeys(["onnxruntime", "tensorrt_rtx", "tensorrt", "torch", "migraphx"]))
from loka_onnx.core.backends import backend_names
from loka_onnx.engines.registry import get_backend
for backend in map(get_backend, backend_names()):
    a = backend.availability()
    assert not (a.installed or a.can_build or a.can_run), a
    print(backend.name, "|", a.reason, "|", a.remedy)
"""


def test_availability_names_the_package_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "onnxruntime | ONNX Runtime is not installed | "
        "pip install 'loka-onnx[cpu]' (or [nvidia], [amd]: exactly one of them)",
        "onnxruntime_tensorrt | ONNX Runtime is not installed | "
        "pip install 'loka-onnx[cpu]' (or [nvidia], [amd]: exactly one of them)",
        "tensorrt | TensorRT is not installed | pip install 'loka-onnx[tensorrt]'",
        "tensorrt_rtx | TensorRT for RTX is not installed | "
        "pip install 'loka-onnx[tensorrt-rtx]' (Linux x86-64 and Windows)",
        "migraphx | MIGraphX is not installed | install ROCm with its package `migraphx`",
        "inductor | PyTorch is not installed | pip install 'loka-onnx[inductor]'",
    ]


def test_availability_is_complete() -> None:
    for backend in map(get_backend, backend_names()):
        availability = backend.availability()
        assert (availability.reason == "") == (availability.can_build and availability.can_run)


def test_without_a_driver_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARIES", ("libno-such-driver.so",))
    assert cuda.list_cuda_devices() == ()
    with pytest.raises(EngineError, match=r"no CUDA driver(?s:.*)libno-such-driver"):
        cuda.CudaContext()
