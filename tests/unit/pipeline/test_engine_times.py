"""Timing the engines of a run: who is timed beside whom, on what, and what is said of those that fail."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Evaluation, InputPlace
from loka_onnx.core.progress import silent
from loka_onnx.core.rewrite import Part
from loka_onnx.errors import EngineError
from loka_onnx.evaluation.engines import with_latencies
from loka_onnx.pipeline import engine_times
from loka_onnx.pipeline.engine_times import TimingBench, counts_here
from loka_onnx.sessions import host_devices
from loka_onnx.sessions.cuda import CudaDevice
from loka_onnx.sessions.runner import Arrays, Resident, Runner


@pytest.fixture(autouse=True)
def what_lives_already_is_not_collected() -> Iterator[None]:
    """Each measurement collects garbage first, and whatever the tests before have left is not its own."""
    gc.freeze()
    yield
    gc.unfreeze()


class Adding(Runner):
    """Real work on arrays; keeps what it was asked."""

    def __init__(self, most: int = 10**9) -> None:
        self.most, self.asked = most, set[str]()

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        self.asked.add("run")
        if len(inputs["x"]) > self.most:
            raise EngineError("the worker died", evidence="signal 11")
        return {"y": inputs["x"] + 1.0}

    def resident(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        self.asked.add("resident")
        return Resident(lambda: inputs["x"] + 1.0, lambda: None)


def artifact(plan: str, target: str = "cpu", architecture: str = "cpu", **more: Any) -> EngineArtifact:
    status = more.pop("status", BuildStatus.READY)
    return EngineArtifact(
        "maker", plan, target, architecture, status, False, None, 0, "", "", (), 0.0, part=Part.WHOLE
    )


def bench(runners: Mapping[str, Runner], inputs: InputPlace = InputPlace.HOST) -> TimingBench:
    def opened(engine: EngineArtifact) -> Runner:
        if engine.plan not in runners:
            raise EngineError("the file is damaged")
        return runners[engine.plan]

    def no_lookup() -> Runner:
        raise AssertionError("the model was not cut")

    config = SimpleNamespace(batch=SimpleNamespace(serve=(2, 4)), serving=SimpleNamespace(inputs=inputs))
    return TimingBench(
        config,  # type: ignore[arg-type] - what is read of a run file
        silent,
        opened,
        no_lookup,
        lambda rows: {"x": np.ones(rows, np.float32)},
    )


def test_what_fails_while_it_is_timed_is_told_and_the_others_go_on() -> None:
    engines = [artifact(plan) for plan in ("fp32", "bf16", "fp8-all")]
    engines.append(artifact("fp16", status=BuildStatus.FAILED))
    timed = bench({"fp32": Adding(), "bf16": Adding(most=2)}).time(engines)
    assert timed.failures == {
        "cpu-maker-cpu-bf16": "at batch 4: the worker died\n  evidence: signal 11",
        "cpu-maker-cpu-fp8-all": "it does not open: the file is damaged",
    }
    assert {name: [x.batch for x in found] for name, found in timed.latencies.items()} == {
        "cpu-maker-cpu-fp32": [2, 4],
        "cpu-maker-cpu-bf16": [2],
    }
    assert {x.device for found in timed.latencies.values() for x in found} == {"cpu"}


class Broken(Adding):
    """A lookup that fails some of its requests, by their number."""

    def __init__(self, fails: range) -> None:
        super().__init__()
        self.fails, self.number = fails, count()

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        if next(self.number) in self.fails:
            raise EngineError("the table is gone")
        return super().run(inputs)


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (None, "the lookup before it does not open: the file is damaged"),
        # Inputs of a size are four requests, before anything is timed.
        (range(2, 9), "at batch 2, where its inputs are made: the table is gone"),
        # Then it is timed among the engines.
        (range(4, 5), "the lookup before it failed at batch 2: the table is gone"),
    ],
)
def test_a_lookup_that_fails_costs_the_engines_behind_it(fails: range | None, said: str) -> None:
    """Their times alone would be those of engines that cannot serve."""
    engine = replace(artifact("fp32"), part=Part.DENSE)

    def opened() -> Runner:
        if fails is None:
            raise EngineError("the file is damaged")
        return Broken(fails)

    timed = replace(bench({"fp32": Adding()}), open_lookup=opened).time([engine])
    assert timed.failures == {engine.id: said}


@pytest.mark.parametrize(("place", "asked"), [("host", {"run"}), ("device", {"resident"})])
def test_engines_are_asked_as_the_fleet_will_ask(place: str, asked: set[str]) -> None:
    runner = Adding()
    timed = bench({"fp32": runner}, InputPlace(place)).time([artifact("fp32")])
    assert runner.asked == asked
    assert {x.inputs for x in timed.latencies["cpu-maker-cpu-fp32"]} == {InputPlace(place)}


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_devices, "list_cuda_devices", lambda: (CudaDevice(0, "NVIDIA H200", "sm90"),))
    monkeypatch.setattr(engine_times, "device_alone", contextlib.nullcontext)


@pytest.mark.usefixtures("on_h200")
def test_times_of_an_h200_are_none_of_an_h100() -> None:
    engines = [artifact("fp32", target, "sm90") for target in ("nvidia-h100", "nvidia-h200")]
    timed = bench({"fp32": Adding()}).time(engines)
    found = {
        engine: {(x.device, x.counts_for_choice) for x in latencies}
        for engine, latencies in timed.latencies.items()
    }
    assert found == {
        "nvidia-h100-maker-sm90-fp32": {("NVIDIA H200", False)},
        "nvidia-h200-maker-sm90-fp32": {("NVIDIA H200", True)},
    }


@pytest.mark.usefixtures("on_h200")
def test_engines_are_timed_again_where_their_target_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = artifact("fp32", "nvidia-h100", "sm90")
    timed = bench({"fp32": Adding()}).time([engine])
    judged = Evaluation(engine.id, "maker", "fp32", "nvidia-h100", "selection", 9, (), (), "measured")
    evaluations = [with_latencies(judged, timed)]
    # Here they would say no more than before, and neither would they where there is no such GPU.
    assert not counts_here(evaluations, [engine])
    monkeypatch.setattr(host_devices, "list_cuda_devices", tuple)
    assert not counts_here(evaluations, [engine])
    h100 = CudaDevice(0, "NVIDIA H100 80GB HBM3", "sm90")
    monkeypatch.setattr(host_devices, "list_cuda_devices", lambda: (h100,))
    assert counts_here(evaluations, [engine])
    there = [with_latencies(judged, bench({"fp32": Adding()}).time([engine]))]
    assert not counts_here(there, [engine])
    # An H100 as well, and another machine; on an H200 nothing better can be had than what there is.
    pcie = CudaDevice(0, "NVIDIA H100 PCIe", "sm90")
    monkeypatch.setattr(host_devices, "list_cuda_devices", lambda: (pcie,))
    assert counts_here(there, [engine])
    for other in ("NVIDIA H200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        monkeypatch.setattr(
            host_devices, "list_cuda_devices", lambda name=other: (CudaDevice(0, name, "sm90"),)
        )
        assert not counts_here(there, [engine])
