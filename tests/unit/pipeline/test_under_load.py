"""Which engines are put under load."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from small_configs import engine_of, plan_of

from loka_onnx.config.schema import ServingConfig
from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.engine import BuildStatus, EngineArtifact, EngineSet
from loka_onnx.core.evaluation import (
    BudgetStatus,
    Choice,
    Evaluation,
    EvaluationSet,
    InputPlace,
    Latency,
    OutputEvaluation,
    Rejection,
    Route,
    TargetChoice,
    TaskMetrics,
    Why,
)
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.progress import silent
from loka_onnx.core.throughput import CHOSEN, HIGH_PRECISION, ThroughputSet
from loka_onnx.errors import EngineError
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.serving import EngineCopies, measure_throughput, under_load
from loka_onnx.planning.evidence import Evidence
from loka_onnx.sessions import host_devices
from loka_onnx.sessions.cuda import CudaDevice
from loka_onnx.sessions.runner import Arrays, Resident, Runner

PLANS = PlanSet(
    (
        plan_of("fp32", base=Precision.FP32),
        plan_of("bf16", predicted_us={"gpu": {"8": 60.0}}),
        plan_of("fp16", base=Precision.FP16),
        plan_of("fp8-all", ["fc"], predicted_us={"gpu": {"8": 25.0}}),
    )
)
US = {"fp32": 300.0, "bf16": 100.0, "fp16": 90.0, "fp8-all": 70.0}


def evaluation(of: EngineArtifact, status: str) -> Evaluation:
    us = US[of.plan]
    metrics = TaskMetrics(0.5, 0.9, 0.8, 1.0)
    output = OutputEvaluation("ctr", OutputKind.LOGIT, metrics, None, 1e-3, status, None)
    latency = Latency(8, us, us, us, 10, "gpu", True)
    return Evaluation(of.id, "trt", of.plan, "gpu", "selection", 10, (output,), (latency,), "measured")


ENGINES = {name: engine_of(name) for name in US}


def evidence(**accuracy: str) -> Evidence:
    judged = [evaluation(e, accuracy.get(e.plan, BudgetStatus.WITHIN)) for e in ENGINES.values()]
    return Evidence(EvaluationSet(tuple(judged)), PLANS)


def choice(main: str, *routes: tuple[int, str]) -> Choice:
    table = tuple(Route(rows, ENGINES[name].id, name) for rows, name in routes)
    taken = {main, *(name for _, name in routes)}
    losers = tuple(Rejection(e.id, Why.SLOWER, "") for e in ENGINES.values() if e.plan not in taken)
    return Choice((TargetChoice("gpu", ENGINES[main].id, main, "", "", losers, table),))


def loaded(of: Evidence, chosen: Choice, batches: tuple[int, ...] = (8,)) -> list[tuple[int, str, str]]:
    found = under_load(list(ENGINES.values()), of, chosen, batches)
    return [(each.batch, each.engine.plan, each.role) for each in found]


def test_the_chosen_and_the_best_without_fp8():
    assert loaded(evidence(), choice("fp8-all")) == [(8, "fp8-all", CHOSEN), (8, "fp16", HIGH_PRECISION)]
    # One beyond the budget is not the best, however fast.
    assert loaded(evidence(fp16=BudgetStatus.BEYOND), choice("fp8-all"))[1][1] == "bf16"
    assert loaded(evidence(), choice("fp16")) == [(8, "fp16", CHOSEN)]


def test_each_size_has_its_own_chosen_engine():
    routed = choice("bf16", (8, "bf16"), (64, "fp8-all"))
    assert loaded(evidence(), routed, (64, 8)) == [
        (8, "bf16", CHOSEN),
        (8, "fp16", HIGH_PRECISION),
        (64, "fp8-all", CHOSEN),
        (64, "fp16", HIGH_PRECISION),
    ]


@pytest.mark.parametrize(
    "change",
    [{"status": BuildStatus.BUILT_NOT_RUN}, {"status": BuildStatus.RUN_ELSEWHERE}, {"simulated": True}],
)
def test_what_cannot_be_loaded_here_is_not(change):
    engines = [engine_of("fp8-all", **change), ENGINES["bf16"]]
    found = under_load(engines, evidence(), choice("fp8-all"), (8,))
    assert [(each.engine.plan, each.role) for each in found] == [("bf16", HIGH_PRECISION)]


def h100s() -> tuple[list[EngineArtifact], Evidence, Choice]:
    """Two engines for an H100, of which the one in FP8 is chosen."""
    made = [engine_of(of, "nvidia-h100") for of in ("bf16", "fp8-all")]
    judged = Evidence(EvaluationSet(tuple(evaluation(e, BudgetStatus.WITHIN) for e in made)), PLANS)
    losers = (Rejection(made[0].id, Why.SLOWER, ""),)
    return made, judged, Choice((TargetChoice("nvidia-h100", made[1].id, "fp8-all", "", "", losers),))


SXM, PCIE, OTHER = "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200"


@pytest.mark.parametrize(
    ("devices", "asked", "told"),
    [
        # Both are H100s; what each answers in time is its own.
        ((SXM, SXM, PCIE, PCIE), [SXM, PCIE], PCIE),
        # Where there is no H100 nothing better can be had than what there is.
        ((SXM, "", OTHER, SXM), [SXM], SXM),
        ((OTHER, SXM), [SXM], SXM),
        ((OTHER, ""), [], None),
    ],
)
def test_another_machine_of_the_target_is_put_under_load_again(devices, asked, told, tmp_path, monkeypatch):
    opened: list[str] = []
    here = ""

    def opens(artifact: EngineArtifact) -> Runner:
        opened.append(here)
        raise EngineError("no copy of it opens")

    def listed() -> tuple[CudaDevice, ...]:
        return (CudaDevice(0, here, "sm90"),) if here else ()

    monkeypatch.setattr(host_devices, "list_cuda_devices", listed)
    limit = ServingConfig(p99_ms=1.0)
    config = SimpleNamespace(serving=limit, batch=SimpleNamespace(serve=(8,)))
    engines, judged, chosen = h100s()
    found = ThroughputSet()
    for device in devices:
        here = device
        with RunDirectory.create(tmp_path / "run", {}, {}, force=False, resume=True) as directory:
            context = SimpleNamespace(config=config, directory=directory, progress=silent)
            judging: Any = SimpleNamespace(context=context, open_alone=opens)
            results: Any = SimpleNamespace(
                engines=EngineSet(tuple(engines)), evaluations=judged.evaluations, plans=PLANS
            )
            found = measure_throughput(judging, results, chosen)
    assert opened == [device for device in asked for _ in engines]
    assert {each.device for each in found.measurements} == ({told} if told else set())
    assert len(found.measurements) == (2 if told else 0)


class Counting(Runner):
    """Counts how it is asked; some batches can stay on the device."""

    def __init__(self, stays: bool) -> None:
        self.stays, self.copied, self.launched = stays, 0, 0

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        self.copied += 1
        return dict(inputs)

    def resident(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        return Resident(self._launch, lambda: None) if self.stays else super().resident(inputs)

    def _launch(self) -> None:
        self.launched += 1


@pytest.mark.parametrize(
    ("wanted", "stays", "where", "counts"),
    [("host", True, "host", (1, 0)), ("device", True, "device", (0, 1)), ("device", False, "host", (1, 0))],
)
def test_copies_of_an_engine_are_asked_as_servers_ask(wanted, stays, where, counts):
    copies = [Counting(stays), Counting(stays)]
    request = {"x": np.zeros(8)}
    served = EngineCopies.of(copies, request, InputPlace(wanted))
    for answer in served.runs:
        answer(request)
    assert served.inputs is InputPlace(where)
    assert [(copy.copied, copy.launched) for copy in copies] == [counts] * 2
