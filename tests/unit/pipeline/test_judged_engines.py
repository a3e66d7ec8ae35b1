"""Requests that engines are judged by; who is timed beside whom, and what is said of those that fail."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from small_configs import engine_of

from loka_onnx.core.engine import BuildStatus, EngineArtifact, SitePrecision
from loka_onnx.core.evaluation import Evaluation, InputPlace, Latency
from loka_onnx.core.rewrite import Part
from loka_onnx.data import InputBinding, open_dataset
from loka_onnx.errors import EngineError
from loka_onnx.evaluation.engines import REQUEST_ROWS, with_latencies
from loka_onnx.evaluation.latency import Interleaved
from loka_onnx.pipeline import judging
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.judging import Judging, can_be_timed_on_target
from loka_onnx.sessions import host_devices
from loka_onnx.sessions.cuda import CudaDevice
from loka_onnx.sessions.runner import Arrays, Resident, Runner


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


@dataclass(frozen=True)
class Bench(Judging):
    """Engines by their plans, and a lookup."""

    runners: Mapping[str, Runner] = field(kw_only=True)
    lookup: Runner | None = None

    def open_alone(self, engine: EngineArtifact) -> Runner:
        return opened(self.runners.get(engine.plan))

    def open_lookup(self) -> Any:
        return opened(self.lookup)


def opened(runner: Runner | None) -> Runner:
    if runner is None:
        raise EngineError("the file is damaged")
    return runner


def bench(runners: Mapping[str, Runner], inputs: InputPlace = InputPlace.HOST, **more: Any) -> Bench:
    serving = SimpleNamespace(inputs=inputs, by_batch=True, margin=0.03)
    config = SimpleNamespace(batch=SimpleNamespace(serve=(2, 4)), serving=serving)
    context = Context(config, None, exported=None)  # type: ignore[arg-type] - what is read of a run
    generated = SimpleNamespace(generated=lambda rows: {"x": np.ones(rows, np.float32)})
    context.__dict__["requests"] = generated
    return Bench(context, None, runners=runners, **more)


def test_what_fails_while_it_is_timed_is_told_and_the_others_go_on():
    engines = [engine_of(plan, "cpu", "cpu") for plan in ("fp32", "bf16", "fp8-all")]
    engines.append(engine_of("fp16", "cpu", "cpu", status=BuildStatus.FAILED))
    timed = bench({"fp32": Adding(), "bf16": Adding(most=2)}).time_engines(engines)
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
    "us, beyond, patience, loads",
    [
        # The most exact is the fastest, or as fast: it is chosen, however the others turn out.
        ((100.0, 101.5, 103.0), set(), 60.0, (3, 3, 3)),
        # One in eight bits may be faster, or not: what the others are is open as well.
        ((100.0, 98.5, 103.0), set(), 60.0, (6, 6, 6)),
        ((100.0, 98.5, 150.0), set(), 60.0, (6, 6, 3)),
        # Beyond the budget it cannot be chosen.
        ((100.0, 98.5, 103.0), {"int8-all"}, 60.0, (3, 3, 3)),
        # One may be much faster on a busy host, or not; patience ends.
        ((100.0, 80.0, 1e6), set(), 60.0, (12, 12, 3)),
        ((100.0, 80.0, 1e6), set(), -1.0, (6, 6, 3)),
    ],
)
def test_engines_are_loaded_again_while_the_choice_is_open(monkeypatch, us, beyond, patience, loads):
    eight_bits = (SitePrecision("fc", "int8", (), True, ""),)
    engines = [
        replace(engine_of(plan, "cpu", "cpu"), sites=() if plan == "fp32" else eight_bits)
        for plan in ("int8-all", "fp32", "int8-safe")
    ]
    typical = dict(zip(("fp32", "int8-all", "int8-safe"), us, strict=True))
    random = np.random.default_rng(0)

    def load(self: Judging, loaded: list[EngineArtifact], kind: Any, options: Any) -> Interleaved:
        def latency(engine: EngineArtifact, size: int) -> Latency:
            spread = 0.5 if typical["int8-all"] == 80.0 else 0.02
            least = size * typical[engine.plan] * (1.0 + spread * random.choice((-1, 0, 1)))
            known = (size, least, least, least, 3, "cpu", True)
            return Latency(*known, loads_us=(least,), least_us=(least,))

        return Interleaved({e.id: (latency(e, 2), latency(e, 4)) for e in loaded}, {})

    monkeypatch.setattr(Judging, "_load", load)
    monkeypatch.setattr(judging, "PATIENCE", patience)
    ids = {engine.plan: engine.id for engine in engines}
    timed = bench({}).time_engines(engines, {ids[plan] for plan in beyond})
    assert tuple(len(timed.latencies[ids[plan]][0].loads_us) for plan in typical) == loads


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
def test_a_lookup_that_fails_costs_the_engines_behind_it(fails, said):
    """Their times alone would be those of engines that cannot serve."""
    engine = replace(engine_of("fp32", "cpu", "cpu"), part=Part.DENSE)
    lookup = None if fails is None else Broken(fails)
    timed = bench({"fp32": Adding()}, lookup=lookup).time_engines([engine])
    assert timed.failures == {engine.id: said}


@pytest.mark.parametrize(("place", "asked"), [("host", {"run"}), ("device", {"resident"})])
def test_engines_are_asked_as_the_fleet_will_ask(place, asked):
    runner = Adding()
    timed = bench({"fp32": runner}, InputPlace(place)).time_engines([engine_of("fp32", "cpu", "cpu")])
    assert runner.asked == asked
    assert {x.inputs for x in timed.latencies["cpu-maker-cpu-fp32"]} == {InputPlace(place)}


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_devices, "list_cuda_devices", lambda: (CudaDevice(0, "NVIDIA H200", "sm90"),))
    monkeypatch.setattr(judging, "device_alone", contextlib.nullcontext)


@pytest.mark.usefixtures("on_h200")
def test_times_of_an_h200_are_none_of_an_h100():
    engines = [engine_of("fp32", target) for target in ("nvidia-h100", "nvidia-h200")]
    timed = bench({"fp32": Adding()}).time_engines(engines)
    found = {
        engine: {(x.device, x.counts_for_choice) for x in latencies}
        for engine, latencies in timed.latencies.items()
    }
    assert found == {
        "nvidia-h100-maker-sm90-fp32": {("NVIDIA H200", False)},
        "nvidia-h200-maker-sm90-fp32": {("NVIDIA H200", True)},
    }


@pytest.mark.usefixtures("on_h200")
def test_engines_are_timed_again_where_their_target_is(monkeypatch):
    engine = engine_of("fp32", "nvidia-h100")
    timed = bench({"fp32": Adding()}).time_engines([engine])
    judged = Evaluation(engine.id, "maker", "fp32", "nvidia-h100", "selection", 9, (), (), "measured")
    evaluations = [with_latencies(judged, timed)]
    # Here they would say no more than before, and neither would they where there is no such GPU.
    assert not can_be_timed_on_target(evaluations, [engine])
    monkeypatch.setattr(host_devices, "list_cuda_devices", tuple)
    assert not can_be_timed_on_target(evaluations, [engine])
    h100 = CudaDevice(0, "NVIDIA H100 80GB HBM3", "sm90")
    monkeypatch.setattr(host_devices, "list_cuda_devices", lambda: (h100,))
    assert can_be_timed_on_target(evaluations, [engine])
    there = [with_latencies(judged, bench({"fp32": Adding()}).time_engines([engine]))]
    assert not can_be_timed_on_target(there, [engine])
    # An H100 as well, and another machine; on an H200 nothing better can be had than what there is.
    pcie = CudaDevice(0, "NVIDIA H100 PCIe", "sm90")
    monkeypatch.setattr(host_devices, "list_cuda_devices", lambda: (pcie,))
    assert can_be_timed_on_target(there, [engine])
    for other in ("NVIDIA H200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        monkeypatch.setattr(
            host_devices, "list_cuda_devices", lambda name=other: (CudaDevice(0, name, "sm90"),)
        )
        assert not can_be_timed_on_target(there, [engine])


ROWS = 10_250


class Strict:
    """An engine that refuses what it was not built for, as compiled ones do."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most

    def __enter__(self) -> Strict:
        return self

    def __exit__(self, *error: object) -> None: ...

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if not self.least <= len(inputs["x"]) <= self.most:
            raise EngineError(f"{len(inputs['x'])} rows")
        return {"y": 2 * inputs["x"]}


