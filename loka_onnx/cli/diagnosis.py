"""What this machine can build and run, as values; `doctor` prints them. Never needs an optional package."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.backends import backend_names
from loka_onnx.core.installation import versions_of
from loka_onnx.engines.base import Availability
from loka_onnx.engines.registry import get_backend
from loka_onnx.errors import LokaError, MissingPackage
from loka_onnx.export.onnx_model import BECOME_SITES
from loka_onnx.export.preflight import Batches, preflight
from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.products import other_products
from loka_onnx.graph.shape_values import tensor_spec
from loka_onnx.graph.sites import find_sites
from loka_onnx.pipeline.sample import generated_rows
from loka_onnx.pipeline.splits import bind_columns
from loka_onnx.pipeline.survival import find_fatal_batch
from loka_onnx.sessions.backends import BackendSpec, get_spec
from loka_onnx.sessions.cuda import list_cuda_devices
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

_ROWS = 256
"""Generated rows that a model is run on."""


@dataclass(frozen=True)
class Package:
    """An optional package; without a version it cannot be used, and the remedy says how to get it."""

    name: str
    version: str
    use: str
    remedy: str


@dataclass(frozen=True)
class Machine:
    """The machine and its interpreter; memory in 10⁹ bytes, GPUs with their architecture."""

    system: str
    python: str
    loka_onnx: str
    cores: int
    memory_gb: float
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model file that need no data.

    Attributes:
        notes: Conversions on the way in.
        fp8_able: How many of the sites are linear with K, N ≥ 16.
        problems: Why a run would refuse it, as far as the file alone shows it.
    """

    path: str
    producer: str
    notes: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sites: int
    fp8_able: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `doctor` tells; backends by name."""

    machine: Machine
    backends: dict[str, Availability]
    packages: tuple[Package, ...]
    model: ModelFacts | None = None


_PACKAGES = (
    # Distribution, module to import ("" when it is only read as data), use, remedy.
    ("onnxscript", "onnxscript", "export from PyTorch", "pip install 'loka-onnx[export]'"),
    ("safetensors", "safetensors", ".safetensors checkpoints", "pip install 'loka-onnx[export]'"),
    ("recbole", "", "the demo's data (only read)", "pip install --no-deps recbole==1.2.1"),
)


def diagnose(model: Path | None = None) -> Diagnosis:
    """Look at this machine, and at a model when one is given.

    Raises:
        ModelError: The model cannot be read.
    """
    return Diagnosis(
        machine=_machine(),
        backends={name: _availability(name) for name in backend_names()},
        packages=(*_libraries(), *(_package(*row) for row in _PACKAGES)),
        model=None if model is None else describe_model(model),
    )


def describe_model(path: Path) -> ModelFacts:
    """Bring a model into canonical form in memory and look at it.

    Raises:
        ModelError: The model is truncated, too old, or has custom operators.
    """
    canonical = canonicalize(path)
    graph = canonical.model
    sites = find_sites(graph)
    is_product = any(site.n for site in sites) or any(
        other.op_type in BECOME_SITES for other in other_products(graph)
    )
    problems = [] if is_product else ["it has no product to quantize: no MatMul or Gemm of an activation"]
    inputs = tuple(tensor_spec(tensor) for tensor in graph.inputs)
    outputs = tuple(tensor_spec(tensor) for tensor in graph.outputs)
    problems += [problem for spec in inputs for problem in _problems_of(spec)]
    try:
        OnnxSession(path, SessionOptions(threads=1, optimize=False))
    except LokaError as error:
        problems.append(f"{error.what}: {error.evidence}")
    if not problems:
        # Rows cannot be generated for inputs that have a problem of their own.
        problems += _problems_with_rows(path, graph)
    return ModelFacts(
        path=str(path),
        producer=canonical.producer,
        notes=canonical.notes,
        inputs=inputs,
        outputs=outputs,
        sites=len(sites),
        fp8_able=sum(site.is_fp8_able for site in sites),
        problems=tuple(problems),
    )


def _problems_with_rows(path: Path, graph: GraphModel) -> list[str]:
    """Run preflight on generated rows and return its findings; ids of unknown tables are all 0."""
    inputs, outputs = (tuple(map(tensor_spec, ends)) for ends in (graph.inputs, graph.outputs))
    bindings = bind_columns({}, inputs, id_bounds(graph))
    batches = Batches(generated_rows(inputs, bindings, _ROWS))
    fatal = find_fatal_batch(path, other_products(graph), batches)
    names = [spec.name for spec in outputs if spec.shape[:1] == (None,)]
    findings = preflight(graph, batches, names) if fatal is None else (fatal,)
    return [f"{finding.operator} {finding.what}: {finding.evidence}" for finding in findings]


def _problems_of(spec: TensorSpec) -> Iterator[str]:
    """Why a run would refuse an input, whichever columns feed it."""
    if not spec.shape or spec.shape[0] is not None:
        yield f"input '{spec.name}' has no dynamic batch: its shape is {list(spec.shape)}"
    if spec.shape:
        try:
            bind_columns({}, [spec])
        except LokaError as error:
            yield f"{error.what} ({error.evidence}): {error.remedy}"


def _machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        loka_onnx=metadata.version("loka-onnx"),
        cores=cores,
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        gpus=tuple(f"{gpu.name} ({gpu.architecture})" for gpu in list_cuda_devices()),
    )


def _availability(name: str) -> Availability:
    """Return what a backend can do here; of a package that does not import, why not."""
    try:
        return get_backend(name).availability()
    except MissingPackage as error:
        return Availability(False, "", False, False, (), f"{error.what}: {error.evidence}", error.remedy)


def _libraries() -> Iterator[Package]:
    """The library of each backend that has one among packages, each once."""
    first: dict[str, BackendSpec] = {}
    for name in backend_names():
        with suppress(MissingPackage):
            if (spec := get_spec(name)).use:
                first.setdefault(spec.modules[0], spec)
    for spec in first.values():
        versions = versions_of(spec.modules[:1])
        yield _imported(spec.modules[0], next(iter(versions.values()), ""), spec.use, spec.install)


def _package(distribution: str, module: str, use: str, remedy: str) -> Package:
    version = _version(distribution)
    return (
        _imported(module, version, use, remedy)
        if module
        else Package(distribution, version, use, "" if version else remedy)
    )


def _imported(module: str, version: str, use: str, remedy: str) -> Package:
    if version:
        try:
            importlib.import_module(module)
        except Exception as error:
            # A package whose native libraries do not fit this machine raises whatever its loader raises.
            return Package(module, "", use, f"{version} is installed and does not import: {error}")
    return Package(module, version, use, "" if version else remedy)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
