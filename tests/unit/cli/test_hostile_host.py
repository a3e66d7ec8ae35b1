"""What the host does to the command: Ctrl-C while it starts, a full disk behind its output, no memory."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loka_onnx.cli import main as cli
from loka_onnx.errors import OutputError
from loka_onnx.graph.storage import replacing

COMMAND = [sys.executable, "-c", "from loka_onnx.cli import command; command()"]


@pytest.mark.slow
def test_an_output_that_is_full_is_an_error_and_no_traceback() -> None:
    for arguments in (["--version"], ["schema", "run"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.05, 0.15, 0.4])
def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(delay: float, tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"from loka_onnx.cli import command; open({str(started)!r}, 'w').close(); command()"
    process = subprocess.Popen([sys.executable, "-c", code, "doctor"], stderr=subprocess.PIPE, text=True)
    while not started.exists():
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode in {-signal.SIGINT, 130}
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("12 GB"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    ],
    ids=str,
)
def test_what_the_host_ran_out_of_is_told_as_itself(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*arguments: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", failing)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    signal.signal(signal.SIGTERM, handler)
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "Traceback" not in said and "please report" not in said and str(error) in said


def test_a_disk_that_is_full_while_a_model_is_written_is_an_error_of_the_place(tmp_path: Path) -> None:
    (tmp_path / ".model.onnx.unfinished").symlink_to("/dev/full")
    with pytest.raises(OutputError), replacing(tmp_path / "model.onnx") as stream:
        stream.write(bytes(1 << 20))
    assert list(tmp_path.iterdir()) == []
