"""Where files that only save time are kept between runs; deleting any of them is harmless."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "LOKA_ONNX_CACHE"


def cache_directory() -> Path:
    """The directory of this user's caches; it need not exist yet.

    The environment variable `LOKA_ONNX_CACHE` if it is set, else ``loka-onnx`` below what the XDG Base
    Directory Specification calls the cache home.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path is invalid and is to be ignored.
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return base / "loka-onnx"
