"""Requests in arrays of other libraries: taken where they lie, answered in kind."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx_text import parsed
from sample_run import SampleRun

from loka_onnx.bundle.writer import BundleContents, BundleEngine, Expectation, write_bundle
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.digests import digest_file
from loka_onnx.errors import DataError
from loka_onnx.runtime import Engine, load, requests
from loka_onnx.sessions import dlpack
from loka_onnx.sessions.dlpack import CUDA, Borrowed
from loka_onnx.sessions.runner import Allocate, Arrays, Runner

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")


@pytest.fixture(scope="module")
def engine(original: Path) -> Iterator[Engine]:
    with load(original) as engine:
        yield engine


@pytest.fixture
def seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Arrays]:
    """What the backend was given."""
    given: list[Arrays] = []
    run = engine._runner.run

    def spy(inputs: Any) -> Arrays:
        given.append(dict(inputs))
        return run(inputs)

    monkeypatch.setattr(engine._runner, "run", spy)
    return given


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((count, 16)).astype(np.float32)


def test_a_tensor_is_read_where_it_lies_and_answered_by_tensors(engine, seen):
    tensor = torch.from_numpy(rows(5))
    expected = engine.infer({"dense": rows(5)})["ctr"]
    answer = engine.infer({"dense": tensor})["ctr"]
    assert seen[-1]["dense"].ctypes.data == tensor.data_ptr()
    assert isinstance(answer, torch.Tensor) and answer.device.type == "cpu"
    np.testing.assert_array_equal(answer.numpy(), expected)
    answer += 1  # it is the caller's own
    np.testing.assert_array_equal(engine.infer({"dense": tensor})["ctr"].numpy(), expected)


def test_an_engine_without_page_locked_memory_makes_arrays_that_it_reads_in_place(engine, seen):
    buffers = engine.buffers(5)
    buffers["dense"][:] = rows(5)
    np.testing.assert_array_equal(engine.infer(buffers)["ctr"], engine.infer({"dense": rows(5)})["ctr"])
    assert seen[0]["dense"] is buffers["dense"]
    like = engine.infer(buffers, like=torch.empty(0))["ctr"]
    np.testing.assert_array_equal(like.numpy(), engine.infer({"dense": rows(5)})["ctr"])
    with pytest.raises(DataError) as refused:
        engine.buffers(10**6)
    assert refused.value.code == "E1319"


def test_an_array_of_an_unknown_library_is_answered_by_numpy(engine, seen):
    class Foreign:
        """Speaks DLPack and nothing else."""

        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **named: Any) -> Any:
            return self.array.__dlpack__(**named)

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    held = rows(4)
    answer = engine.infer({"dense": Foreign(held)})["ctr"]
    assert type(answer) is np.ndarray
    assert seen[-1]["dense"].ctypes.data == held.ctypes.data
    np.testing.assert_array_equal(answer, engine.infer({"dense": held})["ctr"])


def strange(place: Any) -> Any:
    """An object that does not say where it lies."""

    def device(self: Any) -> Any:
        if isinstance(place, Exception):
            raise place
        return place

    return type("Strange", (), {"__dlpack_device__": device})()


ZEROS = torch.zeros(2, 16)
NOT_TAKEN = (
    (ZEROS.double(), r"float64\(2, 16\), the model takes float32\(None, 16\)"),
    (ZEROS[:, :3], r"float32\(2, 3\)"),
    (torch.zeros(2, 16).requires_grad_(), r"a Tensor cannot be read(?s:.*)detach it"),
    (ZEROS.tolist(), r"a list is no array(?s:.*)PyTorch, CuPy"),
    (ZEROS.bfloat16(), r"bfloat16\(2, 16\), the model takes float32"),
    (ZEROS.bfloat16().T, r"is not in C order(?s:.*)make it contiguous"),
    (ZEROS.to(torch.float8_e4m3fn), "cannot be read|has a type that NumPy lacks"),
    (np.ma.masked_array(rows(3), mask=rows(3) > 0), "an array is masked"),
    *((strange(place), "a Strange is no array") for place in ((1,), 5, ("a", 0), RuntimeError("boom"))),
)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        *(({"dense": array}, message) for array, message in NOT_TAKEN),
        *(
            (asked, "a request is a mapping of names to arrays")
            for asked in (None, 3, [rows(2)], "x", {"dense"}, rows(1))
        ),
    ],
)
def test_what_is_not_taken_says_why(engine, asked, message):
    for named in ({}, {"like": np.empty(0)}):
        with pytest.raises(DataError, match=message):
            engine.infer(asked, **named)


def brain_float(sample: SampleRun, root: Path) -> BundleContents:
    """A bundle of a model that takes BF16 and gives its squares."""
    model = parsed(
        "wide = Cast<to=1>(dense)  half = Mul(wide, wide)  ctr = Cast<to=16>(half)",
        inputs="bfloat16[b,16] dense",
        outputs="bfloat16[b,16] ctr",
    )
    known = sample.contents
    artifact = known.engines[1].artifact
    for path in (root / artifact.path, root / known.model.path):
        path.parent.mkdir(parents=True)
        onnx.save(model, path)
    digest, values = digest_file(path), known.sample["dense"].astype(ml_dtypes.bfloat16)
    squares = (values.astype(np.float32) ** 2).astype(ml_dtypes.bfloat16)
    outputs = Expectation({"ctr": squares}, {"ctr": 0.0})
    inputs, gives = (TensorSpec(name, "bfloat16", (None, 16)) for name in ("dense", "ctr"))
    return replace(
        known,
        root=root,
        model=replace(known.model, digest=digest, inputs=(inputs,), outputs=(gives,)),
        engines=(BundleEngine(replace(artifact, digest=digest, bytes=path.stat().st_size), outputs),),
        fallback=outputs,
        sample={"dense": values},
    )


def test_bf16_goes_in_and_comes_out():
    tensor = torch.arange(6.0).bfloat16().reshape(2, 3)
    array = dlpack.on_host(tensor)
    assert array.dtype == ml_dtypes.bfloat16
    assert array.ctypes.data == tensor.data_ptr()
    back = requests.to_kind(array * array, requests.kind_of(tensor))
    assert back.dtype == torch.bfloat16
    torch.testing.assert_close(back, tensor * tensor)
    # The view keeps what it looks at.
    pointer = dlpack.on_host(torch.full((1000,), 3.0).bfloat16())
    assert float(pointer.astype(np.float32).sum()) == 3000.0


def test_a_model_of_bf16_is_served(sample, tmp_path):
    place = write_bundle(brain_float(sample, tmp_path / "run"), tmp_path / "bundle")
    with load(place) as engine:
        tensor = torch.linspace(-3, 3, 32).bfloat16().reshape(2, 16)
        answer = engine.infer({"dense": tensor})["ctr"]
    torch.testing.assert_close(answer, tensor * tensor)


class OnDevice(torch.Tensor):
    """A tensor of the host that says it lies on a GPU, and notes for which streams it was borrowed."""

    is_cpu = False
    streams: list[Any] = []  # noqa: RUF012 — shared on purpose

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA, 0)

    def __dlpack__(self, *, stream: Any = None, **named: Any) -> Any:
        type(self).streams.append(stream)
        return self.as_subclass(torch.Tensor).__dlpack__()

    def cpu(self) -> Any:
        return self.as_subclass(torch.Tensor).clone()


class DeviceRunner(Runner):
    """Runs on "device memory": addresses of the host; gives twice its input's first column."""

    device, stream = 0, 77

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def run(self, inputs: Any) -> Arrays:
        return {"ctr": inputs["dense"][:, :1] * np.float32(2)}

    def run_on_device(self, inputs: Any, allocate: Allocate) -> dict[str, Borrowed]:
        given = inputs["dense"]
        self.addresses.append(given.address)
        made = allocate((given.shape[0], 1), given.dtype)
        source = np.frombuffer((ctypes.c_float * (given.nbytes // 4)).from_address(given.address), np.float32)
        target = np.frombuffer((ctypes.c_float * given.shape[0]).from_address(made.address), np.float32)
        target[:] = 2 * source.reshape(given.shape)[:, 0]
        return {"ctr": made}


@pytest.fixture
def on_device(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> DeviceRunner:
    runner = DeviceRunner()
    monkeypatch.setattr(engine, "_runner", runner)
    OnDevice.streams.clear()

    def empty(shape: Any, dtype: Any, device: str) -> Any:
        assert device == "cuda:0"
        return torch.empty(shape, dtype=dtype).as_subclass(OnDevice)

    stand_in = SimpleNamespace(empty=empty, float32=torch.float32)
    stand_in.device = lambda *place: torch.device("cpu")
    monkeypatch.setitem(requests.sys.modules, "torch", stand_in)  # type: ignore[arg-type]
    return runner


def test_a_request_on_the_device_stays_there(engine, on_device):
    tensor = torch.from_numpy(rows(3)).as_subclass(OnDevice)
    before = engine.metrics.snapshot()
    answer = engine.infer({"dense": tensor})["ctr"]
    assert on_device.addresses == [tensor.data_ptr()]
    assert isinstance(answer, OnDevice)
    np.testing.assert_array_equal(answer.as_subclass(torch.Tensor).numpy(), rows(3)[:, :1] * 2)
    # Both are ordered behind what their library has queued: input and output.
    assert OnDevice.streams == [77, 77]
    now = engine.metrics.snapshot()
    assert (now.requests - before.requests, now.host_copies - before.host_copies) == (1, 0)
    # It is checked like any.
    with pytest.raises(DataError, match=r"float32\(3, 4\), the model takes"):
        engine.infer({"dense": torch.zeros(3, 4).as_subclass(OnDevice)})
    assert len(on_device.addresses) == 1


def test_an_engine_of_the_host_gets_a_copy_which_is_counted(engine, on_device, monkeypatch):
    monkeypatch.setattr(on_device, "device", None, raising=False)
    before = engine.metrics.snapshot().host_copies
    answer = engine.infer({"dense": torch.from_numpy(rows(3)).as_subclass(OnDevice)}, like=np.empty(0))["ctr"]
    assert type(answer) is np.ndarray
    np.testing.assert_array_equal(answer, rows(3)[:, :1] * 2)
    assert on_device.addresses == []
    assert engine.metrics.snapshot().host_copies == before + 1
