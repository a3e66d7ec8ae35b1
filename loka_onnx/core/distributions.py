"""Installed distributions by the modules that they provide.

One module comes from distributions of several names (``onnxruntime-gpu``, ``tensorrt-cu12``): a version is
looked up by the name that is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path


def versions_of(modules: Iterable[str]) -> dict[str, str]:
    """Version of every installed distribution that provides one of some modules, by its normalized name.

    A module that is not installed, or that no distribution provides, has none. Names are normalized as PyPI
    does (PEP 503).
    """
    providers = _providers()
    names = sorted({name for module in modules for name in providers.get(module, ())})
    return {re.sub(r"[-_.]+", "-", name).lower(): version(name) for name in names}


def _providers() -> Mapping[str, Sequence[str]]:
    """Distributions of each module; read once while no directory of the path changes."""
    stamps = [
        (place, Path(place or ".").stat().st_mtime_ns) for place in sys.path if Path(place or ".").exists()
    ]
    return _scanned(tuple(stamps))


@cache
def _scanned(stamps: tuple[tuple[str, int], ...]) -> Mapping[str, Sequence[str]]:
    """It reads the list of files of everything that is installed: half a second."""
    return packages_distributions()
