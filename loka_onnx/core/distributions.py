"""Installed distributions by the modules that they provide.

One module may come from several distributions (``onnxruntime-gpu``, ``tensorrt-cu12``), so versions are
looked up by import name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path


def versions_of(modules: Iterable[str]) -> dict[str, str]:
    """Return the version of every installed distribution of these modules, by normalized name (PEP 503)."""
    providers = _providers()
    names = sorted({name for module in modules for name in providers.get(module, ())})
    return {re.sub(r"[-_.]+", "-", name).lower(): version(name) for name in names}


def _providers() -> Mapping[str, Sequence[str]]:
    """Return distributions of each module; read once while no directory of the path changes."""
    stamps = [
        (place, Path(place or ".").stat().st_mtime_ns) for place in sys.path if Path(place or ".").exists()
    ]
    return _scanned(tuple(stamps))


@cache
def _scanned(stamps: tuple[tuple[str, int], ...]) -> Mapping[str, Sequence[str]]:
    """Read the file lists of all installed distributions: half a second."""
    return packages_distributions()
