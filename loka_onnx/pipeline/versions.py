"""Versions of what took part in a run."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = (
    "loka-onnx",
    "numpy",
    "onnx",
    "onnx-graphsurgeon",
    "ml-dtypes",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-migraphx",
    "onnxscript",
    "torch",
    "tensorrt",
    "tensorrt-rtx-cu13",
)


def library_versions() -> dict[str, str]:
    """Version of every installed library that can change a result, and of Python and the machine."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
