"""The two sides of a comparison, opened: bundles as a fleet host loads them, or plain ONNX models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from loka_onnx.bundle.format.archive import unpacked
from loka_onnx.bundle.format.manifest import read_manifest
from loka_onnx.core.artifact import OutputSpec, TensorSpec
from loka_onnx.core.devices import CPU
from loka_onnx.core.manifest import MANIFEST_NAME, EngineEntry, Manifest
from loka_onnx.errors import ConfigError, EngineError, LokaError, ModelError
from loka_onnx.evaluation.predictions import Run
from loka_onnx.graph.storage import model_digest, read_proto
from loka_onnx.operations.compare.deployment_document import (
    Deployment,
    DeploymentKind,
    EngineUsed,
    PassedOver,
    ServedTo,
)
from loka_onnx.runtime import Engine, load
from loka_onnx.sessions.host_devices import device_of_architecture
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions, holds_float8, import_onnxruntime

UNLIMITED_ROWS = 1 << 20
"""Most rows of a request to a model with a dynamic batch, which states no limit."""


@dataclass(frozen=True)
class Opening:
    """Options of loading the sides.

    Attributes:
        trust: Whether engines that are programs may run, whoever signed their bundle.
        keys: Public keys whose signature lets them run as well.
        threads: Threads of ONNX Runtime; 0 lets it choose.
    """

    trust: bool = False
    keys: tuple[Path, ...] = ()
    threads: int = 0


@dataclass(frozen=True)
class Side:
    """One side (``A`` or ``B``), ready to answer.

    Attributes:
        run: Answers one request of the model's inputs, while it is open.
        load: Loads it once more until the stack closes, and returns what answers a request.
        judged: Outputs that its accuracy was judged on, as it records them; empty for a model.
        timed_at: Batch sizes that it was timed at when it was made.
        model: An ONNX model of it with all its tables, which bound the ids.
        manifest: Its manifest file; None for a model.
        beside: The directory that it lies in.
    """

    name: str
    deployment: Deployment
    run: Run
    load: Callable[[ExitStack], Run]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    judged: tuple[OutputSpec, ...]
    timed_at: tuple[int, ...]
    model: Path
    manifest: Path | None
    beside: Path


def open_side(path: Path, name: str, opening: Opening, place: ExitStack, engines: ExitStack) -> Side:
    """Load a bundle, in a directory or in a single file, or an ONNX model.

    `engines` frees what is loaded; `place` removes what a single file is unpacked to, and until then it can
    be loaded once more.

    Raises:
        ConfigError: There is nothing at the path.
        BundleInvalid: The bundle does not verify.
        EngineError: Nothing in the bundle runs here.
        ModelError: The model cannot be read or run.
    """
    if not path.exists():
        raise ConfigError(
            f"{name} is not there",
            where=str(path),
            evidence="no such file or directory",
            remedy="name the directory of a bundle, a bundle in a single file, or an .onnx file",
        )
    try:
        if path.is_dir():
            return _open_bundle(path, path, name, opening, engines)
        if path.suffix == ".onnx":
            return _open_model(path, name, opening, engines)
        return _open_bundle(place.enter_context(unpacked(path)), path, name, opening, engines)
    except LokaError as error:
        # Both paths may be alike: say which side it is.
        raise type(error)(
            f"{name}: {error.what}", where=error.where, evidence=error.evidence, remedy=error.remedy
        ) from error


def refuse_different_requests(a: Side, b: Side) -> None:
    """Check that both sides answer the same requests with the same outputs.

    Raises:
        ConfigError: An input or an output is missing on one side, or of another type or shape.
    """
    for what, ours, theirs in (("input", a.inputs, b.inputs), ("output", a.outputs, b.outputs)):
        mine, other = ({spec.name: spec for spec in specs} for specs in (ours, theirs))
        for name in sorted({*mine, *other}):
            left, right = mine.get(name), other.get(name)
            if left is not None and right is not None and _fits(left, right):
                continue
            raise ConfigError(
                f"A and B do not have the same {what}s, so no request can be put to both",
                where=f"{what} '{name}'",
                evidence=f"A ('{a.deployment.path}') has {_layout(left)}, "
                f"B ('{b.deployment.path}') has {_layout(right)}",
                remedy="compare deployments of models that take and give the same tensors",
            )


def _fits(one: TensorSpec, other: TensorSpec) -> bool:
    return (
        one.dtype == other.dtype
        and len(one.shape) == len(other.shape)
        and all(x is None or y is None or x == y for x, y in zip(one.shape, other.shape, strict=True))
    )


def _layout(spec: TensorSpec | None) -> str:
    if spec is None:
        return "none"
    return f"{spec.dtype}[{', '.join('?' if size is None else str(size) for size in spec.shape)}]"


def _open_bundle(directory: Path, path: Path, name: str, opening: Opening, stack: ExitStack) -> Side:
    """A bundle that was given as `path` and lies in `directory`."""
    engine = _load(directory, opening, stack)
    manifest = read_manifest(directory)
    answering = _answering(engine)
    return Side(
        name=name,
        deployment=_deployment(path, manifest, engine),
        run=engine.infer,
        load=lambda again: _same(_load(directory, opening, again), answering, path).infer,
        inputs=engine.inputs,
        outputs=engine.outputs,
        judged=manifest.judged,
        timed_at=tuple(sorted(set(_timed_at(manifest)))),
        model=directory / manifest.fallback.path,
        manifest=directory / MANIFEST_NAME,
        beside=path.absolute().parent,
    )


def _load(directory: Path, opening: Opening, stack: ExitStack) -> Engine:
    options = SessionOptions(threads=opening.threads)
    engine = load(directory, options, trust=opening.trust, keys=opening.keys)
    stack.callback(engine.close)
    return engine


@dataclass(frozen=True)
class _Answering:
    """Which engines of a loaded bundle answer: the main one, and those by the rows of a request."""

    main: str
    routes: dict[int, str]

    def __str__(self) -> str:
        routed = (f"'{engine}' to {rows} rows" for rows, engine in sorted(self.routes.items()))
        return ", ".join((f"'{self.main}'", *routed))


def _answering(engine: Engine) -> _Answering:
    return _Answering(engine.entry.id, dict(engine.health().routes))


def _same(engine: Engine, expected: _Answering, path: Path) -> Engine:
    found = _answering(engine)
    if found == expected:
        return engine
    raise EngineError(
        "another engine answers when the bundle is loaded once more",
        where=str(path),
        evidence=f"{expected} at first, then {found}",
        remedy="see whether the device is shared or short of memory",
    )


def _deployment(path: Path, manifest: Manifest, engine: Engine) -> Deployment:
    routes = engine.health().routes
    known = {entry.id: entry for entry in manifest.candidates}
    used = dict.fromkeys((engine.entry.id, *routes.values()))
    return Deployment(
        path=str(path),
        kind=DeploymentKind.BUNDLE if path.is_dir() else DeploymentKind.ARCHIVE,
        model_digest=manifest.model_digest,
        engines=tuple(_used(known[name], manifest) for name in used),
        routes=tuple(ServedTo(rows, routes[rows]) for rows in sorted(routes)),
        passed_over=tuple(PassedOver(skipped.engine, skipped.reason) for skipped in engine.skipped),
        least_rows=engine.entry.batch.min,
        most_rows=engine.entry.batch.max,
    )


def _used(entry: EngineEntry, manifest: Manifest) -> EngineUsed:
    return EngineUsed(
        id=entry.id,
        backend=entry.backend,
        version=entry.version,
        plan=entry.plan,
        target=entry.target,
        architecture=entry.architecture,
        device=device_of_architecture(entry.architecture) or entry.architecture,
        simulated=entry.simulated,
        is_fallback=entry.id == manifest.fallback.id,
        digest=entry.digest,
    )


def _timed_at(manifest: Manifest) -> Iterator[int]:
    for entry in manifest.engines:
        yield from (latency.batch for latency in (entry.evaluation.latencies if entry.evaluation else ()))
    for choice in manifest.choice.targets:
        yield from (route.batch for route in choice.routes)


def _open_model(path: Path, name: str, opening: Opening, stack: ExitStack) -> Side:
    proto = read_proto(path)
    held = {tensor.name for tensor in proto.graph.initializer}
    inputs = tuple(_spec(value) for value in proto.graph.input if value.name not in held)
    outputs = tuple(_spec(value) for value in proto.graph.output)

    def load_model(until: ExitStack) -> Run:
        return until.enter_context(OnnxSession(path, SessionOptions(threads=opening.threads))).run

    run = load_model(stack)
    least, most = _rows_of(inputs, path)
    digest = model_digest(path)
    used = EngineUsed(
        id=path.name,
        backend="onnxruntime",
        version=str(import_onnxruntime().__version__),
        plan="",
        target=CPU,
        architecture=CPU,
        device=CPU,
        simulated=holds_float8(proto),
        is_fallback=False,
        digest=digest,
    )
    deployment = Deployment(str(path), DeploymentKind.MODEL, digest, (used,), (), (), least, most)
    return Side(
        name, deployment, run, load_model, inputs, outputs, (), (), path, None, path.absolute().parent
    )


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """Name, type and shape of an input or output as the file declares it."""
    tensor = value.type.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
    sizes = (int(size.dim_value) if size.HasField("dim_value") else None for size in tensor.shape.dim)
    return TensorSpec(value.name, dtype, tuple(sizes))


def _rows_of(inputs: Sequence[TensorSpec], path: Path) -> tuple[int, int]:
    """Fewest and most rows of a request."""
    if not inputs or not all(spec.shape for spec in inputs):
        raise ModelError(
            "the model cannot be asked for rows",
            where=str(path),
            evidence="an input without axes has no batch" if inputs else "it has no inputs",
            remedy="give every input the batch as its first axis",
        )
    fixed = {spec.shape[0] for spec in inputs if spec.shape[0] is not None}
    if not fixed:
        return 1, UNLIMITED_ROWS
    if len(fixed) > 1:
        raise ModelError(
            "the inputs of the model have different fixed batches",
            where=str(path),
            evidence=f"{sorted(fixed)} rows",
            remedy="export it with one dynamic batch as the first axis of every input",
        )
    (rows,) = fixed
    return rows, rows
