"""What has arrived of a bundle that is being pulled: ``.<name>.pulling`` beside its destination.

It holds blobs by their digest: ``<digest>`` a whole one, ``<digest>.part`` the beginning of one, which only
grows at its end. An interrupted pull leaves them for the next one, which takes nothing on trust: whole ones
are hashed before they count, beginnings with the rest of the blob.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from loka_onnx.bundle.registry.layout import BlobPart, parts_of
from loka_onnx.bundle.registry.local import write_all
from loka_onnx.bundle.registry.store import Store, in_order
from loka_onnx.core.digests import CHUNK_BYTES
from loka_onnx.core.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, BundleFile
from loka_onnx.errors import BundleError, BundleInvalid, LokaError, OutputError
from loka_onnx.sessions.bundle_documents import OPEN_PLAIN, printable, read_document
from loka_onnx.sessions.bundle_manifest import parse_manifest

PUSH_AGAIN = "push the bundle again with --again, from where it verifies"


@contextlib.contextmanager
def arrivals_beside(destination: Path) -> Iterator[Path]:
    """The directory that keeps what arrives, locked for as long as this pull lives."""
    folder = destination.parent / f".{destination.name}.pulling"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BundleError(
                f"another pull writes to '{destination}'",
                evidence=f"it holds '{folder.name}'",
                remedy="wait for it, or choose another directory",
            ) from error
        # A pull that ended since the directory was opened has removed it.
        if not folder.is_dir() or os.fstat(descriptor).st_ino != folder.stat().st_ino:
            raise BundleError(
                f"another pull wrote to '{destination}' just now",
                evidence="it has ended",
                remedy="pull again",
            )
        yield folder
    finally:
        os.close(descriptor)


class Arrivals:
    """Blobs that have arrived: ``<digest>`` a whole one, ``<digest>.part`` the beginning of one."""

    def __init__(self, folder: Path, shown: str) -> None:
        self._folder = folder
        self._shown = shown

    def has(self, digest: str) -> bool:
        """Whether a blob is there, whole."""
        return (self._folder / digest).exists()

    def forget_others(self, blobs: dict[str, BundleFile]) -> None:
        """Removes what is no part of this bundle, and whole blobs that are damaged."""
        for path in list(self._folder.iterdir()):
            digest = path.name.removesuffix(".part")
            is_plain = stat.S_ISREG(path.lstat().st_mode)
            if digest not in blobs or not is_plain:
                _remove(path)
            elif path.name == digest:
                if _digest_of(path) != digest:
                    _remove(path)
            elif path.stat().st_size > blobs[digest].bytes or self.has(digest):
                _remove(path)

    def take_over(self, blobs: dict[str, BundleFile], bundle: Path) -> None:
        """Takes what an old bundle has, if it is what its manifest says."""
        try:
            old = parse_manifest(read_document(bundle, MANIFEST_NAME, MAX_MANIFEST_BYTES), bundle)
        except LokaError:
            return
        for file in old.files:
            if file.sha256 in blobs and not self.has(file.sha256):
                source = bundle / file.path
                with contextlib.suppress(OSError):
                    if source.stat().st_size == file.bytes and _digest_of(source) == file.sha256:
                        link_or_copy(source, self._folder / file.sha256)
                        self._part(file.sha256).unlink(missing_ok=True)

    def check_room(self, blobs: dict[str, BundleFile]) -> int:
        """Bytes that are still to come; refuses more than there is room for.

        Raises:
            OutputError: The disk has no room for them.
        """
        needed = sum(
            max(0, file.bytes - self._started(digest))
            for digest, file in blobs.items()
            if not self.has(digest)
        )
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise OutputError(
                f"there is no room for the bundle in '{self._folder.parent}'",
                evidence=f"{needed:,} bytes are to come, {free:,} are free",
                remedy="make room or choose another place; the next pull goes on with what arrived",
            )
        return needed

    def fetch(self, store: Store, files: Sequence[BundleFile], threads: int) -> Iterator[int]:
        """Reads blobs to their end, each from where an earlier pull stopped.

        Yields:
            Bytes of every piece that was read and kept.

        Raises:
            BundleInvalid: A blob is missing, has another size, or another content. The others stay, and the
                beginning of one that ends too early; a wrong content does not.
        """
        begun = [(file, self._started(file.sha256)) for file in files]
        calls = (partial(_read, store, piece) for file, start in begun for piece in _pieces(file, start))
        damaged: list[BundleFile] = []
        with contextlib.closing(in_order(calls, threads)) as results:
            for file, start in begun:
                state = hashlib.sha256()
                with self._appending(file.sha256, state) as descriptor:
                    for piece in _pieces(file, start):
                        data = self._checked(file, piece, next(results))
                        write_all(descriptor, data)
                        state.update(data)
                        yield len(data)
                if state.hexdigest() == file.sha256:
                    self._part(file.sha256).rename(self._folder / file.sha256)
                elif start:
                    # The beginning lay on this disk: a power failure may have cost what was not yet synced.
                    self._part(file.sha256).unlink()
                    damaged.append(file)
                else:
                    self._part(file.sha256).unlink()
                    refuse_registry(
                        self._shown,
                        f"the registry holds another content for '{file.path}'",
                        f"sha256 {state.hexdigest()[:16]}…, the manifest says {file.sha256[:16]}…",
                    )
        if damaged:
            yield from self.fetch(store, damaged, threads)

    def _checked(self, file: BundleFile, piece: BlobPart, data: bytes | None) -> bytes:
        if data is None:
            refuse_registry(
                self._shown,
                f"a part of '{file.path}' is missing in the registry",
                f"there is no '{piece.key}'",
            )
        if len(data) != piece.bytes:
            which = "more" if len(data) > piece.bytes else "fewer"
            refuse_registry(
                self._shown,
                f"the registry holds {which} bytes of '{file.path}' than the manifest lists",
                f"'{piece.key}' should hold {piece.bytes:,} bytes from byte {piece.start:,} on, "
                + ("and goes on" if which == "more" else f"and holds {len(data):,}"),
            )
        return data

    def _part(self, digest: str) -> Path:
        return self._folder / f"{digest}.part"

    def _started(self, digest: str) -> int:
        try:
            return self._part(digest).stat().st_size
        except FileNotFoundError:
            return 0

    @contextlib.contextmanager
    def _appending(self, digest: str, state: hashlib._Hash) -> Iterator[int]:
        """The file of a beginning, open at its end; `state` takes what is there."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(self._part(digest), flags, 0o644)
        try:
            while chunk := os.read(descriptor, CHUNK_BYTES):
                state.update(chunk)
            yield descriptor
        finally:
            os.close(descriptor)


def _pieces(file: BundleFile, start: int) -> Iterator[BlobPart]:
    """What is to be read of a blob from byte `start` on; a piece's own `start` is within its part."""
    for part in parts_of(file.sha256, file.bytes):
        skipped = max(0, start - part.start)
        if skipped < part.bytes:
            yield BlobPart(part.key, skipped, part.bytes - skipped)


def _read(store: Store, piece: BlobPart) -> bytes | None:
    # One byte more than there should be: a blob that is too large is noticed, and not read to its end.
    return store.read(piece.key, piece.bytes + 1, start=piece.start)


def _digest_of(path: Path) -> str:
    state = hashlib.sha256()
    with os.fdopen(os.open(path, OPEN_PLAIN), "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name; a copy where the file system cannot."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def refuse_registry(shown: str, what: str, evidence: str) -> NoReturn:
    """Raises that a registry holds something else than it should.

    Raises:
        BundleInvalid: Always.
    """
    raise BundleInvalid(printable(what), where=shown, evidence=printable(evidence), remedy=PUSH_AGAIN)
