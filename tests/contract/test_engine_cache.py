"""Engines are taken from the cache where everything they depend on is the same, and from nowhere else."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import faulty_backends as faulty
import numpy as np
import pytest
from tiny_models import MlpShape, TinyModel, mlp, request_for, write_sample

from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.engines import cache as cache_module
from loka_onnx.engines.cache import EngineCache, cache_key
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend
from loka_onnx.engines.request import BuildLimits, BuildRequest
from loka_onnx.errors import OutputError
from loka_onnx.sessions import host_devices
from loka_onnx.sessions.cuda import CudaDevice

GB = 10**9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return mlp(tmp_path_factory.mktemp("model"), Precision.FP32, Precision.FP32, fp8=False)


class Counting(OnnxRuntimeBackend):
    """Counts what is really built, in this process."""

    def __init__(self) -> None:
        self.built = 0

    def build(self, request: BuildRequest) -> EngineArtifact:
        self.built += 1
        return super().build(request)


class Fake(Counting):
    """Leaves an engine of some bytes without a child process: what is tested is the cache."""

    size = 1000

    def build(self, request: BuildRequest) -> EngineArtifact:
        self.built += 1
        request.output.mkdir(parents=True, exist_ok=True)
        (request.output / "engine.onnx").write_bytes(bytes([self.built]) * self.size)
        plain = self.failed_artifact(request.plan, request.target, request.architecture, "", 2.5)
        path = (request.output / "engine.onnx").relative_to(request.relative_to or request.output)
        return replace(plain, status=BuildStatus.READY, path=path, bytes=self.size, digest="d")


def test_the_second_build_of_the_same_is_a_copy_of_the_first(model, tmp_path):
    backend, cache = Counting(), EngineCache(tmp_path / "cache", GB)
    request = replace(request_for(model, tmp_path / "run/engines/a"), relative_to=tmp_path / "run")
    first = cache.build(backend, request)
    assert (first.status, first.detail, backend.built) == (BuildStatus.READY, "", 1)
    other = replace(request, output=tmp_path / "other/engines/b", relative_to=tmp_path / "other")
    again = cache.build(backend, other)
    assert backend.built == 1
    assert again.path == Path("engines/b/engine.onnx")
    built = f"{first.build_seconds:.1f} s"
    assert again.detail.startswith(f"taken from the engine cache, built there in {built} on 20")
    assert replace(again, path=first.path, detail="") == first
    with backend.open(again, tmp_path / "other" / again.path) as runner, np.load(model.sample) as sample:
        assert runner.run({"x": sample["x"]})["out"].shape[0] == 16
    assert "taken from the engine cache" in (tmp_path / "other/engines/b.log").read_text()
    # A copy: what a user does to the one is not done to the other.
    entry = next((tmp_path / "cache").glob("*/*/engine/engine.onnx"))
    assert entry.stat().st_ino != (tmp_path / "other" / again.path).stat().st_ino


def test_equal_builds_at_the_same_time_are_one(model, tmp_path):
    """As of a plan that quantizes nothing, and the plan in its base precision."""

    class Slow(Fake):
        def build(self, request: BuildRequest) -> EngineArtifact:
            time.sleep(0.2)
            return super().build(request)

    backend, plan = Slow(), request_for(model, tmp_path).plan
    names = ("bf16", "fp8-safe")
    requests = [replace(request_for(model, tmp_path / name), plan=replace(plan, id=name)) for name in names]
    with ThreadPoolExecutor(2) as pool:
        cache = EngineCache(tmp_path / "cache", GB)
        built = list(pool.map(lambda request: cache.build(backend, request), requests))
    assert backend.built == 1
    assert tuple(engine.plan for engine in built) == names
    assert sum("engine cache" in engine.detail for engine in built) == 1
    assert all((tmp_path / name / "engine.onnx").is_file() for name in names)


def test_everything_that_a_build_depends_on_is_in_the_key(model, tmp_path):
    backend, request = OnnxRuntimeBackend(), request_for(model, tmp_path / "engine")

    def key(**changes: object) -> str:
        return cache_key(backend, replace(request, **changes))

    reworded = tuple(replace(decision, reason="said otherwise") for decision in model.plan.decisions)
    assert key(output=tmp_path, relative_to=tmp_path, limits=BuildLimits(1.0, 5), target="here") == key()
    assert key(plan=replace(model.plan, id="other", decisions=reworded)) == key()
    external = mlp(tmp_path / "m", Precision.FP32, Precision.FP32, fp8=False, shape=MlpShape(external=True))
    weights = external.path.with_name("model.onnx.data")
    before = key(model=external.path)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert key(model=external.path) != before
    assert cache_key(faulty.Raises(), request) != key()
    others: dict[str, tuple[object, ...]] = {
        "plan": (replace(model.plan, base=Precision.BF16),),
        "sites": (model.sites[:1],),
        "batch": (BatchSizes(1, 8, 32), BatchSizes(1, 8, 16, (8, 16))),
        "options": ({"level": 3},),
        "sample": (write_sample(tmp_path / "other.npz", {"x": (64,)}, rows=9),),
        "architecture": ("sm90",),
    }
    for what, values in others.items():
        assert key() not in {key(**{what: value}) for value in values}, what


def test_version_and_devices_are_in_the_key(model, tmp_path, monkeypatch):
    backend, request = OnnxRuntimeBackend(), request_for(model, tmp_path / "engine")
    known = backend.availability()
    keys = {cache_key(backend, request)}
    monkeypatch.setattr(backend, "availability", lambda: replace(known, version="0.0.1"))
    keys.add(cache_key(backend, request))
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        # Of one architecture: an engine of one loads on the other, with kernels that were timed on the one.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_devices, "list_cuda_devices", lambda name=name: (CudaDevice(0, name, "sm90"),))
            keys.add(cache_key(backend, replace(request, architecture="sm90")))
    with pytest.MonkeyPatch.context() as patch:
        # Compiled code holds instructions of the processor, and hosts may share a cache.
        patch.setattr(cache_module, "instruction_sets", lambda: {"sse2"})
        keys.add(cache_key(backend, request))
    # Not run here: what an engine does when it runs is not known of it.
    monkeypatch.setattr(backend, "why_not_run", lambda architecture: "no GPU")
    keys.add(cache_key(backend, request))
    assert len(keys) == 6


@pytest.mark.parametrize("harm", ["altered", "extra", "missing", "document"])
def test_an_entry_that_is_not_whole_is_built_again(model, tmp_path, harm):
    backend, cache = Fake(), EngineCache(tmp_path / "cache", GB)
    cache.build(backend, request_for(model, tmp_path / "a"))
    (entry,) = cache.entries()
    file = entry / "engine" / "engine.onnx"
    if harm == "altered":
        file.write_bytes(b"\x09" + file.read_bytes()[1:])
    elif harm == "extra":
        (entry / "engine" / "more").touch()
    elif harm == "missing":
        file.unlink()
    else:
        (entry / "entry.json").write_text("{}")
    again = cache.build(backend, request_for(model, tmp_path / "b"))
    assert (backend.built, again.detail) == (2, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "cache"]
    # What was built took the place of what was not whole.
    third = cache.build(backend, request_for(model, tmp_path / "c"))
    assert backend.built == 2 and "engine cache" in third.detail
    assert (tmp_path / "c/engine.onnx").read_bytes() == b"\x02" * Fake.size


def test_what_was_not_used_for_longest_goes_first(model, tmp_path):
    backend, cache = Fake(), EngineCache(tmp_path / "cache", 12_000)
    requests = [request_for(model, tmp_path / "e", batch=BatchSizes(1, 8, 16 + i)) for i in range(4)]

    def hits() -> list[bool]:
        held = {entry.name for entry in cache.entries()}
        return [cache_key(backend, request) in held for request in requests]

    cache.build(backend, requests[0])
    size = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    cache.limit_bytes = int(2.5 * size)
    cache.build(backend, requests[1])
    for entry in cache.entries():
        os.utime(entry / "entry.json", (1, 1))
    cache.build(backend, requests[0])  # a hit: used last
    assert hits() == [True, True, False, False]
    cache.build(backend, requests[2])
    assert hits() == [True, False, True, False]
    assert backend.built == 3
    # An engine larger than the whole cache drives nothing out.
    backend.size = 100 * size
    cache.build(backend, requests[3])
    assert hits() == [True, False, True, False]


@pytest.mark.slow
def test_nothing_is_kept_at_size_0_nor_of_a_failure_and_remarks_are(model, tmp_path):
    backend = Fake()
    for _ in range(2):
        EngineCache(tmp_path / "cache", 0).build(backend, request_for(model, tmp_path / "a"))
    assert backend.built == 2
    failed = EngineCache(tmp_path / "cache", GB).build(faulty.Raises(), request_for(model, tmp_path / "b"))
    assert failed.status is BuildStatus.FAILED
    assert not (tmp_path / "cache").exists()
    backend, cache = faulty.LeavesOut(), EngineCache(tmp_path / "cache", GB)
    for name in ("built", "taken"):
        found = cache.build(backend, request_for(model, tmp_path / name))
        assert found.status is BuildStatus.READY
        assert found.remarks == ("left out: the norm at 'n', which is too wide",)
    assert "taken from the engine cache" in found.detail


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_entry(model, tmp_path):
    (tmp_path / "file").touch()
    request = request_for(model, tmp_path / "a")
    built = EngineCache(tmp_path / "file" / "cache", GB).build(Fake(), request)
    assert built.status is BuildStatus.READY
    place = tmp_path / "file" / "cache"
    said = (
        f"the engine cache '{place}' cannot be written ([Errno 20] Not a directory: '{place}'): correct its"
    )
    assert built.detail.startswith(said)


@pytest.mark.parametrize("file", ["entry.json", "engine/engine.onnx"])
def test_an_entry_that_cannot_be_read_costs_a_build_and_stays(model, tmp_path, file):
    backend, cache = Fake(), EngineCache(tmp_path / "cache", GB)
    cache.build(backend, request_for(model, tmp_path / "a"))
    (entry,) = cache.entries()
    (entry / file).unlink()
    # A file that opens and whose first byte cannot be read (EIO), for root as well.
    (entry / file).symlink_to("/proc/self/mem")
    again = cache.build(backend, request_for(model, tmp_path / "b"))
    assert (again.status, backend.built) == (BuildStatus.READY, 2)
    assert f"the engine cache '{tmp_path / 'cache'}' cannot be read ([Errno 5]" in again.detail
    assert (tmp_path / "b/engine.onnx").read_bytes() == b"\x02" * Fake.size
    assert entry.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "cache"]


def test_a_place_that_takes_no_copy_is_an_error(model, tmp_path, monkeypatch):
    backend, cache = Fake(), EngineCache(tmp_path / "cache", GB)
    cache.build(backend, request_for(model, tmp_path / "a"))
    opened = Path.open

    def full(self: Path, mode: str = "r", **how: object) -> object:
        return opened(Path("/dev/full") if mode == "wb" else self, mode, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OutputError, match=r"engine\.onnx'(?s:.*)No space left on device(?s:.*)make room"):
        cache.build(backend, request_for(model, tmp_path / "b"))
    # Nothing is wrong with the entry.
    assert len(cache.entries()) == 1


def test_what_killed_processes_left_is_removed(model, tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    cache = EngineCache(tmp_path / "cache", GB)
    host = os.uname().nodename
    left = tmp_path / "cache" / f".entry.building-{host}@{gone.pid}-x"
    mine = tmp_path / "cache" / f".entry.building-{host}@{os.getpid()}-x"
    foreign = tmp_path / "cache" / ".entry.building-elsewhere@1-x"
    for place in (left, mine, foreign):
        place.mkdir(parents=True)
    cache.build(Fake(), request_for(model, tmp_path / "a"))
    assert [place.exists() for place in (left, mine, foreign)] == [False, True, True]


@pytest.mark.slow
def test_processes_that_build_keep_and_evict_at_once_always_get_whole_engines(model, tmp_path):
    """Four processes over three engines in a cache with room for two."""
    code = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
import test_engine_cache as t
from tiny_models import mlp
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
here, cache = Path(sys.argv[2]), t.EngineCache(Path(sys.argv[3]), 12_000)
here.mkdir()
model = mlp(here / "m", Precision.FP32, Precision.FP32, fp8=False)
backend = t.Fake()
backend.size = 3000
for i in range(60):
    request = replace(t.request_for(model, here / "e"), batch=BatchSizes(1, 8, 16 + i % 3))
    found = cache.build(backend, request)
    content = (here / "e/engine.onnx").read_bytes()
    assert len(content) == 3000 and len(set(content)) == 1, i
print(backend.built)
"""
    root = Path(__file__).parent
    call, pipe = [sys.executable, "-c", code, str(root)], subprocess.PIPE
    places = ([str(tmp_path / str(i)), str(tmp_path / "cache")] for i in range(4))
    processes = [subprocess.Popen([*call, *p], stdout=pipe, stderr=pipe, text=True) for p in places]
    ended = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, ended
    assert any(int(out) < 60 for out, _ in ended), "nothing was ever taken from the cache"
    left = [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]
    assert left == []
    shutil.rmtree(tmp_path / "cache")
