"""Session of a serialized engine, through the TensorRT API and the CUDA driver.

The vendor module is a parameter: the calls are equal in `tensorrt_rtx` and `tensorrt` 10 and 11.

A batch is copied into page-locked memory, to the device, run, and copied back, all queued on one stream. The
second time that a tuned batch size comes, this work is captured into a CUDA graph, and is a single launch
from then on. A smaller request is padded to the next tuned size of at most `buckets.MOST_PADDING` times its
rows. TensorRT's rules for graphs (developer guide, "CUDA Graphs"): a graph belongs to the shapes, buffers and
execution context of its capture; the context must have run with them before, and must not be changed
afterwards. Each tuned size therefore has its own context, and a graph is dropped when a buffer moves.

An engine is a program: load one only from someone who may run code on the host.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loka_onnx.engines.tensorrt.first_opening import check_opens
from loka_onnx.errors import EngineError
from loka_onnx.sessions.buckets import padded_rows
from loka_onnx.sessions.cuda import CudaContext, CudaGraph, first_gpu, why_no_gpu
from loka_onnx.sessions.dlpack import Borrowed
from loka_onnx.sessions.runner import Allocate, Arrays, Resident, Runner, check_types

if TYPE_CHECKING:
    from loka_onnx.engines.tensorrt.spec import TensorRtSpec

_LOG = logging.getLogger("loka_onnx.sessions")
_SAME_NAME = ("int8", "uint8", "int32", "int64", "bool")
NUMPY_TYPES = {"FLOAT": "float32", "HALF": "float16", **{name.upper(): name for name in _SAME_NAME}}
"""NumPy type of each member of `DataType` that has one."""


def open_engine(
    spec: TensorRtSpec, engine: Path, architecture: str, version: str = "", *, is_new: bool = False
) -> TensorRtSession:
    """Deserialize an engine on the first GPU of its architecture, after the driver has answered; an empty
    `version` of the library is not checked. With `is_new`, a child process opens it first (`first_opening`).
    """
    trt = spec.load_library()
    here = str(trt.__version__)
    if version not in {"", here}:
        raise EngineError(
            f"E2802 the engine was built by another version of {spec.title}",
            where=str(engine),
            evidence=f"built by {version}, this host has {here}",
            remedy=f"install {spec.package} {version}, or build the engine again",
        )
    reason = why_no_gpu(architecture)
    if reason:
        raise EngineError(f"E2803 cannot run here: {reason}", where=str(engine))
    device = first_gpu(architecture)
    if is_new:
        check_opens(spec.modules[0], here, engine, device)
    return TensorRtSession(trt, engine, device.index)


@dataclass
class _Instance:
    """An execution context with its graphs and current state: `moves` is `CudaContext.moves` when its buffers
    were set; `is_warm` once it has run with these shapes and buffers. One that serves a single batch size
    `is_captured`: `graph` copies a batch in, runs and copies back; `engine_graph` runs.
    """

    context: Any
    is_captured: bool
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    moves: int = -1
    is_warm: bool = False
    graph: CudaGraph | None = None
    engine_graph: CudaGraph | None = None

    def drop_graphs(self) -> None:
        """Free the captured graphs."""
        for graph in filter(None, (self.graph, self.engine_graph)):
            graph.close()
        self.graph = self.engine_graph = None
        self.is_warm = False


class TensorRtSession(Runner):
    """A deserialized engine; calls from several threads run one after the other."""

    def __init__(self, trt: Any, engine: Path, device: int = 0) -> None:
        self._trt, self.device = trt, device
        self._lock = threading.Lock()
        self._instances: dict[int, _Instance] = {}
        self._cuda = CudaContext(device)
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(engine.read_bytes())
        context = self._engine.create_execution_context() if self._engine is not None else None
        if context is None:
            del self._engine, self._runtime
            self._cuda.close()
            raise EngineError(
                f"E2804 {trt.__name__} does not load the engine",
                where=str(engine),
                remedy="an engine belongs to one GPU architecture, one TensorRT version and one OS",
            )
        self._general = _Instance(context, is_captured=False)
        try:
            self._describe()
        except BaseException:
            self.close()
            raise

    def _describe(self) -> None:
        engine, kind = self._engine, self._trt.TensorIOMode.INPUT
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self._inputs = tuple(name for name in names if engine.get_tensor_mode(name) == kind)
        self._outputs = tuple(name for name in names if name not in self._inputs)
        self._types = {name: self._numpy_type(name) for name in names}
        dynamic = [name for name in names if tuple(engine.get_tensor_shape(name))[:1] == (-1,)]
        self._batched = tuple(name for name in self._inputs if name in dynamic)
        self._follows = frozenset(dynamic).difference(self._inputs)
        self._profiles: dict[int, int] = {}
        """Optimization profile of each tuned batch size; the last, narrowest one where there are several."""
        for profile in range(engine.num_optimization_profiles) if self._batched else ():
            _, tuned, _ = engine.get_tensor_profile_shape(self._batched[0], profile)
            self._profiles[int(tuned[0])] = profile
        self.served_sizes = tuple(sorted(self._profiles))

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch, inside the optimization profile."""
        with self._lock:
            instance = self._hand_over(inputs)
            self._execute(instance)
            shapes = {name: inputs[name].shape for name in self._inputs}
            answer = {}
            for name, shape in instance.outputs.items():
                staged = self._cuda.staging(name, shape, self._types[name])
                answer[name] = staged[tuple(map(slice, self._cut(name, shape, shapes)))].copy()
            return answer

    @property
    def stream(self) -> int:
        """Handle of the stream."""
        return self._cuda.stream

    def run_on_device(self, inputs: Mapping[str, Borrowed], allocate: Allocate) -> dict[str, Borrowed]:
        """Run one batch on the device, through the engine's buffers: CUDA graphs have fixed addresses."""
        check_types(inputs, {name: self._types[name] for name in self._inputs})
        with self._lock:
            self._cuda.activate()
            shapes = {name: inputs[name].shape for name in self._inputs}
            instance = self._instance_for(shapes)
            for name, shape in instance.inputs.items():
                address, given = self._cuda.reserve(name, self._size(name, shape)), inputs[name]
                if shape == given.shape:
                    self._cuda.copy(address, given.address, given.nbytes)
                else:
                    given_rows, row_bytes = given.shape[0], given.nbytes // given.shape[0]
                    self._cuda.copy_padded(address, given.address, row_bytes, given_rows, shape[0])
            if instance.is_warm and instance.is_captured and instance.engine_graph is None:
                self._cuda.synchronize()
                instance.engine_graph = self._captured(instance, lambda: self._compute(instance))
            self._launch(instance)
            answer = {}
            for name, shape in instance.outputs.items():
                answer[name] = output = allocate(self._cut(name, shape, shapes), self._types[name])
                self._cuda.copy(output.address, self._cuda.reserve(name, 0), output.nbytes)
            self._cuda.synchronize()
            instance.is_warm = True
            return answer

    def _launch(self, instance: _Instance) -> None:
        """Queue the engine alone, as its graph where there is one."""
        if instance.engine_graph is not None:
            instance.engine_graph.launch()
        else:
            self._compute(instance)

    def resident(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Put a batch on the device; launching it runs the engine, as a CUDA graph for a tuned size."""
        with self._lock:
            instance = self._hand_over(inputs)
            self._queue(instance)
            self._cuda.synchronize()
            instance.is_warm = True
            if instance.engine_graph is None:
                instance.engine_graph = self._captured(instance, lambda: self._compute(instance))

        def launch() -> None:
            self._cuda.activate()
            self._launch(instance)

        return Resident(launch, self._cuda.synchronize)

    def close(self) -> None:
        """Free graphs and engine before their device context."""
        self._cuda.activate()
        for instance in (self._general, *self._instances.values()):
            instance.drop_graphs()
        self._instances.clear()
        del self._general, self._engine, self._runtime
        self._cuda.close()

    def _hand_over(self, inputs: Mapping[str, npt.NDArray[Any]]) -> _Instance:
        """Stage a batch in page-locked memory and return its execution context."""
        self._cuda.activate()
        values = {name: inputs[name].astype(self._types[name], copy=False) for name in self._inputs}
        instance = self._instance_for({name: value.shape for name, value in values.items()})
        for name, value in values.items():
            staged = self._cuda.staging(name, instance.inputs[name], value.dtype)
            if staged.shape == value.shape:
                np.copyto(staged, value)
            else:
                staged[: len(value)], staged[len(value) :] = value, value[-1:]
        return instance

    def _rows(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """Rows of a request; None where its inputs disagree, which the engine refuses."""
        counts = {shapes[name][:1] for name in self._batched}
        return next(iter(counts.pop()), None) if len(counts) == 1 else None

    def _cut(self, name: str, shape: tuple[int, ...], sent: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of an output without padding rows, for a request with inputs of the shapes `sent`."""
        rows = self._rows(sent)
        return (rows, *shape[1:]) if rows is not None and name in self._follows else shape

    def _instance_for(self, shapes: Mapping[str, tuple[int, ...]]) -> _Instance:
        """Return the execution context that runs a request, of the next tuned size unless that is too far."""
        rows = self._rows(shapes)
        size = (padded_rows(rows, self.served_sizes) if rows else None) or rows
        if size is not None:
            shapes = {n: (size, *s[1:]) if n in self._batched else s for n, s in shapes.items()}
        instance = self._tuned_instance(size) if size in self._profiles else self._general
        self._bind(instance, dict(shapes))
        return instance

    def _tuned_instance(self, size: int) -> _Instance:
        if size not in self._instances:
            context, profile = self._engine.create_execution_context(), self._profiles[size]
            chosen = context is not None and (
                not profile or context.set_optimization_profile_async(profile, self._cuda.stream)
            )
            self._cuda.synchronize()
            if not chosen:
                raise EngineError(
                    f"E2805 {self._trt.__name__} makes no execution context for batches of {size}",
                    evidence=f"optimization profile {profile}; the device may lack memory",
                )
            self._instances[size] = _Instance(context, is_captured=True)
        return self._instances[size]

    def _bind(self, instance: _Instance, shapes: dict[str, tuple[int, ...]]) -> None:
        """Set shapes and buffers that differ from the context's."""
        context = instance.context
        if instance.inputs != shapes:
            instance.drop_graphs()
            instance.inputs, instance.moves = {}, -1
            for name, shape in shapes.items():
                if not context.set_input_shape(name, shape):
                    raise EngineError(
                        f"E2806 input '{name}' is outside the engine's optimization profile",
                        evidence=f"shape {shape}",
                        remedy="keep requests between batch.min and batch.max, or build for a wider range",
                    )
            instance.outputs = {name: tuple(context.get_tensor_shape(name)) for name in self._outputs}
            instance.inputs = shapes
        addresses = {}
        for name, shape in (instance.inputs | instance.outputs).items():
            self._cuda.staging(name, shape, self._types[name])
            addresses[name] = self._cuda.reserve(name, self._size(name, shape))
        if instance.moves != self._cuda.moves:
            instance.drop_graphs()
            for name, address in addresses.items():
                context.set_tensor_address(name, address)
            instance.moves = self._cuda.moves

    def _execute(self, instance: _Instance) -> None:
        if instance.is_warm and instance.graph is None:
            instance.graph = self._captured(instance, lambda: self._queue(instance))
        if instance.graph is not None:
            instance.graph.launch()
        else:
            self._queue(instance)
        self._cuda.synchronize()
        instance.is_warm = True

    def _captured(self, instance: _Instance, work: Callable[[], None]) -> CudaGraph | None:
        """Capture the work of a warm context as a graph; None where that is not wanted or not possible."""
        if not instance.is_captured:
            return None
        try:
            return self._cuda.capture(work)
        except EngineError as error:
            # Some operators synchronize with the host: such an engine is launched without a graph.
            instance.is_captured = False
            _LOG.warning("batches of shape %s run without a CUDA graph: %s", instance.inputs, error)
            return None

    def _queue(self, instance: _Instance) -> None:
        for name, shape in instance.inputs.items():
            self._cuda.upload(name, self._size(name, shape))
        self._compute(instance)
        for name, shape in instance.outputs.items():
            self._cuda.download(name, self._size(name, shape))

    def _compute(self, instance: _Instance) -> None:
        if not instance.context.execute_async_v3(self._cuda.stream):
            raise EngineError(
                "E2807 the engine failed on a batch", evidence=f"output shapes {instance.outputs}"
            )

    def _size(self, name: str, shape: tuple[int, ...]) -> int:
        return int(np.prod(shape, dtype=np.int64)) * self._types[name].itemsize

    def _numpy_type(self, name: str) -> np.dtype[Any]:
        kind = self._engine.get_tensor_dtype(name)
        if kind.name not in NUMPY_TYPES:
            raise EngineError(
                f"E2808 input or output '{name}' has type {kind.name}, which NumPy lacks",
                remedy="cast it to FP32 inside the model",
            )
        return np.dtype(NUMPY_TYPES[kind.name])
