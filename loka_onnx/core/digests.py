"""Content digests, used as cache keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


def digest_bytes(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's content, read in chunks."""
    state = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def digest_files(paths: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files, in the order given."""
    state = hashlib.sha256()
    for path in paths:
        state.update(json.dumps([path.name, digest_file(path)]).encode())
    return state.hexdigest()


def digest_json(value: Any) -> str:
    """SHA-256 of plain data in canonical JSON (sorted keys, no spaces)."""
    return digest_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode())
