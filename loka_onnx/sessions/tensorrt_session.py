"""Runs a serialized engine through the TensorRT API and the CUDA driver.

`TensorRtSession` takes the vendor module as a parameter: the calls are the same in `tensorrt_rtx` and in
`tensorrt` 10 and 11.

An engine is a program: TensorRT for RTX carries the source of its kernels and compiles it as it loads. Load
one only from whoever may run code on the host.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.errors import EngineError, MissingPackage
from loka_onnx.sessions.cuda import CudaContext, list_cuda_devices
from loka_onnx.sessions.runner import Arrays, Runner


def import_tensorrt_rtx() -> Any:
    """The `tensorrt_rtx` module.

    Raises:
        MissingPackage: It is not installed, or its libraries do not load.
    """
    try:
        return importlib.import_module("tensorrt_rtx")
    except (ImportError, OSError) as error:
        raise MissingPackage(
            "TensorRT for RTX is not installed",
            evidence=str(error),
            remedy="pip install 'loka-onnx[tensorrt-rtx]'",
        ) from error


def why_no_gpu(architecture: str) -> str:
    """Why this host cannot run an engine for an architecture; empty when it has a GPU of it."""
    devices = list_cuda_devices()
    if any(device.architecture == architecture for device in devices):
        return ""
    here = ", ".join(f"{device.name} ({device.architecture})" for device in devices) or "no NVIDIA GPU"
    return f"the engine is for {architecture} and this host has {here}"


def open_tensorrt_rtx(engine: Path, architecture: str, version: str = "") -> TensorRtSession:
    """Deserialize an engine of TensorRT for RTX on the first GPU of its architecture.

    Args:
        engine: Serialized engine.
        architecture: What it was built for, for example ``sm89``.
        version: Version of the library that built it; not checked when empty.

    Raises:
        MissingPackage: The library is not installed.
        EngineError: There is no such GPU, the library has another version, or it refuses the engine.
    """
    trt = import_tensorrt_rtx()
    here = str(trt.__version__)
    if version not in {"", here}:
        raise EngineError(
            "the engine was built by another version of TensorRT for RTX",
            where=str(engine),
            evidence=f"built by {version}, this host has {here}",
            remedy=f"install tensorrt-rtx-cu13 {version}, or build the engine again",
        )
    reason = why_no_gpu(architecture)
    if reason:
        raise EngineError(f"cannot run here: {reason}", where=str(engine))
    device = next(d.index for d in list_cuda_devices() if d.architecture == architecture)
    return TensorRtSession(trt, engine, device)


class TensorRtSession(Runner):
    """A deserialized engine with its execution context and device buffers.

    Calls from several threads are served one after the other.

    Args:
        trt: The vendor module.
        engine: Serialized engine.
        device: Number of the GPU.

    Raises:
        EngineError: The engine does not load on this machine.
    """

    def __init__(self, trt: Any, engine: Path, device: int = 0) -> None:
        self._trt = trt
        self._lock = threading.Lock()
        self._cuda = CudaContext(device)
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(engine.read_bytes())
        context = self._engine.create_execution_context() if self._engine is not None else None
        if context is None:
            del self._engine, self._runtime
            self._cuda.close()
            raise EngineError(
                f"{trt.__name__} does not load the engine",
                where=str(engine),
                remedy="an engine belongs to one GPU architecture, one TensorRT version and one OS",
            )
        self._context = context
        modes = {
            name: self._engine.get_tensor_mode(name)
            for name in map(self._engine.get_tensor_name, range(self._engine.num_io_tensors))
        }
        self._inputs = tuple(name for name, mode in modes.items() if mode == trt.TensorIOMode.INPUT)
        self._outputs = tuple(name for name, mode in modes.items() if mode == trt.TensorIOMode.OUTPUT)

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch.

        Raises:
            EngineError: A shape lies outside the optimization profile, or the execution fails.
        """
        with self._lock:
            self._cuda.activate()
            return self._run(inputs)

    def _run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        for name in self._inputs:
            value = inputs[name].astype(self._dtype(name), copy=False)
            if not self._context.set_input_shape(name, value.shape):
                raise EngineError(
                    f"input '{name}' is outside the engine's optimization profile",
                    evidence=f"shape {value.shape}",
                    remedy="keep requests between batch.min and batch.max, or build for a wider range",
                )
            self._context.set_tensor_address(name, self._cuda.upload(name, value))
        shapes = {name: tuple(self._context.get_tensor_shape(name)) for name in self._outputs}
        for name, shape in shapes.items():
            size = int(np.prod(shape)) * self._dtype(name).itemsize
            self._context.set_tensor_address(name, self._cuda.reserve(name, size))
        if not self._context.execute_async_v3(self._cuda.stream):
            raise EngineError("the engine failed on a batch", evidence=f"output shapes {shapes}")
        return {name: self._cuda.download(name, shape, self._dtype(name)) for name, shape in shapes.items()}

    def close(self) -> None:
        """Free the engine before the device context that it lives in."""
        del self._context, self._engine, self._runtime
        self._cuda.close()

    def _dtype(self, name: str) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self._trt.nptype(self._engine.get_tensor_dtype(name)))
        return dtype
