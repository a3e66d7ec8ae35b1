"""A run beside engine makers that crash, hang, eat memory and are killed emits the right engine."""

import importlib
import os
import signal
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

import loka_onnx
from loka_onnx.core.engine import BuildStatus
from loka_onnx.engines import registry
from loka_onnx.engines.base import Backend
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend
from loka_onnx.pipeline.run import run

pytestmark = pytest.mark.slow

SECONDS, GB = 12.0, 0.9
BUILT_BY_CHILDREN = True


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # The child processes of builds find it there as well.
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "contract")
    return importlib.import_module("faulty_backends")


def register(monkeypatch: pytest.MonkeyPatch, faults: dict[str, type[Backend]]) -> None:
    """Put faulty makers in the place of others, under their names."""
    own = OnnxRuntimeBackend().provider
    for name, kind in faults.items():
        monkeypatch.setattr(kind, "name", name)
        monkeypatch.setattr(kind, "provider", lambda self, architecture: own(architecture))
    makers = {OnnxRuntimeBackend.spec.name: OnnxRuntimeBackend, **faults}
    monkeypatch.setattr(registry, "maker_of", makers.__getitem__)


def kill_when_told(place: Path) -> threading.Thread:
    """As an operator, or the kernel, would: SIGKILL to a build that is under way."""

    def wait_and_kill() -> None:
        deadline = time.monotonic() + 120
        while not place.is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(int(place.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    return thread


def test_the_run_emits_what_it_emits_without_them(place, finished, faulty, monkeypatch):
    faults: dict[str, type[Backend]] = {
        "tensorrt": faulty.Segfaults,
        "tensorrt_rtx": faulty.Hangs,
        "migraphx": faulty.Allocates,
        "inductor": faulty.TellsAndHangs,
    }
    register(monkeypatch, faults)
    place.write_run_file(
        # Mods depend on the format, and `finished` has plans in FP8.
        plan={"plans": ["fp32"], "formats": ["fp8"]},
        # The good one last: nothing that went wrong before may reach it.
        targets=[{"device": "cpu", "backends": [*faults, "onnxruntime"]}],
        build={"timeout_seconds": SECONDS, "memory_gb": GB, "parallel": 3, "cache_gb": 0},
    )
    killer = kill_when_told(place.output / "engines" / "worker")
    result = run(place.run_file)
    killer.join()
    engines = {engine.backend: engine for engine in result.report.engines}
    assert list(engines) == [*faults, "onnxruntime"], "the order of the run file"
    for name in faults:
        assert engines[name].status is BuildStatus.FAILED
    assert "died of SIGSEGV" in engines["tensorrt"].detail
    assert f"ended at the time limit of {SECONDS:g} s" in engines["tensorrt_rtx"].detail
    assert "ended at the memory limit of 858 MiB" in engines["migraphx"].detail
    assert "while compiling" in engines["inductor"].detail
    assert "died of SIGKILL" in engines["inductor"].detail

    (choice,) = result.choice.targets
    assert choice.engine == "cpu-onnxruntime-cpu-fp32"
    (undisturbed,) = [e for e in (finished.report.engines if finished.report else ()) if e.plan == "fp32"]
    assert engines["onnxruntime"].digest == undisturbed.digest
    loka_onnx.verify_bundle(result.bundle)
    assert {entry.reason.split(":")[0] for entry in choice.losers} == {"failed"}
    # Nothing is left behind of the builds that came to nothing.
    left = {path.name for path in (place.output / "engines").iterdir()} - {"worker"}
    logs = {f"cpu-{name}-cpu-fp32.log" for name in engines}
    assert left == {*logs, "cpu-onnxruntime-cpu-fp32"}
