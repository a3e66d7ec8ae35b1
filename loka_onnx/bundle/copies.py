"""Copies of files with their digests; of a file with several names there is one copy with as many names."""

from __future__ import annotations

import hashlib
from pathlib import Path

from loka_onnx.core.digests import CHUNK_BYTES


class Copies:
    """Copies files in chunks; a source that was copied before becomes a hard link to that copy."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Path, str]] = {}

    def copy(self, source: Path, target: Path) -> str:
        """Copy a file and return its SHA-256."""
        state = hashlib.sha256()
        with source.open("rb") as reader:
            status = source.stat()
            file = (status.st_dev, status.st_ino)
            if file in self._known:
                earlier, digest = self._known[file]
                try:
                    target.hardlink_to(earlier)
                    return digest
                except OSError:
                    # No links here, no more of them, or the name is taken.
                    pass
            with target.open("wb") as writer:
                while chunk := reader.read(CHUNK_BYTES):
                    writer.write(chunk)
                    state.update(chunk)
        self._known.setdefault(file, (target, state.hexdigest()))
        return state.hexdigest()
