"""`loka-onnx doctor`: abilities of this machine, and the checks of a run; needs no extra package."""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import psutil
import typer
from rich.text import Text

from loka_onnx.bundle.inspection import layout
from loka_onnx.cli.progress import reported
from loka_onnx.cli.run import Overrides, read_run_file
from loka_onnx.cli.terminal import print_words, terminal_of
from loka_onnx.config import RunConfig
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.backends import backend_names
from loka_onnx.core.installation import versions_of
from loka_onnx.engines.base import Availability
from loka_onnx.engines.registry import get_backend
from loka_onnx.errors import LokaError, MissingPackage
from loka_onnx.export.onnx_model import BECOME_SITES
from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.products import other_products
from loka_onnx.graph.shape_values import tensor_spec
from loka_onnx.graph.sites import find_sites
from loka_onnx.pipeline.accepting import accept
from loka_onnx.pipeline.context import RunSettings
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.outlook import Outlook, duration
from loka_onnx.pipeline.plans import buildable
from loka_onnx.pipeline.rows import bind_columns
from loka_onnx.pipeline.survival import try_generated
from loka_onnx.sessions.backends import BackendSpec, get_spec
from loka_onnx.sessions.cuda import list_cuda_devices
from loka_onnx.sessions.host_devices import integer_instructions
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
    integers: tuple[str, ...]
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model file that need no data; `notes` are conversions on the way in.

    `problems` say why a run would refuse it, as far as the file alone shows it.
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


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that may begin; `engines` says why one is not built here, "" if it is."""

    name: str
    sites: int
    rows: dict[str, int]
    engines: dict[str, str]
    outlook: Outlook


MOST_ROWS = 65_536
"""Rows of each split that are read for a check."""
_PACKAGES = (
    # Module, use, remedy; then, for one that is only read as data, False.
    ("onnxscript", "export from PyTorch", "pip install 'loka-onnx[export]'", True),
    ("safetensors", ".safetensors checkpoints", "pip install 'loka-onnx[export]'", True),
    ("recbole", "the demo's data (only read)", "pip install --no-deps recbole==1.2.1", False),
)


def diagnose(model: Path | None = None) -> Diagnosis:
    """Look at this machine, and at a model when one is given."""
    return Diagnosis(
        machine=_machine(),
        backends={name: _availability(name) for name in backend_names()},
        packages=(*_libraries(), *(_package(*row) for row in _PACKAGES)),
        model=None if model is None else describe_model(model),
    )


def check_run(config: RunConfig) -> RunFacts:
    """Do the checks of a run, and leave no file; raises as `pipeline.accepting.accept`."""
    with TemporaryDirectory() as place:
        path = Path(place) / "run"
        with RunDirectory.create(path, {}, {}, force=False, resume=False) as directory:
            accepted = accept(RunSettings(config, directory), most=MOST_ROWS)
    engines = {
        f"{target.device}, {backend.name} ({architecture})": backend.build_blocker(architecture)
        for target, backend, architecture in buildable(config)
    }
    splits, sites = accepted.context.splits, accepted.context.exported.sites
    rows = {name: getattr(splits, name).rows for name in config.data.SPLITS}
    return RunFacts(config.name, len(sites), rows, engines, accepted.outlook)


def describe_model(path: Path) -> ModelFacts:
    """Bring a model into canonical form in memory and look at it; raises as `canonicalize`."""
    canonical = canonicalize(path)
    graph = canonical.model
    sites = find_sites(graph)
    is_product = any(site.n for site in sites) or any(
        other.op_type in BECOME_SITES for other in other_products(graph)
    )
    problems = [] if is_product else ["it has no product to quantize: no MatMul or Gemm of an activation"]
    inputs, outputs = (tuple(map(tensor_spec, ends)) for ends in (graph.inputs, graph.outputs))
    problems += [problem for spec in inputs for problem in _problems_of(spec)]
    try:
        OnnxSession(path, SessionOptions(threads=1, optimize=False))
    except LokaError as error:
        problems.append(f"{error.what}: {error.evidence}")
    if not problems:
        # Rows cannot be generated for inputs that have a problem of their own.
        findings = try_generated(path, graph, 1, _ROWS)
        problems += [f"{finding.operator} {finding.what}: {finding.evidence}" for finding in findings]
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


def _problems_of(spec: TensorSpec) -> Iterator[str]:
    """Reasons why a run would refuse an input, whichever columns feed it."""
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
        integers=integer_instructions(),
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
    return (_package(spec.modules[0], spec.use, spec.install) for spec in first.values())


def _package(module: str, use: str, remedy: str, is_imported: bool = True) -> Package:
    version = next(iter(versions_of((module,)).values()), "")
    if version and is_imported:
        try:
            importlib.import_module(module)
        except Exception as error:
            # A package whose native libraries do not fit this machine raises whatever its loader raises.
            return Package(module, "", use, f"{version} is installed and does not import: {error}")
    return Package(module, version, use, "" if version else remedy)


def doctor(
    context: typer.Context,
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.yaml]", help="A run file to check.", show_default=False)
    ] = None,
    model: Annotated[Path | None, typer.Option(help="An .onnx file to look at as well.")] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can build and run, per backend, and how to get what is missing.

    With a run file, check it, its model and rows as the first seconds of `run` do, and say what to expect.
    """
    terminal = terminal_of(context)
    if run_file is None:
        facts: Diagnosis | RunFacts = diagnose(model)
    else:
        with reported(terminal, "check data"):
            facts = check_run(read_run_file(run_file, None, overrides))
    if as_json:
        terminal.out.out(json.dumps(asdict(facts), indent=2))
        return
    for line in _run(facts) if isinstance(facts, RunFacts) else _lines(facts):
        print_words(terminal.out, line)


