"""What a user sees of a run, on a terminal, in a pipe and in a log, and what it ends with."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
from changed_run import with_outputs
from decided_run import DELTA, HARM, OVER_BF16, ROUTED, decided, routed
from rich.console import Console
from sample_run import DECLINED

from loka_onnx.cli import progress as module
from loka_onnx.cli.log_lines import Event, JsonLog, json_log, line_schema
from loka_onnx.cli.main import main
from loka_onnx.cli.outcome import first_line, outcome_json, print_outcome
from loka_onnx.cli.progress import StageReporter
from loka_onnx.cli.terminal import Terminal, is_plain
from loka_onnx.core.evaluation import BudgetStatus, SliceDifference
from loka_onnx.core.progress import JoinedProgress
from loka_onnx.pipeline.directory import StageOutcome
from loka_onnx.pipeline.run import RunResult
from loka_onnx.report import ReportData


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def reporting(stream: io.StringIO, *, quiet: bool = False) -> StageReporter:
    console = Console(file=stream, force_terminal=stream.isatty(), width=80, highlight=False)
    return StageReporter(Terminal(console, console, quiet))


def report(stream: io.StringIO, *, quiet: bool = False) -> str:
    with reporting(stream, quiet=quiet) as reporter:
        reporter.on_stage("calibrate", None)
        reporter.progress("ranges", 3, 12)
        reporter.progress("errors", 9, 12)
        reporter.on_stage("calibrate", StageOutcome("calibrate", False, 6.84))
        reporter.on_stage("plan", None)
        reporter.on_stage("plan", StageOutcome("plan", True, 0.0))
        reporter.on_stage("mods", None)
        reporter.on_stage("mods", StageOutcome("mods", False, 0.01))
    return stream.getvalue()


def test_a_pipe_gets_one_line_for_each_stage_and_a_terminal_is_left_clean():
    lines = "✓ calibrate      6.8 s\n✓ plan           reused\n✓ mods           < 0.1 s\n"
    assert report(io.StringIO()) == lines
    assert report(io.StringIO(), quiet=True) == report(Tty(), quiet=True) == ""
    assert reported(quiet=True) == []
    text = report(Tty())
    assert "✓" in text and "calibrate      6.8 s" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor comes back"
    stream = Tty()
    with pytest.raises(ValueError), reporting(stream) as reporter:
        reporter.on_stage("build", None)
        raise ValueError
    assert stream.getvalue().endswith("\r\x1b[2K\x1b[?25h\r"), "the line is erased and the cursor is back"


def test_a_terminal_shows_the_running_task_and_the_clock_goes_on_after_its_last_unit():
    stream = Tty()
    with reporting(stream) as reporter:
        reporter.on_stage("evaluate", None)
        reporter.progress("fp8-all on [selection]", 3000, 12000)
        reporter._bar.refresh()
        assert "evaluate: fp8-all on [selection]" in stream.getvalue()
        assert "25%" in stream.getvalue()
        reporter.progress("fp8-all on [selection]", 12000, 12000)
        (task,) = reporter._bar.tasks
        assert not task.finished and task.percentage > 99.9


def test_a_pipe_hears_from_a_long_stage_now_and_then(monkeypatch):
    now, stream = Mock(return_value=0.0), io.StringIO()
    monkeypatch.setattr(module.time, "monotonic", now)
    with reporting(stream) as reporter:
        reporter.on_stage("train", None)
        for now.return_value in map(float, range(100)):
            reporter.progress("train (loss 0.5)", int(now.return_value), 100)
    assert stream.getvalue().splitlines() == [
        f"  train (loss 0.5)  {share}%  {share} s so far" for share in (30, 60, 90)
    ]


def test_a_stage_says_its_place_among_those_that_are_left():
    places = []
    with reporting(Tty()) as reporter:

        def begin(stage: str) -> None:
            reporter.on_stage(stage, None)
            places.append(reporter._bar.tasks[0].fields["place"])
            reporter.on_stage(stage, StageOutcome(stage, False, 1.0))

        reporter.on_stages(["export", "plan", "refine", "evaluate", "report"])
        begin("export")
        begin("extra")
        begin("evaluate")  # plan and refine were not necessary
        reporter.on_stages(["export", "report", "bundle"])  # everything anew
        begin("export")
        begin("report")
        begin("bundle")
    assert places == ["1 of 5", "2 of 6", "3 of 4", "4 of 6", "5 of 6", "6 of 6"]


@pytest.mark.parametrize(
    ("kind", "environment", "plain", "coloured"),
    [
        (io.StringIO, {}, True, False),
        (io.StringIO, {"FORCE_COLOR": "1"}, True, True),
        (io.StringIO, {"FORCE_COLOR": ""}, True, False),
        (io.StringIO, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        (io.StringIO, {"FORCE_COLOR": "1", "TERM": "dumb"}, True, False),
        (Tty, {}, False, True),
        (Tty, {"NO_COLOR": "1"}, True, False),
        (Tty, {"NO_COLOR": ""}, False, True),
        (Tty, {"TERM": "dumb"}, True, False),
    ],
)
def test_who_gets_plain_lines_and_who_colour(monkeypatch, kind, environment, plain, coloured):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = kind()
    monkeypatch.setattr("sys.stdout", stream)
    out = Terminal.open().out
    assert is_plain(stream) is plain and out.is_terminal is not plain
    out.print("[green]within")
    assert stream.getvalue() == ("\x1b[32mwithin\x1b[0m\n" if coloured else "within\n")


def test_pieces_of_work_are_one_task():
    told: list[tuple[str, int, int]] = []
    joined = JoinedProgress(lambda task, done, total: told.append((task, done, total)), 25)
    joined("judge a", 4, 10)
    joined("judge a", 10, 10)
    joined.skip_to_next(10)
    joined("judge b", 3, 10)  # and fails
    joined.skip_to_next(10)
    joined("judge c", 5, 5)
    assert told == [("judge a", 4, 25), ("judge a", 10, 25), ("judge b", 13, 25), ("judge c", 25, 25)]


Capture = pytest.CaptureFixture[str]


def records(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for record in found:
        jsonschema.validate(record, line_schema())
    return found


def reported(*, quiet: bool = False) -> list[dict[str, Any]]:
    stream = io.StringIO()
    console = Console(file=io.StringIO(), force_terminal=True)
    with StageReporter(Terminal(console, console, quiet, JsonLog(stream))) as reporter:
        reporter.on_stages(["calibrate", "plan"])
        reporter.on_stage("calibrate", None)
        for done in range(0, 101, 10):
            reporter.progress("ranges", done, 100)
        reporter.on_stage("calibrate", StageOutcome("calibrate", False, 6.84))
        reporter.on_stage("plan", None)
        reporter.on_stage("plan", StageOutcome("plan", True, 0.0))
    assert console.file.getvalue() == "", "nothing but records"  # type: ignore[attr-defined]
    return records(stream.getvalue())


def test_a_stage_in_records(monkeypatch):
    seconds = iter(range(10_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.1 * next(seconds))
    found = reported()
    keys = ("event", "stage", "position", "stages", "reused", "seconds")
    assert [tuple(r.get(key) for key in keys) for r in found if "task" not in r] == [
        ("stage_started", "calibrate", 1, 2, None, None),
        ("stage_ended", "calibrate", 1, 2, False, 6.84),
        ("stage_started", "plan", 2, 2, None, None),
        ("stage_ended", "plan", 2, 2, True, 0.0),
    ]
    tasks = [r for r in found if r["event"] == "progress"]
    assert 2 < len(tasks) < 11, "once a second, though it was told more often"
    ends = [(r["task"], r["done"], r["total"], r.get("seconds_left")) for r in (tasks[0], tasks[-1])]
    assert ends == [("ranges", 0, 100, None), ("ranges", 100, 100, None)]
    known = [r["seconds_left"] for r in tasks if "seconds_left" in r]
    assert known == sorted(known, reverse=True) and known


def test_what_others_say_becomes_records(capfd, monkeypatch):
    # pytest has put its own object there, and takes what goes to the descriptor.
    with os.fdopen(os.dup(2), "w") as text:
        monkeypatch.setattr(sys, "stderr", Mock(wraps=text, fileno=lambda: 2))
        with json_log() as log, warnings.catch_warnings():
            warnings.simplefilter("always")
            log.write(Event.STARTED, message="loka-onnx run", version="0")
            logging.getLogger("some.library").warning("weights of %s are odd", "fc1")
            logging.getLogger("some.library").info("never shown")
            warnings.warn("will be gone in 2.0", DeprecationWarning, stacklevel=1)
            os.write(2, "[W:onnxruntime] from C, π\nhalf a".encode())
            subprocess.run([sys.executable, "-c", "import os; os.write(2, b' line\\n')"], check=True)
        os.write(2, b"after it\n")
    *lines, last = capfd.readouterr().err.splitlines()
    assert last == "after it", "the stream is as it was"
    found = [(r["level"], r.get("logger"), r.get("message")) for r in records("\n".join(lines))]
    assert found[0] == ("info", None, "loka-onnx run")
    assert ("warning", "some.library", "weights of fc1 are odd") in found
    assert ("info", "stderr", "[W:onnxruntime] from C, π") in found
    assert ("info", "stderr", "half a line") in found
    (warned,) = [message for _, logger, message in found if logger == "py.warnings"]
    assert "DeprecationWarning: will be gone in 2.0" in warned
    assert len(found) == 5


def ended(arguments: list[str], capsys: Capture) -> tuple[list[dict[str, Any]], str, int]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    return records(captured.err), captured.out, int(end.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "variable", "is_json"),
    [
        (["--log", "json", "schema"], "", True),
        (["schema", "--log", "json"], "", True),
        (["schema", "--log=json"], "", True),
        (["schema"], "json", True),
        (["schema", "--log", "text"], "json", False),
    ],
)
def test_the_result_stays_on_standard_output(arguments, variable, is_json, capsys, monkeypatch):
    """The environment asks for records too, and the command line wins."""
    monkeypatch.setenv("LOKA_ONNX_LOG", variable)
    found, out, code = ended(arguments, capsys)
    assert code == 0 and out.startswith("{")
    assert [(r["event"], r.get("message"), r.get("exit_code")) for r in found] == [
        ("started", "loka-onnx schema", None), ("ended", None, 0)
    ][: 2 * is_json]  # fmt: skip


SECRET = "file://user:hunter2@/nowhere"


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["runn"], "Usage", "No such command 'runn'"),
        (["run"], "Usage", "Missing argument 'RUN.yaml'"),
        (["run", "absent.yaml"], "ConfigError", "cannot read the run file"),
        (["run", "absent.yaml", "--debug"], "ConfigError", "cannot read the run file"),
        (["bundle", "list", SECRET], "ConfigError", "neither a password nor a query"),
    ],
)
def test_errors_are_records(arguments, kind, said, capsys):
    found, out, code = ended([*arguments, "--log", "json"], capsys)
    assert code == 2 and out == ""
    assert [r["event"] for r in found] == ["started", "error", "ended"]
    assert (found[1]["kind"], found[1]["exit_code"], found[1]["level"]) == (kind, 2, "error")
    assert said in found[1]["message"]
    assert found[1].get("traceback", "").startswith("Traceback") == ("--debug" in arguments)
    assert found[2]["exit_code"] == 2
    assert "hunter2" not in json.dumps(found)
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--log", "xml"])
    assert end.value.code == 2
    assert "'xml' is not one of 'text', 'json'" in capsys.readouterr().err


WAITS = "no nvidia-h100 on this host; `loka-onnx build --job jobs/x` builds it on a host with nvidia-h100"


@pytest.mark.parametrize(
    ("here", "place"), [("", "runs/a/jobs/x"), ("runs", "a/jobs/x"), ("elsewhere", "{root}/runs/a/jobs/x")]
)
def test_a_job_is_named_as_seen_from_here(tmp_path, monkeypatch, here, place):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / here)
    told = first_line(replace(DECLINED, detail=f"{WAITS}\nmore"), tmp_path / "runs" / "a")
    assert told == WAITS.replace("jobs/x", place.format(root=tmp_path))
    other = replace(DECLINED, detail="  declined: jobs/x\nmore")
    assert first_line(other, tmp_path) == "declined: jobs/x"


def shown(data: ReportData, directory: Path) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=120)
    print_outcome(Terminal(console, console), RunResult(directory, report=data))
    return stream.getvalue()


def test_a_slice_that_any_emitted_engine_harms_is_told(sample, tmp_path):
    harmed = SliceDifference("country", "BR", 100, 100, HARM, HARM, HARM, BudgetStatus.BEYOND)
    data = with_outputs(
        routed(sample.report), lambda o: replace(o, slices=(harmed,)), "certification", ROUTED
    )
    lines = shown(data, tmp_path).splitlines()
    assert [line for line in lines if line.startswith("! ")] == [
        f"! {ROUTED}, ctr, slices: 1 of 1 judged beyond the budget of 0.02 %; "
        "worst country = BR: +0.060 % [+0.030 %, +0.090 %]"
    ]
    first = "gpu: bf16 and fp8-safe, 2.10× over FP32 (246.0 µs → 117.0 µs at 1,024), ΔNE "
    assert lines[1].startswith(first) and lines[2].rstrip() == "  fastest inside"


def test_the_result_as_json_has_every_number_and_the_sentence(sample, tmp_path):
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


def test_a_reason_that_two_targets_share_is_told_once(sample, tmp_path):
    data = decided(sample.report)
    targets = tuple(replace(t, reason="as measured") for t in data.choice.targets)
    data = replace(data, choice=replace(data.choice, targets=targets))
    assert len(targets) > 1 and shown(data, tmp_path).count("as measured") == 1
