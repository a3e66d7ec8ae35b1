"""What a user sees: on a terminal of any width, in a log, after Ctrl-C and after an error."""

import json
import os
import re
import sys
from datetime import datetime

import jsonschema
import pytest
from pseudo_terminal import Session, screen, start
from run_findings import STAGES as RECORDED
from synthetic_runs import BIN, finish
from synthetic_runs import start as start_in_pipes

from loka_onnx.cli.log_lines import LogLine, line_schema

pytestmark = pytest.mark.slow
ESCAPE = "\x1b"
STAGES = [RECORDED[0], "check data", *RECORDED[1:]]
SLOW_STAGE = """
import time
from loka_onnx.cli.main import main
from loka_onnx.cli import doctor
from loka_onnx.cli.progress import StageReporter
from loka_onnx.cli.terminal import Terminal
from loka_onnx.errors import StageError

def slow(model=None):
    with StageReporter(Terminal.open()) as reporter:
        reporter.on_stages(["first", "second", "third"])
        reporter.on_stage("first", None)
        for done in range(1, 21):
            time.sleep(0.1)
            reporter.progress("rows", done, 40)
        raise StageError("the stage broke")

doctor.diagnose = slow
main(["doctor"])
"""
"""A command with a stage whose length is known, and that fails half-way: 2 s of 4 s."""


WIDTHS = (40, 60, 100)
ESTIMATE = re.compile(r"about \d+ (s|min) in all \(.+\)")
"""What to expect of the run, after the data were checked."""


def slow_stage(columns: int = 100, **environment: str) -> Session:
    return start([sys.executable, "-c", SLOW_STAGE], columns=columns, environment=environment)


@pytest.fixture(scope="module")
def failed() -> dict[int, str]:
    """What the slow stage wrote on terminals of several widths."""
    sessions = {columns: slow_stage(columns) for columns in WIDTHS}
    assert [session.end() for session in sessions.values()] == [1, 1, 1]
    return {columns: session.text for columns, session in sessions.items()}


