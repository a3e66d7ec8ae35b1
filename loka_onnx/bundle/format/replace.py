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
    """Yield an empty directory that replaces `destination` when the block ends without an error.

    Removes leftovers of interrupted writers. Contents are synced to disk before the move.

    Raises:
        OutputError: The destination cannot be written.
    """
    with _stage(destination) as stage:
        yield stage
        for folder, _, _ in os.walk(stage):
            Path(folder).chmod(0o755)
        _sync_tree(stage)
        with _locked(destination.parent):
            move_into_place(stage, destination)


@contextlib.contextmanager
def staged_file(
    destination: Path, *, beside: Path | None = None, check: Callable[[], None] | None = None
) -> Iterator[Path]:
    """Yield a path for a new file that replaces `destination` when the block ends without an error.

    As `staged_directory`. The file is staged beside `beside`, by default `destination`: a closed-world
    directory must never hold anything but the finished file. `check` is called last, while no directory can
    replace `beside`.
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


def check_replaceable(destination: Path) -> None:
    """Raise `OutputError` unless a path is free, an empty directory, or a bundle by its manifest's schema."""
    if destination.is_dir() and (_is_empty(destination) or _is_bundle(destination)):
        return
    if os.path.lexists(destination):
        raise in_the_way(destination, "it exists and is not a bundle, so it is not replaced")


def check_replaceable_file(destination: Path) -> None:
    """Raise `OutputError` unless a path is free, or a file that begins with the manifest of a bundle."""
    if destination.is_file() and _begins_as_archive(destination):
        return
    if os.path.lexists(destination):
        raise in_the_way(destination, "it exists and is not a single-file bundle, so it is not replaced")


def in_the_way(destination: Path, evidence: str) -> OutputError:
    """Error for a place that holds something else."""
    return OutputError(
        f"E1204 '{destination}' is in the way",
        evidence=evidence,
        remedy="choose another place, or move it away",
    )


def _is_empty(directory: Path) -> bool:
    try:
        return not any(directory.iterdir())
    except OSError:
        return False


def _is_bundle(directory: Path) -> bool:
    try:
        return states_manifest(read_document(directory, MANIFEST_NAME, MAX_MANIFEST_BYTES))
    except BundleInvalid:
        return False


def _begins_as_archive(file: Path) -> bool:
    """Return True for a zip archive whose first entry is a manifest, also if the rest is cut off."""
    try:
        with file.open("rb") as stream:
            manifest = read_entry(stream, MANIFEST_NAME, MAX_MANIFEST_BYTES, file)
    except (OSError, BundleInvalid):
        return False
    return manifest is not None and states_manifest(manifest)


@contextlib.contextmanager
def _stage(destination: Path) -> Iterator[Path]:
    """Yield a new locked directory beside `destination`; removed at the end with its contents."""
    stage: Path | None = None
    lock: int | None = None
    prefix = f".{destination.name}.staged-"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        # The parent stays locked until the stage is, so that no other writer takes the stage for a leftover.
        with _locked(destination.parent):
            _remove_leftovers(destination, prefix)
            stage = Path(tempfile.mkdtemp(dir=destination.parent, prefix=prefix))
            lock = _lock(stage, wait=False)
        yield stage
    except OSError as error:
        raise OutputError(
            f"E1205 cannot write '{destination}'",
            evidence=str(error),
            remedy="choose a place that can be written and has room",
        ) from error
    finally:
        if stage is not None:
            # After an exchange, this is the old directory.
            shutil.rmtree(stage, ignore_errors=True)
        if lock is not None:
            os.close(lock)


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


def _remove_leftovers(destination: Path, prefix: str) -> None:
    for path in sorted(destination.parent.iterdir()):
        if not path.name.startswith(prefix) or path.is_symlink() or not path.is_dir():
            continue
        try:
            lock = _lock(path, wait=False)
        except (BlockingIOError, FileNotFoundError, PermissionError):
            # At work, gone, or another user's.
            continue
        try:
            # Interrupted between the two renames: restore the old directory, which is whole.
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
