"""A bundle as a single file: a zip archive with the files of the directory, in one determined form.

Entries are the manifest, the signature if there is one, and the files in the order of their paths,
uncompressed; of files with equal content only the first is stored. The archive follows byte for byte from the
bundle. A reader parses the manifest first, which gives all headers with their offsets and sizes
(`archive_layout`), and compares them: it trusts no offset, count or size in the archive. All headers
are checked before anything is written; contents are checked against their digests while they are copied to a
staged directory, which is moved into place last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

import onnx

from loka_onnx.bundle.format.archive_layout import (
    MAX_HEADER_BYTES,
    Header,
    Stored,
    central_header,
    ending,
    local_header,
    parse_central,
    parse_local,
)
from loka_onnx.bundle.format.documents import refuse
from loka_onnx.bundle.format.files import Verified, check_models, verify_directory
from loka_onnx.bundle.format.manifest import parse_manifest
from loka_onnx.bundle.format.pinned import pinned
from loka_onnx.bundle.format.replace import check_replaceable, staged_directory
from loka_onnx.bundle.format.signature import (
    MAX_SIGNATURE_BYTES,
    SIGNATURE_NAME,
    check_signature,
    parse_signature,
)
from loka_onnx.core.digests import CHUNK_BYTES
from loka_onnx.core.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    BundleFile,
    Manifest,
    path_problem,
)
from loka_onnx.core.progress import Progress, silent
from loka_onnx.errors import ModelError, OutputError
from loka_onnx.sessions.model_files import read_model

_NOT_OURS = "an archive of a bundle is written by `loka-onnx bundle pack` and by nothing else"


def is_archive(path: Path) -> bool:
    """Tell whether a path is a file, and so can only be a single-file bundle."""
    return path.is_file()


def verify_path(path: Path, keys: Sequence[Path] = (), progress: Progress = silent) -> Verified:
    """Verify a bundle in either form.

    Args:
        keys: Accepted public keys; without keys, no signature is required.

    Raises:
        BundleInvalid: It does not verify, or no accepted key signed it.
        ConfigError: A key is not an Ed25519 public key.
        MissingPackage: There are keys, but `cryptography` is not installed.
    """
    if is_archive(path):
        with _opened(path) as archive:
            archive.check_contents(progress)
            signer = archive.signer(keys) if keys else None
            return Verified(archive.manifest, archive.claimed, signer)
    return verify_directory(path, keys, progress)


def unpack(archive: Path, directory: Path, progress: Progress = silent) -> Path:
    """Write the bundle of an archive as a directory, atomically.

    Args:
        directory: Destination; a bundle there is replaced as a whole.

    Returns:
        The directory, with links resolved.

    Raises:
        BundleInvalid: The archive does not verify; nothing written remains.
        OutputError: The destination cannot be written, has no room, or holds something that is not a bundle.
    """
    destination = Path(os.path.realpath(directory))
    check_replaceable(destination)
    with _opened(archive) as opened, staged_directory(destination) as stage:
        opened.extract(stage, progress)
    return destination


@contextlib.contextmanager
def unpacked(archive: Path, parent: Path | None = None) -> Iterator[Path]:
    """Unpack an archive into a temporary directory for a block.

    Args:
        parent: Directory for it; None for the system's temporary directory.

    Yields:
        A verified directory; it is removed afterwards.

    Raises:
        BundleInvalid: The archive does not verify.
        OutputError: There is no room for it, or `parent` is missing.
    """
    with _opened(archive) as opened, contextlib.ExitStack() as stack:
        try:
            made = tempfile.TemporaryDirectory(prefix="loka-onnx-", dir=parent)
            directory = Path(stack.enter_context(made)) / "bundle"
            directory.mkdir()
            opened.extract(directory)
        except OSError as error:
            raise OutputError(
                f"cannot unpack '{archive}'",
                evidence=str(error),
                remedy="set TMPDIR to a place with room, or unpack it with `loka-onnx bundle unpack`",
            ) from error
        yield directory


def distinct_files(manifest: Manifest) -> tuple[BundleFile, ...]:
    """Files whose content an archive stores: of equal contents the first, in the order of paths."""
    first: dict[str, BundleFile] = {}
    for file in sorted(manifest.files, key=lambda f: f.path):
        first.setdefault(file.sha256, file)
    return tuple(first.values())


def write_archive(directory: Path, target: Path, progress: Progress = silent) -> None:
    """Write a verified bundle as an archive, not atomically.

    Raises:
        OSError: It cannot be read or written.
    """
    with pinned(directory) as pin:
        manifest = verify_directory(pin.path, progress=progress).manifest
        total = sum(file.bytes for file in distinct_files(manifest))
        names = [MANIFEST_NAME, *([SIGNATURE_NAME] if (pin.path / SIGNATURE_NAME).exists() else [])]
        written: list[Stored] = []
        with target.open("xb") as out:
            for path in (*names, *(file.path for file in distinct_files(manifest))):
                with (pin.path / path).open("rb") as source:
                    written.append(_write_entry(out, path, source))
                progress("write", min(out.tell(), total), total)
            offset = out.tell()
            for entry in written:
                out.write(central_header(entry))
            out.write(ending(len(written), out.tell() - offset, offset))


def _write_entry(out: BinaryIO, path: str, source: BinaryIO) -> Stored:
    offset, crc, size = out.tell(), 0, os.fstat(source.fileno()).st_size
    # The checksum precedes the content, and is known only after it.
    out.write(local_header(Stored(path, size, 0, offset)))
    copied = 0
    while chunk := source.read(CHUNK_BYTES):
        out.write(chunk)
        crc, copied = zlib.crc32(chunk, crc), copied + len(chunk)
    entry = Stored(path, copied, crc, offset)
    out.seek(offset)
    out.write(local_header(entry))
    out.seek(entry.end)
    return entry


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Archive]:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        refuse(path, "the archive cannot be read", str(error), "name a single-file bundle")
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            refuse(path, "there is no bundle here", "not a file", "name a single-file bundle")
        yield _Archive(path, stream, status.st_size)


class _Archive:
    """An archive whose layout is checked: all bytes except the contents."""

    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self._path, self._stream, self._size = path, stream, size
        self._entries: dict[str, Stored] = {}
        # Offset behind the entries read so far.
        self._end = 0
        first = self._header(0)
        if first is None or first.path != MANIFEST_NAME:
            found = (
                "it does not begin as a zip archive" if first is None else f"it begins with {first.path!r}"
            )
            refuse(path, "this is not a single-file bundle", found, f"name one; {_NOT_OURS}")
        self._manifest_data = self._document(MANIFEST_NAME, first, MAX_MANIFEST_BYTES)
        self.manifest = parse_manifest(self._manifest_data, path)
        second = self._header(self._end)
        self._signature_data = None
        self.claimed: tuple[str, ...] = ()
        if second is not None and second.path == SIGNATURE_NAME:
            self._signature_data = self._document(SIGNATURE_NAME, second, MAX_SIGNATURE_BYTES)
            self.claimed = parse_signature(self._signature_data, self._manifest_data, path).keys
        for file in distinct_files(self.manifest):
            self._add(file.path, file.bytes)
        self._check_directory()

    def signer(self, keys: Sequence[Path]) -> str:
        """Fingerprint of the key that signed it; see `check_signature`."""
        return check_signature(self._signature_data, self._manifest_data, keys, self._path)

    def check_contents(self, progress: Progress = silent) -> None:
        """Check every file against its digest, and the external data of models.

        Raises:
            BundleInvalid: A file was altered.
        """
        files, done = distinct_files(self.manifest), 0
        total = sum(file.bytes for file in files)
        for file in files:
            for chunk in self._content(file):
                done += len(chunk)
                progress("verify", done, total)
        by_digest = {file.sha256: file for file in files}
        check_models(
            self.manifest,
            self._path,
            lambda path: self._model(by_digest[self.manifest.file(path).sha256]),
        )

    def extract(self, directory: Path, progress: Progress = silent) -> None:
        """Write the bundle to an empty directory and check every file against its digest.

        Raises:
            BundleInvalid: A file was altered.
            OSError: The directory cannot be written or has no room.
        """
        files, done = distinct_files(self.manifest), 0
        total = sum(file.bytes for file in files)
        _check_room(directory, total)
        (directory / MANIFEST_NAME).write_bytes(self._manifest_data)
        if self._signature_data is not None:
            (directory / SIGNATURE_NAME).write_bytes(self._signature_data)
        for file in files:
            with _new_file(directory, file.path) as out:
                for chunk in self._content(file):
                    out.write(chunk)
                    done += len(chunk)
                    progress("unpack", done, total)
        _add_names(directory, _other_names(self.manifest))
        for folder, _, names in os.walk(directory):
            Path(folder).chmod(0o755)
            for name in names:
                (Path(folder) / name).chmod(0o644)
        check_models(
            self.manifest,
            self._path,
            lambda path: read_model(directory / path),
        )

    def _read(self, offset: int, size: int) -> bytes:
        try:
            self._stream.seek(offset)
            return self._stream.read(size)
        except OSError as error:
            refuse(self._path, "the archive cannot be read", str(error))

    def _header(self, offset: int) -> Header | None:
        return parse_local(self._read(offset, MAX_HEADER_BYTES))

    def _document(self, name: str, header: Header, limit: int) -> bytes:
        if header.bytes > limit:
            kind = Path(name).stem
            refuse(self._path, f"the {kind} is too large", f"{header.bytes} bytes, the limit is {limit}")
        self._add(name, header.bytes)
        entry = self._entries[name]
        data = self._read(entry.content, entry.bytes)
        if zlib.crc32(data) != entry.crc:
            refuse(self._path, f"file '{name}' was altered", "its checksum in the archive is another")
        return data

    def _add(self, path: str, size: int) -> None:
        """Check and record the entry that must come next."""
        offset = self._end
        found = self._header(offset)
        if found is None:
            refuse(self._path, f"file {path!r} is missing", f"no entry begins at byte {offset}")
        entry = Stored(path, size, found.crc, offset)
        expected = local_header(entry)
        if self._read(offset, len(expected)) != expected:
            self._explain(found, entry)
        if entry.end > self._size:
            refuse(
                self._path,
                "the archive is cut short",
                f"'{path}' ends at {entry.end}, the file at {self._size}",
            )
        self._entries[path] = entry
        self._end = entry.end

    def _check_directory(self) -> None:
        """Compare everything after the last entry with the expected bytes."""
        start = offset = self._end
        extra = self._header(offset)
        if extra is not None:
            self._explain_extra(extra)
        for entry in self._entries.values():
            expected = central_header(entry)
            if self._read(offset, len(expected)) != expected:
                found = parse_central(self._read(offset, MAX_HEADER_BYTES))
                if found is None:
                    refuse(
                        self._path,
                        "the archive has no whole directory of its entries",
                        f"none for '{entry.path}' at byte {offset}",
                    )
                self._explain(found, entry)
            offset += len(expected)
        more = parse_central(self._read(offset, MAX_HEADER_BYTES))
        if more is not None:
            self._explain_extra(more)
        expected = ending(len(self._entries), offset - start, start)
        found_end = self._read(offset, len(expected))
        if self._size < offset + len(expected):
            refuse(self._path, "the archive is cut short", f"{self._size} bytes")
        if found_end != expected:
            refuse(
                self._path,
                "the end of the archive is not that of its entries",
                f"{len(self._entries)} entries, their directory is at byte {start}",
                f"{_NOT_OURS}: it has no comment and is in one piece",
            )
        after = self._size - offset - len(expected)
        if after:
            refuse(self._path, "the archive goes on after its end", f"{after} bytes", _NOT_OURS)

    def _explain_extra(self, found: Header) -> NoReturn:
        if found.path in self._entries:
            refuse(self._path, f"file {found.path!r} is in the archive twice", "a name stands for one file")
        problem = path_problem(found.path)
        if problem is not None:
            refuse(self._path, f"the archive holds a forbidden path: {found.path!r} {problem}", _NOT_OURS)
        count = len(self._entries)
        what = f"file {found.path!r} is not listed in the manifest, or is there under another name"
        refuse(self._path, what, f"{count} entries are expected")

    def _explain(self, found: Header, entry: Stored) -> NoReturn:
        """Refuse an unexpected header with a specific reason."""
        path = found.path
        if path != entry.path:
            if path in self._entries or path_problem(path) is not None or not self._is_listed(path):
                self._explain_extra(found)
            refuse(
                self._path, f"file {entry.path!r} is missing, or out of order", f"{path!r} is in its place"
            )
        evidence = f"its header at or after byte {entry.offset}"
        if found.flags & 0x41:
            refuse(self._path, f"entry {path!r} is encrypted", evidence, _NOT_OURS)
        if found.method != 0:
            refuse(self._path, f"entry {path!r} is compressed", f"method {found.method}", _NOT_OURS)
        if found.mode and stat.S_IFMT(found.mode) not in {0, stat.S_IFREG}:
            kind = "a symbolic link" if stat.S_ISLNK(found.mode) else "not a regular file"
            refuse(self._path, f"entry {path!r} is {kind}", f"mode {found.mode:o}", _NOT_OURS)
        if found.bytes != entry.bytes:
            refuse(
                self._path,
                f"file '{path}' has another size",
                f"{found.bytes} bytes, the manifest says {entry.bytes}",
            )
        if found.mode and found.offset != entry.offset:
            refuse(
                self._path,
                f"entry {path!r} lies elsewhere: entries overlap, or there is room between them",
                f"byte {found.offset}, it must be {entry.offset}",
            )
        refuse(self._path, f"the header of entry {path!r} was altered", evidence, _NOT_OURS)

    def _is_listed(self, path: str) -> bool:
        return any(file.path == path for file in self.manifest.files)

    def _content(self, file: BundleFile) -> Iterator[bytes]:
        """Yield a file's content in chunks; it is verified after the last one."""
        entry = self._entries[file.path]
        state, crc, done, start = hashlib.sha256(), 0, 0, entry.content
        while done < entry.bytes:
            chunk = self._read(start + done, min(CHUNK_BYTES, entry.bytes - done))
            if not chunk:
                refuse(self._path, "the archive is cut short", f"'{file.path}' ends after {done} bytes")
            state.update(chunk)
            crc, done = zlib.crc32(chunk, crc), done + len(chunk)
            yield chunk
        if state.hexdigest() != file.sha256:
            refuse(
                self._path,
                f"file '{file.path}' was altered",
                f"sha256 {state.hexdigest()[:16]}…, the manifest says {file.sha256[:16]}…",
            )
        if crc != entry.crc:
            refuse(self._path, f"the checksum of entry '{file.path}' was altered", "its content was not")

    def _model(self, file: BundleFile) -> onnx.ModelProto:
        try:
            return onnx.load_model_from_string(b"".join(self._content(file)))
        except Exception as error:
            # The import path of google.protobuf's DecodeError depends on its implementation.
            raise ModelError(f"'{file.path}' is not an ONNX model", evidence=str(error)[:200]) from error


