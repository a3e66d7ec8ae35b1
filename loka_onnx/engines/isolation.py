"""Child processes that cannot crash the parent, and directories that appear as a whole.

The child has its own process group, writes to a log file, and the parent watches its wall time and resident
memory. An address-space limit (`RLIMIT_AS`) does not work, because CUDA reserves far more address space than
it uses. Every outcome of the child is returned as a value.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from loka_onnx.engines.request import BuildLimits
from loka_onnx.errors import OutputError

POLL_SECONDS = 0.02
TAIL_LINES, TAIL_CHARACTERS = 20, 3000
MIB = 1 << 20
STALE_SECONDS = 86_400.0
"""Age at which a staging directory of another machine counts as abandoned."""


class Ending(StrEnum):
    """Endings of a child process."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class ChildOutcome:
    """Ending of a child process, its exit code or signal, and its largest resident memory seen."""

    ending: Ending
    code: int
    seconds: float
    peak_bytes: int

    def describe(self, limits: BuildLimits) -> str:
        """Describe the ending of a build in a sentence, with evidence and remedy."""
        options = {Ending.TIMED_OUT: "timeout_seconds", Ending.OUT_OF_MEMORY: "memory_gb"}
        option = options.get(self.ending)
        return self.ended(limits) + (f"; raise `build.{option}`" if option else "")

    def ended(self, limits: BuildLimits) -> str:
        """Describe the ending, with evidence."""
        used = f"after {self.seconds:.1f} s, peak memory {self.peak_bytes / MIB:.0f} MiB"
        if self.ending is Ending.TIMED_OUT:
            return f"ended at the time limit of {limits.seconds:g} s ({used})"
        if self.ending is Ending.OUT_OF_MEMORY:
            return f"ended at the memory limit of {limits.memory_bytes / MIB:.0f} MiB ({used})"
        if self.ending is Ending.SIGNALLED:
            # Only the kernel and operators send SIGKILL; usually memory ran out.
            cause = "; SIGKILL is what the kernel sends when memory runs out" if self.code == 9 else ""
            text = (signal.strsignal(self.code) or "unknown signal").lower()
            known = {each.value: each.name for each in signal.Signals}
            return f"died of {known.get(self.code, f'signal {self.code}')} ({text}) ({used}){cause}"
        return f"exited with code {self.code} ({used})"


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block ends: an exception between the start of a process, or the
    creation of a directory, and the storing of its name would leave it behind. A signal mask does not help:
    threads of other libraries receive the signal instead.
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
    """A child was ended because its waiters were interrupted; like Ctrl-C, no error."""


_thread = threading.local()
"""Event of each thread that ends its children."""


@contextlib.contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """End this thread's children and raise `Cancelled` once the main thread sets an event, after a signal."""
    earlier = getattr(_thread, "cancelled", None)
    _thread.cancelled = event
    try:
        yield
    finally:
        _thread.cancelled = earlier


def run_child(
    module: str, arguments: Sequence[str], log: Path, limits: BuildLimits, waiting: Path | None = None
) -> ChildOutcome:
    """Run ``python -m module arguments`` in a clean interpreter, under limits, with its output in a log. The
    child's whole process group has ended when this returns or is interrupted. While the file `waiting`
    exists, the child waits for the device (`device_lock`), which does not count against the limit. Raises
    `Cancelled` once the event of `cancelled_by` is set.
    """
    # The child imports what the parent can, and nothing from its working directory (-P).
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
            # Until the leader is reaped its number is not reused, so that the group is certainly ours.
            with interrupts_held():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                returncode = process.wait()
    seconds = time.monotonic() - started
    if ended is None:
        ended, returncode = Ending.SIGNALLED if returncode < 0 else Ending.EXITED, abs(returncode)
    return ChildOutcome(ended, returncode, seconds, peak)


def _watch(
    process: subprocess.Popen[bytes], limits: BuildLimits, waiting: Path | None
) -> tuple[Ending | None, int]:
    """Wait for the child without reaping it; return the exceeded limit, if any, and the peak memory."""
    cancelled: threading.Event | None = getattr(_thread, "cancelled", None)
    peak, own_seconds, last = 0, 0.0, time.monotonic()
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if cancelled is not None and cancelled.is_set():
            raise Cancelled
        now = time.monotonic()
        if waiting is None or not waiting.exists():
            own_seconds += now - last
        last = now
        if own_seconds > limits.seconds:
            return Ending.TIMED_OUT, peak
        peak = max(peak, _resident_bytes(process.pid))
        if peak > limits.memory_bytes:
            return Ending.OUT_OF_MEMORY, peak
        # Children are searched for among all processes of the host, a millisecond for each hundred.
        pause = min(50 * (time.monotonic() - now), limits.seconds - own_seconds)
        time.sleep(max(POLL_SECONDS, pause))
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
    """Last lines of a log, as evidence of a failure."""
    try:
        with log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 4 * TAIL_CHARACTERS))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])[-TAIL_CHARACTERS:].strip()


def _make_staging(output: Path) -> Path:
    """Make a staging directory beside the output, and remove those of dead processes."""
    prefix, here = f".{output.name}.building-", socket.gethostname()
    with OutputError(f"E0883 cannot write '{output}'").in_place_of(OSError):
        output.parent.mkdir(parents=True, exist_ok=True)
        for stale in output.parent.glob(f"{glob.escape(prefix)}*"):
            host, _, rest = stale.name.removeprefix(prefix).rpartition("@")
            owner = rest.partition("-")[0]
            with contextlib.suppress(FileNotFoundError):
                is_old = host != here and time.time() - stale.stat().st_mtime > STALE_SECONDS
                if is_old or (host == here and owner.isdecimal() and not psutil.pid_exists(int(owner))):
                    shutil.rmtree(stale, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{prefix}{here}@{os.getpid()}-", dir=output.parent))


def replace_directory(source: Path, target: Path, staging: Path) -> None:
    """Move a finished directory into place of an earlier one, which is put back with an `OutputError`."""
    replaced = staging / "replaced"
    with OutputError(f"E0884 cannot write '{target}'").in_place_of(OSError):
        if target.exists():
            target.rename(replaced)
        try:
            source.rename(target)
        except OSError:
            if replaced.exists():
                replaced.rename(target)
            raise


@contextlib.contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Give a staging directory for an output, and remove it afterwards."""
    staging: Path | None = None
    try:
        with interrupts_held():
            staging = _make_staging(output)
        yield staging
    finally:
        if staging is not None:
            with interrupts_held():
                shutil.rmtree(staging, ignore_errors=True)
