"""A bundle as a single file: a zip archive that holds what the directory holds, in one determined form.

Entries are the manifest, the signature where there is one, and the files in the order of their paths; of
files with one content only the first is there. Entries are stored uncompressed and dated 1980-01-01, so an
archive follows byte for byte from the bundle. A reader checks that: the entries must be those that the
manifest lists, with its sizes and digests, and `zipfile`, which writes them again, must give every byte of
the archive; no header of it is followed. Contents are staged in a directory first.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import onnx

from loka_onnx.bundle.format.documents import pinned, read_entry, refuse
from loka_onnx.bundle.format.files import Verified, check_documents, check_models, verify_directory
from loka_onnx.bundle.format.replace import check_replaceable, staged_directory, staged_file
from loka_onnx.bundle.format.signature import MAX_SIGNATURE_BYTES, SIGNATURE_NAME
from loka_onnx.core.digests import CHUNK_BYTES, digest_bytes
from loka_onnx.core.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, BundleFile, Manifest
from loka_onnx.core.progress import Progress, silent
from loka_onnx.errors import ModelError, OutputError
from loka_onnx.sessions.model_files import read_model

_NOT_OURS = "an archive of a bundle is written by `loka-onnx bundle pack` and by nothing else"
_MODE = 0o100644 << 16


def bundle_name(bundle: Path) -> str:
    """Default name of a bundle: of its directory (``ranker-1.5``), or of its file without the suffix."""
    place = Path(os.path.realpath(bundle))
    return place.stem if place.is_file() else place.name


def verify_path(path: Path, keys: Sequence[Path] = (), progress: Progress = silent) -> Verified:
    """Check a bundle in either form; see `verify_directory`."""
    if path.is_file():
        with _opened(path, keys) as archive:
            places = _copy(archive, None, progress)
            check_models(archive.manifest, path, lambda name: archive.model(name, places))
            return archive.documents
    return verify_directory(path, keys, progress)


def pack_bundle(directory: Path, archive: Path, progress: Progress = silent) -> Path:
    """Write a bundle as a single file, atomically; return it with links resolved.

    The bundle is verified first, and the archive before it takes its place. An old archive there is replaced.
    Equal bundles give equal archives. Raises BundleInvalid if the bundle does not verify, OutputError if the
    place cannot be written or holds something else.
    """
    destination = Path(os.path.realpath(archive))
    check_replaceable(destination, is_file=True)
    with staged_file(destination) as file:
        write_archive(directory, file, progress)
        verify_path(file, progress=progress)
    return destination


def unpack(archive: Path, directory: Path, progress: Progress = silent) -> Path:
    """Write the bundle of an archive as a directory, atomically; return it with links resolved. Raises as
    `pack_bundle`; nothing is left of what was written.
    """
    destination = Path(os.path.realpath(directory))
    check_replaceable(destination)
    with _opened(archive) as opened, staged_directory(destination) as stage:
        _extract(opened, stage, progress)
    return destination


@contextlib.contextmanager
def as_directory(bundle: Path) -> Iterator[Path]:
    """Yield the directory of a bundle; an archive is unpacked and verified for the block."""
    if not bundle.is_file():
        yield bundle
        return
    with _opened(bundle) as opened, contextlib.ExitStack() as stack:
        with OutputError(
            f"E1201 cannot unpack '{bundle}'",
            remedy="set TMPDIR to a place with room, or unpack it with `loka-onnx bundle unpack`",
        ).in_place_of(OSError):
            temporary = tempfile.TemporaryDirectory(prefix="loka-onnx-")
            directory = Path(stack.enter_context(temporary)) / "bundle"
            directory.mkdir()
            _extract(opened, directory)
        yield directory


def distinct_files(manifest: Manifest) -> tuple[BundleFile, ...]:
    """Files whose content an archive holds: of those with one content the first, in the order of paths."""
    first: dict[str, BundleFile] = {}
    for file in sorted(manifest.files, key=lambda f: f.path):
        first.setdefault(file.sha256, file)
    return tuple(first.values())


def write_archive(directory: Path, target: Path, progress: Progress = silent) -> None:
    """Write a bundle, which is verified first, as an archive, not atomically; raises `OSError`."""
    with pinned(directory) as pin:
        manifest = verify_directory(pin.path, progress=progress).manifest
        files, done = distinct_files(manifest), 0
        total = sum(file.bytes for file in files)
        names = [MANIFEST_NAME, *([SIGNATURE_NAME] if (pin.path / SIGNATURE_NAME).exists() else [])]
        with zipfile.ZipFile(target, "x") as out:
            for path in (*names, *(file.path for file in files)):
                with (pin.path / path).open("rb") as source:
                    size = os.fstat(source.fileno()).st_size
                    with _entry(out, path, size) as entry:
                        shutil.copyfileobj(source, entry, CHUNK_BYTES)
                done += size
                progress("write", min(done, total), total)


def _entry(archive: zipfile.ZipFile, path: str, size: int) -> IO[bytes]:
    """A new entry, to be written; everything that zip archives leave open is fixed here."""
    info = zipfile.ZipInfo(path)
    info.create_system, info.external_attr = 3, _MODE
    return archive.open(info, "w", force_zip64=size > zipfile.ZIP64_LIMIT)


@dataclass(frozen=True)
class _Archive:
    """An archive whose documents are checked; `_copy` checks the rest."""

    path: Path
    stream: BinaryIO
    manifest: Manifest
    documents: Verified

    def model(self, path: str, places: dict[str, int]) -> onnx.ModelProto:
        """Read an ONNX model by the places that `_copy` returned."""
        file = self.manifest.file(path)
        self.stream.seek(places[file.sha256])
        try:
            return onnx.load_model_from_string(self.stream.read(file.bytes))
        except Exception as error:
            # google.protobuf's DecodeError has no stable import path across its implementations.
            raise ModelError(f"E1202 '{path}' is not an ONNX model", evidence=str(error)[:200]) from error


class _Compared(io.RawIOBase):
    """A file that is not written but compared; `wrong` holds the places of the pieces that differ."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._place = stream, 0
        self.wrong: set[int] = set()

    def ahead(self, size: int) -> bytes:
        """Bytes that are compared next."""
        self._stream.seek(self._place)
        return self._stream.read(size)

    def write(self, data: Any, /) -> int:
        # A header is written twice: without the checksum first, and with it behind the content.
        change = self.wrong.discard if self.ahead(len(data)) == data else self.wrong.add
        change(self._place)
        self._place += len(data)
        return len(data)

    def seek(self, place: int, whence: int = 0, /) -> int:
        self._place = place
        return place

    def tell(self) -> int:
        return self._place


