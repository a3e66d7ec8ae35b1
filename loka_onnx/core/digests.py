"""Content digests, used as cache keys, and the seal: a digest that a document has of itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


def digest_bytes(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's content, read in chunks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_files(paths: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files, in the order given."""
    return digest_bytes("".join(json.dumps([path.name, digest_file(path)]) for path in paths).encode())


def digest_json(value: Any) -> str:
    """SHA-256 of plain data in canonical JSON (sorted keys, no spaces)."""
    return digest_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode())


UNSEALED = "0" * 64
"""Seal of a document before sealing."""

# In a JSON string its quotes would be escaped, so that only a key can match.
_FIELD = re.compile(rb'"seal": "([0-9a-f]{64})"')


def seal(text: str) -> str:
    """Return a JSON document with its one key ``seal`` filled in; idempotent.

    The seal is the SHA-256 of the file's bytes with the 64 digits of the seal as zeros, spaces included, so
    that it needs no canonical JSON. It finds accidents, not forgery: anyone can seal an altered file again.
    """
    data = text.encode()
    count = len(_FIELD.findall(data))
    if count != 1:
        raise ValueError(f"a document has one seal, this one has {count}")
    return _replaced(data, digest_bytes(_replaced(data, UNSEALED))).decode()


def seal_problem(data: bytes) -> str | None:
    """Return why the seal of a document's bytes is invalid; None when it is valid."""
    digests = _FIELD.findall(data)
    if len(digests) != 1:
        return f"{len(digests)} seals, there must be one"
    digest = digest_bytes(_replaced(data, UNSEALED))
    if digest.encode() == digests[0]:
        return None
    return f"sha256 {digest[:16]}…, the seal says {digests[0].decode()[:16]}…"


def _replaced(data: bytes, digits: str) -> bytes:
    return _FIELD.sub(f'"seal": "{digits}"'.encode(), data)
