"""Atomic replacement of a directory or a file.

A directory is staged beside its destination and moved in with one system call: Linux exchanges both
atomically (renameat2 with RENAME_EXCHANGE). Elsewhere the old one is renamed first, so that for an instant
there is none; both stay complete on disk, and the next write cleans up after an interruption. A file is
staged in such a directory too, and renamed over the old one.

A stage directory is locked (flock) while its writer lives. The lock ends with the process, so that leftovers
are told from active stages without process ids.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from loka_onnx.bundle.format.documents import read_document, read_entry, states_manifest
from loka_onnx.core.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from loka_onnx.errors import BundleInvalid, OutputError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def staged_directory(destination: Path) -> Iterator[Path]:
    """Yield an empty directory that replaces `destination` when the block ends without an error. Removes
    leftovers of interrupted writers. Contents may be read by all, and are synced to disk before the move.
    Raises OutputError if the destination cannot be written.
    """
    with _stage(destination) as stage:
        yield stage
        for folder, _, names in os.walk(stage):
            for name in (*names, ""):
                path = Path(folder, name)
                path.chmod(0o644 if name else 0o755)
                _sync(path)
        with _locked(destination.parent):
            move_into_place(stage, destination)


@contextlib.contextmanager
def staged_file(
    destination: Path, *, beside: Path | None = None, check: Callable[[], None] | None = None
) -> Iterator[Path]:
    """Yield a path for a new file that replaces `destination` when the block ends without an error.

    As `staged_directory`. The file is staged beside `beside`, by default `destination`: a closed-world
    directory must never hold anything but the finished file. `check` comes last, while nothing can replace
    `beside`.
    """
    anchor = destination if beside is None else beside
    with _stage(anchor) as stage:
        file = stage / destination.name
        yield file
        file.chmod(0o644)
        _sync(file)
        with _locked(anchor.parent):
            if check is not None:
                check()
            file.replace(destination)
        _sync(destination.parent)


def check_replaceable(destination: Path, *, is_file: bool = False) -> None:
    """Raise `OutputError` unless a path is free, an empty directory, or a bundle in this form. The schema of
    its manifest tells a bundle, whether the rest of it verifies or not.
    """
    manifest = None
    with contextlib.suppress(OSError, BundleInvalid):
        if is_file:
            with os.fdopen(os.open(destination, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
                manifest = read_entry(stream, MANIFEST_NAME, MAX_MANIFEST_BYTES, destination)
        elif any(destination.iterdir()):
            manifest = read_document(destination, MANIFEST_NAME, MAX_MANIFEST_BYTES)
        else:
            return
    if os.path.lexists(destination) and not (manifest is not None and states_manifest(manifest)):
        kind = "single-file bundle" if is_file else "bundle"
        raise not_replaced(destination, f"it exists and is not a {kind}, so it is not replaced")


def not_replaced(destination: Path, evidence: str) -> OutputError:
    """Return the error for a place that holds something else."""
    return OutputError(
        f"E1204 '{destination}' is in the way",
        evidence=evidence,
        remedy="choose another place, or move it away",
    )


@contextlib.contextmanager
def _stage(destination: Path) -> Iterator[Path]:
    """Yield a new locked directory beside `destination`; removed at the end with its contents."""
    prefix = f".{destination.name}.staged-"
    with (
        contextlib.ExitStack() as stack,
        OutputError(
            f"E1205 cannot write '{destination}'", remedy="choose a place that can be written and has room"
        ).in_place_of(OSError),
    ):
        destination.parent.mkdir(parents=True, exist_ok=True)
        # The parent stays locked until the stage is, so that no other writer takes it for a leftover.
        with _locked(destination.parent):
            _remove_leftovers(destination, prefix)
            stage = Path(tempfile.mkdtemp(dir=destination.parent, prefix=prefix))
            stack.enter_context(_locked(stage))
        # After an exchange, this is the old directory.
        stack.callback(shutil.rmtree, stage, ignore_errors=True)
        yield stage


def move_into_place(stage: Path, destination: Path) -> None:
    """Move `stage` to `destination`; the old directory is then at `stage`, or removed."""
    if not destination.exists():
        stage.rename(destination)
    elif not _exchange(stage, destination):
        away = Path(tempfile.mkdtemp(dir=stage.parent, prefix=stage.name))
        destination.rename(away / destination.name)
        stage.rename(destination)
        shutil.rmtree(away, ignore_errors=True)
    _sync(destination.parent)


def _exchange(first: Path, second: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}:
        return False
    raise OSError(code, os.strerror(code), os.fspath(second))


def remove_leftovers(destination: Path) -> None:
    """Remove stages of interrupted writers of a directory, if its parent may be written."""
    with contextlib.suppress(OSError), _locked(destination.parent):
        _remove_leftovers(destination, f".{destination.name}.staged-")


def _remove_leftovers(destination: Path, prefix: str) -> None:
    for path in sorted(destination.parent.iterdir()):
        if not path.name.startswith(prefix) or path.is_symlink() or not path.is_dir():
            continue
        # At work, gone, or another user's.
        is_kept = contextlib.suppress(BlockingIOError, FileNotFoundError, PermissionError)
        with is_kept, _locked(path, wait=False):
            # Interrupted between the two renames: restore the old directory, which is whole.
            if (path / destination.name).is_dir() and not destination.exists():
                (path / destination.name).rename(destination)
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
