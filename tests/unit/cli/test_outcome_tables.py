"""The last table of a run: each time and ratio where it belongs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from loka_onnx.cli.outcome_tables import latency_table
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
    TargetChoice,
    TaskMetrics,
)
from loka_onnx.core.intervals import Interval
from loka_onnx.core.sensitivity import LOSS
from loka_onnx.report import ReportData

GPU, EDGE = "nvidia-h100", "nvidia-rtx-ada"


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


def printed(table: Table | None, width: int = 80) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(table)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


FP32, BF16, SAFE, FAST = (engine(plan) for plan in ("fp32", "bf16", "fp8-safe", "fp8-fast"))
WITHIN = judged(0.00005, BudgetStatus.WITHIN)


@pytest.fixture
def data() -> ReportData:
    """A target with an engine for each of two batch sizes, and one whose engine could not run here."""
    waiting = engine("fp8-safe", EDGE, BuildStatus.BUILT_NOT_RUN)
    routes = (Route(256, BF16.id, "bf16"), Route(1024, SAFE.id, "fp8-safe"))
    return report(
        [
            evaluated(FP32, WITHIN, b256=90.0, b1024=300.0),
            evaluated(BF16, WITHIN, b256=45.0, b1024=150.0),
            evaluated(SAFE, judged(0.00015, BudgetStatus.UNDECIDED), b256=50.0, b1024=100.0),
        ],
        [
            TargetChoice(GPU, SAFE.id, "fp8-safe", "fastest", "measured", (), routes),
            TargetChoice(EDGE, waiting.id, "fp8-safe", "simulated", "provisional", ()),
        ],
        FP32,
        BF16,
        SAFE,
        waiting,
    )


def test_times_are_those_of_the_engine_that_takes_the_size(data: ReportData) -> None:
    assert printed(latency_table(data)) == [
        "Latency of what was chosen",
        "target      batch      p50 over FP32 over BF16 plan",
        "nvidia-h100   256  45.0 µs     2.00×     1.00× bf16",
        "            1,024 100.0 µs     3.00×     1.50× fp8-safe",
    ]


def test_times_that_do_not_count_are_not_shown() -> None:
    found = [
        evaluated(FP32, WITHIN, counts=False, b256=90.0),
        evaluated(SAFE, WITHIN, counts=False, b256=9.0),
    ]
    choice = TargetChoice(GPU, SAFE.id, "fp8-safe", "simulated", "provisional", ())
    assert latency_table(report(found, [choice], FP32, SAFE)) is None


def test_a_plan_that_was_not_timed_has_no_ratio() -> None:
    found = [evaluated(FP32, WITHIN, b8=90.0), evaluated(SAFE, WITHIN, b8=45.0, b16=60.0)]
    choice = TargetChoice(GPU, SAFE.id, "fp8-safe", "fastest", "measured", ())
    lines = printed(latency_table(report(found, [choice], FP32, SAFE)))
    assert lines[2].split() == ["nvidia-h100", "8", "45.0", "µs", "2.00×", "–", "fp8-safe"]
    assert lines[3].split() == ["16", "60.0", "µs", "–", "–", "fp8-safe"]
