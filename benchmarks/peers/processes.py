"""Other tools in processes of their own, under limits of time and memory.

A child reads one JSON object from standard input and answers on standard output: first the versions of its
packages, when its imports are done, then what came of the job. What it prints goes to a log. Whatever happens
to it comes back as a value: a tool that crashes has its row in the table.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

POLL_SECONDS = 0.02
TAIL_LINES = 15
MIB = 1 << 20


@dataclass(frozen=True)
class ChildLimits:
    """What a child may take.

    Attributes:
        seconds: Wall time of the job; its imports have as much again.
        memory_mib: Anonymous resident memory of the child and its descendants.
    """

    seconds: float = 900.0
    memory_mib: float = 12_000.0


@dataclass(frozen=True)
class ChildResult:
    """What became of one job.

    Attributes:
        answer: What the child answered; None where it failed.
        failure: Why there is no answer; empty where there is one.
        log_tail: Last lines of its log; empty where it answered.
        versions: Packages of its environment; empty where it never came up.
        wall_seconds: From the start of the process to its end, imports included.
        peak_anonymous_mib: Largest anonymous resident memory, imports included.
        imported_anonymous_mib: The same when its imports were done.
    """

    answer: dict[str, Any] | None
    failure: str
    log_tail: str
    versions: dict[str, str] = field(default_factory=dict)
    wall_seconds: float = 0.0
    peak_anonymous_mib: float = 0.0
    imported_anonymous_mib: float = 0.0


def run_job(
    command: Sequence[str | Path],
    job: dict[str, Any],
    log: Path,
    limits: ChildLimits,
    environment: dict[str, str] | None = None,
) -> ChildResult:
    """Run one job in a fresh process; nothing of its process group is left when this returns.

    Args:
        command: Of the child.
        job: What it is asked for.
        log: Takes what it prints.
        limits: When to end it.
        environment: Variables beside those of this process.

    Returns:
        The answer, or why there is none.
    """
    began = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [os.fspath(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        watch = _Watch(process, limits)
        try:
            versions, answer = _talk(process, job, watch)
            process.wait()
        finally:
            watch.stop()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
    failure = ""
    if answer is None:
        failure = watch.reason or f"ended with {_ending(process.returncode)} and no answer"
    elif "failure" in answer:
        failure, answer = str(answer["failure"]), None
    return ChildResult(
        answer,
        failure,
        tail_of(log) if failure else "",
        versions or {},
        time.monotonic() - began,
        watch.peak_mib,
        watch.imported_mib,
    )


def _talk(
    process: subprocess.Popen[str], job: dict[str, Any], watch: _Watch
) -> tuple[dict[str, str] | None, dict[str, Any] | None]:
    """Versions and the answer; None for what did not come."""
    assert process.stdin is not None
    assert process.stdout is not None
    versions = _line(process)
    if versions is None:
        return None, None
    watch.begin()
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return versions, None
    return versions, _line(process)


def _line(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


class _Watch:
    """Looks at the memory and the clock of a child, and ends it and its descendants at a limit."""

    def __init__(self, process: subprocess.Popen[str], limits: ChildLimits) -> None:
        self._process, self._limits = process, limits
        self._deadline = time.monotonic() + limits.seconds
        self._is_done = threading.Event()
        self.reason, self.peak_mib, self.imported_mib = "", 0.0, 0.0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Its imports are done: time counts from here."""
        self.imported_mib = anonymous_mib(self._process.pid)
        self._deadline = time.monotonic() + self._limits.seconds

    def stop(self) -> None:
        """End the watch, and what is left of the child's process group."""
        self._is_done.set()
        self._thread.join()
        _kill_group(self._process)

    def _look(self) -> None:
        while not self._is_done.wait(POLL_SECONDS):
            self.peak_mib = max(self.peak_mib, anonymous_mib(self._process.pid))
            if self.peak_mib > self._limits.memory_mib:
                self.reason = f"ended at the memory limit of {self._limits.memory_mib:.0f} MiB"
            elif time.monotonic() > self._deadline:
                self.reason = f"ended at the time limit of {self._limits.seconds:g} s"
            else:
                continue
            _kill_group(self._process)
            return


def anonymous_mib(pid: int) -> float:
    """Anonymous resident memory of a process and its descendants, MiB; 0 where it has ended.

    Source: Linux, ``Documentation/filesystems/proc.rst``, RssAnon of ``/proc/PID/status``.
    """
    try:
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return 0.0
    return sum(_resident_anonymous(member) for member in family)


def _resident_anonymous(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _kill_group(process: subprocess.Popen[str]) -> None:
    # The child leads a process group of its own (`start_new_session`), so nobody else is reached.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def tail_of(log: Path) -> str:
    """The last lines of a log; empty where there is none."""
    if not log.is_file():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line[:300] for line in lines[-TAIL_LINES:])