@contextlib.contextmanager
def _opened(path: Path, keys: Sequence[Path] = ()) -> Iterator[_Archive]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        refuse(path, "the archive cannot be read", str(error), "name a single-file bundle")
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            refuse(path, "there is no bundle here", "not a file", "name a single-file bundle")
        text = read_entry(stream, MANIFEST_NAME, MAX_MANIFEST_BYTES, path)
        if text is None:
            evidence = f"it does not begin with '{MANIFEST_NAME}'"
            refuse(path, "this is not a single-file bundle", evidence, f"name one; {_NOT_OURS}")
        signature = read_entry(stream, SIGNATURE_NAME, MAX_SIGNATURE_BYTES, path)
        documents = check_documents(text, signature, keys, path)
        manifest = documents.manifest
        size = len(text) + len(signature or b"") + sum(file.bytes for file in distinct_files(manifest))
        if size > status.st_size:
            refuse(path, "the archive is cut short", f"{status.st_size} bytes, its files have {size}")
        yield _Archive(path, stream, manifest, documents)


def _copy(archive: _Archive, target: Path | None, progress: Progress) -> dict[str, int]:
    """Check every byte, write files to a directory, if given, and return places of contents by digest."""
    documents = {MANIFEST_NAME: archive.documents.text, SIGNATURE_NAME: archive.documents.signature}
    entries = [(n, len(text), digest_bytes(text)) for n, text in documents.items() if text is not None]
    entries += [(file.path, file.bytes, file.sha256) for file in distinct_files(archive.manifest)]
    total, done = sum(size for _, size, _ in entries), 0
    places, compared = dict[str, int](), _Compared(archive.stream)
    with zipfile.ZipFile(compared, "w") as again:
        for name, size, digest in entries:
            state = hashlib.sha256()
            with contextlib.ExitStack() as stack:
                copies = [stack.enter_context(_entry(again, name, size))]
                places[digest] = compared.tell()
                if target is not None:
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    copies.append(stack.enter_context((target / name).open("xb")))
                for start in range(0, size, CHUNK_BYTES):
                    chunk = compared.ahead(min(CHUNK_BYTES, size - start))
                    state.update(chunk)
                    for copy in copies:
                        copy.write(chunk)
                    done += len(chunk)
                    progress("verify" if target is None else "unpack", done, total)
            if state.hexdigest() != digest:
                evidence = f"sha256 {state.hexdigest()[:16]}…, the manifest says {digest[:16]}…"
                refuse(archive.path, f"file '{name}' was altered, or is not in its place", evidence)
    after = os.fstat(archive.stream.fileno()).st_size - compared.tell()
    if after < 0:
        refuse(archive.path, "the archive is cut short", f"{-after} bytes are missing")
    if compared.wrong:
        what, place = "the archive is not as it was packed", min(compared.wrong)
        refuse(archive.path, what, f"a header at or after byte {place}, or the room around it", _NOT_OURS)
    if after:
        refuse(archive.path, "the archive goes on after its end", f"{after} bytes", _NOT_OURS)
    return places


def _extract(archive: _Archive, directory: Path, progress: Progress = silent) -> None:
    """Write the bundle to an empty directory; raises as `_copy`."""
    check_room(directory, sum(file.bytes for file in distinct_files(archive.manifest)))
    _copy(archive, directory, progress)
    add_names(directory, archive.manifest)
    check_models(archive.manifest, archive.path, lambda path: read_model(directory / path))


def add_names(directory: Path, manifest: Manifest) -> None:
    """Link files to their further names; copies where the file system has no links, or no more of them."""
    sources = {file.sha256: directory / file.path for file in distinct_files(manifest)}
    further = [file for file in manifest.files if directory / file.path != sources[file.sha256]]
    left = sum(file.bytes for file in further)
    for file in further:
        target = directory / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(sources[file.sha256])
        except OSError:
            check_room(directory, left)
            shutil.copyfile(sources[file.sha256], target)
            sources[file.sha256] = target
        left -= file.bytes


def check_room(directory: Path, needed: int) -> None:
    """Raise `OutputError` unless so many bytes are free for a bundle that is staged at `directory`."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OutputError(
            f"E1203 there is no room for the bundle in '{directory.parent}'",
            evidence=f"{needed:,} bytes, {free:,} are free",
            remedy="choose a place that has room",
        )
