"""Versions of what took part in a run."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version

from loka_onnx.config import TargetConfig
from loka_onnx.core.installation import versions_of
from loka_onnx.engines.registry import get_backend

MODULES = ("numpy", "onnx", "onnx_graphsurgeon", "ml_dtypes", "onnxruntime", "onnxscript", "torch")
"""Modules that every stage may import and that can change a result; those of an engine are its backend's."""


def library_versions() -> dict[str, str]:
    """Version of this package, of every library that can change a result, of Python and of the machine."""
    machine = {"machine": platform.machine(), "system": platform.system()}
    return {
        "python": platform.python_version(),
        **machine,
        "loka-onnx": version("loka-onnx"),
        **versions_of(MODULES),
    }


def backend_versions(targets: Iterable[TargetConfig]) -> dict[str, str]:
    """Version of every library that the backends of some targets build with."""
    names = sorted({str(name) for target in targets for name in target.backends})
    return {library: told for name in names for library, told in get_backend(name).versions().items()}
