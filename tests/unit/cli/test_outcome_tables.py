"""The last tables of a run: each engine, verdict, time and ratio where it belongs, at any width."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from loka_onnx.cli.outcome_tables import decision_table, fitted, latency_table
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
from loka_onnx.core.sensitivity import ENTROPY, LOSS
from loka_onnx.report import ReportData

GPU, EDGE = "nvidia-h100", "nvidia-rtx-ada"


def engine(plan: str, target: str = GPU, status: BuildStatus = BuildStatus.READY) -> EngineArtifact:
    return EngineArtifact("inductor", plan, target, "sm90", status, False, Path(plan), 9, "d", "2", (), 1.0)


def judged(value: float, status: str, *, name: str = "ctr", labels: bool = True) -> OutputEvaluation:
    interval = Interval(value, value - 1e-4, value + 1e-4, 0.95, 1000)
    return OutputEvaluation(
        name,
        OutputKind.LOGIT,
        TaskMetrics(0.5, 0.9, 0.7, 1.0),
        PairedDifference(
            LOSS if labels else ENTROPY, interval if labels else None, interval, None, None, None, 0.1, 0.2
        ),
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


def test_every_emitted_engine_has_its_cost_and_verdict(data: ReportData) -> None:
    assert printed(decision_table(data)) == [
        "Chosen",
        "target         backend  plan            ΔNE, 95 % budget verdict",
        "nvidia-h100    inductor fp8-safe         +0.015 % 0.02 % undecided",
        "                                 [+0.005, +0.025]",
        "                                      KL +0.015 %",
        "                                 [+0.005, +0.025]",
        "nvidia-h100    inductor bf16             +0.005 % 0.02 % within",
        "                                 [-0.005, +0.015]",
        "                                      KL +0.005 %",
        "                                 [-0.005, +0.015]",
        "nvidia-rtx-ada inductor fp8-safe     not measured      – built, not run",
    ]


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


def test_an_output_without_labels_says_what_was_judged() -> None:
    outputs = (WITHIN, judged(0.0004, BudgetStatus.BEYOND, name="watch", labels=False))
    choice = TargetChoice(GPU, SAFE.id, "fp8-safe", "fastest", "measured", ())
    lines = printed(decision_table(report([evaluated(SAFE, *outputs)], [choice], SAFE)))
    assert lines[2].split() == [
        "nvidia-h100",
        "inductor",
        "fp8-safe",
        "ctr",
        "+0.005",
        "%",
        "0.02",
        "%",
        "within",
    ]
    assert lines[4].split() == ["KL", "+0.005", "%"]
    assert lines[6].split() == ["watch", "KL", "+0.040", "%", "0.02", "%", "beyond"]


@pytest.mark.parametrize("width", [60, 80])
def test_no_number_is_cut(data: ReportData, width: int) -> None:
    for table in (decision_table(data), latency_table(data)):
        lines = printed(table, width)
        assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    assert "[+0.005, +0.025]" in "".join(printed(decision_table(data), width))


def test_headings_give_way_before_words_do() -> None:
    """80 columns are just enough where "FP8 sites" and "FP8 FLOPs" stand on two lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("plan", overflow="fold", no_wrap=True)
    for heading in ("NE", "AUC", "ΔNE, 95 %", "FP8 sites", "FP8 FLOPs", "size"):
        table.add_column(heading, justify="right", no_wrap=not heading.startswith("FP8"))
    table.add_column("status", overflow="fold", min_width=10)
    change = "+0.063 %\n[+0.022, +0.103]"
    row = ("fp8-all", "0.86044", "0.74657", change, "4 of 4", "100.0 %", "88.5 KiB")
    table.add_row(*row, "undecided, simulated")
    table.add_row("fp8-safe", *row[1:], "within, simulated")
    lines = printed(fitted(table, Console(file=io.StringIO(), width=80), ("FP8 FLOPs",)))
    assert [line.rpartition(" ")[2] for line in lines[2:]] == [
        "undecided,",
        "simulated",
        "within,",
        "simulated",
    ]
    assert max(map(len, lines)) <= 80 and "FP8 FLOPs" not in lines[0] + lines[1]
    assert lines[0].split() == ["FP8", "FP8"]


def wide() -> Table:
    table = Table("plan", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("NE", "FP8 FLOPs"):
        table.add_column(heading, justify="right")
    table.add_column("status", overflow="fold", min_width=9)
    table.add_row("fp8-safe", "0.82182", "100.0 %", "within, simulated")
    return table


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (80, ["plan", "NE", "FP8 FLOPs", "status"]),
        (36, ["plan", "NE", "FP8 FLOPs", "status"]),
        (34, ["plan", "NE", "status"]),
        (24, ["plan", "status"]),
        (5, ["plan", "status"]),
    ],
)
def test_what_a_narrow_terminal_goes_without(width: int, headings: list[str]) -> None:
    console = Console(file=io.StringIO(), width=width)
    table = fitted(wide(), console, ("FP8 FLOPs", "NE"))
    assert [column.header for column in table.columns] == headings
    if width >= 20:
        shown = "\n".join(printed(table, width))
        assert "fp8-safe" in shown and "within," in shown and "simulated" in shown
