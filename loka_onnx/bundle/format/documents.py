"""Reading of an untrusted bundle: its documents, and its directory, which another may replace meanwhile.

Bundles are replaced by exchanging directories, so that two files opened by path in turn may belong to two
bundles. Linux resolves paths below an open directory through ``/proc/self/fd`` whatever its current name:
everything read through a pin is of one directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from loka_onnx.core import serde
from loka_onnx.core.digests import seal_problem
from loka_onnx.core.manifest import Manifest
from loka_onnx.errors import BundleInvalid, LokaError, UserError

T = TypeVar("T")

COPY_AGAIN = "copy the bundle again from where it was written, or write it again"
_ANY_MANIFEST = serde.schema_id(Manifest).rpartition("/")[0] + "/"
# Refuses a link that appeared after the walk, and does not wait for a pipe.
OPEN_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
DESCRIPTORS = Path("/proc/self/fd")
"""Linux's links to the open files of a process, followed without their names."""
_SPECIAL = {
    **{"l": "a symbolic link", "d": "a directory", "p": "a named pipe", "s": "a socket"},
    **{"b": "a block device", "c": "a character device"},
}
_ZIP_ENTRY = struct.Struct("<4s18xIHH")
"""Start of an entry of a zip archive: signature, size, bytes of its name and of its extra fields."""


def refuse(where: Path, what: str, evidence: str, remedy: str = COPY_AGAIN) -> NoReturn:
    """Raise that a bundle does not verify."""
    raise BundleInvalid(
        f"E1246 {printable(what)}",
        where=printable(str(where)),
        evidence=printable(evidence),
        remedy=printable(remedy),
    )


def printable(text: str) -> str:
    """Escape characters that could move a terminal's cursor, hide, or imitate another line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def read_document(directory: Path, name: str, limit: int) -> bytes:
    """Read a document if it is a plain file of at most `limit` bytes; `BundleInvalid` otherwise."""
    kind = Path(name).stem
    path = directory / name
    try:
        status = path.lstat()
    except OSError as error:
        refuse(directory, f"'{name}' is missing", str(error))
    if not stat.S_ISREG(status.st_mode):
        refuse(directory, f"'{name}' is not a regular file", file_type(status.st_mode))
    try:
        with os.fdopen(os.open(path, OPEN_PLAIN), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                refuse(directory, f"the {kind} is too large", f"{size} bytes, the limit is {limit}")
            return stream.read(limit)
    except OSError as error:
        refuse(directory, f"the {kind} cannot be read", str(error))


def read_entry(stream: BinaryIO, name: str, limit: int, where: Path) -> bytes | None:
    """Read the document that is the entry of an archive (`where`) at the stream's place; None for another."""
    head, encoded = stream.read(_ZIP_ENTRY.size), name.encode()
    if len(head) < _ZIP_ENTRY.size or stream.read(len(encoded)) != encoded:
        return None
    signature, size, name_bytes, extra_bytes = _ZIP_ENTRY.unpack(head)
    if (signature, name_bytes, extra_bytes) != (b"PK\x03\x04", len(encoded), 0):
        return None
    if size > limit:
        refuse(where, f"the {Path(name).stem} is too large", f"{size} bytes, the limit is {limit}")
    content = stream.read(size)
    if len(content) < size:
        refuse(where, "the archive is cut short", f"{len(content)} of {size} bytes of '{name}' are there")
    return content


def parse_document(kind: type[T], data: bytes, name: str, where: Path) -> T:
    """Parse a sealed document; `BundleInvalid` unless it is JSON of a known schema that matches its seal."""
    what = Path(name).stem
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        refuse(where, f"the {what} cannot be read as UTF-8", str(error))
    try:
        # Checked first: two parsers could read a repeated key differently.
        json.loads(text, object_pairs_hook=_refuse_repeated)
    except (ValueError, RecursionError) as error:
        refuse(where, f"the {what} is not valid JSON", str(error))
    try:
        document = serde.loads(kind, text, where=name)
    except UserError as error:
        expected = serde.schema_id(kind)
        refuse(
            where,
            f"the {what} is not a {expected} document: {error.what}",
            error.evidence,
            f"read it with a version of loka-onnx that knows its schema; this one knows {expected}",
        )
    problem = seal_problem(data)
    if problem is not None:
        refuse(where, f"the {what} was altered", problem)
    return document


def states_manifest(data: bytes) -> bool:
    """Tell whether a document claims to be a bundle's manifest, of any version."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return False
    schema = document.get("schema") if isinstance(document, dict) else None
    return isinstance(schema, str) and schema.startswith(_ANY_MANIFEST)


def file_type(mode: int) -> str:
    """Name the type of a special file from its mode."""
    return _SPECIAL.get(stat.filemode(mode)[0], "a special file")


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} stands twice in one object")


@dataclass(frozen=True)
class Pin:
    """An open directory: `path` opens its files, in this process and its forks; `name` is for messages."""

    path: Path
    name: Path
    status: os.stat_result

    @property
    def is_current(self) -> bool:
        """True if the directory still has its name."""
        return _is_at(self.name, self.status)

    def worded(self, text: str) -> str:
        """Replace the pin's path in a text by its name."""
        return re.sub(re.escape(str(self.path)) + r"(?!\d)", lambda _: printable(str(self.name)), text)


@contextlib.contextmanager
def pinned(directory: Path) -> Iterator[Pin]:
    """Pin a directory for a block; errors of this package that leave the block show its name."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError) as error:
        evidence = str(error) if directory.is_dir() else "not a directory"
        refuse(directory, "there is no bundle here", evidence, "name the directory of a bundle")
    try:
        status = os.fstat(descriptor)
        pin = Pin(DESCRIPTORS / str(descriptor), directory, status)
        if not _is_at(pin.path, status):
            refuse(directory, "the bundle cannot be held open", f"no '{DESCRIPTORS}'", "mount /proc")
        try:
            yield pin
        except LokaError as error:
            said = {
                "what": error.coded,
                "where": error.where,
                "evidence": error.evidence,
                "remedy": error.remedy,
            }
            error.restate(**{part: pin.worded(text) for part, text in said.items()})
            raise
    finally:
        os.close(descriptor)


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)  # noqa: PTH116 — status of whatever is there
    except OSError:
        return False
