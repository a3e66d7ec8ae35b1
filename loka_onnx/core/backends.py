"""Backends by name, one line each; installed packages add theirs by an entry point of the group `GROUP`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

GROUP = "loka_onnx.backends"
"""Entry points of this group: name of a backend, and where its spec is."""

_OWN: Mapping[str, str] = {
    "onnxruntime": "loka_onnx.engines.onnxruntime.spec:ONNXRUNTIME",
    "onnxruntime_tensorrt": "loka_onnx.engines.onnxruntime.spec:ONNXRUNTIME_TENSORRT",
    "tensorrt": "loka_onnx.engines.tensorrt.spec:TENSORRT",
    "tensorrt_rtx": "loka_onnx.engines.tensorrt.spec:TENSORRT_RTX",
    "migraphx": "loka_onnx.engines.migraphx.spec:MIGRAPHX",
    "inductor": "loka_onnx.engines.inductor.spec:INDUCTOR",
}


@cache
def spec_paths() -> Mapping[str, str]:
    """Import path (``module:value``) of each backend's spec, by name, in the order in which they compete."""
    return {**_OWN, **{e.name: e.value for e in entry_points(group=GROUP) if e.name not in _OWN}}


def backend_names() -> tuple[str, ...]:
    """Names of every backend, installed or not."""
    return tuple(spec_paths())
