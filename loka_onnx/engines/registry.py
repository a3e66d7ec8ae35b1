"""Backends by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from loka_onnx.engines.base import Backend
from loka_onnx.engines.inductor.backend import InductorBackend
from loka_onnx.engines.migraphx.backend import MigraphxBackend
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend, OnnxRuntimeTensorRtBackend
from loka_onnx.engines.tensorrt.backend import TensorRtBackend
from loka_onnx.engines.tensorrt.rtx_backend import TensorRtRtxBackend
from loka_onnx.errors import ConfigError

BACKENDS: Mapping[str, Callable[[], Backend]] = {
    OnnxRuntimeBackend.name: OnnxRuntimeBackend,
    OnnxRuntimeTensorRtBackend.name: OnnxRuntimeTensorRtBackend,
    TensorRtBackend.name: TensorRtBackend,
    TensorRtRtxBackend.name: TensorRtRtxBackend,
    MigraphxBackend.name: MigraphxBackend,
    InductorBackend.name: InductorBackend,
}


def get_backend(name: str) -> Backend:
    """Return the backend of that name.

    Raises:
        ConfigError: There is none.
    """
    if name in BACKENDS:
        return BACKENDS[name]()
    near = difflib.get_close_matches(name, BACKENDS, n=1)
    raise ConfigError(
        f"there is no backend '{name}'",
        evidence=f"known backends: {', '.join(sorted(BACKENDS))}",
        remedy=f"did you mean '{near[0]}'?" if near else "name one of these",
    )


def all_backends() -> tuple[Backend, ...]:
    """All backends, installed or not, in the order of competition."""
    return tuple(make() for make in BACKENDS.values())
