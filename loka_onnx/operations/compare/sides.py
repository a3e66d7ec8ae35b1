"""The two sides of a comparison, opened: bundles as a fleet host loads them, or plain ONNX models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from loka_onnx.bundle.format.archive import as_directory
from loka_onnx.bundle.format.files import read_manifest
from loka_onnx.bundle.inspection import layout
from loka_onnx.core.artifact import OutputSpec, TensorSpec
from loka_onnx.core.devices import CPU
from loka_onnx.core.manifest import MANIFEST_NAME, EngineEntry, Manifest
from loka_onnx.errors import ConfigError, EngineError, LokaError, ModelError
from loka_onnx.evaluation.predictions import Run
from loka_onnx.graph.storage import model_digest, read_proto
from loka_onnx.operations.compare import difference
from loka_onnx.report import numbers
from loka_onnx.runtime import Engine, load
from loka_onnx.sessions.host_devices import device_of_architecture
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions, holds_float8, import_onnxruntime

UNLIMITED_ROWS = 1 << 20
"""Most rows of a request to a model with a dynamic batch, which states no limit."""


@dataclass(frozen=True)
class Opening:
    """Options of loading: engines that are programs run with `trust`, or if one of `keys` signed them."""

    trust: bool = False
    keys: tuple[Path, ...] = ()
    threads: int = 0


@dataclass(frozen=True)
class EngineUsed:
    """One engine that answered, or an ONNX model: its id is the file name, its plan empty.

    `version` is of the library that built an engine, or loaded a model. `target` is the device that it was
    built for, `device` the one that it ran on. `is_fallback` if it is the FP32 model of a bundle.
    """

    id: str
    backend: str
    version: str
    plan: str
    target: str
    architecture: str
    device: str
    simulated: bool
    digest: str
    is_fallback: bool = False

    def __str__(self) -> str:
        words = [
            f"{self.id}: {self.backend} {self.version} on {self.device} ({self.architecture})",
            f"sha256 {numbers.digest(self.digest)}",
            f"plan {self.plan}" if self.plan else "",
            "FP8 simulated" if self.simulated else "",
            "the FP32 fallback, because no emitted engine runs here" if self.is_fallback else "",
        ]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True)
class OpenSide:
    """One side (``A`` or ``B``), ready to answer requests of `least_rows` to `most_rows`.

    Attributes:
        digest: Digest of the exported model; of a plain ONNX model, its own.
        engines: Engines that answered, the main one first.
        routes: Engines by the rows of a request, ascending; empty if one takes all.
        skipped: Why engines that were preferred do not run here, by engine.
        run: Answers one request of the model's inputs, while it is open.
        load: Loads it once more until the stack closes, and returns a function like `run`.
        judged: Outputs that its accuracy was judged on, as it records them; empty for a model.
        timed_at: Batch sizes that it was timed at when it was made.
        model: An ONNX model of it with all its tables, which bound the ids.
        manifest: Its manifest file; None for a model.
    """

    name: str
    path: Path
    kind: str
    digest: str
    engines: tuple[EngineUsed, ...]
    least_rows: int
    most_rows: int
    run: Run
    load: Callable[[ExitStack], Run]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    model: Path
    manifest: Path | None = None
    routes: Mapping[int, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    judged: tuple[OutputSpec, ...] = ()
    timed_at: frozenset[int] = frozenset()

    def engine_for(self, rows: int) -> str:
        """Id of the engine that answers a request of so many rows, as `runtime.Engine` picks it."""
        last = [*self.routes.values()][-1] if self.routes else self.engines[0].id
        return next((engine for most, engine in self.routes.items() if rows <= most), last)

    @property
    def described(self) -> difference.Side:
        """The side as the document names it."""
        facts = [self.kind]
        for engine in self.engines:
            sizes = [numbers.count(rows) for rows, name in self.routes.items() if name == engine.id]
            facts.append(f"{engine}, requests to {' and '.join(sizes)} rows" if sizes else str(engine))
        facts += [f"not used: {name}: {why.partition(chr(10))[0]}" for name, why in self.skipped.items()]
        return difference.Side(self.name, str(self.path), self.digest, tuple(facts))


def open_side(path: Path, name: str, opening: Opening, place: ExitStack, engines: ExitStack) -> OpenSide:
    """Load a bundle, in a directory or in a single file, or an ONNX model.

    `engines` frees what is loaded; `place` removes what a single file is unpacked to, and until then it can
    be loaded once more. Raises ConfigError where there is nothing, BundleInvalid where a bundle does not
    verify, EngineError or ModelError where nothing can be run here.
    """
    if not path.exists():
        raise ConfigError(
            f"E1614 {name} is not there",
            where=str(path),
            evidence="no such file or directory",
            remedy="name the directory of a bundle, a bundle in a single file, or an .onnx file",
        )
    try:
        if path.suffix == ".onnx" and not path.is_dir():
            return _open_model(path, name, opening, engines)
        return _open_bundle(place.enter_context(as_directory(path)), path, name, opening, engines)
    except LokaError as error:
        # Both paths may be alike: say which side it is.
        error.restate(what=f"{error.code} {name}: {error.what}".lstrip())
        raise


def refuse_different_requests(a: OpenSide, b: OpenSide) -> None:
    """Raise ConfigError for an input or output that is missing on one side, or of another type or shape."""
    for what, ours, theirs in (("input", a.inputs, b.inputs), ("output", a.outputs, b.outputs)):
        mine, other = ({spec.name: spec for spec in specs} for specs in (ours, theirs))
        for name in sorted({*mine, *other}):
            before, after = mine.get(name), other.get(name)
            if before is None or after is None or not _fits(before, after):
                has_a, has_b = ("none" if spec is None else layout(spec) for spec in (before, after))
                raise ConfigError(
                    f"E1615 A and B do not have the same {what}s, so no request can be put to both",
                    where=f"{what} '{name}'",
                    evidence=f"A ('{a.path}') has {has_a}, B ('{b.path}') has {has_b}",
                    remedy="compare deployments of models that take and give the same tensors",
                )


def _fits(one: TensorSpec, other: TensorSpec) -> bool:
    return (
        one.dtype == other.dtype
        and len(one.shape) == len(other.shape)
        and all(x is None or y is None or x == y for x, y in zip(one.shape, other.shape, strict=True))
    )


def _open_bundle(directory: Path, path: Path, name: str, opening: Opening, stack: ExitStack) -> OpenSide:
    """Load the bundle in `directory`, which is named by `path`."""

    def load_engine(until: ExitStack) -> Engine:
        options = SessionOptions(threads=opening.threads)
        engine = load(directory, options, trust=opening.trust, keys=opening.keys)
        until.callback(engine.close)
        return engine

    def load_again(until: ExitStack) -> Run:
        again = load_engine(until)
        answering = _answering(again, again.health().routes)
        if answering != expected:
            raise EngineError(
                "E1616 another engine answers when the bundle is loaded once more",
                where=str(path),
                evidence=f"{expected} at first, then {answering}",
                remedy="see whether the device is shared or short of memory",
            )
        return again.infer

    engine = load_engine(stack)
    manifest = read_manifest(directory)
    routes = dict(sorted(engine.health().routes.items()))
    expected = _answering(engine, routes)
    entries = {entry.id: entry for entry in manifest.candidates}
    used = dict.fromkeys((engine.entry.id, *routes.values()))
    records = (entry.evaluation for entry in manifest.engines if entry.evaluation is not None)
    timed = (latency.batch for record in records for latency in record.latencies)
    routed = (route.batch for choice in manifest.choice.targets for route in choice.routes)
    return OpenSide(
        name=name,
        path=path,
        kind="bundle" if path.is_dir() else "bundle in a single file",
        digest=manifest.model_digest,
        engines=tuple(_used(entries[id_], manifest) for id_ in used),
        least_rows=engine.entry.batch.min,
        most_rows=engine.entry.batch.max,
        run=engine.infer,
        load=load_again,
        inputs=engine.inputs,
        outputs=engine.outputs,
        model=directory / manifest.fallback.path,
        manifest=directory / MANIFEST_NAME,
        routes=routes,
        skipped={skipped.engine: skipped.reason for skipped in engine.skipped},
        judged=manifest.judged,
        timed_at=frozenset((*timed, *routed)),
    )


def _answering(engine: Engine, routes: Mapping[int, str]) -> str:
    """Engines of a loaded bundle that answer: the main one, and those by the rows of a request."""
    routed = (f"'{name}' to {rows} rows" for rows, name in sorted(routes.items()))
    return ", ".join((f"'{engine.entry.id}'", *routed))


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
        digest=entry.digest,
        is_fallback=entry.id == manifest.fallback.id,
    )


def _open_model(path: Path, name: str, opening: Opening, stack: ExitStack) -> OpenSide:
    proto = read_proto(path)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    inputs = tuple(_spec(value) for value in proto.graph.input if value.name not in initializers)

    def load_model(until: ExitStack) -> Run:
        return until.enter_context(OnnxSession(path, SessionOptions(threads=opening.threads))).run

    least, most = _rows_of(inputs, path)
    digest, version = model_digest(path), str(import_onnxruntime().__version__)
    used = EngineUsed(path.name, "onnxruntime", version, "", CPU, CPU, CPU, holds_float8(proto), digest)
    return OpenSide(
        name=name,
        path=path,
        kind="ONNX model",
        digest=digest,
        engines=(used,),
        least_rows=least,
        most_rows=most,
        run=load_model(stack),
        load=load_model,
        inputs=inputs,
        outputs=tuple(map(_spec, proto.graph.output)),
        model=path,
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
            "E1617 the model cannot be asked for rows",
            where=str(path),
            evidence="an input without axes has no batch" if inputs else "it has no inputs",
            remedy="give every input the batch as its first axis",
        )
    fixed = {spec.shape[0] for spec in inputs if spec.shape[0] is not None}
    if not fixed:
        return 1, UNLIMITED_ROWS
    if len(fixed) > 1:
        raise ModelError(
            "E1618 the inputs of the model have different fixed batches",
            where=str(path),
            evidence=f"{sorted(fixed)} rows",
            remedy="export it with one dynamic batch as the first axis of every input",
        )
    (rows,) = fixed
    return rows, rows
