"""What a user sees while a run works, on a terminal, in a pipe and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loka_onnx.cli import progress as module
from loka_onnx.cli.progress import StageReporter
from loka_onnx.cli.terminal import Terminal, is_plain
from loka_onnx.core.progress import Joined
from loka_onnx.pipeline.directory import Outcome


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
        reporter.on_stage("calibrate", Outcome("calibrate", False, 6.84))
        reporter.on_stage("plan", None)
        reporter.on_stage("plan", Outcome("plan", True, 0.0))
        reporter.on_stage("mods", None)
        reporter.on_stage("mods", Outcome("mods", False, 0.01))
    return stream.getvalue()


def test_a_pipe_gets_one_line_for_each_stage() -> None:
    lines = "✓ calibrate      6.8 s\n✓ plan           reused\n✓ mods           < 0.1 s\n"
    assert report(io.StringIO()) == lines


def test_quiet_says_nothing() -> None:
    assert report(io.StringIO(), quiet=True) == report(Tty(), quiet=True) == ""


def test_a_terminal_gets_the_lines_and_is_left_clean() -> None:
    text = report(Tty())
    assert "✓" in text and "calibrate      6.8 s" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor comes back"


def test_a_terminal_shows_the_running_task() -> None:
    stream = Tty()
    with reporting(stream) as reporter:
        reporter.on_stage("evaluate", None)
        reporter.progress("fp8-all on [selection]", 3000, 12000)
        reporter._bar.refresh()
        assert "evaluate: fp8-all on [selection]" in stream.getvalue()
        assert "25%" in stream.getvalue()


def test_the_clock_goes_on_after_the_last_unit() -> None:
    with reporting(Tty()) as reporter:
        reporter.on_stage("evaluate", None)
        reporter.progress("fp8-all", 12, 12)
        (task,) = reporter._bar.tasks
        assert not task.finished and task.percentage > 99.9


def test_a_bar_does_not_outlive_an_error() -> None:
    stream = Tty()
    with pytest.raises(ValueError), reporting(stream) as reporter:
        reporter.on_stage("build", None)
        raise ValueError
    assert stream.getvalue().endswith("\r\x1b[2K\x1b[?25h\r"), "the line is erased and the cursor is back"


def test_a_pipe_hears_from_a_long_stage_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with reporting(stream) as reporter:
        reporter.on_stage("train", None)
        for second in range(100):
            now[0] = float(second)
            reporter.progress("train (loss 0.5)", second, 100)
    assert stream.getvalue().splitlines() == [
        f"  train (loss 0.5)  {share}%  {share} s so far" for share in (30, 60, 90)
    ]


def test_a_stage_says_its_place_among_those_that_are_left() -> None:
    places = []
    with reporting(Tty()) as reporter:

        def begin(stage: str) -> None:
            reporter.on_stage(stage, None)
            places.append(reporter._bar.tasks[0].fields["place"])
            reporter.on_stage(stage, Outcome(stage, False, 1.0))

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
def test_who_gets_plain_lines_and_who_colour(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[io.StringIO],
    environment: dict[str, str],
    plain: bool,
    coloured: bool,
) -> None:
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


def test_pieces_of_work_are_one_task() -> None:
    told: list[tuple[str, int, int]] = []
    joined = Joined(lambda task, done, total: told.append((task, done, total)), 25)
    joined("judge a", 4, 10)
    joined("judge a", 10, 10)
    joined.skip_to_next(10)
    joined("judge b", 3, 10)  # and fails
    joined.skip_to_next(10)
    joined("judge c", 5, 5)
    assert told == [("judge a", 4, 25), ("judge a", 10, 25), ("judge b", 13, 25), ("judge c", 25, 25)]
