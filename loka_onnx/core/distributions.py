"""Installed distributions by the modules that they provide.

One module may come from several distributions (``onnxruntime-gpu``, ``tensorrt-cu12``), so versions are
looked up by import name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.metadata import packages_distributions, version

# Reading the file lists of all distributions takes half a second.
_providers = cache(packages_distributions)


def versions_of(modules: Iterable[str]) -> dict[str, str]:
    """Return the version of every installed distribution of these modules, by normalized name (PEP 503)."""
    names = sorted({name for module in modules for name in _providers().get(module, ())})
    return {re.sub(r"[-_.]+", "-", name).lower(): version(name) for name in names}
