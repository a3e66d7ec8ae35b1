"""ONNX Runtime sessions that cannot be silently wrong about FP8.

Above `ORT_ENABLE_BASIC`, ONNX Runtime 1.31 fuses Q/DQ pairs around products into integer kernels: an E4M3FN
graph then fails to load (`MatMulIntegerToFloat`) or, with quantization fusions disabled, loads and returns
wrong values. A model that holds FP8 is therefore never loaded above BASIC. At BASIC, too, it rounds the bias
of a Gemm between DequantizeLinear and QuantizeLinear to multiples of the product of its factors' scales, as
is right for integers; `session.disable_quant_qdq` stops that, and the values are then those of
ORT_DISABLE_ALL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.errors import EngineError, MissingPackage, ModelError
from loka_onnx.sessions.runner import Arrays, Runner

_FLOAT8_TYPES = frozenset(
    {
        onnx.TensorProto.FLOAT8E4M3FN,
        onnx.TensorProto.FLOAT8E4M3FNUZ,
        onnx.TensorProto.FLOAT8E5M2,
        onnx.TensorProto.FLOAT8E5M2FNUZ,
    }
)


def import_onnxruntime() -> Any:
    """The `onnxruntime` module.

    Raises:
        MissingPackage: It is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingPackage(
            "ONNX Runtime is not installed",
            evidence=str(error),
            remedy="pip install 'loka-onnx[cpu]' (or [nvidia], [amd]: exactly one of them)",
        ) from error
    return onnxruntime


def holds_float8(model: onnx.ModelProto) -> bool:
    """Whether an initializer, constant, cast or quantization has an FP8 type, subgraphs included."""
    return _graph_holds_float8(model.graph)


def _graph_holds_float8(graph: onnx.GraphProto) -> bool:
    if any(tensor.data_type in _FLOAT8_TYPES for tensor in graph.initializer):
        return True
    return any(
        (attribute.name in {"to", "output_dtype"} and attribute.i in _FLOAT8_TYPES)
        or attribute.t.data_type in _FLOAT8_TYPES
        or (attribute.type == onnx.AttributeProto.GRAPH and _graph_holds_float8(attribute.g))
        for node in graph.node
        for attribute in node.attribute
    )


@dataclass(frozen=True)
class SessionOptions:
    """How a session runs.

    Attributes:
        threads: Threads of one operator; 0 lets ONNX Runtime choose.
        optimize: Whether graph optimizations beyond BASIC are allowed (they never are for FP8).
        providers: Execution providers in order of preference.
    """

    threads: int = 0
    optimize: bool = True
    providers: tuple[str, ...] = ("CPUExecutionProvider",)


def keep_float8_exact(settings: Any) -> None:
    """Set ONNX Runtime's session options so that a model with FP8 keeps its values.

    Args:
        settings: `onnxruntime.SessionOptions`; changed.
    """
    settings.graph_optimization_level = import_onnxruntime().GraphOptimizationLevel.ORT_ENABLE_BASIC
    settings.add_session_config_entry("session.disable_quant_qdq", "1")


class OnnxSession(Runner):
    """A model loaded in ONNX Runtime.

    Args:
        model: Path of the model; external data is mapped from beside it, not loaded.
        options: How to run it.

    Raises:
        ModelError: ONNX Runtime refuses the model.
        MissingPackage: ONNX Runtime is not installed.
    """

    def __init__(self, model: Path, options: SessionOptions | None = None) -> None:
        ort = import_onnxruntime()
        options = options or SessionOptions()
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = options.threads
        levels = ort.GraphOptimizationLevel
        if holds_float8(onnx.load(os.fspath(model), load_external_data=False)):
            keep_float8_exact(settings)
        else:
            settings.graph_optimization_level = (
                levels.ORT_ENABLE_ALL if options.optimize else levels.ORT_ENABLE_BASIC
            )
        try:
            self._session = ort.InferenceSession(
                os.fspath(model), settings, providers=list(options.providers)
            )
        except Exception as error:
            # onnxruntime raises a family of unrelated extension types here.
            raise ModelError(
                f"ONNX Runtime refuses '{model}'",
                evidence=str(error).splitlines()[0][:400],
                remedy="check the model with `loka-onnx doctor --model`, or export it again",
            ) from error
        self.input_names: tuple[str, ...] = tuple(i.name for i in self._session.get_inputs())
        self.output_names: tuple[str, ...] = tuple(o.name for o in self._session.get_outputs())

    def run(self, inputs: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        """Run one batch.

        Args:
            inputs: One array per graph input, the batch on axis 0.
            outputs: Names of the outputs to compute; all when None.

        Raises:
            EngineError: ONNX Runtime fails on this batch.
        """
        names = tuple(outputs) if outputs is not None else self.output_names
        feeds = {name: np.ascontiguousarray(inputs[name]) for name in self.input_names}
        try:
            values = self._session.run(list(names), feeds)
        except Exception as error:
            raise EngineError("ONNX Runtime failed on a batch", evidence=str(error)[:400]) from error
        return dict(zip(names, values, strict=True))
