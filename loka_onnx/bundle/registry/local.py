"""Writing files of a registry in a local directory, so that a reader sees the old file or the whole new one.

fsspec's own local files are opened for writing in place, or moved in from a temporary directory that may lie
on another disk. Here a file is written to `uploads/` of the registry, synced, and renamed.

A file in `uploads/` is locked (flock) for as long as its writer lives, so that what a killed writer left can
be told from what is being written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from loka_onnx.bundle.registry.layout import UPLOADS


def write_file(root: Path, key: str, data: bytes) -> None:
    """Writes a file of a registry atomically.

    Args:
        root: Directory of the registry; made when absent.
        key: Path of the file in it; directories are made when absent.
        data: Its content.

    Raises:
        OSError: The place cannot be written; the earlier file is as it was.
    """
    target = root / key
    target.parent.mkdir(parents=True, exist_ok=True)
    uploads = root / UPLOADS
    uploads.mkdir(exist_ok=True)
    # The directory stays locked until the file is, so that nobody takes it for a leftover.
    with _locked(uploads):
        descriptor, temporary = tempfile.mkstemp(dir=uploads)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        write_all(descriptor, data)
        os.fchmod(descriptor, 0o644)
        os.fsync(descriptor)
        Path(temporary).replace(target)
        _sync_directory(target.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def read_file(root: Path, key: str, start: int, limit: int) -> bytes:
    """Reads at most `limit` bytes of a file of a registry from byte `start` on; follows links.

    Raises:
        OSError: It is not there, is no plain file, or cannot be read.
    """
    # O_NONBLOCK: a pipe that somebody put there does not hold us up.
    descriptor = os.open(root / key, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", key)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            stream.seek(start)
            return stream.read(limit)
    finally:
        os.close(descriptor)


def remove_leftovers(root: Path) -> None:
    """Removes what killed writers left in `uploads/`; what is being written stays.

    Raises:
        OSError: The place cannot be read or written.
    """
    uploads = root / UPLOADS
    if not uploads.is_dir():
        return
    with _locked(uploads):
        for path in uploads.iterdir():
            with (
                contextlib.suppress(FileNotFoundError, BlockingIOError),
                _opened(path, os.O_RDONLY) as descriptor,
            ):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of it at the position of an open file.

    Raises:
        OSError: The disk is full, or the file may not grow so far.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_directory(directory: Path) -> None:
    with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    # O_NONBLOCK: a pipe that somebody put there does not hold us up.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
