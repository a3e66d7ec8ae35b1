"""The log in JSON: its fields, and that nothing else gets onto standard error."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from loka_onnx.cli import progress as progress_module
from loka_onnx.cli.log_lines import Event, JsonLog, json_log, line_schema
from loka_onnx.cli.main import main
from loka_onnx.cli.progress import StageReporter
from loka_onnx.cli.terminal import Terminal
from loka_onnx.pipeline.directory import Outcome

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
        reporter.on_stage("calibrate", Outcome("calibrate", False, 6.84))
        reporter.on_stage("plan", None)
        reporter.on_stage("plan", Outcome("plan", True, 0.0))
    assert console.file.getvalue() == "", "nothing but records"  # type: ignore[attr-defined]
    return records(stream.getvalue())


def test_a_stage_in_records(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10_000))
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: 0.1 * next(seconds))
    found = reported()
    assert [
        (r["event"], r["stage"], r.get("position"), r.get("stages")) for r in found if "task" not in r
    ] == [
        ("stage_started", "calibrate", 1, 2),
        ("stage_ended", "calibrate", 1, 2),
        ("stage_started", "plan", 2, 2),
        ("stage_ended", "plan", 2, 2),
    ]
    ended = [(r["reused"], r["seconds"]) for r in found if r["event"] == "stage_ended"]
    assert ended == [(False, 6.84), (True, 0.0)]
    tasks = [(r["task"], r["done"], r["total"]) for r in found if r["event"] == "progress"]
    assert tasks[0] == ("ranges", 0, 100) and tasks[-1] == ("ranges", 100, 100)
    assert 2 < len(tasks) < 11, "once a second, though it was told more often"
    left = [r.get("seconds_left") for r in found if r["event"] == "progress"]
    assert left[0] is None and left[-1] is None
    known = [value for value in left if value is not None]
    assert known == sorted(known, reverse=True) and known


def test_quiet_records_nothing_of_stages() -> None:
    assert reported(quiet=True) == []


def test_what_others_say_becomes_records(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest has put its own object there, and takes what goes to the descriptor.
    with os.fdopen(os.dup(2), "w") as text:
        monkeypatch.setattr(sys, "stderr", _OfDescriptor(text))
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


class _OfDescriptor(io.StringIO):
    """Standard error as a process has it: an object over descriptor 2."""

    def __init__(self, beneath: io.TextIOBase) -> None:
        super().__init__()
        self._beneath = beneath

    def fileno(self) -> int:
        return 2


def ended(arguments: list[str], capsys: Capture) -> tuple[list[dict[str, Any]], str, int]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    return records(captured.err), captured.out, int(end.value.code or 0)


@pytest.mark.parametrize(
    "arguments", [["--log", "json", "schema"], ["schema", "--log", "json"], ["schema", "--log=json"]]
)
def test_the_result_stays_on_standard_output(arguments: list[str], capsys: Capture) -> None:
    found, out, code = ended(arguments, capsys)
    assert code == 0 and out.startswith("{")
    assert [r["event"] for r in found] == ["started", "ended"]
    assert found[0]["message"] == "loka-onnx schema" and found[1]["exit_code"] == 0


def test_the_environment_asks_for_it_and_the_command_line_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("LOKA_ONNX_LOG", "json")
    assert len(ended(["schema"], capsys)[0]) == 2
    assert ended(["schema", "--log", "text"], capsys)[0] == []


def test_a_secret_in_the_arguments_is_not_logged(tmp_path: Path, capsys: Capture) -> None:
    url = f"file://user:hunter2@{tmp_path}/nowhere"
    found, _, _ = ended(["--log", "json", "bundle", "list", url], capsys)
    assert found[0]["message"] == "loka-onnx bundle list"
    assert "hunter2" not in json.dumps(found)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["runn"], "Usage", "No such command 'runn'"),
        (["run"], "Usage", "Missing argument 'RUN.yaml'"),
        (["run", "absent.yaml"], "ConfigError", "cannot read the run file"),
    ],
)
def test_errors_are_records(arguments: list[str], kind: str, said: str, capsys: Capture) -> None:
    found, out, code = ended([*arguments, "--log", "json"], capsys)
    assert code == 2 and out == ""
    assert [r["event"] for r in found] == ["started", "error", "ended"]
    assert (found[1]["kind"], found[1]["exit_code"], found[1]["level"]) == (kind, 2, "error")
    assert said in found[1]["message"] and "traceback" not in found[1]
    assert found[2]["exit_code"] == 2


def test_debug_adds_the_traceback(capsys: Capture) -> None:
    found, _, _ = ended(["run", "absent.yaml", "--log", "json", "--debug"], capsys)
    assert found[1]["traceback"].startswith("Traceback")


def test_an_unknown_format_is_refused(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--log", "xml", "schema"])
    assert end.value.code == 2
    assert "'xml' is not one of 'text', 'json'" in capsys.readouterr().err