def _run(facts: RunFacts) -> Iterator[Text]:
    yield _heading(f"Run {facts.name}")
    yield Text.assemble(("  ✓ ", "green"), f"model: {facts.sites} sites; it runs at every batch size")
    shares = ", ".join(f"{name} {rows:,}" for name, rows in facts.rows.items())
    yield Text.assemble(("  ✓ ", "green"), f"rows: {shares}; up to {MOST_ROWS:,} of each were read")
    for name, blocker in facts.engines.items():
        mark, what = (("  ~ ", "yellow"), blocker) if blocker else (("  ✓ ", "green"), "builds here")
        yield Text.assemble(mark, f"{name}: {what}")
    for line in facts.outlook.lines():
        yield Text(f"  {line}")
    for stage, seconds in facts.outlook.seconds.items():
        yield _note(f"{stage:<12} {duration(seconds)}")


def _lines(diagnosis: Diagnosis) -> Iterator[Text]:
    machine = diagnosis.machine
    yield Text(
        f"loka-onnx {machine.loka_onnx}, Python {machine.python}, {machine.system}, "
        f"{machine.cores} cores, {machine.memory_gb:g} GB"
    )
    yield Text(f"Instructions for INT8: {', '.join(machine.integers) or 'none; eight bits are simulated'}")
    yield Text(f"GPUs: {', '.join(machine.gpus) or 'none'}")
    yield _heading("Backends")
    for name, can in diagnosis.backends.items():
        builds = "builds" if can.can_build else "does not build"
        runs = "runs" if can.can_run else "does not run"
        where = f" on {', '.join(can.devices)}" if can.devices else ""
        works = can.can_build and can.can_run
        yield _entry(name, can.version, f"{builds}, {runs}{where}", is_good=works, is_partial=can.can_build)
        if not works:
            yield from (_note(can.reason), _note(f"→ {can.remedy}"))
    yield _heading("Optional packages")
    for package in diagnosis.packages:
        yield _entry(package.name, package.version, package.use, is_good=bool(package.version))
        if package.remedy:
            yield _note(f"→ {package.remedy}")
    if diagnosis.model is not None:
        yield from _model(diagnosis.model)


def _model(model: ModelFacts) -> Iterator[Text]:
    yield _heading(f"Model {model.path}")
    yield Text(f"  written by {model.producer or 'an unnamed tool'}")
    yield Text(f"  {model.sites} sites, {model.fp8_able} of them linear with K, N ≥ 16")
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        for tensor in tensors:
            yield Text(f"  {kind:<7}{tensor.name}: {layout(tensor)}")
    for note in model.notes:
        yield Text(f"  note   {note}")
    for problem in model.problems:
        yield Text.assemble(("  ✗ ", "red"), problem)
    if not model.problems:
        yield Text.assemble(("  ✓ ", "green"), "no problem found; the run file and its rows decide the rest")


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _entry(name: str, version: str, what: str, *, is_good: bool, is_partial: bool = False) -> Text:
    mark = ("✓", "green") if is_good else ("~", "yellow") if is_partial else ("✗", "red")
    return Text.assemble("  ", mark, f" {name:<20} {version or 'missing':<12} {what}")


def _note(text: str) -> Text:
    return Text(f"    {text}", style="dim")
