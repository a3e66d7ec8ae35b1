"""Directory of files that only save time between runs; deleting any of them is harmless."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "LOKA_ONNX_CACHE"


def cache_directory() -> Path:
    """Return the directory of this user's caches; it need not exist yet.

    `LOKA_ONNX_CACHE` if it is set, else ``loka-onnx`` in the cache home of the XDG Base Directory
    Specification.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return base / "loka-onnx"
