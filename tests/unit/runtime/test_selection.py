"""The order in which engines are tried, and why one is not tried at all; nothing is opened for that."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loka_onnx.core.manifest import INSTRUCTIONS, EngineEntry, Manifest, Need, Requirement
from loka_onnx.core.rewrite import Part
from loka_onnx.engines.onnxruntime import providers, spec
from loka_onnx.runtime import Cause, loading
from loka_onnx.runtime.loading import in_order, is_program, obstacle
from loka_onnx.sessions import backends, cuda, host_devices
from loka_onnx.sessions.backends import get_spec
from loka_onnx.sessions.cuda import CudaDevice
from loka_onnx.sessions.onnx_session import SessionOptions

ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'loka-onnx[cpu]'")


def host(monkeypatch: pytest.MonkeyPatch, *gpus: tuple[str, str], **libraries: str) -> None:
    """A host with these GPUs, and libraries by module and version."""
    devices = tuple(CudaDevice(index, name, kind) for index, (name, kind) in enumerate(gpus))
    for module in (cuda, host_devices, providers):
        monkeypatch.setattr(module, "list_cuda_devices", lambda: devices)
    monkeypatch.setattr(backends, "is_installed", lambda module: module in libraries)
    for name, version in libraries.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__name__=name, __version__=version))
    monkeypatch.setattr(backends.metadata, "version", lambda name: libraries[name])


def entry(manifest: Manifest, name: str, **changes: Any) -> EngineEntry:
    return replace(manifest.engines[0], id=name, **changes)


H100 = ("NVIDIA H100 80GB HBM3", "sm90")


def test_this_device_first_then_its_architecture_then_the_processor_then_the_fp32_model(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, H100, tensorrt="10.9")
    here = str(ort.__version__)
    cpu = {"backend": "onnxruntime", "architecture": "cpu", "target": "cpu"}
    gpu = {"backend": "tensorrt", "architecture": "sm90", "version": "10.9"}
    engines = (
        manifest.fallback,
        entry(manifest, "cpu-old", version="1.2.3", **cpu),
        entry(manifest, "cpu", version=here, **cpu),
        entry(manifest, "cpu-second", version=here, **cpu),
        entry(manifest, "h200", target="nvidia-h200", **gpu),
        entry(manifest, "h100-second", target="nvidia-h100", **gpu),
        entry(manifest, "h100-third", target="nvidia-h100", **gpu),
    )
    expected = ["h100-second", "h100-third", "h200", "cpu", "cpu-second", "cpu-old", manifest.fallback.id]
    assert [each.id for each in in_order(manifest, engines)] == expected


RTX = ("RTX 4090", "sm89")
NO_GPU = "pip install 'loka-onnx[tensorrt]'; cannot run here: the engine is for sm90 and this host has no"
OBSTACLES: list[tuple[dict[str, str], tuple[Any, ...], dict[str, str], Cause | None, str]] = [
    ({"backend": "tensorrt"}, (H100,), {"tensorrt": "10.9"}, None, ""),
    ({"backend": "tensorrt"}, (H100,), {"tensorrt": "10.8"}, Cause.VERSION, "by 10.9, this host has 10.8"),
    ({"backend": "tensorrt"}, (RTX,), {"tensorrt": "10.9"}, Cause.DEVICE, "this host has RTX 4090 (sm89)"),
    ({"backend": "tensorrt"}, (), {}, Cause.LIBRARY, f"{NO_GPU} NVIDIA GPU"),
    ({"backend": "inductor", "version": "2.13.0+cu130"}, (H100,), {"torch": "2.13.1"}, None, ""),
    ({"backend": "inductor", "version": "2.12.0"}, (H100,), {"torch": "2.13.1"}, Cause.VERSION, "by 2.12.0,"),
    ({"backend": "onnxruntime"}, (H100,), {}, Cause.DEVICE, "has no CUDAExecutionProvider"),
    ({"backend": "coreml"}, (H100,), {}, Cause.BACKEND, "this loader runs no engine of coreml on sm90"),
    ({"backend": "onnxruntime", "architecture": "npu9"}, (), {}, Cause.BACKEND, "of onnxruntime on npu9"),
]


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_keeps_an_engine_from_being_tried(manifest, monkeypatch, case):
    changes, gpus, libraries, cause, said = case
    host(monkeypatch, *gpus, **libraries)
    made = entry(manifest, "engine", **{"architecture": "sm90", "version": "10.9", **changes})
    found = obstacle(made, Part.WHOLE, is_trusted=True)
    assert (None if found is None else found.cause) == cause
    assert found is None or said in found.reason


@pytest.mark.parametrize(
    ("here", "runs"), [(("amx_int8", "avx512_vnni"), True), (("i8mm",), False), ((), False)]
)
def test_an_engine_of_integers_runs_on_its_instructions_only(manifest, monkeypatch, here, runs):
    monkeypatch.setattr(loading, "integer_instructions", lambda: here)
    needed = (Requirement(INSTRUCTIONS, Need.EXACTLY, "avx512_vnni"),)
    cpu = {"backend": "onnxruntime", "architecture": "cpu", "target": "cpu"}
    found = obstacle(entry(manifest, "int8", requires=needed, **cpu), Part.WHOLE, is_trusted=False)
    assert (found is None) == runs
    assert found is None or (found.cause is Cause.DEVICE and "avx512_vnni" in found.reason)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of `open_io_binding`."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(spec, "open_io_binding", lambda *arguments: asked.append(arguments))
    return asked


def untrusted(backend: str, architecture: str) -> Any:
    return SimpleNamespace(
        id="e", backend=backend, architecture=architecture, version="1.31.1", path="engine.onnx"
    )


def open_entry(bundle: Path, entry: Any, options: SessionOptions | None) -> None:
    """As the runtime opens an engine."""
    get_spec(entry.backend).open(bundle / entry.path, entry.architecture, entry.version, options)


def test_a_graph_on_cuda_is_data(opened, tmp_path):
    cuda = untrusted("onnxruntime", "sm90")
    assert not is_program(cuda)
    open_entry(tmp_path, cuda, SessionOptions(threads=3))
    open_entry(tmp_path, cuda, None)
    asked = (tmp_path / "engine.onnx", "onnxruntime", "sm90", "1.31.1")
    assert opened == [(*asked, 3), (*asked, 0)]


@pytest.mark.parametrize(
    ("backend", "architecture"), [("onnxruntime_tensorrt", "sm90"), ("onnxruntime", "gfx942")]
)
def test_what_a_provider_compiled_is_a_program(backend, architecture, opened, tmp_path):
    compiled = untrusted(backend, architecture)
    found = obstacle(compiled, Part.WHOLE, is_trusted=False)
    assert found is not None and found.cause is Cause.UNTRUSTED
    assert f"engine of {backend} on {architecture} is a program" in found.reason
    assert "`trust=True`" in found.reason
    open_entry(tmp_path, compiled, None)
    assert opened == [(tmp_path / "engine.onnx", backend, architecture, "1.31.1", 0)]
