"""Programs as plain functions, and a stand-in for the GPU.

It keeps what a CUDA graph promises: fixed addresses in and out, and nothing but a replay in between.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loka_onnx.engines.inductor.executors import GraphExecutor, HostExecutor
from loka_onnx.engines.inductor.gpu import Captured
from loka_onnx.engines.inductor.package import InductorEngine, InputPort, OutputPort, Program
from loka_onnx.engines.inductor.session import InductorSession

torch = pytest.importorskip("torch", reason="needs torch")

DYNAMIC = InductorEngine(
    torch="2.13.0+cpu",
    architecture="cpu",
    instruction_sets=("avx2",),
    inputs=(InputPort("x", "float32", (2,)), InputPort("ids", "int64", ())),
    outputs=(OutputPort("out", True), OutputPort("version", False)),
    minimum=1,
    maximum=64,
    sizes=(4, 16),
    programs=(Program("rows", 1, 64),),
)
STATIC = replace(DYNAMIC, programs=(Program("rows4", 4, 4), Program("rows16", 16, 16)))


class Recording:
    """The program: ``out = x · 2 + ids``; keeps how many rows it saw, and the last ids."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.ids: list[int] = []

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        x, ids = inputs
        self.rows.append(len(x))
        self.ids = ids.tolist()
        inputs.clear()
        return [x * 2 + ids[:, None], torch.arange(3)]


class StandInGpu:
    """Replays by running the captured call on the addresses it was captured with."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.stream = 0
        self.calls: list[str] = []
        self.moved = 0

    def pinned(self, shape: Sequence[int], dtype: Any) -> Any:
        return torch.zeros(tuple(shape), dtype=dtype)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield

    def activate(self) -> None:
        self.calls.append("activate")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def copying(self, target: Any, source: Any) -> Any:
        assert target.dtype == source.dtype
        return self.moving(target, source)

    def moving(self, target: Any, source: Any) -> Any:
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert target.shape == source.shape
        self.moved += source.numel() * source.element_size()
        return lambda: target.copy_(source)

    def capture(self, call: Any, *, warm_ups: int) -> Captured:
        self.calls.append("capture")
        outputs = tuple(output.clone() for output in call())
        assert all(output.is_contiguous() for output in outputs)

        def replay() -> None:
            self.calls.append("replay")
            for output, value in zip(outputs, call(), strict=True):
                output.copy_(value)

        return Captured(replay, outputs, lambda: self.calls.append("reset"))

    def close(self) -> None:
        self.calls.append("close")


def request(rows: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    x = np.random.default_rng([rows, seed]).normal(size=(rows, 2)).astype(np.float32)
    return {"x": x, "ids": np.arange(rows) + 1}


def expected(inputs: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return inputs["x"] * np.float32(2) + inputs["ids"][:, None].astype(np.float32)


def calls_of(engine: InductorEngine, program: Recording) -> dict[str, Any]:
    return {each.name: program for each in engine.programs}


def on_gpu(engine: InductorEngine = DYNAMIC) -> tuple[InductorSession, Recording]:
    program = Recording()
    executor = GraphExecutor(torch, engine, calls_of(engine, program), StandInGpu())  # type: ignore[arg-type]
    program.rows.clear()
    return InductorSession(engine, executor), program


def on_cpu(engine: InductorEngine = DYNAMIC) -> tuple[InductorSession, Recording]:
    program = Recording()
    return InductorSession(engine, HostExecutor(torch, engine, calls_of(engine, program))), program
