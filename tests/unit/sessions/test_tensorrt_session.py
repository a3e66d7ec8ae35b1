"""What the session asks of the vendor module and the driver; neither a GPU nor the module is needed."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loka_onnx.errors import EngineError, MissingPackage
from loka_onnx.sessions import tensorrt_session
from loka_onnx.sessions.cuda import CudaDevice
from loka_onnx.sessions.tensorrt_session import TensorRtSession, open_tensorrt_rtx

LARGEST_BATCH = 8


class FakeCuda:
    """Device buffers in host memory; keeps the calls that were made."""

    def __init__(self, device: int) -> None:
        self.device, self.stream = device, 7
        self.buffers: dict[str, Any] = {}
        self.calls: list[str] = []
        self.threads: list[int] = []

    def activate(self) -> None:
        self.threads.append(threading.get_ident())

    def upload(self, name: str, array: np.ndarray[Any, Any]) -> int:
        self.buffers[name] = array
        return 1

    def reserve(self, name: str, size: int) -> int:
        self.buffers[name] = size
        return 2

    def download(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        assert self.buffers[name] == int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.asarray(self.buffers["x"] * 2, dtype).reshape(shape)

    def close(self) -> None:
        self.calls.append("close")


class FakeContext:
    """An execution context that doubles ``x``, for at most `LARGEST_BATCH` rows."""

    works = True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return shape[0] <= LARGEST_BATCH

    def set_tensor_address(self, name: str, address: int) -> None:
        assert address

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == 7
        return self.works


class FakeEngine:
    num_io_tensors = 2

    def __init__(self) -> None:
        self.context = FakeContext()

    def get_tensor_name(self, index: int) -> str:
        return ("x", "out")[index]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name == "x" else "out"

    def get_tensor_dtype(self, name: str) -> str:
        return "float32"

    def create_execution_context(self) -> FakeContext:
        return self.context


def fake_trt(engine: FakeEngine | None) -> SimpleNamespace:
    class Logger:
        WARNING = 2

        def __init__(self, severity: int) -> None:
            assert severity == self.WARNING

    return SimpleNamespace(
        __name__="tensorrt_rtx",
        __version__="1.7.1",
        Logger=Logger,
        Runtime=lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda data: engine),
        TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"),
        nptype=np.dtype,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.trt"
    path.write_bytes(b"engine")
    return path


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[FakeCuda]:
    made: list[FakeCuda] = []

    def make(device: int) -> FakeCuda:
        made.append(FakeCuda(device))
        return made[-1]

    monkeypatch.setattr(tensorrt_session, "CudaContext", make)
    return made


@pytest.fixture
def ada(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a Blackwell GPU, then an Ada one, and the library."""
    devices = (CudaDevice(0, "RTX 5090", "sm120"), CudaDevice(1, "RTX 4090", "sm89"))
    monkeypatch.setattr(tensorrt_session, "list_cuda_devices", lambda: devices)
    monkeypatch.setattr(tensorrt_session, "import_tensorrt_rtx", lambda: fake_trt(FakeEngine()))


def rows(count: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.arange(2.0 * count).reshape(count, 2)}


def test_a_batch_is_converted_run_and_fetched(cuda: list[FakeCuda], file: Path) -> None:
    with TensorRtSession(fake_trt(FakeEngine()), file) as session:
        answer = session.run(rows(3))
    np.testing.assert_array_equal(answer["out"], rows(3)["x"] * 2)
    assert answer["out"].dtype == np.float32
    assert cuda[0].buffers["x"].dtype == np.float32
    assert cuda[0].calls == ["close"]


def test_every_thread_makes_the_context_current(cuda: list[FakeCuda], file: Path) -> None:
    session = TensorRtSession(fake_trt(FakeEngine()), file)
    thread = threading.Thread(target=session.run, args=(rows(1),))
    thread.start()
    thread.join()
    session.run(rows(1))
    assert len(set(cuda[0].threads)) == 2


def test_a_batch_outside_the_profile_is_refused(cuda: list[FakeCuda], file: Path) -> None:
    session = TensorRtSession(fake_trt(FakeEngine()), file)
    with pytest.raises(EngineError, match=r"'x' is outside the engine's optimization profile(?s:.*)\(9, 2\)"):
        session.run(rows(LARGEST_BATCH + 1))


def test_a_failed_execution_is_an_error(cuda: list[FakeCuda], file: Path) -> None:
    engine = FakeEngine()
    engine.context.works = False
    with pytest.raises(EngineError, match="the engine failed on a batch"):
        TensorRtSession(fake_trt(engine), file).run(rows(1))


def test_an_engine_that_does_not_load_leaves_nothing_open(cuda: list[FakeCuda], file: Path) -> None:
    with pytest.raises(EngineError, match=r"does not load the engine(?s:.*)one GPU architecture"):
        TensorRtSession(fake_trt(None), file)
    assert cuda[0].calls == ["close"]


@pytest.mark.usefixtures("ada")
def test_the_gpu_of_the_architecture_is_chosen(cuda: list[FakeCuda], file: Path) -> None:
    open_tensorrt_rtx(file, "sm89", "1.7.1")
    assert cuda[0].device == 1


@pytest.mark.usefixtures("ada")
def test_another_version_or_architecture_is_refused(cuda: list[FakeCuda], file: Path) -> None:
    with pytest.raises(EngineError, match=r"built by 1\.5, this host has 1\.7\.1"):
        open_tensorrt_rtx(file, "sm89", "1.5")
    with pytest.raises(
        EngineError, match=r"for sm86 and this host has RTX 5090 \(sm120\), RTX 4090 \(sm89\)"
    ):
        open_tensorrt_rtx(file, "sm86", "1.7.1")
    assert not cuda


def test_a_missing_library_names_the_package(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_rtx", None)
    with pytest.raises(MissingPackage, match=r"pip install 'loka-onnx\[tensorrt-rtx\]'"):
        open_tensorrt_rtx(file, "sm89")
