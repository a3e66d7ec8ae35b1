"""An engine maker may crash, hang, eat memory or be killed: the candidate fails, the run goes on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import faulty_backends as faulty
import psutil
import pytest
from tiny_models import TinyModel, mlp, request_for

from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.engines.isolation import interrupts_held
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend
from loka_onnx.engines.request import BuildLimits
from loka_onnx.errors import ConfigError, EngineError, ModelError

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return mlp(tmp_path_factory.mktemp("model"), Precision.FP32, Precision.FP32, fp8=False)


COMPILING = "while compiling"
FAULTS = {
    faulty.Segfaults: (COMPILING, "died of SIGSEGV (segmentation fault)", "in compile"),
    faulty.Raises: (COMPILING, "no tactic for node 'mlp.fc0'", "evidence: workspace 0", "remedy: give"),
    faulty.IsKilled: (COMPILING, "died of SIGKILL (killed)", "memory runs out"),
    faulty.Exits: (COMPILING, "exited with code 7", "the vendor library says goodbye"),
    faulty.ExitsAsIfDone: (COMPILING, "left no valid response"),
    faulty.RaisesForeign: (COMPILING, "RuntimeError: Myelin pass.cpp:1500"),
    faulty.SegfaultsInFirstBatch: ("while running the first batches", "SIGSEGV"),
    faulty.MisreadsPrecision: ("while reading the precision", "ValueError: compiled graph in an unknown"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "said"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_a_faulty_engine_maker_fails_its_candidate_alone(backend, said, model, tmp_path):
    artifact = backend().build(request_for(model, tmp_path / "engine"))
    assert (artifact.status, artifact.path, artifact.bytes) == (BuildStatus.FAILED, None, 0)
    assert all(text in artifact.detail for text in said), artifact.detail
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.log"]
    if backend is faulty.Segfaults:
        again = OnnxRuntimeBackend().build(request_for(model, tmp_path / "engine"))
        assert again.status is BuildStatus.READY


def test_a_hang_ends_at_the_time_limit(model, tmp_path):
    started = time.monotonic()
    artifact = faulty.Hangs().build(
        request_for(model, tmp_path / "engine", limits=BuildLimits(1.5, 2048 * MIB))
    )
    assert time.monotonic() - started < 15
    assert artifact.status is BuildStatus.FAILED
    assert "ended at the time limit of 1.5 s" in artifact.detail
    assert "raise `build.timeout_seconds`" in artifact.detail
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.log"]


@pytest.mark.slow
def test_the_process_group_ends_with_the_build(model, tmp_path):
    artifact = faulty.LeavesChild().build(request_for(model, tmp_path / "engine"))
    assert artifact.status is BuildStatus.FAILED
    grandchild = int((tmp_path / "grandchild").read_text(encoding="utf-8"))
    _wait_for(lambda: not _is_alive(grandchild))


@pytest.mark.slow
def test_a_killed_run_leaves_no_build_and_its_remains_are_removed(model, tmp_path):
    request = request_for(model, tmp_path / "engine", limits=BuildLimits(600.0, 2048 * MIB))
    serde.write(request, tmp_path / "request.json")
    code = (
        "import sys; from pathlib import Path; import faulty_backends as f; from loka_onnx.core import serde;"
        "from loka_onnx.engines.request import BuildRequest;"
        "f.TellsAndHangs().build(serde.read(BuildRequest, Path(sys.argv[1])))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", code, str(tmp_path / "request.json")]
    with subprocess.Popen(command, env=environment) as run:
        _wait_for((tmp_path / "worker").is_file)
        worker = int((tmp_path / "worker").read_text(encoding="utf-8"))
        assert _is_alive(worker)
        run.kill()
    _wait_for(lambda: not _is_alive(worker))
    assert len(list(tmp_path.glob(".engine.building-*"))) == 1
    assert OnnxRuntimeBackend().build(request).status is BuildStatus.READY
    assert list(tmp_path.glob(".engine.building-*")) == []


def _wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_memory_ends_at_the_limit(model, tmp_path):
    artifact = faulty.Allocates().build(
        request_for(model, tmp_path / "engine", limits=BuildLimits(60.0, 400 * MIB))
    )
    assert artifact.status is BuildStatus.FAILED
    assert "ended at the memory limit of 400 MiB" in artifact.detail
    assert "raise `build.memory_gb`" in artifact.detail


@pytest.mark.slow
def test_a_failed_rebuild_keeps_the_engine_before_it(model, tmp_path):
    request = request_for(model, tmp_path / "engine")
    first = OnnxRuntimeBackend().build(request)
    assert faulty.Segfaults().build(request).status is BuildStatus.FAILED
    with OnnxRuntimeBackend().open(first, tmp_path / "engine" / "engine.onnx"):
        pass
    second = OnnxRuntimeBackend().build(request)
    assert second.digest == first.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "engine.log"]


@pytest.mark.slow
def test_a_sample_below_the_smallest_batch_is_refused(model, tmp_path):
    request = request_for(model, tmp_path / "engine", batch=BatchSizes(64, 64, 64))
    artifact = OnnxRuntimeBackend().build(request)
    assert artifact.status is BuildStatus.FAILED
    assert "16 rows, the smallest batch has 64" in artifact.detail


def test_requests_that_make_no_sense_raise(model, tmp_path):
    backend, request = OnnxRuntimeBackend(), request_for(model, tmp_path / "engine")
    for what in ("model", "sample"):
        with pytest.raises(ModelError, match=f"the {what} to build from is missing"):
            backend.build(replace(request, **{what: tmp_path / "absent"}))
    with pytest.raises(ConfigError, match="has no architecture 'sm60'"):
        backend.build(replace(request, architecture="sm60"))
    where = f"options for target '{request.target}': backend 'onnxruntime' has no option 'speed'"
    with pytest.raises(ConfigError, match=rf"^{where}(?s:.*)cuda_graph \(0 to 1\)(?s:.*)leave it out"):
        backend.build(replace(request, options={"speed": 1}))
    with pytest.raises(ConfigError, match="1 <= min <= serve <= max"):
        BatchSizes(8, 4, 16)
    with pytest.raises(ConfigError, match="seconds 0"):
        BuildLimits(seconds=0)


def test_opening_refuses_what_was_not_built(model, tmp_path):
    backend = OnnxRuntimeBackend()
    artifact = backend.build(request_for(model, tmp_path / "engine"))
    engine = tmp_path / "engine" / "engine.onnx"
    for status in (BuildStatus.FAILED, BuildStatus.DECLINED):
        with pytest.raises(EngineError, match="no such engine to load"):
            backend.open(replace(artifact, status=status), engine)
    engine.write_bytes(engine.read_bytes() + b"\x00")
    with pytest.raises(EngineError, match="is not the one that was built"):
        backend.open(artifact, engine)
    with pytest.raises(EngineError, match="is missing"):
        backend.open(artifact, tmp_path / "absent")


def test_an_interrupt_waits_until_what_it_would_cut_in_two_is_whole():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        done.append("whole")
    assert done == ["whole"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
