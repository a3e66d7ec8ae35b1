"""Completion: what the command answers, and a real shell that asks it."""

from __future__ import annotations

import pytest

from loka_onnx.cli.main import main

Capture = pytest.CaptureFixture[str]


def offered(line: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> list[str]:
    """What bash is offered for the last word of a line."""
    words = line.split(" ")
    monkeypatch.setenv("_LOKA_ONNX_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("loka-onnx cali", {"calibrate"}),
        ("loka-onnx bundle pu", {"push", "pull"}),
        ("loka-onnx run --re", {"--resume", "--require-fp8"}),
        ("loka-onnx --lo", {"--log"}),
        ("loka-onnx --log ", {"text", "json"}),
        ("loka-onnx calibrate --executor r", {"ray"}),
        # The shell's own business: files.
        ("loka-onnx run R", set()),
    ],
)
def test_what_is_offered(
    line: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert set(offered(line, monkeypatch, capsys)) == expected


def test_a_log_in_json_does_not_reach_the_shell(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("LOKA_ONNX_LOG", "json")
    assert offered("loka-onnx cali", monkeypatch, capsys) == ["calibrate"]
