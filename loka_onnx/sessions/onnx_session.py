"""ONNX Runtime sessions with exact FP8.

Above `ORT_ENABLE_BASIC`, ONNX Runtime 1.31 fuses Q/DQ pairs around products into integer kernels: an E4M3FN
graph then fails to load (`MatMulIntegerToFloat`) or, with quantization fusions disabled, returns wrong
values. A model with FP8 is therefore never loaded above BASIC. Even at BASIC, the bias of a Gemm between
DequantizeLinear and QuantizeLinear is rounded to multiples of the product of its factors' scales, as for
integers; `session.disable_quant_qdq` prevents that, and the values are then those of ORT_DISABLE_ALL.
"""

from __future__ import annotations

import copy
import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.core.rewrite import INDEX, USERS
from loka_onnx.errors import EngineError, MissingPackage, ModelError, line_of, said_by
from loka_onnx.sessions.model_files import FLOAT8_TYPES, messages, nested_nodes, read_model
from loka_onnx.sessions.runner import Arrays, Runner, to_users

_BFLOAT16 = "tensor(bfloat16)"
_LEAVE_WEIGHTS = frozenset({"Gather", "Gemm", "MatMul"})
"""Operators whose weights ONNX Runtime 1.31 changes under a new name only."""
INSTALL = "pip install 'loka-onnx[cpu]' (or [nvidia], [amd]: exactly one of them)"


def import_onnxruntime() -> Any:
    """Import `onnxruntime`; a `MissingPackage` where it is not installed."""
    with MissingPackage("E0917 ONNX Runtime is not installed", remedy=INSTALL).in_place_of(ImportError):
        import onnxruntime
    return onnxruntime


@contextmanager
def quiet_sessions() -> Iterator[None]:
    """Keep sessions that have no settings of their own from printing warnings and errors."""
    try:
        ort = import_onnxruntime()
    except MissingPackage:
        yield
        return
    ort.set_default_logger_severity(4)
    try:
        yield
    finally:
        # The default; ONNX Runtime does not tell what it was.
        ort.set_default_logger_severity(2)


def holds_float8(model: onnx.ModelProto) -> bool:
    """True if an initializer, constant, cast or quantization has an FP8 type, wherever it is."""
    found = [*messages(model)]
    tensors = {each.data_type for each in found if isinstance(each, onnx.TensorProto)}
    attributes = (each for each in found if isinstance(each, onnx.AttributeProto))
    casts = {each.i for each in attributes if each.name in {"to", "output_dtype"}}
    return not FLOAT8_TYPES.isdisjoint(tensors | casts)


@dataclass(frozen=True)
class SessionOptions:
    """Options of a session.

    Attributes:
        threads: Threads of one operator; 0 lets ONNX Runtime choose.
        optimize: Optimize beyond BASIC (never for FP8).
        as_written: Do not optimize at all: at BASIC, ONNX Runtime 1.31 removes a Dropout in training mode.
        providers: Execution providers in order of preference.
    """

    threads: int = 0
    optimize: bool = True
    as_written: bool = False
    providers: tuple[str, ...] = ("CPUExecutionProvider",)


def keep_float8_exact(settings: Any) -> None:
    """Change `onnxruntime.SessionOptions` so that a model with FP8 keeps its values."""
    settings.graph_optimization_level = import_onnxruntime().GraphOptimizationLevel.ORT_ENABLE_BASIC
    settings.add_session_config_entry("session.disable_quant_qdq", "1")


def _settings(model: onnx.ModelProto, options: SessionOptions | None) -> Any:
    """`onnxruntime.SessionOptions` for a model."""
    ort = import_onnxruntime()
    options = options or SessionOptions()
    settings = ort.SessionOptions()
    # ONNX Runtime would also print errors that it raises.
    settings.log_severity_level = 4
    settings.intra_op_num_threads = options.threads
    levels = ort.GraphOptimizationLevel
    settings.graph_optimization_level = levels.ORT_ENABLE_ALL if options.optimize else levels.ORT_ENABLE_BASIC
    if holds_float8(model):
        keep_float8_exact(settings)
    if options.as_written:
        settings.graph_optimization_level = levels.ORT_DISABLE_ALL
    return settings


def _on_host(array: npt.NDArray[Any]) -> Any:
    """Wrap an array as an `onnxruntime.OrtValue` without a copy, including types that NumPy lacks."""
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    stored = array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")
    return import_onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(stored, kind)


