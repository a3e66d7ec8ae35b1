"""Installed distributions by the modules that they provide.

One module comes from distributions of several names (``onnxruntime-gpu``, ``tensorrt-cu12``): a version is
looked up by the name that is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions, version


def versions_of(modules: Iterable[str]) -> dict[str, str]:
    """Version of every installed distribution that provides one of some modules, by its normalized name.

    A module that is not installed, or that no distribution provides, has none. Names are normalized as PyPI
    does (PEP 503).
    """
    providers = _providers()
    names = sorted({name for module in modules for name in providers.get(module, ())})
    return {re.sub(r"[-_.]+", "-", name).lower(): version(name) for name in names}


@cache
def _providers() -> Mapping[str, Sequence[str]]:
    """Once a process: it reads the list of files of everything that is installed."""
    return packages_distributions()
