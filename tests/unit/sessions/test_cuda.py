"""Buffers, copies and graphs through the CUDA driver: on a double in host memory, and on a real GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fake_cuda_driver import FakeDriver

from loka_onnx.errors import EngineError
from loka_onnx.sessions import cuda
from loka_onnx.sessions.cuda import CudaContext, list_cuda_devices


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


def test_devices_are_listed(driver: FakeDriver) -> None:
    assert [(d.index, d.name, d.architecture) for d in list_cuda_devices()] == [
        (0, "RTX 5090", "sm120"),
        (1, "NVIDIA H100", "sm90"),
    ]


def test_values_come_back_from_the_device(context: CudaContext) -> None:
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    send(context, "x", values)
    staging = context.staging("x", values.shape, values.dtype)
    context.synchronize()
    staging[:] = 0
    context.download("x", values.nbytes)
    context.synchronize()
    np.testing.assert_array_equal(staging, values)


def test_an_empty_batch_is_no_copy(context: CudaContext) -> None:
    send(context, "x", np.zeros((0, 4), np.float32))
    context.download("x", 0)
    context.synchronize()
    assert context.staging("x", (0, 4), np.float32).shape == (0, 4)


def test_buffers_stay_until_a_larger_batch(context: CudaContext) -> None:
    first = context.reserve("x", 1000)
    context.staging("x", (250,), np.float32)
    moves = context.moves
    assert context.reserve("x", 10) == first
    context.staging("x", (2,), np.float32)
    assert context.moves == moves
    context.reserve("x", 2000)
    assert context.moves == moves + 1


def test_a_graph_repeats_what_was_queued_on_what_is_there_then(context: CudaContext) -> None:
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


def test_what_cannot_be_captured_leaves_the_stream_usable(context: CudaContext) -> None:
    with pytest.raises(EngineError, match="the CUDA driver failed in cuStreamSynchronize"):
        context.capture(context.synchronize)
    values = np.arange(3.0)
    send(context, "x", values)
    context.synchronize()
    context.capture(lambda: context.download("x", values.nbytes)).close()


def test_closing_frees_everything(driver: FakeDriver) -> None:
    context = CudaContext(1)
    send(context, "x", np.ones(4))
    context.reserve("y", 8)
    context.reserve("y", 80)
    context.capture(lambda: context.upload("x", 8)).close()
    context.close()
    assert driver.buffers == {}
    assert driver.graphs == {}
    assert (driver.calls[0], driver.calls[-1]) == ("retain 1", "release")
