"""Runs a serialized engine through the TensorRT API and the CUDA driver."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.engines.base import Runner
from loka_onnx.engines.cuda import CudaContext
from loka_onnx.errors import EngineError
from loka_onnx.sessions.onnx_session import Arrays


class TensorRtRunner(Runner):
    """A deserialized engine with its execution context and device buffers.

    Args:
        trt: The vendor module.
        engine: Serialized engine.
        device: Number of the GPU.

    Raises:
        EngineError: The engine does not load on this machine.
    """

    def __init__(self, trt: Any, engine: Path, device: int = 0) -> None:
        self._trt = trt
        self._cuda = CudaContext(device)
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(engine.read_bytes())
        context = self._engine.create_execution_context() if self._engine is not None else None
        if context is None:
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
