"""Many threads get what one gets, from every kind of session; closing waits for whoever is inside."""

import ctypes
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.parser
import pytest
from cut_models import cut_contents, request
from fake_cuda_driver import FakeDriver

from loka_onnx.bundle.format.files import Sample
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core import serde
from loka_onnx.core.manifest import BatchRange, Manifest
from loka_onnx.engines.migraphx.session import (
    MigraphxEngine,
    MigraphxSession,
    ProgramFile,
    ProgramInput,
    ProgramOutput,
)
from loka_onnx.engines.onnxruntime.io_binding_session import IoBindingSession
from loka_onnx.engines.onnxruntime.io_binding_settings import IoBindingSettings
from loka_onnx.engines.tensorrt.session import TensorRtSession
from loka_onnx.errors import EngineError
from loka_onnx.runtime import Engine, load
from loka_onnx.sessions import cuda
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.sessions.runner import Runner

ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'loka-onnx[cpu]'")

THREADS, REQUESTS, WIDTH = 16, 12, 16
MODEL = (
    '<ir_version: 10, opset_import: ["" : 21]> g (float[b,16] dense) => (float[b,1] ctr)'
    " { axes = Constant<value = int64[1] {1}>()  ctr = ReduceSum<keepdims=1>(dense, axes) }"
)
SIZES = (4, 16, 64)


def rows(count: int, seed: int) -> np.ndarray:
    # Whole numbers: their sum is the same in every order.
    return np.random.default_rng([count, seed]).integers(-50, 50, (count, WIDTH)).astype(np.float32)


def write_model(folder: Path) -> Path:
    onnx.save(onnx.parser.parse_model(MODEL), folder / "engine.onnx")
    return folder / "engine.onnx"


