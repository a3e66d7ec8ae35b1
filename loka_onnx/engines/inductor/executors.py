"""Execution of the programs of an Inductor package: on the CPU, or on a GPU through CUDA graphs.

A GPU finishes the kernels of a ranker faster than a CPU can launch them one by one. For each served batch
size the launches are therefore captured once into a CUDA graph (CUDA C++ Programming Guide, section CUDA
Graphs) and replayed for each request. A graph uses fixed addresses: all inputs of a request are written one
behind the other into pinned host memory. The graph begins with the move of these bytes to the device and ends
with that of the outputs back, so that a request is one launch and one wait, and no call of PyTorch. `Gpu`
holds every call of the vendor.

Ids whose valid values are all int32 (`InputPort.fits_int32`) are written and moved as such, and widened on
the device. The host looks for others, which no table has, while the device works: such a request runs once
more, as int64.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from math import prod
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from loka_onnx.engines.inductor.package import InductorEngine, InputPort
from loka_onnx.errors import EngineError, InternalError
from loka_onnx.sessions.buckets import Piece, padded
from loka_onnx.sessions.cuda import CudaDriver
from loka_onnx.sessions.dlpack import Borrowed
from loka_onnx.sessions.runner import Allocate, Arrays, Buffers, Resident

Tensor = Any
"""`torch.Tensor`; torch is imported only when a session is opened."""
Call = Callable[[list[Tensor]], Sequence[Tensor]]
"""A loaded program: takes tensors in the order of `InductorEngine.inputs`, returns those of its outputs."""
WARM_UPS = 3
ALIGNMENT = 16
"""Bytes at whose multiples each input begins: kernels load as many at once."""
MOVED_BY_KERNELS = 1 << 21
"""Bytes up to which a kernel moves memory in a graph: a copy of less takes up to 7 µs longer (H100)."""
MOST_VIEWS = 64
"""Numbers of rows for which views of pinned memory are kept."""
_CAPTURING = threading.Lock()
"""Held by the session that captures: PyTorch's allocator records for one graph at a time."""


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
        """Compute the rows of a piece."""

    @abstractmethod
    def resident(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Put the inputs of a placement into the program's memory."""

    def run_on_device(
        self, placements: Sequence[Placement], inputs: Mapping[str, Borrowed], allocate: Allocate
    ) -> dict[str, Borrowed]:
        """Run all pieces of a request, from device memory to memory that `allocate` makes."""
        raise InternalError(f"{type(self).__name__} has no device", evidence=f"{len(inputs)} inputs")

    def staging(self, placement: Placement) -> Staging | None:
        """Make page-locked memory for requests of a placement; None where none is read."""
        return None

    def close(self) -> None:
        """Free the programs and everything that they hold."""
        self._calls.clear()

    def _rows_of(self, piece: Piece, outputs: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        """Select the rows of a piece from those that a program computed."""
        if piece.rows == piece.size:
            return outputs
        pairs = zip(self._engine.outputs, outputs, strict=True)
        return [value[: piece.rows] if port.batched else value for port, value in pairs]

    def _answer(self, piece: Piece, outputs: Sequence[npt.NDArray[Any]]) -> Arrays:
        """Copy the rows of a piece out of those that a program computed."""
        held = self._rows_of(piece, outputs)
        return {port.name: value.copy() for port, value in zip(self._engine.outputs, held, strict=True)}

    def _tensors(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> list[Tensor]:
        """Inputs of a piece as tensors on the host, padded and converted."""
        # Torch warns about read-only arrays, although no program writes its inputs.
        values = ((padded(inputs[port.name], piece), port.dtype) for port in self._engine.inputs)
        return [self._torch.from_numpy(np.require(value, dtype, ["C", "W"])) for value, dtype in values]


class HostExecutor(Executor):
    """Runs programs on the CPU."""

    def run(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run on the arrays themselves; outputs are copied, because they may share an input or a constant."""
        outputs = self._calls[placement.program](self._tensors(placement.piece, inputs))
        return self._answer(placement.piece, [value.numpy() for value in outputs])

    def resident(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Wrap the arrays as tensors."""
        feeds, call = self._tensors(placement.piece, inputs), self._calls[placement.program]
        return Resident(lambda: call(list(feeds)), lambda: None)


@dataclass(frozen=True)
class Captured:
    """A CUDA graph; `outputs` are the same tensors in each replay, `replay` needs an `activated` thread."""

    replay: Callable[[], object]
    outputs: tuple[Tensor, ...]
    reset: Callable[[], object]


class Gpu:
    """One stream of a GPU, and the memory pool of the graphs captured on it.

    Graphs of a pool may share memory for tensors that nothing holds after the capture. That is safe because
    they run in turn on one stream.
    """

    def __init__(self, torch: Any, index: int) -> None:
        self._torch = torch
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)
        self.stream = int(self._stream.cuda_stream)
        self._pool = torch.cuda.graph_pool_handle()
        self._driver, self._context = CudaDriver(), ctypes.c_void_p()
        self._handle = ctypes.c_void_p(self.stream)
        # PyTorch has made the primary context current in this thread.
        self._driver.call("cuCtxGetCurrent", ctypes.byref(self._context))

    def pinned(self, shape: Sequence[int], dtype: Any) -> Tensor:
        """Allocate page-locked host memory."""
        return self._torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Queue the work of PyTorch in the calling thread on this stream."""
        with self._torch.inference_mode(), self._torch.cuda.stream(self._stream):
            yield

    def activate(self) -> None:
        """Let the calling thread use the driver."""
        self._driver.call("cuCtxSetCurrent", self._context)

    def synchronize(self) -> None:
        """Wait for everything that was queued; in an activated thread."""
        self._driver.call("cuStreamSynchronize", self._handle)

    def copying(self, target: Tensor, source: Tensor) -> Callable[[], object]:
        """Return a function that queues a copy of a contiguous tensor, between the device and pinned memory.

        It allocates nothing and holds neither tensor.
        """
        addresses = (ctypes.c_uint64(each.data_ptr()) for each in (target, source))
        size = ctypes.c_size_t(source.numel() * source.element_size())
        return partial(self._driver.call, "cuMemcpyAsync", *addresses, size, self._handle)

    def moving(self, target: Tensor, source: Tensor) -> Callable[[], object]:
        """Return a function that queues such a copy in a graph, by a kernel on pinned memory.

        Large ones go through `copying`. Integers are widened to the target's type.
        """
        if source.dtype != target.dtype:
            return partial(self._torch.add, self._bytes(source).view(source.dtype), 0, out=target)
        if source.numel() * source.element_size() > MOVED_BY_KERNELS:
            return self.copying(target, source)
        target, source = self._bytes(target), self._bytes(source)
        if (target.data_ptr() | source.data_ptr() | len(source)) % 4 == 0:
            target, source = target.view(self._torch.int32), source.view(self._torch.int32)
        return partial(self._torch.add, source, 0, out=target)

    def _bytes(self, tensor: Tensor) -> Tensor:
        """View the bytes of a tensor; those of pinned memory have the same address on the device."""
        flat = tensor.reshape(-1).view(self._torch.uint8)
        if tensor.is_cuda:
            return flat
        place = {"shape": (len(flat),), "typestr": "|u1", "data": (flat.data_ptr(), False), "version": 3}
        holder = SimpleNamespace(__cuda_array_interface__=place, memory=tensor)
        return self._torch.as_tensor(holder, device=self.device)

    def capture(self, call: Callable[[], Sequence[Tensor]], *, warm_ups: int) -> Captured:
        """Capture the work of a call, after calls that load kernels and let libraries choose theirs."""
        for _ in range(warm_ups):
            call()
        self._stream.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        # Only errors of this thread end the capture: others may use the GPU meanwhile, but not capture too.
        how = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with _CAPTURING, self._torch.cuda.graph(graph, **how):
            outputs = call()
        program = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        replay = partial(self._driver.call, "cuGraphLaunch", program, self._handle)
        return Captured(replay, tuple(outputs), graph.reset)

    def close(self) -> None:
        """Return unused memory to the device."""
        self._stream.synchronize()
        self._torch.cuda.empty_cache()


@dataclass(frozen=True)
class Block:
    """Inputs of one type and row shape, from byte `begin` of a memory, `stride` bytes apart."""

    ports: tuple[InputPort, ...]
    begin: int
    stride: int

    @property
    def end(self) -> int:
        """Byte behind the last one."""
        return self.begin + self.stride * len(self.ports)

    def view(self, memory: Any, dtype: Any, size: int) -> Any:
        """View the inputs in a memory of bytes, a tensor or an array, as (inputs, rows, …) of a type."""
        used = size * prod(self.ports[0].row_shape) * dtype.itemsize
        bytes_of = memory[self.begin : self.end].reshape(len(self.ports), self.stride)[:, :used]
        return bytes_of.view(dtype).reshape(len(self.ports), size, *self.ports[0].row_shape)


def blocks_of(inputs: Sequence[InputPort], size: int) -> list[Block]:
    """Places of the inputs of so many rows in one memory; ids that are moved as int32 come first."""
    blocks: list[Block] = []
    for _, ports in groupby(sorted(inputs, key=_likeness), _likeness):
        same = tuple(ports)
        used = size * prod(same[0].row_shape) * np.dtype(same[0].dtype).itemsize
        begin = blocks[-1].end if blocks else 0
        blocks.append(Block(same, begin, -(-used // ALIGNMENT) * ALIGNMENT))
    return blocks


def _likeness(port: InputPort) -> tuple[bool, str, tuple[int, ...]]:
    return not port.fits_int32, port.dtype, port.row_shape


def fit_int32(columns: Sequence[npt.NDArray[Any]]) -> bool:
    """Return True if int32 holds all values of arrays of one row shape."""
    values = np.concatenate(columns) if len(columns) > 1 else columns[0]
    # One pass where none is negative.
    if values.dtype == np.int64 and 0 <= np.bitwise_or.reduce(values, axis=None) < 1 << 31:
        return True
    return bool(values.min(initial=0) >= -1 << 31 and values.max(initial=0) < 1 << 31)


@dataclass(frozen=True, eq=False)
class Staging:
    """Pinned host memory of requests of one batch size, and the CUDA graph that reads and writes it.

    Attributes:
        columns: Inputs of one type and row shape: names, and the array (inputs, rows, …) that holds them.
        narrow: Number of the first ones that hold ids of int64 as int32.
        captured: Graph of a request: the move to the device, the kernels, the moves of the outputs back.
        fetched: Outputs of the last request, in the order of the engine's.
        owner: Executor whose device buffers the graph uses.
    """

    columns: tuple[tuple[tuple[str, ...], npt.NDArray[Any]], ...]
    narrow: int
    captured: Captured
    fetched: tuple[npt.NDArray[Any], ...]
    owner: Executor
    _targets: dict[int, tuple[tuple[str, npt.NDArray[Any]], ...]] = field(default_factory=dict)
    """Views of the first rows of each input, by their number."""

    @property
    def arrays(self) -> Arrays:
        """Inputs, by name."""
        return {name: each for names, held in self.columns for name, each in zip(names, held, strict=True)}

    def fill(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write the rows of a piece; values of narrow columns are not checked."""
        # Views take longer than copies of a few hundred rows.
        targets = self._targets.get(piece.rows)
        if targets is None:
            if len(self._targets) == MOST_VIEWS:
                self._targets.clear()
            targets = tuple((name, held[: piece.rows]) for name, held in self.arrays.items())
            self._targets[piece.rows] = targets
        if len(inputs[targets[0][0]]) == piece.rows:
            for name, target in targets:
                target[...] = inputs[name]
        else:
            for name, target in targets:
                target[...] = inputs[name][piece.start : piece.start + piece.rows]

    def fits(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Return True if narrow columns hold the rows that were written."""
        rows = slice(piece.start, piece.start + piece.rows)
        return all(
            fit_int32([inputs[name][rows] for name in names]) for names, _ in self.columns[: self.narrow]
        )

    def pad(self, piece: Piece) -> None:
        """Repeat the last row of a piece up to the size."""
        if piece.rows < piece.size:
            for _, held in self.columns:
                held[:, piece.rows :] = held[:, piece.rows - 1 : piece.rows]


@dataclass(frozen=True)
class Served:
    """A batch size that is served by CUDA graphs.

    Attributes:
        compute: Launches the kernels of the size, on `inputs`; returns the outputs.
        inputs: Views of the device's buffers, by name.
        captured: Graph of the kernels alone, for rows that lie on the device.
        staging: Where requests from host memory are written.
    """

    compute: Callable[[], list[Tensor]]
    inputs: Mapping[str, Tensor]
    captured: Captured
    staging: Staging


class GraphExecutor(Executor):
    """Runs programs on a GPU, by CUDA graphs for served batch sizes; closes `gpu`."""

    captures = True

    def __init__(self, torch: Any, engine: InductorEngine, calls: dict[str, Call], gpu: Gpu) -> None:
        super().__init__(torch, engine, calls)
        self._gpu = gpu
        self.device, self.stream = int(gpu.device.index or 0), gpu.stream
        self._served: dict[int, Served] = {}
        self._stagings: WeakSet[Staging] = WeakSet()
        with gpu.active():
            room = (blocks_of(engine.inputs, engine.graph_sizes[-1])[-1].end,)
            self._host = gpu.pinned(room, torch.uint8)
            self._device = torch.zeros(room, dtype=torch.uint8, device=gpu.device)
            # The largest first: its memory also serves the others.
            for size in reversed(engine.graph_sizes):
                self._served[size] = self._prepare(size)

    def run(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Launch the graph of a request, or move the rows, call the program and move its outputs."""
        if placement.captured:
            staging = self._filled(placement.piece, inputs)
            staging.captured.replay()
            # The device works meanwhile.
            fetched = self._rows_of(placement.piece, staging.fetched)
            answer = {
                port.name: np.empty_like(each)
                for port, each in zip(self._engine.outputs, fetched, strict=True)
            }
            fits = staging.fits(placement.piece, inputs)
            self._gpu.synchronize()
            if fits:
                # The next request overwrites the pinned memory.
                for target, source in zip(answer.values(), fetched, strict=True):
                    target[...] = source
                return answer
        with self._gpu.active():
            outputs = self._calls[placement.program](self._moved(placement.piece, inputs))
            return self._answer(placement.piece, [output.cpu().numpy() for output in outputs])

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
        self._gpu.activate()
        self._gpu.synchronize()
        return answer

    def _outputs_on_device(self, placement: Placement, feeds: Mapping[str, Tensor]) -> Sequence[Tensor]:
        piece = placement.piece
        with self._gpu.active():
            if placement.captured:
                served = self._served[piece.size]
                for name, buffer in served.inputs.items():
                    rows = feeds[name][piece.start : piece.start + piece.rows]
                    buffer[: piece.rows].copy_(rows, non_blocking=True)
                    if piece.size > piece.rows:
                        buffer[piece.rows :].copy_(rows[-1:], non_blocking=True)
                self._gpu.activate()
                served.captured.replay()
                return served.captured.outputs
            moved = []
            for port in self._engine.inputs:
                rows = feeds[port.name][piece.start : piece.start + piece.rows].to(self._dtype(port))
                padding = rows[-1:].expand(piece.size - piece.rows, *rows.shape[1:])
                moved.append(self._torch.cat([rows, padding]) if piece.size > piece.rows else rows)
            return self._calls[placement.program](moved)

    def resident(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Put the batch into device memory; `launch` queues its kernels and fetches nothing."""
        gpu, piece = self._gpu, placement.piece
        if placement.captured:
            served = self._served[piece.size]
            launch = served.captured.replay
            with gpu.active():
                for port, value in zip(self._engine.inputs, self._moved(piece, inputs), strict=True):
                    served.inputs[port.name].copy_(value)
        else:
            with gpu.active():
                moved = self._moved(piece, inputs)

            def launch() -> object:
                with gpu.active():
                    return self._calls[placement.program](list(moved))

        gpu.activate()
        gpu.synchronize()
        return Resident(launch, gpu.synchronize)

    def close(self) -> None:
        """Free graphs, buffers and programs, then their shared memory."""
        for staging in self._stagings:
            staging.captured.reset()
        for served in self._served.values():
            served.captured.reset()
        self._served.clear()
        self._calls.clear()
        self._host = self._device = None
        self._gpu.close()

    def staging(self, placement: Placement) -> Staging | None:
        """Make page-locked memory like that of the executor's own requests, with a graph that reads it."""
        size = placement.piece.size
        if not placement.captured:
            return None
        # Requests of another thread than the one that opened the session may ask for it.
        self._gpu.activate()
        with self._gpu.active():
            memory = self._gpu.pinned((blocks_of(self._engine.inputs, size)[-1].end,), self._torch.uint8)
            served = self._served[size]
            return self._staging(memory, size, served.compute, served.captured.outputs, narrows=False)

    def _filled(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> Staging:
        """Write a piece into pinned memory, unless it lies there, and let this thread launch its graph."""
        if type(inputs) is Buffers and getattr(inputs.memory, "owner", None) is self:
            staging: Staging = inputs.memory
        else:
            staging = self._served[piece.size].staging
            staging.fill(piece, inputs)
        staging.pad(piece)
        self._gpu.activate()
        return staging

    def _staging(
        self,
        memory: Tensor,
        size: int,
        compute: Callable[[], list[Tensor]],
        outputs: Sequence[Tensor],
        *,
        narrows: bool,
    ) -> Staging:
        """Pinned memory as the inputs of a batch size, with the graph of its requests."""
        blocks, columns, moves = blocks_of(self._engine.inputs, size), [], []
        ids = [block for block in blocks if narrows and block.ports[0].fits_int32]
        wide, end = (ids[-1].end if ids else 0), blocks[-1].end
        saved = wide // 2 // ALIGNMENT * ALIGNMENT
        for number, block in enumerate(blocks):
            place, dtype = replace(block, begin=block.begin - saved), np.dtype(block.ports[0].dtype)
            if number < len(ids):
                place, dtype = (
                    replace(block, begin=block.begin // 2, stride=block.stride // 2),
                    np.dtype("i4"),
                )
            columns.append((tuple(p.name for p in block.ports), place.view(memory.numpy(), dtype, size)))
        if wide:
            source = memory[: wide // 2].view(self._torch.int32)
            moves.append(self._gpu.moving(self._device[:wide].view(self._torch.int64), source))
        if wide < end:
            moves.append(self._gpu.moving(self._device[wide:end], memory[wide - saved : end - saved]))
        fetched = [self._gpu.pinned(tuple(t.shape), t.dtype) for t in outputs]

        def request() -> Sequence[Tensor]:
            for move in moves:
                move()
            for pair in zip(fetched, compute(), strict=True):
                self._gpu.moving(*pair)()
            # Nothing holds the outputs on the device: other graphs may use their memory.
            return ()

        # New memory holds zeros, which are ids. A library makes a handle a thread, which no capture allows.
        captured = self._capture(size, request, warm_ups=1)
        staging = Staging(tuple(columns), len(ids), captured, tuple(host.numpy() for host in fetched), self)
        self._stagings.add(staging)
        return staging

    def _prepare(self, size: int) -> Served:
        program = next(p for p in self._engine.programs if p.minimum <= size <= p.maximum)
        call, views = self._calls[program.name], {}
        for block in blocks_of(self._engine.inputs, size):
            held = block.view(self._device, self._dtype(block.ports[0]), size)
            views.update({port.name: each for port, each in zip(block.ports, held, strict=True)})
        inputs = {port.name: views[port.name] for port in self._engine.inputs}

        def compute() -> list[Tensor]:
            return [output.contiguous() for output in call([*inputs.values()])]

        captured = self._capture(size, compute, warm_ups=WARM_UPS)
        staging = self._staging(self._host, size, compute, captured.outputs, narrows=True)
        return Served(compute, inputs, captured, staging)

    def _capture(self, size: int, work: Callable[[], Sequence[Tensor]], *, warm_ups: int) -> Captured:
        try:
            return self._gpu.capture(work, warm_ups=warm_ups)
        except RuntimeError as error:
            raise EngineError(
                f"E0817 the engine cannot be captured into a CUDA graph for {size} rows",
                evidence=str(error).splitlines()[0][:400],
                remedy="an operator of it waits for the device; the log of the build has its kernels",
            ) from error

    def _moved(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> list[Tensor]:
        return [each.to(self._gpu.device) for each in self._tensors(piece, inputs)]

    def _dtype(self, port: InputPort) -> Any:
        return self._torch.from_numpy(np.empty(0, port.dtype)).dtype
