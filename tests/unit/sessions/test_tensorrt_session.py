"""What the session asks of the vendor module and the driver; neither a GPU nor the module is needed.

The driver is a double in host memory, and the engine reads and writes the addresses that it was given: what
the session returns has been through every copy.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda_driver import STREAM, FakeDriver

from loka_onnx.engines.tensorrt.session import TensorRtSession, open_engine
from loka_onnx.engines.tensorrt.spec import TENSORRT, TENSORRT_RTX, TensorRtSpec
from loka_onnx.errors import EngineError, MissingPackage
from loka_onnx.sessions import cuda

RANGE = ((1, 2), (8, 2), (16, 2))


class FakeContext:
    """An execution context that doubles ``x`` of two columns, in the batches of its profile."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.profile = engine, 0
        self.addresses: dict[str, int] = {}
        self.changes = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream == STREAM
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.profiles[self.profile]
        self.shape = shape
        self.changes += 1
        return least[0] <= shape[0] <= most[0] and shape[1:] == least[1:]

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address
        self.changes += 1

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == STREAM
        count, x, out = int(np.prod(self.shape)), self.addresses["x"], self.addresses["out"]
        driver = self.engine.driver
        assert driver.allocated(x, 4 * count)
        assert driver.allocated(out, 4 * count)
        self.engine.executions.append((self.profile, self.shape[0]))

        def double() -> None:
            source = np.frombuffer((ctypes.c_float * count).from_address(x), np.float32)
            np.frombuffer((ctypes.c_float * count).from_address(out), np.float32)[:] = 2 * source

        if self.engine.synchronizes:
            driver.cuStreamSynchronize(stream)
        driver.queue(double)
        return self.engine.works


class FakeEngine:
    """An engine with a profile for every size, and others behind it."""

    num_io_tensors = 2

    def __init__(self, *profiles: Any) -> None:
        self.driver = FakeDriver()
        self.profiles = profiles or (RANGE,)
        self.num_optimization_profiles = len(self.profiles)
        self.contexts: list[FakeContext] = []
        self.executions: list[tuple[int, int]] = []
        self.works, self.synchronizes, self.kind = True, False, "FLOAT"

    def get_tensor_name(self, index: int) -> str:
        return ("x", "out")[index]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name == "x" else "out"

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=self.kind)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 2)

    def get_tensor_profile_shape(self, name: str, profile: int) -> Any:
        return list(self.profiles[profile])

    def create_execution_context(self) -> FakeContext:
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]


def fake_trt(engine: FakeEngine | None, name: str = "tensorrt_rtx") -> SimpleNamespace:
    class Logger:
        WARNING = 2

        def __init__(self, severity: int) -> None:
            assert severity == self.WARNING

    return SimpleNamespace(
        __name__=name,
        __version__="1.7.1",
        Logger=Logger,
        Runtime=lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda data: engine),
        TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.trt"
    path.write_bytes(b"engine")
    return path


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    made = FakeEngine(RANGE, ((4, 2),) * 3)
    monkeypatch.setattr(cuda, "_load_library", lambda: made.driver)
    return made


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    """A host with a Blackwell GPU, then an Ada one, and the libraries."""
    engine.driver.devices = (("RTX 5090", 12, 0), ("RTX 4090", 8, 9))
    monkeypatch.setattr(TensorRtSpec, "load_library", lambda self: fake_trt(engine, self.modules[0]))


@pytest.fixture
def session(engine: FakeEngine, file: Path) -> Iterator[TensorRtSession]:
    with TensorRtSession(fake_trt(engine), file) as made:
        yield made
    assert (engine.driver.buffers, engine.driver.graphs) == ({}, {}), "everything is freed"


def rows(count: int, start: float = 0.0) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": start + np.arange(2.0 * count).reshape(count, 2)}


def check(session: TensorRtSession, count: int, start: float = 0.0) -> None:
    np.testing.assert_array_equal(session.run(rows(count, start))["out"], rows(count, start)["x"] * 2)


def test_a_served_size_runs_in_its_own_profile(engine, session):
    assert session.served_sizes == (4, 8)
    first = session.run(rows(4))["out"]
    for count in (5, 8, 16, 4):
        check(session, count, 100.0)
    # What was returned is not overwritten by the next batch; rows came in FP64.
    np.testing.assert_array_equal(first, rows(4)["x"] * 2)
    assert first.dtype == np.float32
    # Five rows are padded to the next served size.
    assert engine.executions == [(1, 4), (0, 8), (0, 8), (0, 16), (1, 4)]


