"""Refining as a stage: when what was found before stands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from small_configs import engine_of, plan_of

from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.engine import EngineSet
from loka_onnx.core.evaluation import Evaluation, EvaluationSet, Latency
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.refined_run import RefinedRun
from loka_onnx.core.refinement import Refinement
from loka_onnx.pipeline import refining
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.emission import Results
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.refining import Rounds, refine_engines
from loka_onnx.sessions import host_devices
from loka_onnx.sessions.cuda import CudaDevice

MODEL: Any = SimpleNamespace(digest="model")
ENGINE = engine_of("fp8-all", "nvidia-h100")
PLANS = PlanSet((plan_of("fp8-all", ["fc"]),))


def judging_in(directory: RunDirectory) -> Judging:
    """What the stage reads of a run."""
    config: Any = SimpleNamespace(
        refine=SimpleNamespace(rounds=1, plans=1, seconds=9.0),
        outputs=(),
        data=SimpleNamespace(group=None, slices=()),
        batch={},
        plan={},
        serving=SimpleNamespace(inputs="host"),
    )
    split = SimpleNamespace(digest="data")
    context = Context(config, directory, exported=MODEL)
    context.__dict__["splits"] = SimpleNamespace(calibration=split, selection=split)
    return Judging(context, None)


def test_what_was_refined_on_another_device_is_refined_again_on_the_target(tmp_path, monkeypatch):
    """No time counts on an H200 that stands in for an H100, so that no round was ever begun there."""
    here: list[CudaDevice] = []
    rounds = []

    def refined(*inputs: object) -> Rounds:
        device = here[-1].name
        rounds.append(device)
        latency = Latency(8, 1.0, 1.0, 1.0, 9, device, counts_for_choice="H100" in device)
        judged = Evaluation(
            ENGINE.id, "maker", "fp8-all", "nvidia-h100", "selection", 9, (), (latency,), "measured"
        )
        return Rounds(Refinement(), RefinedRun(evaluations=EvaluationSet((judged,))))

    monkeypatch.setattr(refining, "refine", refined)
    monkeypatch.setattr(host_devices, "list_cuda_devices", lambda: tuple(here[-1:]))
    results = Results(MODEL, MODEL, PLANS, {}, EngineSet((ENGINE,)), CorrectionSet())
    h200, h100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
    pcie = "NVIDIA H100 PCIe"
    for device in (h200, h200, h100, h100, h200, pcie, pcie):
        here.append(CudaDevice(0, device, "sm90"))
        with RunDirectory.create(tmp_path / "run", {}, {}, force=False, resume=True) as directory:
            refine_engines(judging_in(directory), results)
    # Nothing is lost where the run goes on on another device later; another H100 is another machine.
    assert rounds == [h200, h100, pcie]
