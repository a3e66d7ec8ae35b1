"""ONNX Runtime on a GPU with io-binding: fixed buffers and a CUDA graph for every served batch size.

A CUDA graph replays recorded work on the addresses of its recording. Each served size therefore has inputs
and outputs of its own, bound once. A request is copied into the buffers of the smallest size that holds it,
and the run names that size's graph (`gpu_graph_id`; 0 is ONNX Runtime's own, -1 runs without one). Source:
onnxruntime.ai, CUDA Execution Provider, section Using CUDA Graphs.

A request that would need too much padding, or is larger than any size, runs unpadded without a graph.
Providers that compile (TensorRT, MIGraphX) would compile within such a request, so that they cut and pad
every request to the sizes.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from loka_onnx.core import serde
from loka_onnx.engines.onnxruntime.io_binding_settings import PROGRAMS, SETTINGS_FILE, IoBindingSettings
from loka_onnx.engines.onnxruntime.providers import (
    PROVIDERS,
    TENSORRT,
    PlacedNode,
    gpu_index,
    host_blocker,
    placed_nodes,
    provider_chain,
    provider_for,
    session_options,
    start_session,
    timing_directory,
)
from loka_onnx.errors import EngineError, ModelError, said_by
from loka_onnx.sessions.buckets import padded, padded_rows, pieces_of, rows_of, run_in_buckets
from loka_onnx.sessions.cuda import CudaContext
from loka_onnx.sessions.dlpack import DTYPES, Borrowed
from loka_onnx.sessions.onnx_session import import_onnxruntime
from loka_onnx.sessions.runner import Allocate, Arrays, Resident, Runner, check_types

_NO_GRAPH, _FIRST_GRAPH = -1, 1

T = TypeVar("T")

_NUMPY_TYPES = {f"tensor({name})": np.dtype(name) for name in DTYPES - {"bfloat16", "float32", "float64"}}
_NUMPY_TYPES |= {"tensor(float)": np.dtype(np.float32), "tensor(double)": np.dtype(np.float64)}


@dataclass(frozen=True)
class _Buffers:
    """Buffers of one batch size, which its graph reads and writes."""

    binding: Any
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    run_options: Any


class IoBindingSession(Runner):
    """A model on a provider, with fixed buffers where its settings name batch sizes.

    Opening runs every size once on zeros: that allocates its memory, lets a provider compile for it, and
    records its CUDA graph. Calls from several threads run one after the other. With `writes`, as during a
    build, the provider keeps its programs beside the engine; else it writes into a copy, because an engine's
    files do not change. Raises ModelError if ONNX Runtime refuses the model, or an axis other than the batch
    is dynamic; EngineError if the provider does not start, or the model fails on a batch.
    """

    def __init__(
        self,
        engine: Path,
        settings: IoBindingSettings,
        *,
        device: int = 0,
        writes: bool = False,
        threads: int = 0,
    ) -> None:
        self._ort = import_onnxruntime()
        self._provider, self._index = PROVIDERS[settings.provider], device
        # A provider that copies reads the host's memory.
        self.device = device if self._provider.memory == "cuda" else None
        self._lock = threading.Lock()
        self._cuda: CudaContext | None = None
        self._remove_copy: weakref.finalize[..., Any] | None = None
        programs = engine.parent / PROGRAMS if settings.programs else None
        if programs is not None and not writes:
            copied = Path(tempfile.mkdtemp(prefix="loka-onnx-programs-"))
            self._remove_copy = weakref.finalize(self, shutil.rmtree, copied, True)
            # A provider that keeps nothing leaves no directory in a bundle.
            if programs.is_dir():
                shutil.copytree(programs, copied, dirs_exist_ok=True)
            programs = copied
        timing = None
        if writes and self._provider.key == TENSORRT.key:
            timing = timing_directory(settings.version)
            timing.mkdir(parents=True, exist_ok=True)
        chain = provider_chain(self._provider, settings.options, device, programs, timing)
        options = session_options(engine, self._provider)
        options.intra_op_num_threads = threads
        self._session = start_session(engine, options, chain)
        self._types = {i.name: _numpy_type(i.name, i.type) for i in self._session.get_inputs()}
        outputs = self._session.get_outputs()
        self.input_names, self.output_names = tuple(self._types), tuple(output.name for output in outputs)
        self._batched = {o.name for o in outputs if o.shape and not isinstance(o.shape[0], int)}
        self._bound: dict[int, _Buffers] = {}
        for number, size in enumerate(settings.sizes, _FIRST_GRAPH):
            inputs = self._session.get_inputs()
            zeros = {i.name: np.zeros(_fixed_shape(i, size), self._types[i.name]) for i in inputs}
            self._bound[size] = self._bind(zeros, number)
        self.served_sizes = tuple(self._bound)

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch."""
        feeds = self._feeds(inputs)
        with self._lock:
            if self._fits(feeds):
                return run_in_buckets(self._run_bound, feeds, self.served_sizes, self._batched)
            contiguous = {name: np.ascontiguousarray(value) for name, value in feeds.items()}
            options = self._run_options(_NO_GRAPH)
            values = self._try(lambda: self._session.run(list(self.output_names), contiguous, options))
            return dict(zip(self.output_names, values, strict=True))

    @property
    def stream(self) -> int:
        """Handle of the stream that copies to and from the buffers are queued on."""
        with self._lock:
            return self._copying_context().stream

    def run_on_device(self, inputs: Mapping[str, Borrowed], allocate: Allocate) -> dict[str, Borrowed]:
        """Run one batch through fixed buffers; one that fits no size is bound directly."""
        check_types(inputs, self._types)
        with self._lock:
            cuda = self._copying_context()
            cuda.activate()
            run = self._run_pieces if self._fits(inputs) else self._run_where_it_lies
            return run(cuda, inputs, allocate)

    def resident(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Put the batch into the buffers of its size, or into its own where it fits no size."""
        feeds = self._feeds(inputs)
        if not self._fits(feeds):
            own = self._bind(feeds, _NO_GRAPH)
            return Resident(lambda: self._launch(own), lambda: None)
        pieces = pieces_of(rows_of(feeds), self.served_sizes)
        if len(pieces) > 1:
            return super().resident(inputs)
        bound = self._bound[pieces[0].size]
        self._fill(bound, {name: padded(value, pieces[0]) for name, value in feeds.items()})
        return Resident(lambda: self._launch(bound), lambda: None)

    def placement(self) -> tuple[PlacedNode, ...]:
        """Provider of each node; see `placed_nodes`."""
        return placed_nodes(self._session)

    def close(self) -> None:
        """Free buffers, graphs, the session, and its temporary copies."""
        self._bound.clear()
        self._session = None
        if self._cuda is not None:
            self._cuda.close()
        self._cuda = None
        if self._remove_copy is not None:
            self._remove_copy()

    def _feeds(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        return {n: np.asarray(inputs[n]).astype(kind, copy=False) for n, kind in self._types.items()}

    def _fits(self, inputs: Mapping[str, npt.NDArray[Any] | Borrowed]) -> bool:
        """True if a request is served from fixed buffers."""
        if self._provider.compiles or not self._bound:
            return bool(self._bound)
        return padded_rows(rows_of(inputs), self.served_sizes) is not None

    def _copying_context(self) -> CudaContext:
        """Context whose stream copies on the device; opened by the first request that needs it."""
        if self._cuda is None:
            self._cuda = CudaContext(self._index)
        return self._cuda

    def _run_pieces(
        self, cuda: CudaContext, inputs: Mapping[str, Borrowed], allocate: Allocate
    ) -> dict[str, Borrowed]:
        answer: dict[str, Borrowed] = {}
        rows = rows_of(inputs)
        for piece in pieces_of(rows, self.served_sizes):
            bound = self._bound[piece.size]
            for name, value in bound.inputs.items():
                row_bytes = inputs[name].nbytes // rows
                source = inputs[name].address + piece.start * row_bytes
                cuda.copy_padded(value.data_ptr(), source, row_bytes, piece.rows, piece.size)
            # ONNX Runtime runs on its own stream, which does not wait for this one.
            cuda.synchronize()
            self._launch(bound)
            for name, value in bound.outputs.items():
                shape = tuple(value.shape())
                batched = name in self._batched
                if name not in answer:
                    kind = _numpy_type("output", value.data_type())
                    answer[name] = allocate((rows, *shape[1:]) if batched else shape, kind)
                elif not batched:
                    continue
                output = answer[name]
                row_bytes = output.nbytes // rows if batched else 0
                size = piece.rows * row_bytes if batched else output.nbytes
                cuda.copy(output.address + piece.start * row_bytes, value.data_ptr(), size)
            # The next piece or request overwrites the buffers.
            cuda.synchronize()
        return answer

    def _run_where_it_lies(
        self, cuda: CudaContext, inputs: Mapping[str, Borrowed], allocate: Allocate
    ) -> dict[str, Borrowed]:
        cuda.synchronize()
        memory, binding = self._provider.memory, self._session.io_binding()
        for name, kind in self._types.items():
            value = inputs[name]
            binding.bind_input(name, memory, self._index, kind, list(value.shape), value.address)
        for name in self.output_names:
            binding.bind_output(name, memory, self._index)
        self._try(lambda: self._session.run_with_iobinding(binding, self._run_options(_NO_GRAPH)))
        answer = {}
        for name, value in zip(self.output_names, binding.get_outputs(), strict=True):
            kind = _numpy_type("output", value.data_type())
            answer[name] = output = allocate(tuple(value.shape()), kind)
            cuda.copy(output.address, value.data_ptr(), output.nbytes)
        cuda.synchronize()
        return answer

    def _bind(self, arrays: Arrays, graph: int) -> _Buffers:
        memory, value_of = self._provider.memory, self._ort.OrtValue.ortvalue_from_numpy
        inputs = {
            # Copied, because on the CPU the value shares the array's memory.
            name: self._try(partial(value_of, np.array(value, order="C"), memory, self._index))
            for name, value in arrays.items()
        }
        trial, binding = self._session.io_binding(), self._session.io_binding()
        for name, value in inputs.items():
            trial.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_input(name, value)
        for name in self.output_names:
            trial.bind_output(name, memory, self._index)
        # The first run gives the shapes of outputs that inference does not.
        self._try(lambda: self._session.run_with_iobinding(trial, self._run_options(_NO_GRAPH)))
        outputs = dict(zip(self.output_names, trial.get_outputs(), strict=True))
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        bound = _Buffers(binding, inputs, outputs, self._run_options(graph))
        self._launch(bound)
        return bound

    def _run_options(self, graph: int) -> Any:
        options = self._ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph))
        return options

    def _run_bound(self, size: int, inputs: Arrays) -> Arrays:
        bound = self._bound[size]
        self._fill(bound, inputs)
        self._launch(bound)
        # The next run overwrites the buffers.
        return {name: np.array(self._try(value.numpy)) for name, value in bound.outputs.items()}

    def _fill(self, bound: _Buffers, inputs: Arrays) -> None:
        for name, value in inputs.items():
            shape = tuple(bound.inputs[name].shape())
            if value.shape != shape:
                raise EngineError(
                    f"E0867 input '{name}' has another shape than the engine",
                    evidence=f"a row of {list(value.shape[1:])}, not {list(shape[1:])}",
                    remedy="send what the model's input takes",
                )
            self._try(partial(bound.inputs[name].update_inplace, value))

    def _launch(self, bound: _Buffers) -> None:
        self._try(lambda: self._session.run_with_iobinding(bound.binding, bound.run_options))

    def _try(self, run: Callable[[], T]) -> T:
        try:
            return run()
        except Exception as error:
            # onnxruntime raises errors of unrelated types.
            raise EngineError(
                f"E0868 {self._provider.name} failed on a batch", evidence=said_by(error)
            ) from error


def open_io_binding(
    engine: Path, backend: str, architecture: str, version: str = "", threads: int = 0
) -> IoBindingSession:
    """Load an engine with the settings beside it, on the first GPU of its architecture; an empty `version` of
    ONNX Runtime is not checked. Raises EngineError if settings or programs are not its own, or this host
    cannot run it.
    """
    settings = serde.read(IoBindingSettings, engine.with_name(SETTINGS_FILE))
    provider = provider_for(backend, architecture)
    if settings.provider != provider.key or version not in {"", settings.version}:
        raise EngineError(
            "E0869 the settings beside the engine are not its own",
            where=str(engine),
            evidence=f"provider '{settings.provider}' of ONNX Runtime {settings.version}; "
            f"{backend} on {architecture} is '{provider.key}'{f' of {version}' if version else ''}",
            remedy="build the engine again",
        )
    reason = host_blocker(provider, architecture)
    if reason:
        raise EngineError(f"E0870 cannot run here: {reason}", where=str(engine))
    here = str(import_onnxruntime().__version__)
    if provider.compiles and settings.version != here:
        raise EngineError(
            f"E0871 the engine holds programs that {provider.name} compiled for another version",
            where=str(engine),
            evidence=f"built by ONNX Runtime {settings.version}, this host has {here}",
            remedy="build the engine again",
        )
    return IoBindingSession(engine, settings, device=gpu_index(provider, architecture), threads=threads)


def _fixed_shape(described: Any, size: int) -> tuple[int, ...]:
    tail = tuple(described.shape[1:])
    if not described.shape or not all(isinstance(extent, int) for extent in tail):
        raise ModelError(
            f"E0872 input '{described.name}' has no fixed shape for a batch of {size} rows",
            evidence=f"its shape is {list(described.shape)}",
            remedy="export the model with the batch on axis 0 of every input and the other axes fixed",
        )
    return (size, *tail)


def _numpy_type(name: str, kind: str) -> np.dtype[Any]:
    if kind not in _NUMPY_TYPES:
        raise ModelError(
            f"E0873 input '{name}' cannot be bound to a buffer",
            evidence=f"its type is {kind}",
            remedy="let the model take FP32, and cast inside it",
        )
    return _NUMPY_TYPES[kind]
