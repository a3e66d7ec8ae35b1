"""Tools in processes of their own: answers, failures and limits."""

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.processes import ChildLimits, ChildResult, run_job

CHILDREN = Path(__file__).parents[3] / "benchmarks" / "peers" / "children"
LIMITS = ChildLimits(seconds=20.0, memory_mib=2000.0)


def run(tmp_path: Path, body: str, limits: ChildLimits = LIMITS) -> ChildResult:
    """A child whose ``work(job)`` has this body."""
    script = tmp_path / "child.py"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    script.write_text(
        f"import os, sys, time, subprocess\nsys.path.insert(0, {str(CHILDREN)!r})\n"
        f"from answering import answer\ndef work(job):\n{lines}\nanswer(('numpy',), work)\n",
        encoding="utf-8",
    )
    return run_job([sys.executable, script], {"rows": 3}, tmp_path / "log.txt", limits)


def test_an_answer_comes_with_versions_seconds_and_memory(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        "print('chatter that is no answer')\nheld = bytearray(os.urandom(80 << 20))\ntime.sleep(0.2)\n"
        "return {'rows': job['rows'] + len(held) * 0}",
    )

    assert found.answer is not None
    assert found.answer["rows"] == 3
    assert found.answer["seconds"] >= 0.2
    assert set(found.versions) == {"numpy"}
    assert found.failure == found.log_tail == ""
    # 80 MiB beside what Python held already.
    assert found.peak_anonymous_mib - found.imported_anonymous_mib >= 70
    assert "chatter" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_an_exception_is_a_row_with_its_message_and_log(tmp_path: Path) -> None:
    found = run(tmp_path, "raise RuntimeError('node Foo is not supported')")

    assert found.answer is None
    assert found.failure == "RuntimeError: node Foo is not supported"
    assert "Traceback" in found.log_tail


def test_a_crash_is_told_by_its_signal(tmp_path: Path) -> None:
    found = run(tmp_path, "print('last words', flush=True)\nos.abort()")

    assert found.answer is None
    assert found.failure == "ended with SIGABRT and no answer"
    assert "last words" in found.log_tail
    assert found.versions


def test_the_time_limit_ends_the_child_and_what_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    body = (
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(mark)!r}, 'w').write(str(inner.pid))\ntime.sleep(60)"
    )
    began = time.monotonic()

    found = run(tmp_path, body, ChildLimits(seconds=1.5, memory_mib=2000.0))

    assert found.failure == "ended at the time limit of 1.5 s"
    assert time.monotonic() - began < 15
    pid = int(mark.read_text(encoding="ascii"))
    for _ in range(100):
        if not _is_alive(pid):
            break
        time.sleep(0.05)
    assert not _is_alive(pid)


@pytest.mark.slow
def test_the_memory_limit_ends_the_child(tmp_path: Path) -> None:
    body = "held = []\nwhile True:\n    held.append(os.urandom(8 << 20))\n    time.sleep(0.005)"

    found = run(tmp_path, body, ChildLimits(seconds=30.0, memory_mib=150.0))

    assert found.failure == "ended at the memory limit of 150 MiB"
    assert found.peak_anonymous_mib > 150


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"