def on_onnxruntime(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return OnnxSession(write_model(folder))


def on_fixed_buffers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return IoBindingSession(write_model(folder), IoBindingSettings("cpu", str(ort.__version__), sizes=SIZES))


def on_inductor(folder: Path, monkeypatch: pytest.MonkeyPatch, *, gpu: bool = False) -> Runner:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")
    from inductor_programs import StandInGpu

    from loka_onnx.engines.inductor.executors import GraphExecutor, HostExecutor
    from loka_onnx.engines.inductor.package import InductorEngine, InputPort, OutputPort, Program
    from loka_onnx.engines.inductor.session import InductorSession

    engine = InductorEngine(
        torch=str(torch.__version__),
        architecture="cpu",
        instruction_sets=(),
        inputs=(InputPort("dense", "float32", (WIDTH,)),),
        outputs=(OutputPort("ctr", True),),
        minimum=1,
        maximum=4096,
        sizes=SIZES,
        programs=(Program("rows", 1, 4096),),
    )
    busy = threading.Lock()

    def program(inputs: list[Any]) -> list[Any]:
        # The loaded library serves one thread at a time.
        assert busy.acquire(blocking=False), "two threads are in one program"
        try:
            (dense,) = inputs
            inputs.clear()
            return [dense.sum(dim=1, keepdim=True)]
        finally:
            busy.release()

    calls = {"rows": program}
    if not gpu:
        return InductorSession(engine, HostExecutor(torch, engine, calls))
    return InductorSession(engine, GraphExecutor(torch, engine, calls, StandInGpu()))  # type: ignore[arg-type]


def on_inductor_graphs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return on_inductor(folder, monkeypatch, gpu=True)


def on_tensorrt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """The session, with a driver and an engine that work in host memory."""
    from test_tensorrt_session import FakeContext, FakeEngine, fake_trt

    class SumContext(FakeContext):
        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            self.shape = shape
            return True

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return (self.shape[0], 1)

        def execute_async_v3(self, stream: int) -> bool:
            count, x, out = self.shape[0], self.addresses["x"], self.addresses["out"]

            def add() -> None:
                source = np.frombuffer((ctypes.c_float * (count * WIDTH)).from_address(x), np.float32)
                target = np.frombuffer((ctypes.c_float * count).from_address(out), np.float32)
                target[:] = source.reshape(count, WIDTH).sum(axis=1)

            self.engine.driver.queue(add)
            return True

    class SumEngine(FakeEngine):
        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return (-1, WIDTH) if name == "x" else (-1, 1)

        def create_execution_context(self) -> FakeContext:
            return SumContext(self)

    profiles = [((1, WIDTH), (64, WIDTH), (4096, WIDTH)), *(((size, WIDTH),) * 3 for size in (4, 16))]
    engine = SumEngine(*profiles)
    monkeypatch.setattr(cuda, "_load_library", lambda: engine.driver)
    file = folder / "engine.trt"
    file.write_bytes(b"engine")
    session = TensorRtSession(fake_trt(engine), file)

    class Renamed(Runner):
        """The engine's own names are shorter."""

        def run(self, inputs: Any) -> Any:
            return {"ctr": session.run({"x": inputs["dense"]})["out"]}

        def close(self) -> None:
            session.close()

    assert isinstance(engine.driver, FakeDriver)
    return Renamed()


def on_migraphx(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    class Program:
        def __init__(self, path: str) -> None:
            self.rows, self.busy = int(Path(path).stem), threading.Lock()

        def is_compiled(self) -> bool:
            return True

        def get_parameter_shapes(self) -> dict[str, Any]:
            lens = [self.rows, WIDTH]
            return {"dense": SimpleNamespace(type_string=lambda: "float_type", lens=lambda: lens)}

        def run(self, arguments: dict[str, np.ndarray]) -> list[np.ndarray]:
            assert self.busy.acquire(blocking=False), "two threads are in one program"
            try:
                return [arguments["dense"].sum(axis=1, keepdims=True)]
            finally:
                self.busy.release()

    module = SimpleNamespace(
        __version__="2.15.0", parse_onnx=None, load=Program, argument=lambda array: array
    )
    document = MigraphxEngine(
        "gfx942",
        "2.15.0",
        tuple(ProgramFile(size, f"{size}.mxr") for size in SIZES),
        (ProgramInput("dense", "float32", (WIDTH,)),),
        (ProgramOutput("ctr", True),),
    )
    serde.write(document, folder / "engine.json")
    return MigraphxSession(module, folder / "engine.json", document)


RUNNERS = (on_onnxruntime, on_fixed_buffers, on_inductor, on_inductor_graphs, on_tensorrt, on_migraphx)


def engine_on(manifest: Manifest, runner: Runner) -> Engine:
    entry = dataclasses.replace(manifest.engines[1], batch=BatchRange(1, 4096))
    held = rows(8, 0)
    return Engine(manifest, entry, runner, Sample({"dense": held}, {"ctr": held.sum(axis=1, keepdims=True)}))


@pytest.mark.parametrize("make", RUNNERS, ids=lambda make: make.__name__)
def test_sixteen_threads_get_what_one_gets(make, manifest, tmp_path, monkeypatch):
    engine = engine_on(manifest, make(tmp_path, monkeypatch))
    # Sizes that are served, that are padded, that run as they come, and that take several programs.
    asked = [rows(1 + (number * 7) % 70, number) for number in range(THREADS * REQUESTS)]
    began = threading.Barrier(THREADS)

    def work(thread: int) -> list[np.ndarray]:
        began.wait()
        return [engine.infer({"dense": each})["ctr"] for each in asked[thread::THREADS]]

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(work, range(THREADS)))
    # Compared only now: an answer must not have changed after it was given.
    for thread, given in enumerate(answers):
        for each, answer in zip(asked[thread::THREADS], given, strict=True):
            np.testing.assert_array_equal(answer, each.sum(axis=1, keepdims=True))
    now = engine.metrics.snapshot()
    assert (now.requests, now.rows) == (len(asked), sum(map(len, asked)))
    assert sum(now.errors.values()) == 0
    engine.close()


def test_a_cut_model_is_looked_up_in_many_threads(sample, tmp_path):
    engine = load(write_bundle(cut_contents(sample, tmp_path / "run"), tmp_path / "bundle"))
    asked = [request(1 + number % 9, seed=number) for number in range(64)]
    expected = [engine.infer(each)["ctr"] for each in asked]
    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(lambda each: engine.infer(each)["ctr"], asked))
    for answer, alone in zip(answers, expected, strict=True):
        np.testing.assert_array_equal(answer, alone)


class Slow(Runner):
    """Answers when it is told to; notes whether it was closed in between."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()
        self.closed, self.ran_after_close = 0, False

    def run(self, inputs: Any) -> Any:
        self.started.set()
        assert self.go.wait(10)
        self.ran_after_close |= bool(self.closed)
        return {"ctr": inputs["dense"].sum(axis=1, keepdims=True)}

    def close(self) -> None:
        self.closed += 1


def test_closing_waits_for_requests_and_refuses_new_ones(manifest):
    runner = Slow()
    engine = engine_on(manifest, runner)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(engine.infer, {"dense": rows(2, 1)}) for _ in range(2)]
        assert runner.started.wait(10)
        while engine.metrics.snapshot().running < 2:
            time.sleep(0.001)
        closing = pool.submit(engine.close)
        while not engine._gate.is_closed:
            time.sleep(0.001)
        with pytest.raises(EngineError, match=r"the engine is closed\n.*load the bundle again"):
            engine.infer({"dense": rows(2, 1)})
        assert not closing.done()
        assert runner.closed == 0
        runner.go.set()
        for each in running:
            np.testing.assert_array_equal(each.result(10)["ctr"], rows(2, 1).sum(axis=1, keepdims=True))
        closing.result(10)
    engine.close()
    assert (runner.closed, runner.ran_after_close) == (1, False)
    assert engine.metrics.snapshot().errors["closed"] == 1
