"""CUDA calls, and inputs and outputs in device memory, with stand-ins for the driver."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda_driver import FakeDriver
from test_bound_session import batch, expected, settings, write
from test_tensorrt_session import RANGE, FakeEngine, fake_trt

from loka_onnx.engines.onnxruntime.io_binding_session import IoBindingSession
from loka_onnx.engines.onnxruntime.providers import PROVIDERS
from loka_onnx.engines.tensorrt.session import TensorRtSession
from loka_onnx.errors import EngineError, InternalError
from loka_onnx.sessions import cuda
from loka_onnx.sessions.cuda import CudaContext, list_cuda_devices
from loka_onnx.sessions.dlpack import CUDA, Borrowed, borrow
from loka_onnx.sessions.onnx_session import OnnxSession


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver(("RTX 5090", 12, 0), ("NVIDIA H100", 9, 0))
    monkeypatch.setattr(cuda, "_load_library", lambda: made)
    return made


@pytest.fixture(params=["double", pytest.param("device", marks=pytest.mark.gpu)])
def context(request: pytest.FixtureRequest) -> Iterator[CudaContext]:
    if request.param == "double":
        request.getfixturevalue("driver")
    elif not list_cuda_devices():
        pytest.skip("needs a GPU: no CUDA device here")
    made = CudaContext()
    yield made
    made.close()


def send(context: CudaContext, name: str, values: np.ndarray) -> None:
    context.reserve(name, values.nbytes)
    np.copyto(context.staging(name, values.shape, values.dtype), values)
    context.upload(name, values.nbytes)


def test_devices_are_listed(driver):
    assert [(d.index, d.name, d.architecture) for d in list_cuda_devices()] == [
        (0, "RTX 5090", "sm120"),
        (1, "NVIDIA H100", "sm90"),
    ]


def test_an_empty_batch_is_no_copy(context):
    send(context, "x", np.zeros((0, 4), np.float32))
    context.download("x", 0)
    context.synchronize()
    assert context.staging("x", (0, 4), np.float32).shape == (0, 4)


def test_buffers_stay_until_a_larger_batch(context):
    first = context.reserve("x", 1000)
    context.staging("x", (250,), np.float32)
    moves = context.moves
    assert context.reserve("x", 10) == first
    context.staging("x", (2,), np.float32)
    assert context.moves == moves
    context.reserve("x", 2000)
    assert context.moves == moves + 1


def test_a_graph_repeats_what_was_queued_on_what_is_there_then(context):
    values = np.arange(6, dtype=np.int32)
    send(context, "x", values)
    context.synchronize()

    def there_and_back() -> None:
        context.upload("x", values.nbytes)
        context.download("x", values.nbytes)

    graph = context.capture(there_and_back)
    staging = context.staging("x", values.shape, values.dtype)
    for number in (10, 20):
        staging[:] = values + number
        graph.launch()
        context.synchronize()
        np.testing.assert_array_equal(staging, values + number)
    graph.close()


def test_what_cannot_be_captured_leaves_the_stream_usable(context):
    with pytest.raises(EngineError, match="the CUDA driver failed in cuStreamSynchronize"):
        context.capture(context.synchronize)
    values = np.arange(3.0)
    send(context, "x", values)
    context.synchronize()
    context.capture(lambda: context.download("x", values.nbytes)).close()


def test_closing_frees_everything(driver):
    context = CudaContext(1)
    send(context, "x", np.ones(4))
    context.reserve("y", 8)
    context.reserve("y", 80)
    context.capture(lambda: context.upload("x", 8)).close()
    context.close()
    assert driver.buffers == {}
    assert driver.graphs == {}
    assert (driver.calls[0], driver.calls[-1]) == ("retain 1", "release")


def on_device(array: np.ndarray) -> Borrowed:
    """An array of the host that passes for one of the device."""
    return Borrowed(array.ctypes.data, array.shape, array.dtype, CUDA, 0, None, array)


def allocate(shape: tuple[int, ...], dtype: Any) -> Borrowed:
    return on_device(np.full(shape, -1, dtype))


class AnyAddress(FakeDriver):
    """Takes addresses that other libraries allocated."""

    def allocated(self, address: int, size: int) -> bool:
        return True


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 3), (3, 4), (1, 16), (5, 64), (2, 3)])
def test_rows_are_padded_with_the_last_one_in_few_copies(rows, size, monkeypatch):
    driver = AnyAddress()
    monkeypatch.setattr(cuda, "_load_library", lambda: driver)
    source, target = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3), np.full((size + 1, 3), -1.0, "f")
    context = CudaContext()
    context.copy_padded(target.ctypes.data, source.ctypes.data, 12, rows, size)
    np.testing.assert_array_equal(target[:rows], source)
    np.testing.assert_array_equal(target[rows:size], np.broadcast_to(source[-1], (size - rows, 3)))
    assert (target[size] == -1).all()
    assert driver.calls.count("copy") <= 1 + (size - rows + 1).bit_length()
    context.close()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    made = FakeEngine(RANGE, ((4, 2),) * 3)
    made.driver = AnyAddress()
    monkeypatch.setattr(cuda, "_load_library", lambda: made.driver)
    return made


@pytest.fixture
def tensorrt(engine: FakeEngine, tmp_path: Path) -> TensorRtSession:
    (tmp_path / "engine.trt").write_bytes(b"engine")
    return TensorRtSession(fake_trt(engine), tmp_path / "engine.trt")


def test_tensorrt_reads_and_writes_the_device_and_captures_the_engine_alone(engine, tensorrt):
    assert (tensorrt.device, tensorrt.stream) == (0, 7)
    for count in (4, 4, 3, 9, 4, 8, 5, 4):
        held = np.random.default_rng(count).normal(size=(count, 2)).astype(np.float32)
        answer = tensorrt.run_on_device({"x": on_device(held)}, allocate)["out"]
        assert answer.shape == (count, 2)
        np.testing.assert_array_equal(answer.source, held * 2)
        # What lies on the host is answered as before, in between.
        np.testing.assert_array_equal(tensorrt.run({"x": held})["out"], held * 2)
    assert engine.driver.calls.count("launch") > 0
    # Rows 3 and 5 ran in the programs of 4 and 8.
    assert {rows for _, rows in engine.executions} == {4, 8, 9}
    tensorrt.close()
    assert engine.driver.graphs == {}
    assert engine.driver.buffers == {}


def test_tensorrt_does_not_convert_on_the_device(tensorrt):
    with pytest.raises(EngineError, match=r"'x'(?s:.*)float64 on the device(?s:.*)host"):
        tensorrt.run_on_device({"x": on_device(np.zeros((4, 2)))}, allocate)


@pytest.mark.parametrize(
    ("count", "compiles", "rows"),
    [
        # Padding 1 to 4 would be too much, and 20 is more than any size: bound where they lie.
        *((count, False, rows) for count, rows in ((4, 4), (3, 4), (1, 1), (20, 20))),
        # A provider that compiles sees no other size; of `ran` the first piece's is given.
        *((count, True, rows) for count, rows in ((1, 4), (20, 16), (40, 16))),
    ],
)
def test_onnx_runtime_fills_its_buffers_on_the_device(count, compiles, rows, tmp_path, monkeypatch):
    monkeypatch.setitem(PROVIDERS, "cpu", replace(PROVIDERS["cpu"], compiles=compiles))  # type: ignore[arg-type]
    driver = AnyAddress()
    monkeypatch.setattr(cuda, "_load_library", lambda: driver)
    with IoBindingSession(write(tmp_path), settings()) as session:
        # The CPU's provider has its buffers in host memory, which here passes for the device's.
        assert session.device is None
        for seed in range(3):
            held = batch(count, seed)
            answer = session.run_on_device({n: on_device(value) for n, value in held.items()}, allocate)
            np.testing.assert_allclose(answer["y"].source, expected(held), rtol=1e-6)
            assert answer["y"].shape == (count,)
        assert answer["ran"].source[0] == rows
        assert session.stream == 7
    assert "release" in driver.calls


def test_onnx_runtime_says_its_device_and_does_not_convert_there(tmp_path, monkeypatch):
    with IoBindingSession(write(tmp_path), settings()) as session:
        held = batch(2)
        held["ids"] = held["ids"].astype(np.int32)
        with pytest.raises(EngineError, match=r"input 'ids' has another type(?s:.*)int32 on the device"):
            session.run_on_device({n: on_device(value) for n, value in held.items()}, allocate)
        assert session.device is None
    monkeypatch.setitem(PROVIDERS, "cpu", replace(PROVIDERS["cpu"], memory="cuda"))
    with IoBindingSession(write(tmp_path), settings(sizes=())) as session:
        assert session.device == 0


@pytest.mark.parametrize("engine", ["DYNAMIC", "STATIC"])
@pytest.mark.parametrize("count", [1, 3, 4, 16, 21, 40])
def test_graphs_of_inductor_are_fed_and_read_on_the_device(engine, count):
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")
    import inductor_programs as inductor

    session, _ = inductor.on_gpu(getattr(inductor, engine))
    request = inductor.request
    held = request(count)
    expected = session.run(held)

    def make(shape: tuple[int, ...], dtype: Any) -> Borrowed:
        return borrow(torch.full(shape, -1, dtype=getattr(torch, dtype.name)))

    # A stand-in of the GPU has host memory: what is borrowed is of the host as well.
    given = {name: torch.from_numpy(value.copy()) for name, value in held.items()}
    first = session.run_on_device({name: borrow(value) for name, value in given.items()}, make)
    kept = {name: value.source.clone() for name, value in first.items()}
    session.run_on_device({n: borrow(torch.from_numpy(v)) for n, v in request(count, seed=9).items()}, make)
    for name, value in expected.items():
        np.testing.assert_array_equal(first[name].source.numpy(), value)
        # The next request did not write into it.
        torch.testing.assert_close(first[name].source, kept[name])


def test_other_sessions_take_rows_from_the_host(tmp_path):
    with OnnxSession(write(tmp_path)) as session:
        assert (session.device, session.stream, session.served_sizes) == (None, 0, ())
        with pytest.raises(InternalError, match="OnnxSession takes rows from the host"):
            session.run_on_device({}, allocate)
    with pytest.raises(EngineError, match="the session is closed"):
        session.run({"x": np.zeros((1, 3), np.float32), "ids": np.zeros(1, np.int64)})
