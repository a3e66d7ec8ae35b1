"""Execution of the programs of an Inductor package: on the CPU, or on a GPU through CUDA graphs.

A GPU finishes the kernels of a ranker faster than a CPU can launch them one by one. For each served batch
size the launches are therefore captured once into a CUDA graph (CUDA C++ Programming Guide, section CUDA
Graphs) and replayed for each request. A graph uses fixed addresses: requests are copied into buffers on the
device through pinned host memory. `Gpu` holds every call of the vendor.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.engines.inductor.package import InductorEngine, InputPort
from loka_onnx.errors import EngineError, InternalError
from loka_onnx.sessions.buckets import Piece, padded
from loka_onnx.sessions.dlpack import Borrowed
from loka_onnx.sessions.runner import Allocate, Arrays, Resident

Tensor = Any
"""`torch.Tensor`; torch is imported only when a session is opened."""
Call = Callable[[list[Tensor]], Sequence[Tensor]]
"""A loaded program: takes tensors in the order of `InductorEngine.inputs`, returns those of its outputs."""
WARM_UPS = 3


@dataclass(frozen=True)
class Placement:
    """Program of some rows of a request; `captured`: as a CUDA graph of the piece's size."""

    program: str
    piece: Piece
    captured: bool


class Executor(ABC):
    """Runs the programs of an engine, `calls` by name, one placement at a time; not thread-safe."""

    captures: bool = False
    """True if served batch sizes have CUDA graphs."""
    device: int | None = None
    """CUDA device of `run_on_device`; None where there is none."""
    stream: int = 0
    """Handle of its stream."""

    def __init__(self, torch: Any, engine: InductorEngine, calls: dict[str, Call]) -> None:
        self._torch, self._engine, self._calls = torch, engine, calls

    @abstractmethod
    def run(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Compute `placement.piece.size` rows; those beyond the piece are padding."""

    @abstractmethod
    def resident(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Put the inputs of a placement into the program's memory."""

    def run_on_device(
        self, placements: Sequence[Placement], inputs: Mapping[str, Borrowed], allocate: Allocate
    ) -> dict[str, Borrowed]:
        """Run all pieces of a request, from device memory to memory that `allocate` makes."""
        raise InternalError(f"{type(self).__name__} has no device", evidence=f"{len(inputs)} inputs")

    def close(self) -> None:
        """Free the programs and everything that they hold."""
        self._calls.clear()

    def _tensors(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> list[Tensor]:
        """Inputs of a piece as tensors on the host, padded."""
        # Torch warns about read-only arrays, although no program writes its inputs.
        values = (padded(inputs[port.name], piece) for port in self._engine.inputs)
        return [self._torch.from_numpy(np.require(value, None, ["C", "W"])) for value in values]


class HostExecutor(Executor):
    """Runs programs on the CPU."""

    def run(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run on the arrays themselves; outputs are copied, because they may share an input or a constant."""
        outputs = self._calls[placement.program](self._tensors(placement.piece, inputs))
        ports = self._engine.outputs
        return {port.name: value.numpy().copy() for port, value in zip(ports, outputs, strict=True)}

    def resident(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Wrap the arrays as tensors."""
        feeds, call = self._tensors(placement.piece, inputs), self._calls[placement.program]
        return Resident(lambda: call(list(feeds)), lambda: None)


@dataclass(frozen=True)
class Captured:
    """A CUDA graph; `outputs` are the same tensors in each replay."""

    replay: Callable[[], object]
    outputs: tuple[Tensor, ...]
    reset: Callable[[], object]


class Gpu:
    """One stream of a GPU, and the memory pool of the graphs captured on it.

    Graphs of a pool may share memory for intermediate tensors. That is safe because they run in turn on one
    stream, and outputs are fetched before the next one is queued.
    """

    def __init__(self, torch: Any, index: int) -> None:
        self._torch = torch
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)
        self.stream = int(self._stream.cuda_stream)
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, shape: Sequence[int], dtype: Any) -> Tensor:
        """Allocate page-locked host memory."""
        return self._torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Queue the calling thread's work on this stream."""
        with self._torch.inference_mode(), self._torch.cuda.stream(self._stream):
            yield

    def synchronize(self) -> None:
        """Wait for everything that was queued."""
        self._stream.synchronize()

    def capture(self, call: Callable[[], Sequence[Tensor]]) -> Captured:
        """Capture the work of a call, after calls that load kernels and let libraries choose theirs."""
        for _ in range(WARM_UPS):
            call()
        self.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        # Only errors of this thread end the capture: others may use the GPU meanwhile.
        how = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with self._torch.cuda.graph(graph, **how):
            outputs = call()
        return Captured(graph.replay, tuple(outputs), graph.reset)

    def close(self) -> None:
        """Return unused memory to the device."""
        self.synchronize()
        self._torch.cuda.empty_cache()


class GraphExecutor(Executor):
    """Runs programs on a GPU, by CUDA graphs for served batch sizes; closes `gpu`."""

    captures = True

    def __init__(self, torch: Any, engine: InductorEngine, calls: dict[str, Call], gpu: Gpu) -> None:
        super().__init__(torch, engine, calls)
        self._gpu = gpu
        self.device, self.stream = int(gpu.device.index or 0), gpu.stream
        largest = engine.graph_sizes[-1]
        self._staging = {
            port.name: gpu.pinned((largest, *port.row_shape), self._dtype(port)) for port in engine.inputs
        }
        self._graphs: dict[int, Captured] = {}
        self._fetched: dict[int, tuple[Tensor, ...]] = {}
        with gpu.active():
            self._inputs = {
                name: torch.zeros_like(staging, device=gpu.device) for name, staging in self._staging.items()
            }
            # The largest first: its memory also serves the others.
            for size in reversed(engine.graph_sizes):
                self._capture(size)

    def run(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Copy the rows to the device, run, and copy the outputs back."""
        size = placement.piece.size
        with self._gpu.active():
            if placement.captured:
                self._stage(placement.piece, inputs)
                captured, fetched = self._graphs[size], self._fetched[size]
                captured.replay()
                for host, output in zip(fetched, captured.outputs, strict=True):
                    host.copy_(output, non_blocking=True)
                self._gpu.synchronize()
                # The next request overwrites the pinned memory.
                values = [host.numpy().copy() for host in fetched]
            else:
                outputs = self._calls[placement.program](self._moved(placement.piece, inputs))
                values = [output.cpu().numpy() for output in outputs]
        return {port.name: value for port, value in zip(self._engine.outputs, values, strict=True)}

    def run_on_device(
        self, placements: Sequence[Placement], inputs: Mapping[str, Borrowed], allocate: Allocate
    ) -> dict[str, Borrowed]:
        """Copy rows into the graphs' buffers, and outputs out of them."""
        feeds = {name: self._torch.from_dlpack(value.capsule) for name, value in inputs.items()}
        rows = sum(placement.piece.rows for placement in placements)
        answer: dict[str, Borrowed] = {}
        targets: dict[str, Tensor] = {}
        for placement in placements:
            outputs, piece = self._outputs_on_device(placement, feeds), placement.piece
            for port, output in zip(self._engine.outputs, outputs, strict=True):
                if port.name not in answer:
                    shape = (rows, *output.shape[1:]) if port.batched else tuple(output.shape)
                    # Not on this stream: the allocating library orders it behind its own work.
                    dtype = np.dtype(str(output.dtype).removeprefix("torch."))
                    answer[port.name] = allocate(shape, dtype)
                    targets[port.name] = self._torch.from_dlpack(answer[port.name].capsule)
                elif not port.batched:
                    continue
                target, rows_of = targets[port.name], slice(piece.start, piece.start + piece.rows)
                with self._gpu.active():
                    if port.batched:
                        target[rows_of].copy_(output[: piece.rows], non_blocking=True)
                    else:
                        target.copy_(output, non_blocking=True)
        self._gpu.synchronize()
        return answer

    def _outputs_on_device(self, placement: Placement, feeds: Mapping[str, Tensor]) -> Sequence[Tensor]:
        piece = placement.piece
        with self._gpu.active():
            if placement.captured:
                for name, buffer in self._inputs.items():
                    rows = feeds[name][piece.start : piece.start + piece.rows]
                    buffer[: piece.rows].copy_(rows, non_blocking=True)
                    if piece.size > piece.rows:
                        buffer[piece.rows : piece.size].copy_(rows[-1:], non_blocking=True)
                captured = self._graphs[piece.size]
                captured.replay()
                return captured.outputs
            moved = []
            for port in self._engine.inputs:
                rows = feeds[port.name][piece.start : piece.start + piece.rows].to(self._dtype(port))
                padding = rows[-1:].expand(piece.size - piece.rows, *rows.shape[1:])
                moved.append(self._torch.cat([rows, padding]) if piece.size > piece.rows else rows)
            return self._calls[placement.program](moved)

    def resident(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Put the batch into device memory; `launch` queues its kernels and fetches nothing."""
        with self._gpu.active():
            if placement.captured:
                self._stage(placement.piece, inputs)
                replay, moved = self._graphs[placement.piece.size].replay, list[Tensor]()
            else:
                replay, moved = None, self._moved(placement.piece, inputs)
            self._gpu.synchronize()

        def launch() -> None:
            with self._gpu.active():
                replay() if replay else self._calls[placement.program](list(moved))

        return Resident(launch, self._gpu.synchronize)

    def close(self) -> None:
        """Free graphs, buffers and programs, then their shared memory."""
        for captured in self._graphs.values():
            captured.reset()
        for held in (self._graphs, self._fetched, self._inputs, self._staging, self._calls):
            held.clear()
        self._gpu.close()

    def _capture(self, size: int) -> None:
        program = next(p for p in self._engine.programs if p.minimum <= size <= p.maximum)
        call = self._calls[program.name]
        feeds = [self._inputs[port.name][:size] for port in self._engine.inputs]
        try:
            captured = self._gpu.capture(lambda: call(list(feeds)))
        except RuntimeError as error:
            raise EngineError(
                f"E0817 the engine cannot be captured into a CUDA graph for {size} rows",
                evidence=str(error).splitlines()[0][:400],
                remedy="an operator of it waits for the device; the log of the build has its kernels",
            ) from error
        self._graphs[size] = captured
        self._fetched[size] = tuple(self._gpu.pinned(tuple(t.shape), t.dtype) for t in captured.outputs)

    def _stage(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy a piece into the graphs' buffers, its last row repeated up to the graph's size."""
        for name, staging in self._staging.items():
            rows = staging.numpy()
            rows[: piece.rows] = inputs[name][piece.start : piece.start + piece.rows]
            rows[piece.rows : piece.size] = rows[piece.rows - 1]
            self._inputs[name][: piece.size].copy_(staging[: piece.size], non_blocking=True)

    def _moved(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> list[Tensor]:
        return [each.to(self._gpu.device) for each in self._tensors(piece, inputs)]

    def _dtype(self, port: InputPort) -> Any:
        return self._torch.from_numpy(np.empty(0, port.dtype)).dtype