def frames(text: str) -> list[str]:
    """The states of the line that moves, without colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line for line in re.split(r"[\r\n]+", plain) if re.search(r":\d\d +[-\d:]+ *$", line)]


def test_a_terminal_shows_the_place_the_share_and_the_time_left(failed):
    seen = [frame for frame in frames(failed[100]) if "1 of 3 first: rows" in frame]
    left = [frame.split()[-1] for frame in seen]
    assert left[0] == "-:--:--", "nobody knows at first"
    # It has half of its rows after 2 s, on a machine with nothing else to do.
    known = [int(text.rpartition(":")[2]) for text in left if "-" not in text]
    assert known and 1 <= min(known) <= max(known) <= 8
    assert any(re.search(r" [34][05]% .*0:0[1-9] ", frame) for frame in seen), "share and time so far"


@pytest.mark.parametrize("columns", WIDTHS)
def test_an_error_leaves_nothing_but_its_message(failed, columns):
    assert "first" in failed[columns]
    assert screen(failed[columns]) == ["error: the stage broke"]
    assert failed[columns].count("\x1b[?25l") == failed[columns].count("\x1b[?25h") == 1, "the cursor is back"


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_line_that_moves_never_wraps(failed, columns):
    assert max(map(len, frames(failed[columns]))) <= columns


def test_ctrl_c_leaves_the_finished_stages_and_one_message(place):
    session = start([BIN / "loka-onnx", "run", place.run_file])
    assert session.read_until(lambda text: "3 of 14" in text), session.text
    session.type("\x03")
    assert session.end() == 130
    shown = [line for line in screen(session.text) if not line.startswith("^C")]
    assert shown[-1].startswith("interrupted; `run --resume`")
    assert ESTIMATE.fullmatch(shown[2])
    finished = [line.split("  ")[0] for line in [*shown[:2], *shown[3:-1]]]
    # A stage or two may have ended before the signal came.
    assert 2 <= len(finished) < len(STAGES)
    assert finished == [f"✓ {stage}" for stage in STAGES[: len(finished)]]


@pytest.mark.parametrize("columns", [60, 100])
def test_the_end_of_a_run_fits_the_terminal(finished, columns):
    run_file = finished.directory.parent.parent / "RUN.yaml"
    session = start([BIN / "loka-onnx", "run", run_file, "--resume"], columns=columns)
    assert session.end() == 0
    shown = screen(session.text)
    # The result comes first: a sentence for the target, why, and the table.
    first = next(number for number, line in enumerate(shown) if line.startswith("cpu: "))
    assert re.fullmatch(r"cpu: fp32, [\d.]+ µs at 64, ΔNE 0 % of 1 %", shown[first])
    begins = shown.index("RUN, cpu: certification")
    why, table = shown[first + 1 : begins], shown[begins : shown.index("", begins)]
    (choice,) = finished.choice.targets
    assert " ".join(" ".join(why).split()) == choice.reason
    # In a narrow column the mark is below the name.
    assert "* emitted" in table and re.search(r"^fp32( \*|.*\n\*)", "\n".join(table), re.M)
    assert max(len(line) for line in [*why, *table]) <= columns
    assert not any("…" in line for line in [*why, *table]), "no number and no word is cut"
    report = next(line for line in shown if line.startswith("report "))
    assert report.endswith("report.html")


def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(finished, tmp_path):
    """Lines with a path, which is left whole to be copied, may be. A program that asks nobody takes 80."""
    columns, place = 76, finished.directory.parents[1]
    rows, bundle = place / "rows.parquet", finished.bundle
    exported = finished.directory / "model" / "exported.onnx"
    commands = {
        "doctor": ("doctor",),
        "check": ("doctor", place / "RUN.yaml"),
        "init": ("init", exported, rows, "-o", "RUN.yaml"),
        "run": ("run", place / "RUN.yaml", "--resume"),
        "compare": ("compare", exported, bundle, "--data", rows, "--rows", "2000", "--no-latency"),
    }
    for name, words in commands.items():
        session = start([BIN / "loka-onnx", *words], columns=columns, cwd=tmp_path)
        assert session.end() == 0, session.text
        shown = [line for line in screen(session.text) if not re.search(r"(?<!\S)\.{0,2}/", line)]
        assert len(shown) > 1, name
        assert not [line for line in shown if len(line) > columns or "…" in line], name


def test_every_stage_is_in_the_json_log(place):
    done = finish(start_in_pipes("run", place.run_file, "--log", "json"))
    assert done.code == 0
    lines = [json.loads(line) for line in done.err.splitlines()]
    for line in lines:
        jsonschema.validate(line, line_schema())
        assert line["schema"] == LogLine.SCHEMA
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert lines[0]["event"] == "started" and lines[0]["message"] == "loka-onnx run"
    assert lines[-1]["event"] == "ended" and lines[-1]["exit_code"] == 0
    for event in ("stage_started", "stage_ended"):
        assert [line["stage"] for line in lines if line["event"] == event] == STAGES
    started = [line for line in lines if line["event"] == "stage_started"]
    assert [line["position"] for line in started] == list(range(1, 15))
    # The stage "refine" was expected, until it showed that no device here runs FP8.
    assert [line["stages"] for line in started] == [15] * 10 + [14] * 4
    tasks = {line["stage"] for line in lines if line["event"] == "progress"}
    assert tasks >= {"calibrate", "mods", "correct", "build", "evaluate"}
    record = json.loads((place.output / "run.json").read_text())["value"]
    took = {line["stage"]: line["seconds"] for line in lines if line["event"] == "stage_ended"}
    for stage in record["stages"]:
        assert took[stage["stage"]] == pytest.approx(stage["seconds"], abs=2e-3)
    assert done.out.rstrip().splitlines()[-1].startswith("bundle "), "standard output is the result"


def test_bash_completes(tmp_path):
    """A shell as a user has it: verbs, files, options and values by the Tab key."""
    (tmp_path / "ranker.yaml").touch()
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "PS1": "> ", "HISTFILE": "", "INPUTRC": "/dev/null"}
    session = start(["bash", "--norc", "--noprofile", "-i"], cwd=tmp_path, environment=environment)
    assert session.read_until(lambda text: text.endswith("> "))
    session.type("source <(loka-onnx --show-completion) && echo rea''dy\n")
    assert session.read_until(lambda text: "ready\r\n" in text), session.text
    for keys, shown in (
        ("loka-onnx calib\t", "loka-onnx calibrate "),
        ("ran\t", "calibrate ranker.yaml "),
        ("--exec\t", "ranker.yaml --executor "),
        ("r\t", "--executor ray "),
    ):
        session.type(keys)
        assert session.read_until(lambda text, shown=shown: shown in text), session.text
    session.type("\x15exit\n")  # Ctrl-U takes the line back
    session.end()