def _check_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OutputError(
            f"there is no room for the bundle in '{directory.parent}'",
            evidence=f"{needed:,} bytes, {free:,} are free",
            remedy="choose a place that has room",
        )


@contextlib.contextmanager
def _new_file(directory: Path, path: str) -> Iterator[BinaryIO]:
    target = directory / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as stream:
        yield stream


def _other_names(manifest: Manifest) -> dict[str, list[BundleFile]]:
    """Files that the archive stores under another path, by that path."""
    first = {file.sha256: file.path for file in distinct_files(manifest)}
    names: dict[str, list[BundleFile]] = {}
    for file in manifest.files:
        if first[file.sha256] != file.path:
            names.setdefault(first[file.sha256], []).append(file)
    return names


def _add_names(directory: Path, names: Mapping[str, Sequence[BundleFile]]) -> None:
    """Link files under more names; copy where the file system refuses links.

    Raises:
        OutputError: There is no room for the copies; none was made.
        OSError: The directory cannot be written.
    """
    later = sum(file.bytes for files in names.values() for file in files)
    for first, files in names.items():
        later -= sum(file.bytes for file in files)
        source, links, is_checked = first, 0, False
        for number, file in enumerate(files):
            (directory / file.path).parent.mkdir(parents=True, exist_ok=True)
            if _linked(directory / source, directory / file.path):
                links += 1
                continue
            if not is_checked:
                left = len(files) - number
                # Each copy takes as many links as this one did; if none, other files take none either.
                needed = -(-left // (links + 1)) * file.bytes + (0 if links else later)
                _check_room(directory, needed)
                is_checked = True
            shutil.copyfile(directory / source, directory / file.path)
            source = file.path


def _linked(file: Path, name: Path) -> bool:
    try:
        name.hardlink_to(file)
    except OSError:
        return False
    return True
