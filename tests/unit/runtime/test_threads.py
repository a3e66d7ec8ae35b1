"""Many threads get what one gets, from every kind of session; closing waits for whoever is inside."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from cut_models import cut_contents, request
from onnx_text import parsed

from loka_onnx.bundle.format.files import Sample
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core import serde
from loka_onnx.engines.migraphx import session as migraphx
from loka_onnx.engines.onnxruntime.io_binding_session import IoBindingSession
from loka_onnx.engines.onnxruntime.io_binding_settings import IoBindingSettings
from loka_onnx.engines.tensorrt.session import TensorRtSession
from loka_onnx.errors import EngineError
from loka_onnx.runtime import Engine, load
from loka_onnx.sessions import cuda
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.sessions.runner import Runner

ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'loka-onnx[cpu]'")

THREADS, REQUESTS = 16, 12
SIZES = (4, 16)
# Each session doubles `x` (rows, 2).


def write_model(folder: Path) -> Path:
    model = parsed("out = Add(x, x)", inputs="float[b,2] x", outputs="float[b,2] out")
    onnx.save(model, folder / "engine.onnx")
    return folder / "engine.onnx"


def exclusive(call: Callable[..., Any]) -> Callable[..., Any]:
    """A program that serves one thread at a time."""
    busy = threading.Lock()

    def then(*arguments: Any) -> Any:
        assert busy.acquire(blocking=False), "two threads are in one program"
        try:
            time.sleep(0)  # Others get their turn.
            return call(*arguments)
        finally:
            busy.release()

    return then


def on_onnxruntime(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return OnnxSession(write_model(folder))


def on_fixed_buffers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return IoBindingSession(write_model(folder), IoBindingSettings("cpu", str(ort.__version__), sizes=SIZES))


def on_inductor(folder: Path, monkeypatch: pytest.MonkeyPatch, *, gpu: bool = False) -> Runner:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")
    from inductor_programs import DYNAMIC, StandInGpu

    from loka_onnx.engines.inductor.executors import GraphExecutor, HostExecutor
    from loka_onnx.engines.inductor.session import InductorSession

    engine = replace(DYNAMIC, inputs=DYNAMIC.inputs[:1], outputs=DYNAMIC.outputs[:1])
    calls = {"rows": exclusive(lambda inputs: [2 * inputs.pop()])}
    if not gpu:
        return InductorSession(engine, HostExecutor(torch, engine, calls))
    return InductorSession(engine, GraphExecutor(torch, engine, calls, StandInGpu()))  # type: ignore[arg-type]


def on_inductor_graphs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return on_inductor(folder, monkeypatch, gpu=True)


def on_tensorrt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """The session, with a driver and an engine that work in host memory."""
    from test_tensorrt_session import FakeEngine, fake_trt

    engine = FakeEngine(((1, 2), (8, 2), (64, 2)), *(((size, 2),) * 3 for size in SIZES))
    monkeypatch.setattr(cuda, "_load_library", lambda: engine.driver)
    (folder / "engine.trt").write_bytes(b"engine")
    return TensorRtSession(fake_trt(engine), folder / "engine.trt")


def on_migraphx(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    def compiled(path: str) -> SimpleNamespace:
        lens = [int(Path(path).stem), 2]
        shape = SimpleNamespace(type_string=lambda: "float_type", lens=lambda: lens)
        return SimpleNamespace(
            is_compiled=lambda: True,
            get_parameter_shapes=lambda: {"x": shape},
            run=exclusive(lambda arguments: [2 * arguments["x"]]),
        )

    module = SimpleNamespace(
        __version__="2.15.0", parse_onnx=None, load=compiled, argument=lambda array: array
    )
    programs = tuple(migraphx.ProgramFile(size, f"{size}.mxr") for size in SIZES)
    ports = (migraphx.ProgramInput("x", "float32", (2,)),), (migraphx.ProgramOutput("out", True),)
    document = migraphx.MigraphxEngine("gfx942", "2.15.0", programs, *ports)
    serde.write(document, folder / "engine.json")
    return migraphx.MigraphxSession(module, folder / "engine.json", document)


RUNNERS = (on_onnxruntime, on_fixed_buffers, on_inductor, on_inductor_graphs, on_tensorrt, on_migraphx)


@pytest.mark.parametrize("make", RUNNERS, ids=lambda make: make.__name__)
def test_sixteen_threads_get_what_one_gets(make, tmp_path, monkeypatch):
    # Sizes that are served, that are padded, that run as they come, and that take several programs.
    counts = [1 + number * 7 % 64 for number in range(THREADS * REQUESTS)]
    asked = [np.random.default_rng(n).normal(size=(n, 2)).astype(np.float32) for n in counts]
    began = threading.Barrier(THREADS)
    with make(tmp_path, monkeypatch) as runner:

        def work(thread: int) -> list[np.ndarray]:
            began.wait()
            return [runner.run({"x": each})["out"] for each in asked[thread::THREADS]]

        with ThreadPoolExecutor(THREADS) as pool:
            answers = list(pool.map(work, range(THREADS)))
    # Compared only now: an answer must not have changed after it was given.
    for thread, given in enumerate(answers):
        for each, answer in zip(asked[thread::THREADS], given, strict=True):
            np.testing.assert_array_equal(answer, 2 * each)


def test_a_cut_model_is_looked_up_in_many_threads_and_all_are_counted(sample, tmp_path):
    engine = load(write_bundle(cut_contents(sample, tmp_path / "run"), tmp_path / "bundle"))
    asked = [request(1 + number % 9, seed=number) for number in range(64)]
    expected = [engine.infer(each)["ctr"] for each in asked]
    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(lambda each: engine.infer(each)["ctr"], asked))
    for answer, alone in zip(answers, expected, strict=True):
        np.testing.assert_array_equal(answer, alone)
    now = engine.metrics.snapshot()
    assert (now.requests, now.rows) == (2 * 64, 2 * sum(len(each["x"]) for each in asked))
    assert sum(now.errors.values()) == 0


class Slow(Runner):
    """Answers when it is told to; notes whether it was closed in between."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()
        self.closed, self.ran_after_close = 0, False

    def run(self, inputs: Any) -> Any:
        self.started.set()
        assert self.go.wait(10)
        self.ran_after_close |= bool(self.closed)
        return {"ctr": inputs["dense"][:, :1]}

    def close(self) -> None:
        self.closed += 1


def test_closing_waits_for_requests_and_refuses_new_ones(manifest):
    runner, asked = Slow(), {"dense": np.ones((2, 16), np.float32)}
    engine = Engine(manifest, manifest.engines[1], runner, Sample(asked, {"ctr": asked["dense"][:, :1]}))
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(engine.infer, asked) for _ in range(2)]
        assert runner.started.wait(10)
        while engine.metrics.snapshot().running < 2:
            time.sleep(0.001)
        closing = pool.submit(engine.close)
        while not engine._gate.is_closed:
            time.sleep(0.001)
        with pytest.raises(EngineError, match=r"the engine is closed\n.*load the bundle again"):
            engine.infer(asked)
        assert not closing.done()
        assert runner.closed == 0
        runner.go.set()
        for each in running:
            np.testing.assert_array_equal(each.result(10)["ctr"], np.ones((2, 1)))
        closing.result(10)
    engine.close()
    assert (runner.closed, runner.ran_after_close) == (1, False)
    assert engine.metrics.snapshot().errors["closed"] == 1
