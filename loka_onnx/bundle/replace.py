"""Putting a finished directory in the place of another.

A directory is staged beside its destination and moved in with one system call: Linux exchanges the old and
the new directory atomically (renameat2 with RENAME_EXCHANGE). Elsewhere the old one is renamed away first, so
that for an instant there is none; both stay complete on disk, and the next write finds and removes what an
interruption left.

A stage directory is locked (flock) for as long as its writer lives. The lock dies with the process, however
that ends, so that what is left over can be told from what is being written without trusting process ids.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from loka_onnx.errors import OutputError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def staged_directory(destination: Path) -> Iterator[Path]:
    """A new directory beside `destination` that takes its place when the block ends without an error.

    Removes what interrupted writers of the same destination left behind.

    Args:
        destination: Where the directory goes; what is there is replaced as a whole.

    Yields:
        An empty directory to fill; files and directories in it are synced to disk before the move.

    Raises:
        OutputError: The place cannot be written.
    """
    prefix = f".{destination.name}.staged-"
    stage: Path | None = None
    lock: int | None = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        # The parent stays locked until the stage is, so that no other writer takes it for a leftover.
        with _locked(destination.parent):
            _remove_leftovers(destination, prefix)
            stage = Path(tempfile.mkdtemp(dir=destination.parent, prefix=prefix))
            lock = _lock(stage, wait=False)
        yield stage
        stage.chmod(0o755)
        _sync_tree(stage)
        with _locked(destination.parent):
            move_into_place(stage, destination)
    except OSError as error:
        raise OutputError(
            f"cannot write '{destination}'",
            evidence=str(error),
            remedy="choose a place that can be written and has room",
        ) from error
    finally:
        if stage is not None:
            # After an exchange this is the old directory.
            shutil.rmtree(stage, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def move_into_place(stage: Path, destination: Path) -> None:
    """Moves `stage` to `destination`; what was there is at `stage` afterwards, or gone.

    Raises:
        OSError: The file system refuses.
    """
    if not destination.exists():
        stage.rename(destination)
    elif not _exchange(stage, destination):
        away = Path(tempfile.mkdtemp(dir=stage.parent, prefix=stage.name))
        destination.rename(away / destination.name)
        stage.rename(destination)
        shutil.rmtree(away, ignore_errors=True)
    _sync(destination.parent)


def _exchange(one: Path, other: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}:
        return False
    raise OSError(code, os.strerror(code), os.fspath(other))


def _remove_leftovers(destination: Path, prefix: str) -> None:
    for path in sorted(destination.parent.iterdir()):
        if not path.name.startswith(prefix) or path.is_symlink() or not path.is_dir():
            continue
        try:
            lock = _lock(path, wait=False)
        except (BlockingIOError, FileNotFoundError):
            continue
        try:
            # Interrupted between the two renames: the old directory is still whole, so it comes back.
            if (path / destination.name).is_dir() and not destination.exists():
                (path / destination.name).rename(destination)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = _lock(directory, wait=True)
    try:
        yield
    finally:
        os.close(lock)


def _lock(directory: Path, *, wait: bool) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory):
        for name in names:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