# 10 250 rows end with a request of 50, of 50 again, of 10, of 250, and of 1 250.
@pytest.mark.parametrize(
    ("least", "largest"), [(1, 100), (64, 100), (64, 10_000), (2_500, 4_096), (9_000, 9_000)]
)
def test_engines_are_asked_for_what_they_were_built_for(tmp_path, monkeypatch, least, largest):
    np.savez(tmp_path / "rows.npz", x=np.arange(ROWS, dtype=np.float32))
    data = open_dataset(
        tmp_path / "rows.npz", (InputBinding("x", ("x",), "float32", 1),), (), None, frozenset()
    )
    config: Any = SimpleNamespace(
        batch=SimpleNamespace(min=least, max=largest),
        columns=(),
        data=SimpleNamespace(group=None, slices=()),
        threads=1,
    )
    context = Context(config, cast(Any, None), exported=cast(Any, None))
    context.__dict__["splits"] = SimpleNamespace(selection=data, certification=data)
    splits = (context.selection, context.attempt(0))
    assert [split.name for split in splits] == ["selection", "certification"]
    judging = Judging(context, None)
    monkeypatch.setattr(Judging, "open_alone", lambda self, engine: Strict(least, largest))
    for split in splits:
        with ExitStack() as stack:
            run = judging.open_engine(SimpleNamespace(part=Part.WHOLE), stack)  # type: ignore[arg-type]
            found = [run(batch.inputs)["y"] for batch in split.batches()]
        np.testing.assert_array_equal(np.concatenate(found), 2 * np.arange(ROWS))
        assert max(map(len, found)) == max(least, min(largest, REQUEST_ROWS))
