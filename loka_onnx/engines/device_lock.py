"""Exclusive use of this machine's accelerator.

Builds run in parallel, but timing of kernels, first inferences and latency measurements would disturb each
other. The lock is an flock on a file of this user: it also holds between runs, and ends with its process. One
lock covers all accelerators of a machine, because backends name the same device differently (``sm90``,
``cuda``) and every engine is loaded on the first one that fits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from loka_onnx.core.devices import CPU
from loka_onnx.errors import EngineError

LOCK = "accelerator.lock"


@contextlib.contextmanager
def device_alone(architecture: str, waiting: Path | None = None) -> Iterator[None]:
    """Hold the accelerator for a block; the CPU needs no lock. Nested blocks in one process deadlock. The
    file `waiting` exists while this process waits. Raises EngineError if the lock's directory belongs to
    another user, or cannot be written.
    """
    if architecture == CPU:
        yield
        return
    descriptor = _open()
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting.touch()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            finally:
                if waiting is not None:
                    waiting.unlink(missing_ok=True)
        yield
    finally:
        # Closing is not enough: a forked child may still have the file open.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _open() -> int:
    place = Path(tempfile.gettempdir()) / f"loka-onnx-{os.getuid()}"
    with EngineError(
        "E0810 cannot lock the accelerator",
        where=str(place),
        remedy="remove it, or set TMPDIR to a directory that this user can write",
    ).in_place_of(OSError):
        place.mkdir(mode=0o700, exist_ok=True)
        if place.lstat().st_uid != os.getuid() or place.is_symlink():
            raise PermissionError(f"'{place}' is not a directory of this user")
        return os.open(place / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
