"""What a run ends with, in words."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from loka_onnx.cli.outcome import first_line, print_outcome
from loka_onnx.cli.terminal import Terminal
from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import (
    BudgetStatus,
    Choice,
    Evaluation,
    EvaluationSet,
    Latency,
    OutputEvaluation,
    PairedDifference,
    Route,
    SliceDifference,
    TargetChoice,
    TaskMetrics,
)
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import LOSS
from loka_onnx.pipeline.run import RunResult
from loka_onnx.report import DataDescription, ReportData

GPU = "nvidia-h100"


def engine(plan: str, target: str = GPU, status: BuildStatus = BuildStatus.READY) -> EngineArtifact:
    return EngineArtifact("inductor", plan, target, "sm90", status, False, Path(plan), 9, "d", "2", (), 1.0)


def judged(value: float, status: str) -> OutputEvaluation:
    interval = Interval(value, value - 1e-4, value + 1e-4, 0.95, 1000)
    return OutputEvaluation(
        "ctr",
        OutputKind.LOGIT,
        TaskMetrics(0.5, 0.9, 0.7, 1.0),
        PairedDifference(LOSS, interval, interval, None, None, None, 0.1, 0.2),
        2e-4,
        status,
        None,
    )


def evaluated(
    artifact: EngineArtifact, *outputs: OutputEvaluation, counts: bool = True, **us: float
) -> Evaluation:
    latencies = [Latency(int(b[1:]), t, t, t, 9, "H100", counts) for b, t in us.items()]
    return Evaluation(
        artifact.id,
        artifact.backend,
        artifact.plan,
        artifact.target,
        "certification",
        1000,
        outputs,
        tuple(latencies),
        "measured",
    )


def report(
    evaluations: list[Evaluation], choices: list[TargetChoice], *engines: EngineArtifact
) -> ReportData:
    unused: Any = None
    return ReportData(
        title="t",
        exported=unused,
        modified=unused,
        profile=unused,
        plans=unused,
        rewrites={},
        engines=engines,
        evaluations=EvaluationSet(tuple(evaluations)),
        choice=Choice(tuple(choices), (), None, {}),
        data=unused,
        versions={},
    )


FP32, BF16, SAFE, FAST = (engine(plan) for plan in ("fp32", "bf16", "fp8-safe", "fp8-fast"))
WITHIN = judged(0.00005, BudgetStatus.WITHIN)

WAITS = "no nvidia-h100 on this host; `loka-onnx build --job jobs/x` builds it on a host with nvidia-h100"


def waiting(detail: str) -> EngineArtifact:
    status = BuildStatus.WAITING
    return EngineArtifact(
        "tensorrt", "fp8-all", "nvidia-h100", "sm90", status, False, None, 0, "", "", (), 0.0, detail=detail
    )


@pytest.mark.parametrize(
    ("here", "place"), [("", "runs/a/jobs/x"), ("runs", "a/jobs/x"), ("elsewhere", "{root}/runs/a/jobs/x")]
)
def test_a_job_is_named_as_seen_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, place: str
) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / here)
    told = first_line(waiting(f"{WAITS}\nmore"), tmp_path / "runs" / "a")
    assert told == WAITS.replace("jobs/x", place.format(root=tmp_path))


def test_other_details_are_told_as_they_are(tmp_path: Path) -> None:
    assert first_line(waiting("  declined: jobs/x\nmore"), tmp_path) == "declined: jobs/x"


def test_a_slice_that_any_emitted_engine_harms_is_told(tmp_path: Path) -> None:
    harm = Interval(0.0006, 0.0003, 0.0009, 0.999, 100)
    harmed = SliceDifference("country", "BR", 100, 100, harm, harm, harm, BudgetStatus.BEYOND)
    sliced = dataclasses.replace(WITHIN, slices=(harmed,))
    routes = (Route(256, BF16.id, "bf16"), Route(1024, SAFE.id, "fp8-safe"))
    choice = TargetChoice(GPU, BF16.id, "bf16", "fastest", "measured", (), routes)
    real: Any = SimpleNamespace(synthetic=False)
    data = dataclasses.replace(
        report([evaluated(BF16, WITHIN), evaluated(SAFE, sliced, b1024=117.0)], [choice], BF16, SAFE),
        data=DataDescription((), "clicks", False),
        profile=real,
        plans=PlanSet(()),
    )
    stream = io.StringIO()
    console = Console(file=stream, width=120)
    print_outcome(Terminal(console, console), RunResult(tmp_path, report=data))
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if line.startswith("! ")] == [
        f"! {SAFE.id}, ctr, slices: 1 of 1 judged beyond the budget of 0.02 %; "
        "worst country = BR: +0.060 % [+0.030 %, +0.090 %]"
    ]
    assert f"{GPU}: bf16, fp8-safe — fastest (speed: measured)" in lines
    assert f"  Latency p50: 117.0 µs (batch 1,024, on H100, by {SAFE.id})" in lines
