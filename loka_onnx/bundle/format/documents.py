"""Reading of an untrusted bundle's sealed documents."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from loka_onnx.core import serde
from loka_onnx.core.digests import seal_problem
from loka_onnx.core.manifest import Manifest
from loka_onnx.errors import BundleInvalid, UserError

T = TypeVar("T")

COPY_AGAIN = "copy the bundle again from where it was written, or write it again"
_ANY_MANIFEST = serde.schema_id(Manifest).rpartition("/")[0] + "/"
# Refuses a link that appeared after the walk, and does not wait for a pipe.
OPEN_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


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
        refuse(directory, f"'{name}' is not a regular file", kind_of(status.st_mode))
    try:
        with os.fdopen(os.open(path, OPEN_PLAIN), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                refuse(directory, f"the {kind} is too large", f"{size} bytes, the limit is {limit}")
            return stream.read(limit)
    except OSError as error:
        refuse(directory, f"the {kind} cannot be read", str(error))


def parse_document(kind: type[T], data: bytes, name: str, where: Path) -> T:
    """Parse a sealed document of a bundle (`where`, in messages).

    Raises:
        BundleInvalid: It is not UTF-8, not JSON, has an unknown schema, or its seal does not match.
    """
    what = Path(name).stem
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        refuse(where, f"the {what} cannot be read as UTF-8", str(error))
    try:
        # Checked first: two parsers could read a repeated key differently.
        json.loads(text, object_pairs_hook=_unique_keys)
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


def kind_of(mode: int) -> str:
    """Name the type of a special file from its mode."""
    for test, name in (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISCHR, "a character device"),
    ):
        if test(mode):
            return name
    return "a special file"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} stands twice in one object")
    return keys
