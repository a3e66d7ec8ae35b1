"""Execution of the programs of an Inductor package: on the CPU, or on a GPU through CUDA graphs.

A GPU finishes the kernels of a ranker faster than a CPU can launch them one by one. For each served batch
size the launches are therefore captured once into a CUDA graph (CUDA C++ Programming Guide, section CUDA
Graphs) and replayed for each request. A graph uses fixed addresses: all inputs of a request are written one
behind the other into pinned host memory. The graph moves these bytes to the device first and the outputs back
last, so that a request is one launch and one wait. `gpu` holds every call of the vendor.

Ids whose valid values are all int32 (`InputPort.fits_int32`) are moved as such, and widened on the device.
The host looks for others while the device works: such a request runs once more, as int64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from loka_onnx.engines.inductor.gpu import Captured, Gpu
from loka_onnx.engines.inductor.package import InductorEngine, InputPort
from loka_onnx.errors import EngineError, InternalError, line_of
from loka_onnx.sessions.buckets import Piece, padded
from loka_onnx.sessions.dlpack import Borrowed
from loka_onnx.sessions.runner import Allocate, Arrays, Buffers, Resident

Tensor = Any
"""`torch.Tensor`; torch is imported only when a session is opened."""
Call = Callable[[list[Tensor]], Sequence[Tensor]]
"""A loaded program: takes tensors in the order of `InductorEngine.inputs`, returns those of its outputs."""
WARM_UPS = 3
ALIGNMENT = 32
"""Bytes at whose multiples each input begins, narrow ids at half of them: kernels load up to 16 at once."""
JOINED = 4096
"""Ids up to which columns are checked as one array: a call of NumPy takes as long as a copy of so many."""
MOST_VIEWS = 64
"""Numbers of rows whose views of pinned memory are kept: to make one takes as long as a copy of 200 rows."""


@dataclass(frozen=True)
class Placement:
    """Program of some rows of a request; `captured`: as a CUDA graph of the piece's size."""

    program: str
    piece: Piece
    captured: bool