def test_a_served_size_is_captured_the_second_time(engine, session):
    for start in (0.0, 10.0, 20.0, 30.0):
        check(session, 4, start)
    # Once as it is, once captured; the graph then runs without the engine being asked.
    assert engine.executions == [(1, 4), (1, 4)]
    assert engine.driver.calls.count("launch") == 3
    for _ in range(3):
        session.run(rows(9))
    assert engine.driver.calls.count("launch") == 3


def test_each_captured_size_has_a_context_that_nothing_else_changes(engine, session):
    for count in (16, *(4, 8) * 3):
        session.run(rows(count))
    changes = [context.changes for context in engine.contexts]
    for count in (16, 4, 5, 8, 1):
        session.run(rows(count))
    assert len(changes) == 3
    assert [context.changes for context in engine.contexts[1:]] == changes[1:]


def test_a_graph_is_captured_again_when_a_buffer_has_moved(engine, session):
    for _ in range(3):
        session.run(rows(4))
    launches = engine.driver.calls.count("launch")
    session.run(rows(16))
    for start in (0.0, 10.0, 20.0):
        check(session, 4, start)
    assert engine.driver.calls.count("launch") == launches + 2


def test_an_engine_that_cannot_be_captured_runs_without(engine, session, caplog):
    engine.synchronizes = True
    with caplog.at_level(logging.WARNING, "loka_onnx.sessions"):
        for start in (0.0, 10.0, 20.0):
            check(session, 4, start)
    assert "launch" not in engine.driver.calls
    assert len(caplog.records) == 1
    assert "run without a CUDA graph" in caplog.text


def test_every_thread_makes_the_context_current(engine, session):
    before = engine.driver.calls.count("current")
    threads = [threading.Thread(target=session.run, args=(rows(1),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.driver.calls.count("current") == before + 2


@pytest.mark.parametrize("shape", [(4, 3), (17, 2)])
def test_a_batch_outside_the_profile_is_refused(session, shape):
    session.run(rows(4))
    with pytest.raises(EngineError, match=rf"'x' is outside(?s:.*)\({shape[0]}, {shape[1]}\)"):
        session.run({"x": np.ones(shape)})
    for _ in range(3):
        check(session, 4)


def test_a_failed_execution_is_an_error(engine, session):
    engine.works = False
    with pytest.raises(EngineError, match="the engine failed on a batch"):
        session.run(rows(1))


@pytest.mark.parametrize(("loads", "said"), [(False, "does not load"), (True, "'x' has type BF16")])
def test_an_engine_that_does_not_fit_leaves_nothing_open(engine, file, loads, said):
    engine.kind = "BF16"
    with pytest.raises(EngineError, match=said):
        TensorRtSession(fake_trt(engine if loads else None), file)
    assert engine.driver.calls[-1] == "release"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("spec", [TENSORRT, TENSORRT_RTX], ids=lambda spec: spec.name)
def test_another_version_or_architecture_is_refused(engine, file, spec):
    said = rf"another version of {spec.title}\n(?s:.*)install {spec.package} 1\.5"
    with pytest.raises(EngineError, match=said):
        open_engine(spec, file, "sm89", "1.5")
    with pytest.raises(EngineError, match=r"sm86 and this host has RTX 5090 \(sm120\), RTX 4090 \(sm89\)"):
        open_engine(spec, file, "sm86", "1.7.1")
    assert not engine.contexts
    open_engine(spec, file, "sm89", "1.7.1")
    assert engine.driver.calls[0] == "retain 1"


@pytest.mark.parametrize("count", [4, 9])
def test_a_resident_batch_runs_without_being_handed_over(engine, session, count):
    resident = session.resident(rows(count))
    copies, executions = engine.driver.calls.count("copy"), len(engine.executions)
    for _ in range(3):
        resident()
    assert engine.driver.calls.count("copy") == copies
    # A size that is served is a graph by then.
    assert engine.driver.calls.count("launch") == (3 if count == 4 else 0)
    assert len(engine.executions) - executions == (0 if count == 4 else 3)
    for start in (0.0, 10.0, 20.0):
        check(session, count, start)


def test_a_directory_of_that_name_is_not_the_library(monkeypatch, tmp_path):
    (tmp_path / "tensorrt").mkdir()
    monkeypatch.delitem(__import__("sys").modules, "tensorrt", raising=False)
    monkeypatch.setattr(__import__("sys"), "path", [str(tmp_path)])
    with pytest.raises(MissingPackage, match=rf"TensorRT is not installed(?s:.*){tmp_path}/tensorrt"):
        TENSORRT.load_library()
