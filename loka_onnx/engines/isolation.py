"""A child process that cannot take the parent with it.

The child runs in a process group of its own, writes to a log file, and is watched by the parent for wall
time and resident memory. An address-space limit (`RLIMIT_AS`) would be simpler, but CUDA reserves far more
address space than it uses, and a build would fail under any limit that is worth setting. Whatever happens to
the child comes back as a value.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from loka_onnx.engines.request import Limits

POLL_SECONDS = 0.02
TAIL_LINES = 20
TAIL_CHARACTERS = 3000
MIB = 1 << 20


class Ending(StrEnum):
    """Endings of a child process."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class ChildOutcome:
    """Outcome of a child process.

    Attributes:
        ending: How it ended.
        code: Exit code, or the number of the signal.
        seconds: Wall time.
        peak_bytes: Largest resident memory seen, of the child and its descendants.
    """

    ending: Ending
    code: int
    seconds: float
    peak_bytes: int

    def describe(self, limits: Limits) -> str:
        """One sentence on the ending, with its evidence and remedy where there is one."""
        used = f"after {self.seconds:.1f} s, peak memory {self.peak_bytes / MIB:.0f} MiB"
        if self.ending is Ending.TIMED_OUT:
            return f"ended at the time limit of {limits.seconds:g} s ({used}); raise `build.timeout_seconds`"
        if self.ending is Ending.OUT_OF_MEMORY:
            limit = f"{limits.memory_bytes / MIB:.0f} MiB"
            return f"ended at the memory limit of {limit} ({used}); raise `build.memory_gb`"
        if self.ending is Ending.SIGNALLED:
            # Only the kernel and operators send SIGKILL; a build that ends so most often ran out of memory.
            cause = "; SIGKILL is what the kernel sends when memory runs out" if self.code == 9 else ""
            return f"died of {_signal_name(self.code)} ({used}){cause}"
        return f"exited with code {self.code} ({used})"


def _signal_name(number: int) -> str:
    text = signal.strsignal(number) or "unknown signal"
    try:
        return f"{signal.Signals(number).name} ({text.lower()})"
    except ValueError:
        return f"signal {number} ({text.lower()})"


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block ends.

    For what must not be cut in two: an exception between the start of a process, or the making of a
    directory, and the moment its name is known would leave it behind. A signal mask would not do, because
    the threads of other libraries take the signal in the main thread's place.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    earlier = {
        number: signal.signal(number, lambda number, frame: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0])


class Cancelled(BaseException):
    """A child was ended because those who wait for it were interrupted; as Ctrl-C, it is no error."""


_thread = threading.local()
"""Of each thread, the event that ends its children."""


@contextlib.contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """End this thread's children, and raise `Cancelled`, once an event is set.

    Signals reach the main thread only: whoever waits there for threads that build hands an interrupt on.
    """
    earlier = getattr(_thread, "cancelled", None)
    _thread.cancelled = event
    try:
        yield
    finally:
        _thread.cancelled = earlier


def run_child(
    module: str, arguments: Sequence[str], log: Path, limits: Limits, waiting: Path | None = None
) -> ChildOutcome:
    """Run ``python -m module arguments`` in a clean interpreter, under limits.

    Nothing of the child's process group is left when this returns, or when it is interrupted.

    Args:
        module: Module to run.
        arguments: Its arguments.
        log: File that takes the child's output, standard error included.
        limits: When to end it.
        waiting: A file that the child holds in place while it waits for others (`device_lock`): that time is
            not its own, and does not count against the limit.

    Raises:
        Cancelled: The event of `cancelled_by` was set.
    """
    # The child sees the modules that the parent sees, and nothing from its working directory (-P).
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-X", "faulthandler", "-m", module, *arguments]
    started = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    returncode = 0
    try:
        with log.open("wb") as stream, interrupts_held():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        ended, peak = _watch(process, limits, waiting)
    finally:
        if process is not None:
            # While the leader is not yet reaped its number cannot be reused, so the group is certainly ours.
            with interrupts_held():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                returncode = process.wait()
    seconds = time.monotonic() - started
    if ended is not None:
        return ChildOutcome(ended, returncode, seconds, peak)
    if returncode < 0:
        return ChildOutcome(Ending.SIGNALLED, -returncode, seconds, peak)
    return ChildOutcome(Ending.EXITED, returncode, seconds, peak)


def _watch(
    process: subprocess.Popen[bytes], limits: Limits, waiting: Path | None
) -> tuple[Ending | None, int]:
    """Wait for the child, without reaping it; says which limit was hit, and the peak memory."""
    cancelled: threading.Event | None = getattr(_thread, "cancelled", None)
    peak, own_seconds, last = 0, 0.0, time.monotonic()
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if cancelled is not None and cancelled.is_set():
            raise Cancelled
        peak = max(peak, _resident_bytes(process.pid))
        if peak > limits.memory_bytes:
            return Ending.OUT_OF_MEMORY, peak
        now = time.monotonic()
        if waiting is None or not waiting.exists():
            own_seconds += now - last
        last = now
        if own_seconds > limits.seconds:
            return Ending.TIMED_OUT, peak
        time.sleep(POLL_SECONDS)
    return None, peak


def _resident_bytes(pid: int) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += int(process.memory_info().rss)
    return total


def tail(log: Path) -> str:
    """The end of a log, for a failure's evidence."""
    try:
        with log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 4 * TAIL_CHARACTERS))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])[-TAIL_CHARACTERS:].strip()