class ProgramExecutor(ABC):
    """Runs the programs of an engine, `calls` by name, one placement at a time; not thread-safe."""

    captures: bool = False
    """True if served batch sizes have CUDA graphs."""
    device: int | None = None
    """CUDA device of `run_on_device`; None where there is none."""
    stream: int = 0
    """Handle of its stream."""

    def __init__(self, torch: Any, engine: InductorEngine, calls: dict[str, Call]) -> None:
        self._torch, self._engine, self._calls = torch, engine, calls
        self._names = tuple(port.name for port in engine.outputs)

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
        if piece.rows == piece.size:
            return outputs
        pairs = zip(self._engine.outputs, outputs, strict=True)
        return [value[: piece.rows] if port.batched else value for port, value in pairs]

    def _answer(self, piece: Piece, outputs: Sequence[npt.NDArray[Any]]) -> Arrays:
        rows = self._rows_of(piece, outputs)
        return {name: value.copy() for name, value in zip(self._names, rows, strict=True)}

    def _tensors(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> list[Tensor]:
        # Torch warns about read-only arrays, although no program writes its inputs.
        values = ((padded(inputs[port.name], piece), port.dtype) for port in self._engine.inputs)
        return [self._torch.from_numpy(np.require(value, dtype, ["C", "W"])) for value, dtype in values]


class HostExecutor(ProgramExecutor):
    """Runs programs on the CPU."""

    def run(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run on the arrays themselves if they fit; outputs are copied: they may share an input."""
        outputs = self._calls[placement.program](self._tensors(placement.piece, inputs))
        return self._answer(placement.piece, [value.numpy() for value in outputs])

    def resident(self, placement: Placement, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Make tensors of the inputs once, padded to the program's size; a launch copies nothing."""
        feeds, call = self._tensors(placement.piece, inputs), self._calls[placement.program]
        return Resident(lambda: call(list(feeds)), lambda: None)


@dataclass(frozen=True)
class Block:
    """Inputs of one type and row shape in a memory of bytes, `stride` bytes apart."""

    ports: tuple[InputPort, ...]
    dtype: np.dtype[Any]
    begin: int
    stride: int

    @property
    def end(self) -> int:
        """Byte behind the last one."""
        return self.begin + self.stride * len(self.ports)

    def view(self, memory: Any, dtype: Any, size: int) -> Any:
        """View the inputs in a tensor or an array as (inputs, rows, …) of a type."""
        shape = (size, *self.ports[0].row_shape)
        columns = memory[self.begin : self.end].reshape(len(self.ports), self.stride)
        return columns[:, : prod(shape) * dtype.itemsize].view(dtype).reshape(-1, *shape)


def blocks_of(inputs: Sequence[InputPort], size: int, *, narrow: bool = False) -> list[Block]:
    """Places of the inputs of so many rows in one memory, ids that int32 holds first; `narrow`: as int32."""
    like, blocks, begin = attrgetter("fits_int32", "dtype", "row_shape"), list[Block](), 0
    for (fits, kind, row_shape), ports in groupby(sorted(inputs, key=like, reverse=True), like):
        dtype = np.dtype(kind)
        stride = -(-size * prod(row_shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if narrow and fits:
            # Half of all distances: one kernel widens all ids.
            dtype, stride = np.dtype("int32"), stride // 2
        blocks.append(Block(tuple(ports), dtype, begin, stride))
        begin = blocks[-1].end
    return blocks


def fit_int32(columns: Sequence[npt.NDArray[Any]]) -> bool:
    """Return True if int32 holds all values of arrays of one row shape."""
    first, *others = columns
    if others and first.size > JOINED:
        return all(fit_int32([values]) for values in columns)
    values = np.concatenate(columns) if others else first
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
        targets: Views of the first rows of each input, by their number.
        captured: Graph of a request: the move to the device, the kernels, the moves of the outputs back.
        fetched: Outputs of the last request, in the order of the engine's.
        owner: Executor whose device buffers the graph uses.
    """

    columns: tuple[tuple[tuple[str, ...], npt.NDArray[Any]], ...]
    narrow: int
    targets: Callable[[int], Mapping[str, npt.NDArray[Any]]]
    captured: Captured
    fetched: tuple[npt.NDArray[Any], ...]
    owner: ProgramExecutor

    def fill(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write the rows of a piece; values of narrow columns are not checked."""
        targets = self.targets(piece.rows)
        if len(inputs[self.columns[0][0][0]]) != piece.rows:
            inputs = {name: inputs[name][piece.start : piece.start + piece.rows] for name in targets}
        for name, target in targets.items():
            target[...] = inputs[name]

    def fits(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Return True if narrow columns hold the rows that were written."""
        rows, narrow = slice(piece.start, piece.start + piece.rows), self.columns[: self.narrow]
        return all(fit_int32([inputs[name][rows] for name in names]) for names, _ in narrow)

    def pad(self, piece: Piece) -> None:
        """Repeat the last row of a piece up to the size."""
        if piece.rows < piece.size:
            for _, held in self.columns:
                held[:, piece.rows :] = held[:, piece.rows - 1 : piece.rows]


@dataclass(frozen=True)
class ServedSize:
    """A batch size that is served by CUDA graphs: `compute` launches its kernels on `inputs`, views of the
    device's buffers by name, and returns the outputs; `captured` is the graph of the kernels alone, for rows
    on the device; requests from host memory are written to `staging`.
    """

    compute: Callable[[], list[Tensor]]
    inputs: Mapping[str, Tensor]
    captured: Captured
    staging: Staging


class GraphExecutor(ProgramExecutor):
    """Runs programs on a GPU, by CUDA graphs for served batch sizes; closes `gpu`."""

    captures = True

    def __init__(self, torch: Any, engine: InductorEngine, calls: dict[str, Call], gpu: Gpu) -> None:
        super().__init__(torch, engine, calls)
        self._gpu = gpu
        self.device, self.stream = int(gpu.device.index or 0), gpu.stream
        self._served: dict[int, ServedSize] = {}
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
            answer = dict(zip(self._names, map(np.empty_like, fetched), strict=True))
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
                dtype = getattr(self._torch, port.dtype)
                rows = feeds[port.name][piece.start : piece.start + piece.rows].to(dtype)
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
            return self._staging(memory, size, served.compute, served.captured.outputs)

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
        self, memory: Tensor, size: int, compute: Callable[[], list[Tensor]], outputs: Sequence[Tensor]
    ) -> Staging:
        """Pinned memory as the inputs of a batch size, with the graph of its requests. The executor's own
        memory holds narrow ids, a caller's the inputs' own types.
        """
        there = blocks_of(self._engine.inputs, size)
        here = blocks_of(self._engine.inputs, size, narrow=memory is self._host)
        ids = sum(block.dtype != own.dtype for block, own in zip(here, there, strict=True))
        moves = []
        if ids:
            target, source = self._device[: there[ids - 1].end], memory[: here[ids - 1].end]
            moves.append(self._gpu.moving(target.view(self._torch.int64), source.view(self._torch.int32)))
        if ids < len(there):
            target = self._device[there[ids].begin : there[-1].end]
            moves.append(self._gpu.moving(target, memory[here[ids].begin : here[-1].end]))
        held = [block.view(memory.numpy(), block.dtype, size) for block in here]
        columns = tuple(
            (tuple(p.name for p in block.ports), each) for block, each in zip(here, held, strict=True)
        )

        @lru_cache(MOST_VIEWS)
        def targets(rows: int) -> dict[str, npt.NDArray[Any]]:
            return {
                name: each[:rows] for names, held in columns for name, each in zip(names, held, strict=True)
            }

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
        staging = Staging(columns, ids, targets, captured, tuple(host.numpy() for host in fetched), self)
        self._stagings.add(staging)
        return staging

    def _prepare(self, size: int) -> ServedSize:
        program = next(p for p in self._engine.programs if p.minimum <= size <= p.maximum)
        call, views = self._calls[program.name], {}
        for block in blocks_of(self._engine.inputs, size):
            held = block.view(self._device, getattr(self._torch, block.ports[0].dtype), size)
            views.update({port.name: each for port, each in zip(block.ports, held, strict=True)})
        inputs = {port.name: views[port.name] for port in self._engine.inputs}

        def compute() -> list[Tensor]:
            return [output.contiguous() for output in call([*inputs.values()])]

        captured = self._capture(size, compute, warm_ups=WARM_UPS)
        staging = self._staging(self._host, size, compute, captured.outputs)
        return ServedSize(compute, inputs, captured, staging)

    def _capture(self, size: int, work: Callable[[], Sequence[Tensor]], *, warm_ups: int) -> Captured:
        with EngineError(
            f"E0817 the engine cannot be captured into a CUDA graph for {size} rows",
            remedy="an operator of it waits for the device; the log of the build has its kernels",
        ).in_place_of(RuntimeError, words=line_of):
            return self._gpu.capture(work, warm_ups=warm_ups)

    def _moved(self, piece: Piece, inputs: Mapping[str, npt.NDArray[Any]]) -> list[Tensor]:
        return [each.to(self._gpu.device) for each in self._tensors(piece, inputs)]