def _from_value(value: Any) -> npt.NDArray[Any]:
    """Convert an `onnxruntime.OrtValue` of the host to an array, including BF16."""
    if value.data_type() != _BFLOAT16:
        array: npt.NDArray[Any] = value.numpy()
        return array
    shape = tuple(value.shape())
    brain = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
    if 0 in shape:
        return np.empty(shape, brain)
    memory = (ctypes.c_byte * value.tensor_size_in_bytes()).from_address(value.data_ptr())
    return np.frombuffer(memoryview(memory), np.byte).view(brain).reshape(shape).copy()


class OnnxSession(Runner):
    """A model loaded in ONNX Runtime, or a `ModelError`; external data is mapped from beside it."""

    _session: Any = None
    _weights: tuple[Any, ...] = ()
    """Memory that ONNX Runtime reads during the session."""

    def __init__(self, model: Path, options: SessionOptions | None = None) -> None:
        settings = _settings(read_model(model), options)
        self._start(os.fspath(model), settings, model, options)

    @classmethod
    def in_memory(
        cls,
        proto: onnx.ModelProto,
        weights: Mapping[str, npt.NDArray[Any]],
        model: Path,
        options: SessionOptions | None = None,
    ) -> OnnxSession:
        """Open a session without files; a `ModelError` where ONNX Runtime refuses the model. `weights` are
        values of external initializers of its main graph, by name, in C order; they are used in place.
        """
        settings = _settings(proto, options)
        values = [_on_host(array) for array in weights.values()]
        settings.add_external_initializers(list(weights), values)
        others = (node for node in nested_nodes(proto.graph.node) if node.op_type not in _LEAVE_WEIGHTS)
        copied = {name for node in others for name in node.input}
        for name, value in zip(weights, values, strict=True):
            # Without this, ONNX Runtime 1.31 copies an external initializer: a MatMul by 256 MiB, which it
            # packs anyway, took 519 MiB, and takes 263 MiB with it. With it, a factor that the runtime
            # transposes in place, behind a Transpose, kept its old values.
            if name not in copied:
                settings.add_initializer(name, value)
        session = cls.__new__(cls)
        session._start(proto.SerializeToString(), settings, model, options)
        session._weights = (*values, *weights.values())
        return session

    def _start(self, source: str | bytes, settings: Any, model: Path, options: SessionOptions | None) -> None:
        providers = list((options or SessionOptions()).providers)
        # onnxruntime raises errors of unrelated types.
        with ModelError(
            f"E0918 ONNX Runtime refuses '{model}'",
            remedy="check the model with `onnx.checker`, or export it again",
        ).in_place_of(Exception, words=line_of):
            self._session = import_onnxruntime().InferenceSession(source, settings, providers=providers)
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        self.input_names = tuple(value.name for value in inputs)
        self.output_names = tuple(value.name for value in outputs)
        users = (value.name for value in inputs if value.shape[:1] == [USERS])
        self._shared = tuple(users) if INDEX in self.input_names else ()
        self._has_bfloat16 = any(value.type == _BFLOAT16 for value in (*inputs, *outputs))

    def run(self, inputs: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        """Run one batch, for some of the outputs or all; a model in request form takes a row for each
        candidate too. Raises EngineError if that fails.
        """
        names = tuple(outputs) if outputs is not None else self.output_names
        if self._shared and INDEX not in inputs:
            inputs = to_users(inputs, self._shared)
        try:
            feeds = {name: np.ascontiguousarray(inputs[name]) for name in self.input_names}
        except KeyError as error:
            raise EngineError(
                "E0919 an input of the model is missing", evidence=f"{error}; given are {sorted(inputs)}"
            ) from error
        session = self._session
        if session is None:
            raise EngineError("E0920 the session is closed", remedy="load the model again")
        try:
            if self._has_bfloat16:
                wrapped = {name: _on_host(array) for name, array in feeds.items()}
                values = [_from_value(value) for value in session.run_with_ort_values(list(names), wrapped)]
            else:
                values = session.run(list(names), feeds)
        except Exception as error:
            raise EngineError("E0921 ONNX Runtime failed on a batch", evidence=said_by(error)) from error
        return dict(zip(names, values, strict=True))

    def shared(self) -> OnnxSession:
        """Another reference to the session: each is closed by itself, and the last one frees it."""
        return copy.copy(self)

    def close(self) -> None:
        """Free the session and the reference to its weights."""
        self._session, self._weights = None, ()
