"""One run at a time in a run directory.

The lock is an flock on a hidden file of the directory: it ends with the process, however that ends, so that a
run that was killed can be resumed at once. The file is removed by whoever holds the lock. It is a file of its
own because the bundle is moved into place under an flock on the directory itself.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Self

from loka_onnx.errors import OutputError

LOCK = ".run.lock"
"""The file that is locked; a run that was killed leaves it behind."""


class DirectoryLock:
    """The lock on a run directory, held until it is released.

    Raises:
        OutputError: Another run, in this process or another, holds the lock.
        OSError: The file cannot be written, or the file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / LOCK
        self._descriptor: int | None = _acquire(self._file)

    def release(self) -> None:
        """Let the next run in; does nothing the second time."""
        if self._descriptor is not None:
            # Removed while locked: who waited with this file open sees that it is no longer of that name.
            with suppress(OSError):
                self._file.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _acquire(file: Path) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(descriptor, file):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on '{socket.gethostname()}'".encode())
                return descriptor
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise OutputError(
                f"E1519 the output directory '{file.parent}' is in use by another run",
                evidence=f"{holder} holds the lock on '{file.name}'",
                remedy="wait until that run has ended, or choose another directory with --output",
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_same(descriptor: int, file: Path) -> bool:
    """Return True if the path still names the open file; the last run may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
