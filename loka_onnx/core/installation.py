"""Installed distributions by the modules that they provide, and the directory of caches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

VARIABLE = "LOKA_ONNX_CACHE"


def cache_directory() -> Path:
    """Return `LOKA_ONNX_CACHE`, else ``loka-onnx`` in the XDG cache home: a cache only saves time."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return base / "loka-onnx"


# Reading the file lists of all distributions takes half a second.
_providers = cache(packages_distributions)


def versions_of(modules: Iterable[str]) -> dict[str, str]:
    """Return the version of every installed distribution of these modules, by normalized name (PEP 503)."""
    names = sorted({name for module in modules for name in _providers().get(module, ())})
    return {re.sub(r"[-_.]+", "-", name).lower(): version(name) for name in names}
