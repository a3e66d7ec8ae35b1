"""Session of an Inductor engine, whose shared libraries run with this process's rights (`package`)."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from loka_onnx.core.devices import CPU
from loka_onnx.engines.inductor.executors import Call, GraphExecutor, HostExecutor, Placement, ProgramExecutor
from loka_onnx.engines.inductor.gpu import Gpu
from loka_onnx.engines.inductor.package import InductorEngine, check_host, read_engine, vector_instructions
from loka_onnx.errors import EngineError, MissingPackage, line_of
from loka_onnx.sessions.buckets import Piece, padded_rows, pieces_of, rows_of
from loka_onnx.sessions.cuda import list_cuda_devices, why_no_gpu
from loka_onnx.sessions.dlpack import Borrowed
from loka_onnx.sessions.runner import Allocate, Arrays, Buffers, Resident, Runner

R = TypeVar("R")
INSTALL = "pip install 'loka-onnx[inductor]'"


def import_torch() -> Any:
    """Import `torch`, or raise MissingPackage."""
    with MissingPackage("E0825 PyTorch is not installed", remedy=INSTALL).in_place_of(ImportError, OSError):
        return importlib.import_module("torch")


def open_inductor(package: Path, architecture: str) -> InductorSession:
    """Load a package on the CPU, or on the first GPU of its architecture, after checking that the host fits.
    Raises MissingPackage without PyTorch, and EngineError if the file is no engine of this backend or is for
    another architecture, PyTorch or processor than this host has, or the programs do not load.
    """
    engine = read_engine(package)
    if engine.architecture != architecture:
        raise EngineError(
            "E0826 the engine is for another architecture",
            where=str(package),
            evidence=f"asked for {architecture}, it is for {engine.architecture}",
        )
    torch = import_torch()
    check_host(engine, str(torch.__version__), vector_instructions(), package)
    if architecture == CPU:
        return InductorSession(engine, HostExecutor(torch, engine, _load(torch, package, engine, -1)))
    reason = why_no_gpu(architecture)
    if reason:
        raise EngineError(f"E0827 cannot run here: {reason}", where=str(package))
    if not torch.cuda.is_available():
        raise EngineError(
            "E0828 this PyTorch does not use the GPU",
            where=str(package),
            evidence=f"version {torch.__version__}, built for CUDA {torch.version.cuda}",
            remedy=f"install PyTorch {engine.torch}",
        )
    index = next(device.index for device in list_cuda_devices() if device.architecture == architecture)
    executor = GraphExecutor(torch, engine, _load(torch, package, engine, index), Gpu(torch, index))
    return InductorSession(engine, executor)


def _load(torch: Any, package: Path, engine: InductorEngine, index: int) -> dict[str, Call]:
    """Load the programs of a package; `index` is the number of the GPU, or -1 for the CPU.

    `torch._inductor.aoti_load_package` would import the whole compiler, parse a description of its arguments
    in every call, and load all programs for each one. The loader below it runs single-threaded: its locks for
    several threads do not fit into a CUDA graph ("operation not permitted when stream is capturing").
    """
    # Errors come from the dynamic linker, CUDA and the archive reader.
    with EngineError(
        "E0829 PyTorch does not load the engine",
        where=str(package),
        remedy="an engine belongs to one PyTorch version, one processor and one GPU architecture",
    ).in_place_of(Exception, words=line_of):
        loader = torch._C._aoti.AOTIModelPackageLoader
        # Parameters: package, program, single-threaded, runners, device.
        return {p.name: loader(str(package), p.name, True, 1, index).boxed_run for p in engine.programs}


def placements(engine: InductorEngine, rows: int, *, captures: bool) -> tuple[Placement, ...]:
    """Assign programs to the rows of a request, which must be some that the engine was built for. Of programs
    of fixed sizes, the smallest that holds the rows, or several. Of one program for all sizes, the smallest
    CUDA graph that holds them (`padded_rows`), or else the program itself, kernel by kernel.
    """
    if not engine.minimum <= rows <= engine.maximum:
        raise EngineError(
            "E0834 the batch is not one that the engine was built for",
            evidence=f"{rows} rows; it takes {engine.minimum} to {engine.maximum}",
            remedy="keep requests between batch.min and batch.max, or build for a wider range",
        )
    if engine.is_static:
        names = {program.maximum: program.name for program in engine.programs}
        return tuple(Placement(names[p.size], p, captures) for p in pieces_of(rows, sorted(names)))
    name = engine.programs[0].name
    size = padded_rows(rows, engine.graph_sizes) if captures else None
    return (Placement(name, Piece(0, rows, size or rows), size is not None),)


class InductorSession(Runner):
    """A loaded package; concurrent calls run in turn. Closes its `executor`."""

    def __init__(self, engine: InductorEngine, executor: ProgramExecutor) -> None:
        self.engine, self.device = engine, executor.device
        # Sizes with a CUDA graph or a program of their own.
        self.served_sizes = engine.graph_sizes if executor.captures or engine.is_static else ()
        self._executor: ProgramExecutor | None = executor
        self._lock = threading.Lock()
        self._placements: dict[int, tuple[Placement, ...]] = {}
        """Placements by rows of the requests so far."""

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch."""
        return self.run_checked(inputs, self._rows_of(inputs))

    def run_checked(self, inputs: Mapping[str, npt.NDArray[Any]], rows: int) -> Arrays:
        """Run a checked batch."""
        answers = self._execute(
            rows, lambda executor, pieces: [executor.run(piece, inputs) for piece in pieces]
        )
        if len(answers) == 1:
            return answers[0]
        names = [port.name for port in self.engine.outputs if port.batched]
        return answers[0] | {name: np.concatenate([each[name] for each in answers]) for name in names}

    def buffers(self, rows: int) -> Buffers | None:
        """Make page-locked memory with a CUDA graph of its own, where one graph serves so many rows."""
        staging = self._execute(
            rows, lambda executor, pieces: executor.staging(pieces[0]) if len(pieces) == 1 else None
        )
        if staging is None:
            return None
        return Buffers(staging.targets(rows), self, staging)

    @property
    def stream(self) -> int:
        """Handle of its stream."""
        return self._open_executor().stream

    def run_on_device(self, inputs: Mapping[str, Borrowed], allocate: Allocate) -> dict[str, Borrowed]:
        """Run one batch on the device."""
        rows = next(iter(inputs.values())).shape[0]
        return self._execute(rows, lambda executor, pieces: executor.run_on_device(pieces, inputs, allocate))

    def resident(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Put a batch into device memory."""
        # Pieces share the buffers of a graph, so that only a single one can stay.
        single = self._execute(
            self._rows_of(inputs),
            lambda executor, pieces: executor.resident(pieces[0], inputs) if len(pieces) == 1 else None,
        )
        return single or super().resident(inputs)

    def close(self) -> None:
        """Free graphs, buffers and programs; a second call does nothing."""
        with self._lock:
            if self._executor is not None:
                self._executor.close()
            self._executor = self.device = None

    def _execute(self, rows: int, work: Callable[[ProgramExecutor, tuple[Placement, ...]], R]) -> R:
        """Call `work` alone, with the placements of some rows; a failure is an error of the engine."""
        with self._lock:
            executor = self._open_executor()
            try:
                pieces = self._placements.get(rows)
                if pieces is None:
                    pieces = placements(self.engine, rows, captures=executor.captures)
                    self._placements[rows] = pieces
                return work(executor, pieces)
            except RuntimeError as error:
                raise EngineError("E0835 the engine failed on a batch", evidence=line_of(error)) from error

    def _open_executor(self) -> ProgramExecutor:
        if self._executor is None:
            raise EngineError("E0836 the engine is closed", remedy="open it again")
        return self._executor

    def _rows_of(self, inputs: Mapping[str, npt.NDArray[Any]]) -> int:
        """Rows of a request whose inputs have the engine's shapes."""
        if type(inputs) is Buffers and inputs.session is self:
            return inputs.rows
        rows = -1
        for port in self.engine.inputs:
            value = inputs.get(port.name)
            if value is None or value.shape[1:] != port.row_shape or value.ndim == 0:
                raise EngineError(
                    f"E0837 input '{port.name}' is missing or has another shape",
                    evidence=f"{None if value is None else value.shape}, the engine takes "
                    f"(rows, {', '.join(map(str, port.row_shape))})",
                    remedy="send every input of the model, the batch on axis 0",
                )
            if rows != len(value):
                rows = len(value) if rows < 0 else rows_of(inputs)
        return rows
