"""The order in which engines are tried, and why one is not tried at all; nothing is opened for that."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sample_run import SampleRun

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.manifest import INSTRUCTIONS, EngineEntry, Manifest, Need, Requirement
from loka_onnx.core.rewrite import Part
from loka_onnx.engines.onnxruntime import providers
from loka_onnx.runtime import Cause, selection
from loka_onnx.runtime.selection import in_order, obstacle
from loka_onnx.sessions import backends, cuda, host_devices
from loka_onnx.sessions.cuda import CudaDevice

ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'loka-onnx[cpu]'")


@pytest.fixture(scope="module")
def manifest(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return verify_bundle(write_bundle(sample.contents, tmp_path_factory.mktemp("order") / "bundle"))


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


def ids(entries: Sequence[EngineEntry]) -> list[str]:
    return [each.id for each in entries]


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
    assert ids(in_order(manifest, engines)) == [
        "h100-second",
        "h100-third",
        "h200",
        "cpu",
        "cpu-second",
        "cpu-old",
        manifest.fallback.id,
    ]


@pytest.mark.parametrize(
    ("changes", "gpus", "libraries", "cause", "said"),
    [
        ({"backend": "tensorrt"}, (H100,), {"tensorrt": "10.9"}, None, ""),
        (
            {"backend": "tensorrt"},
            (H100,),
            {"tensorrt": "10.8"},
            Cause.VERSION,
            "built by another version of TensorRT: by 10.9, this host has 10.8",
        ),
        (
            {"backend": "tensorrt"},
            (("RTX 4090", "sm89"),),
            {"tensorrt": "10.9"},
            Cause.DEVICE,
            "cannot run here: the engine is for sm90 and this host has RTX 4090 (sm89)",
        ),
        (
            {"backend": "tensorrt"},
            (),
            {},
            Cause.LIBRARY,
            "TensorRT is not installed; pip install 'loka-onnx[tensorrt]'; cannot run here: the engine is "
            "for sm90 and this host has no NVIDIA GPU",
        ),
        ({"backend": "inductor", "version": "2.13.0+cu130"}, (H100,), {"torch": "2.13.1"}, None, ""),
        (
            {"backend": "inductor", "version": "2.12.0"},
            (H100,),
            {"torch": "2.13.1"},
            Cause.VERSION,
            "built by another version of PyTorch: by 2.12.0, this host has 2.13.1",
        ),
        (
            {"backend": "onnxruntime"},
            (H100,),
            {},
            Cause.DEVICE,
            "this build of ONNX Runtime has no CUDAExecutionProvider",
        ),
        (
            {"backend": "coreml"},
            (H100,),
            {},
            Cause.BACKEND,
            "this loader runs no engine of coreml on sm90",
        ),
        (
            {"backend": "onnxruntime", "architecture": "npu9"},
            (),
            {},
            Cause.BACKEND,
            "this loader runs no engine of onnxruntime on npu9",
        ),
    ],
)
def test_what_keeps_an_engine_from_being_tried(  # noqa: PLR0917 — a table of cases
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    gpus: tuple[tuple[str, str], ...],
    libraries: dict[str, str],
    cause: Cause | None,
    said: str,
) -> None:
    host(monkeypatch, *gpus, **libraries)
    made = entry(manifest, "engine", **{"architecture": "sm90", "version": "10.9", **changes})
    found = obstacle(made, Part.WHOLE, is_trusted=True)
    assert (None if found is None else found.cause) == cause
    assert found is None or said in found.reason


@pytest.mark.parametrize(
    ("here", "runs"), [(("amx_int8", "avx512_vnni"), True), (("i8mm",), False), ((), False)]
)
def test_an_engine_of_integers_runs_on_its_instructions_only(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, here: tuple[str, ...], runs: bool
) -> None:
    monkeypatch.setattr(selection, "integer_instructions", lambda: here)
    needed = (Requirement(INSTRUCTIONS, Need.EXACTLY, "avx512_vnni"),)
    cpu = {"backend": "onnxruntime", "architecture": "cpu", "target": "cpu"}
    found = obstacle(entry(manifest, "int8", requires=needed, **cpu), Part.WHOLE, is_trusted=False)
    assert (found is None) == runs
    assert found is None or (found.cause is Cause.DEVICE and "avx512_vnni" in found.reason)
