"""Exit codes and messages: what becomes of every kind of ending."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loka_onnx.cli import doctor as doctor_verb
from loka_onnx.cli.main import main
from loka_onnx.errors import BudgetMissed, ConfigError, EngineError, InternalError

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _keep_handler() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def ending(monkeypatch: pytest.MonkeyPatch, error: BaseException, *flags: str) -> int:
    """Exit code of a verb that raises."""

    def fail(model: Path | None = None) -> None:
        raise error

    monkeypatch.setattr(doctor_verb, "diagnose", fail)
    return exit_code(["doctor", *flags])


def exit_code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("kind", "code"), [(ConfigError, 2), (EngineError, 1), (BudgetMissed, 3)])
def test_an_expected_error_is_one_message(monkeypatch, capsys, kind, code):
    error = kind("bad key", where="RUN.yaml:3", evidence="found 7", remedy="remove it")
    assert ending(monkeypatch, error) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: RUN.yaml:3: bad key\n  evidence: found 7\n  remedy: remove it\n"
    assert ending(monkeypatch, error, "--debug") == code
    debug = capsys.readouterr().err
    assert debug.startswith("Traceback") and debug.endswith(captured.err)


@pytest.mark.parametrize("flags", [(), ("--debug",)])
def test_what_others_wrote_cannot_steer_the_terminal(monkeypatch, capsys, flags):
    evidence = "found \x1b]0;owned\x1b\\ \x9b2J \u202egnp.exe, [red]x[/red] and [/nothing]"
    assert ending(monkeypatch, ConfigError("bad key", evidence=evidence), *flags) == 2
    shown = capsys.readouterr().err
    assert shown.endswith(
        "  evidence: found \\x1b]0;owned\\x1b\\ \\x9b2J \\u202egnp.exe, [red]x[/red] and [/nothing]\n"
    )
    assert shown.replace("\n", "").isprintable()


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), InternalError("by zero")])
def test_a_bug_says_that_it_is_one_and_ctrl_c_that_it_was_interrupted(monkeypatch, capsys, error):
    assert ending(monkeypatch, error) == 1
    message = capsys.readouterr().err
    assert message.startswith("Traceback")
    assert message.splitlines()[-1].startswith("internal error, please report: ")
    assert message.endswith("by zero\n")
    assert ending(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.startswith("interrupted; ")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *((words, 2) for words in (["frobnicate"], ["run"], ["run", "--bogus", "x"], ["bundle", "verify"])),
        # Global flags stand anywhere.
        *((words, 0) for words in (["--quiet", "schema"], ["schema", "--quiet"])),
    ],
)
def test_right_and_wrong_usage(arguments, code, capsys):
    assert exit_code(arguments) == code
    captured = capsys.readouterr()
    if code:
        assert captured.out == "" and captured.err.startswith("Usage: loka-onnx")
    else:
        assert captured.out.startswith("{")


def test_a_stream_that_knows_only_ascii(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert exit_code(["doctor"]) == 0
    sys.stdout.flush()
    assert b"? onnxruntime" in raw.getvalue()
