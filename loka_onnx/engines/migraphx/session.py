"""Session of programs that MIGraphX compiled, one for each batch size.

An ``.mxr`` file holds kernels but states neither its GPU nor its release, so that a manifest beside it does.
Load it only from someone who may run code on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from loka_onnx.core import serde
from loka_onnx.core.devices import CPU
from loka_onnx.core.serde import STRICT
from loka_onnx.engines.migraphx.api import (
    import_migraphx,
    load_program,
    parameters_of,
    run_program,
    version_of,
)
from loka_onnx.errors import EngineError, UserError
from loka_onnx.sessions.buckets import run_in_buckets
from loka_onnx.sessions.host_devices import list_amd_architectures
from loka_onnx.sessions.runner import Arrays, Runner


@dataclass(frozen=True)
class ProgramFile:
    """A compiled program: its batch size, and the name of its ``.mxr`` file beside the manifest."""

    __pydantic_config__ = STRICT

    rows: int
    file: str


@dataclass(frozen=True)
class ProgramInput:
    """An input of the model: name, NumPy type, and shape without the batch."""

    __pydantic_config__ = STRICT

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ProgramOutput:
    """An output of the model, in the order of the programs' results; `is_batched`: axis 0 is the batch."""

    __pydantic_config__ = STRICT

    name: str
    is_batched: bool


@dataclass(frozen=True)
class MigraphxEngine:
    """Manifest and main file of an engine, for an LLVM target or ``cpu``."""

    SCHEMA: ClassVar[str] = "migraphx-engine/1"
    __pydantic_config__ = STRICT

    architecture: str
    version: str
    programs: tuple[ProgramFile, ...]
    inputs: tuple[ProgramInput, ...]
    outputs: tuple[ProgramOutput, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes of the programs."""
        return tuple(program.rows for program in self.programs)


def read_engine(path: Path) -> MigraphxEngine:
    """Read the manifest of an engine; an `EngineError` where it is none or names a file elsewhere."""
    with EngineError(
        "E0858 this is no engine of MIGraphX", where=str(path), remedy="build it again"
    ).in_place_of(UserError):
        engine = serde.read(MigraphxEngine, path)
    for program in engine.programs:
        if Path(program.file).name != program.file or program.file in {"", ".", ".."}:
            raise EngineError(
                "E0859 the engine names a program outside its directory",
                where=str(path),
                evidence=repr(program.file),
            )
    return engine


def why_not_run(architecture: str) -> str:
    """Reason why this host cannot run programs for an architecture; empty when it can. ROCm runs on the first
    visible GPU (``HIP_VISIBLE_DEVICES``), where another architecture's would fail.
    """
    here = list_amd_architectures() if architecture != CPU else (CPU,)
    if here[:1] == (architecture,):
        return ""
    first = ", the first of which it would run on" if architecture in here else ""
    return f"the engine is for {architecture} and this host has {', '.join(here) or 'no AMD GPU'}{first}"


def open_migraphx(engine: Path, architecture: str, version: str = "") -> MigraphxSession:
    """Load the programs beside a manifest; an empty version is that of the manifest."""
    migraphx = import_migraphx()
    document = read_engine(engine)
    here, built = version_of(migraphx), version or document.version
    if document.architecture != architecture:
        raise EngineError(
            "E0860 the engine was built for another architecture",
            where=str(engine),
            evidence=f"asked for {architecture}, the engine is for {document.architecture}",
            remedy="build it again for this device",
        )
    if {here, built} != {document.version}:
        raise EngineError(
            "E0861 the engine was built by another version of MIGraphX",
            where=str(engine),
            evidence=f"built by {document.version if built == here else built}, this host has {here}",
            remedy=f"install MIGraphX {document.version}, or build the engine again",
        )
    reason = why_not_run(architecture)
    if reason:
        raise EngineError(f"E0862 cannot run here: {reason}", where=str(engine))
    return MigraphxSession(migraphx, engine, document)


class MigraphxSession(Runner):
    """The loaded programs of an engine; calls from several threads run one after the other."""

    def __init__(self, migraphx: Any, engine: Path, document: MigraphxEngine) -> None:
        self._migraphx, self._document = migraphx, document
        self.served_sizes = document.sizes
        self._lock = threading.Lock()
        self._batched = {output.name for output in document.outputs if output.is_batched}
        self._programs: dict[int, Any] = {}
        for program in document.programs:
            loaded = load_program(migraphx, engine.parent / program.file)
            _check_parameters(loaded, program, document)
            self._programs[program.rows] = loaded

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch, in as many programs as needed."""
        feeds = {spec.name: _converted(inputs, spec) for spec in self._document.inputs}
        with self._lock:
            return run_in_buckets(self._run, feeds, self._document.sizes, self._batched)

    def _run(self, rows: int, inputs: Arrays) -> Arrays:
        results = run_program(self._migraphx, self._programs[rows], inputs)
        names = [output.name for output in self._document.outputs]
        if len(results) != len(names):
            raise EngineError(
                "E0863 a program gives another number of outputs than the model has",
                evidence=f"{len(results)} results, outputs {', '.join(names)}",
            )
        return dict(zip(names, results, strict=True))

    def close(self) -> None:
        """Free the programs."""
        self._programs.clear()


def _converted(inputs: Mapping[str, npt.NDArray[Any]], spec: ProgramInput) -> npt.NDArray[Any]:
    value = inputs.get(spec.name)
    if value is None or value.shape[1:] != spec.shape:
        evidence = "it is missing" if value is None else f"shape {value.shape}"
        raise EngineError(
            f"E0864 input '{spec.name}' does not fit the engine",
            evidence=f"{evidence}; a row has shape {spec.shape}",
        )
    return value.astype(np.dtype(spec.dtype), copy=False)


def _check_parameters(loaded: Any, program: ProgramFile, document: MigraphxEngine) -> None:
    """Refuse buffers of other sizes, which the library would read out of bounds."""
    expected = {spec.name: (program.rows, *spec.shape) for spec in document.inputs}
    # A program lacks inputs that its outputs do not depend on.
    wrong = {name: shape for name, shape in parameters_of(loaded).items() if expected.get(name) != shape}
    if wrong:
        raise EngineError(
            "E0865 a program takes something else than its document says",
            where=program.file,
            evidence=f"it takes {wrong}, the document says {expected}",
            remedy="build the engine again",
        )
