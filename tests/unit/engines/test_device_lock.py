"""One process at a time on the accelerator, and nobody pays for waiting."""

import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from loka_onnx.engines import device_lock
from loka_onnx.engines.device_lock import device_alone
from loka_onnx.engines.isolation import Cancelled, Ending, cancelled_by, run_child
from loka_onnx.engines.request import BuildLimits
from loka_onnx.errors import EngineError

HOLDER = """
import sys, time
from pathlib import Path
from loka_onnx.engines.device_lock import device_alone
with device_alone("sm90"):
    Path(sys.argv[1]).touch()
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(device_lock.tempfile, "tempdir", None)


def hold(tmp_path: Path, seconds: float) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "held"), str(seconds)])
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    return process


def is_held(tmp_path: Path) -> bool:
    """Whether the lock's file is locked, as another program finds it."""
    (place,) = tmp_path.glob("loka-onnx-*")
    with (place / device_lock.LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_block_waits_for_the_block_of_another_process(tmp_path):
    waiting, seen = tmp_path / "waiting", []
    with hold(tmp_path, 0.4) as process:
        watcher = threading.Timer(0.2, lambda: seen.append(waiting.exists()))
        watcher.start()
        # ROCm's name of a device, CUDA's name: one accelerator.
        with device_alone("gfx942", waiting):
            assert process.poll() is not None or process.wait(5) == 0
            assert not waiting.exists()
        watcher.join()
    assert seen == [True]


def test_it_ends_with_a_killed_process_and_the_cpu_has_room_for_several(tmp_path):
    with hold(tmp_path, 600) as process:
        assert is_held(tmp_path)
        process.kill()
    with device_alone("sm90"):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)
    with hold(tmp_path, 600) as process:
        with device_alone("cpu"), device_alone("cpu"):
            assert process.poll() is None, "neither waited for the accelerator"
        process.kill()


def test_a_place_of_another_user_is_refused(tmp_path):
    with device_alone("sm90"):
        pass
    (place,) = tmp_path.glob("loka-onnx-*")
    (place / "accelerator.lock").unlink()
    (place / "accelerator.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match=rf"{place}(?s:.*)set TMPDIR"), device_alone("sm90"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def child(tmp_path: Path, code: str) -> str:
    name = f"child_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    return name


def test_time_that_a_child_waits_for_others_is_not_its_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = "import os, sys, time\ntime.sleep(0.9)\n"
    waits = child(tmp_path, code + "os.unlink(sys.argv[1])")
    sleeps = child(tmp_path, "import time\ntime.sleep(600)")
    waiting, limits = tmp_path / "waiting", BuildLimits(0.6, 1 << 30)
    waiting.touch()
    assert run_child(waits, [str(waiting)], tmp_path / "log", limits, waiting).ending is Ending.EXITED
    assert run_child(sleeps, [str(waiting)], tmp_path / "log", limits, waiting).ending is Ending.TIMED_OUT


def test_a_thread_that_is_told_to_stop_ends_its_child(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = child(tmp_path, "import os, sys, time\nopen(sys.argv[1], 'w').close()\ntime.sleep(600)")
    stop, seen = threading.Event(), []

    def build() -> None:
        try:
            with cancelled_by(stop):
                run_child(name, [str(tmp_path / "begun")], tmp_path / "log", BuildLimits(600, 1 << 30))
        except Cancelled:
            seen.append("cancelled")

    thread = threading.Thread(target=build)
    thread.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    stop.set()
    thread.join(10)
    assert seen == ["cancelled"]
