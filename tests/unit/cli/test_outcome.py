"""What a run ends with, in words."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from changed_run import with_outputs
from decided_run import DELTA, HARM, OVER_BF16, ROUTED, decided, routed
from rich.console import Console
from sample_run import DECLINED, SampleRun

from loka_onnx.cli.outcome import first_line, outcome_json, print_outcome
from loka_onnx.cli.terminal import Terminal
from loka_onnx.core.evaluation import BudgetStatus, SliceDifference
from loka_onnx.pipeline.run import RunResult

WAITS = "no nvidia-h100 on this host; `loka-onnx build --job jobs/x` builds it on a host with nvidia-h100"


@pytest.mark.parametrize(
    ("here", "place"), [("", "runs/a/jobs/x"), ("runs", "a/jobs/x"), ("elsewhere", "{root}/runs/a/jobs/x")]
)
def test_a_job_is_named_as_seen_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, place: str
) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / here)
    told = first_line(dataclasses.replace(DECLINED, detail=f"{WAITS}\nmore"), tmp_path / "runs" / "a")
    assert told == WAITS.replace("jobs/x", place.format(root=tmp_path))


def test_other_details_are_told_as_they_are(tmp_path: Path) -> None:
    other = dataclasses.replace(DECLINED, detail="  declined: jobs/x\nmore")
    assert first_line(other, tmp_path) == "declined: jobs/x"


def test_a_slice_that_any_emitted_engine_harms_is_told(sample: SampleRun, tmp_path: Path) -> None:
    harmed = SliceDifference("country", "BR", 100, 100, HARM, HARM, HARM, BudgetStatus.BEYOND)
    data = with_outputs(
        routed(sample.report), lambda o: dataclasses.replace(o, slices=(harmed,)), "certification", ROUTED
    )
    stream = io.StringIO()
    console = Console(file=stream, width=120)
    print_outcome(Terminal(console, console), RunResult(tmp_path, report=data))
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if line.startswith("! ")] == [
        f"! {ROUTED}, ctr, slices: 1 of 1 judged beyond the budget of 0.02 %; "
        "worst country = BR: +0.060 % [+0.030 %, +0.090 %]"
    ]
    first = "gpu: bf16 and fp8-safe, 2.10× over FP32 (246.0 µs → 117.0 µs at 1,024), ΔNE "
    assert lines[1].startswith(first) and lines[2].rstrip() == "  fastest inside"


def test_the_result_as_json_has_every_number_and_the_sentence(sample: SampleRun, tmp_path: Path) -> None:
    data = decided(sample.report)
    told = json.loads(json.dumps(outcome_json(RunResult(tmp_path, report=data))))
    (gpu, *_) = told["targets"]
    assert gpu["times"] == [OVER_BF16.value, OVER_BF16.lower, OVER_BF16.upper]
    assert gpu["sentence"].startswith("gpu: fp8-safe, 1.62× over BF16 (190.0 µs → 117.0 µs at 1,024), ΔNE ")
    assert gpu["p50_us"] == {"1024": 117.0} and gpu["baseline"].endswith("bf16")
    rows = {row["engine"]: row for row in told["engines"]}
    assert rows.keys() == {engine.id for engine in data.engines}
    emitted = rows[gpu["engines"][0]]
    assert (emitted["is_emitted"], emitted["split"], emitted["verdict"]) == (True, "certification", "within")
    assert emitted["change"] == pytest.approx([DELTA.value, DELTA.lower, DELTA.upper])
    assert outcome_json(RunResult(tmp_path))["targets"] == []


def test_a_reason_that_two_targets_share_is_told_once(sample: SampleRun, tmp_path: Path) -> None:
    data = decided(sample.report)
    targets = tuple(dataclasses.replace(t, reason="as measured") for t in data.choice.targets)
    data = dataclasses.replace(data, choice=dataclasses.replace(data.choice, targets=targets))
    stream = io.StringIO()
    console = Console(file=stream, width=80)
    print_outcome(Terminal(console, console), RunResult(tmp_path, report=data))
    assert len(targets) > 1 and stream.getvalue().count("as measured") == 1
