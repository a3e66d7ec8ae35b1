"""Which engine of a bundle is opened, and which one answers a request."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sample_run import SampleRun

from loka_onnx.bundle.writer import BundleContents, write_bundle
from loka_onnx.core.evaluation import Choice, Route
from loka_onnx.core.manifest import INSTRUCTIONS, EngineEntry, Manifest, Need, Requirement
from loka_onnx.core.rewrite import Part
from loka_onnx.engines.onnxruntime import providers, spec
from loka_onnx.errors import EngineError
from loka_onnx.runtime import Cause, Engine, load, loading
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
    assert runs or (found.cause is Cause.DEVICE and "avx512_vnni" in found.reason)


@pytest.mark.parametrize(
    ("backend", "architecture", "is_data"),
    [
        ("onnxruntime", "sm90", True),
        ("onnxruntime_tensorrt", "sm90", False),
        ("onnxruntime", "gfx942", False),
    ],
)
def test_a_graph_on_cuda_is_data_and_what_a_provider_compiled_is_a_program(
    monkeypatch, tmp_path, backend, architecture, is_data
):
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(spec, "open_io_binding", lambda *arguments: asked.append(arguments))
    entry = SimpleNamespace(
        id="e", backend=backend, architecture=architecture, version="1.31.1", path="engine.onnx"
    )
    assert is_program(entry) is not is_data
    if not is_data:
        found = obstacle(entry, Part.WHOLE, is_trusted=False)
        assert found.cause is Cause.UNTRUSTED
        assert f"engine of {backend} on {architecture} is a program" in found.reason
        assert "`trust=True`" in found.reason
    for options, threads in ((SessionOptions(threads=3), 3), (None, 0)):
        get_spec(backend).open(tmp_path / entry.path, architecture, entry.version, options)
        assert asked.pop() == (tmp_path / "engine.onnx", backend, architecture, "1.31.1", threads)


FP32, FP8 = 1, 2
"""Places of two engines for this host among those of the sample; they answer differently."""


def routed(
    contents: BundleContents, *routes: tuple[int, int], places: tuple[int, ...] = (FP32, FP8)
) -> BundleContents:
    """The contents with the engines of these places, the first one main, and routes of (rows, place)."""
    artifacts = [engine.artifact for engine in contents.engines]
    table = tuple(Route(rows, artifacts[place].id, artifacts[place].plan) for rows, place in routes)
    main = artifacts[places[0]]
    choice = replace(
        contents.choice.targets[0], target=main.target, engine=main.id, plan=main.plan, routes=table
    )
    engines = tuple(contents.engines[place] for place in places)
    return replace(contents, engines=engines, choice=Choice((choice,)))


@pytest.fixture(scope="module")
def bundle(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    contents = routed(sample.contents, (4, FP32), (64, FP8))
    return write_bundle(contents, tmp_path_factory.mktemp("routed") / "bundle")


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((count, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("count", "place"), [(1, FP32), (4, FP32), (5, FP8), (64, FP8), (65, FP8), (300, FP8)]
)
def test_a_request_goes_to_the_engine_of_the_next_size(sample, bundle, tmp_path, count, place):
    alone = replace(sample.contents, engines=(sample.contents.engines[place],))
    expected = load(write_bundle(alone, tmp_path / "alone")).infer({"dense": rows(count)})["ctr"]
    got = load(bundle).infer({"dense": rows(count)})["ctr"]
    np.testing.assert_array_equal(got, expected)


def test_health_sees_the_engine_behind_a_route(sample, bundle, monkeypatch):
    engine = load(bundle)
    (other,) = engine._others
    wrong = np.full((8, 1), np.nan, np.float32)
    monkeypatch.setattr(other._runner, "run", lambda inputs: {"ctr": wrong})
    health = engine.health()
    assert not health.ready
    assert health.detail.startswith(f"engine '{other.entry.id}': output 'ctr' is off by nan")


def test_sizes_of_an_engine_that_does_not_run_here_stay_with_the_main_one(sample, tmp_path):
    gpu = 0
    contents = routed(sample.contents, (4, gpu), (64, FP32), places=(FP32, gpu))
    engine = load(write_bundle(contents, tmp_path / "bundle"))
    assert engine.health().routes == {}
    assert [skipped.engine for skipped in engine.skipped] == [sample.contents.engines[gpu].artifact.id]
    assert engine.infer({"dense": rows(2)})["ctr"].shape == (2, 1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Engines that were made, loaded or not."""
    seen: list[Engine] = []
    monkeypatch.setattr(loading, "Engine", lambda *arguments: seen.append(Engine(*arguments)) or seen[-1])
    return seen


@pytest.fixture
def two_sizes(sample: SampleRun, tmp_path: Path) -> Path:
    """16 rows go to FP32, the main one, and 300 to FP8."""
    return write_bundle(routed(sample.contents, (16, FP32), (300, FP8)), tmp_path / "bundle")


@pytest.mark.parametrize("error", [EngineError, RuntimeError])
def test_an_engine_that_fails_at_the_size_of_its_route_loses_it(sample, two_sizes, made, sessions, error):
    sessions.fail_at(300, "fp8-safe", error)
    with load(two_sizes) as engine:
        fp32, fp8 = (sample.contents.engines[each].artifact.id for each in (FP32, FP8))
        health = engine.health()
        assert (health.ready, health.engine, health.routes) == (True, fp32, {})
        # What went to the other one has run on this one instead.
        assert health.warm == (16, 300)
        (skipped,) = health.skipped
        assert (skipped.engine, skipped.cause) == (fp8, Cause.SELF_TEST)
        assert skipped.reason.startswith("300 rows: ")
        assert engine.infer({"dense": np.zeros((300, 16), np.float32)})["ctr"].shape == (300, 1)
        assert [each.entry.id for each in made if not each._gate.is_closed] == [fp32]


def test_a_main_engine_that_fails_at_its_route_is_passed_over(sample, two_sizes, made, sessions):
    sessions.fail_at(16, "fp32", EngineError)
    with load(two_sizes) as engine:
        assert engine.entry.id == sample.contents.engines[FP8].artifact.id
        assert engine.health().ready
        assert [each for each in made if not each._gate.is_closed] == [engine]


def test_what_stops_loading_frees_the_engines_that_are_open(two_sizes, made, sessions):
    sessions.fail_at(300, "fp8-safe", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        load(two_sizes)
    assert [each._gate.is_closed for each in made] == [True, True]
