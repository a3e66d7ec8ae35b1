"""Writes a bundle: copies, lists, verifies, then moves it into place as a whole.

Layout::

    manifest.json           what the bundle holds and why (`core.manifest.Manifest`)
    signature.json          signatures of the manifest, where a key was given
    plans.json              the plans of the engines, scales included
    sample.npz              input/<name> and expected/<engine>/<output>
    engines/<id>/…          one directory per engine
    fallback/…              the exported FP32 model, external data beside it
    lookup/…                the lookup model of a model that was cut at its embeddings, its tables beside it
    report/…                the report's files

Models of a run share their tables: files that are one file in the run directory are one file here too, under
several names (hard links), so that a bundle holds each table once.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.format.replace import check_replaceable, staged_directory
from loka_onnx.bundle.format.signature import SIGNATURE_NAME
from loka_onnx.bundle.signing import read_private_key, signature_text
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact, OutputSpec, TensorSpec
from loka_onnx.core.devices import CPU
from loka_onnx.core.digests import CHUNK_BYTES, digest_file, digest_files, seal
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import Choice, Evaluation
from loka_onnx.core.lineage import StageRecord
from loka_onnx.core.manifest import (
    INSTRUCTIONS,
    MANIFEST_NAME,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    PLANS_NAME,
    SAMPLE_NAME,
    BatchRange,
    BundleFile,
    EngineEntry,
    Manifest,
    Need,
    Requirement,
    SparseCut,
    digest_lineage,
    path_problem,
    sample_key,
)
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.rewrite import Halves, Part
from loka_onnx.errors import BundleError
from loka_onnx.sessions.backends import get_spec
from loka_onnx.sessions.model_files import data_locations, read_model

ArrayMap = Mapping[str, npt.NDArray[Any]]

DEFAULT_TOLERANCE = 1e-4
"""For engines without FP8, absolute, on a logit.

Sums in another order move a logit by a few ulp of its terms: input moved by 3e-7 moved the logits of
16-32-16-1 and 256-512-256-1 MLPs by 4.5e-6 at most in 4000 rows. The rest is room for other hosts.
"""

FP8_TOLERANCE = 0.05
"""For engines with FP8, absolute, on a logit.

An activation on a rounding boundary may fall to the other side on another host, and moves by an eighth of
itself: the same experiment with FP8 in two layers moved one row in 4000 by 0.018, and a batch of one row
differed from the whole by 0.0025. This is about the error of FP8 itself, so the self-test finds a broken
engine and not one that runs another precision; `EngineArtifact.sites` says the precision.
"""
FALLBACK_ID = "fallback-fp32"
LEAST_DRIVER: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""Least Linux driver of the host for programs of each major version of the CUDA toolkit.

NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1; CUDA Toolkit Release Notes, table 2.
"""


@dataclass(frozen=True)
class Expectation:
    """Answers of an engine on the sample, and the largest absolute difference that a self-test accepts."""

    outputs: ArrayMap
    tolerance: Mapping[str, float]


@dataclass(frozen=True)
class BundleEngine:
    """An engine to ship, with a path relative to `BundleContents.root`. `expectation` is its own answer;
    where this host cannot run it, the fallback's, with a tolerance that covers the plan's error.
    """

    artifact: EngineArtifact
    expectation: Expectation
    evaluation: Evaluation | None = None


@dataclass(frozen=True)
class BundleLookup:
    """The lookup half of a model that was cut at its embeddings; `looked_up` has one array per cut tensor."""

    halves: Halves
    looked_up: ArrayMap


@dataclass(frozen=True)
class BundleContents:
    """Everything a bundle is made of; paths of artifacts are relative to `root`, the run directory.

    Attributes:
        model: The exported FP32 model; becomes the fallback.
        engines: Emitted engines, the preferred one of each target first.
        fallback: The FP32 model's outputs on the sample.
        sample: One array per graph input. These rows are shipped: pass only rows that may be given away.
        plans: Plans of the run; those of the engines are shipped.
        report: Report files to ship, absolute or relative to the working directory.
        versions: Version of every library that took part.
        lookup: None where every engine is of the whole.
        shared: Inputs that are equal within a request; engines may be in request form.
    """

    root: Path
    model: ModelArtifact
    judged: tuple[OutputSpec, ...]
    batch: BatchRange
    engines: tuple[BundleEngine, ...]
    fallback: Expectation
    sample: ArrayMap
    plans: PlanSet
    choice: Choice
    report: tuple[Path, ...]
    lineage: tuple[StageRecord, ...]
    versions: dict[str, str]
    lookup: BundleLookup | None = None
    shared: tuple[str, ...] = ()


def write_bundle(contents: BundleContents, directory: Path, *, key: Path | None = None) -> Path:
    """Write a bundle atomically, signed where there is a private `key`; return it with links resolved.

    The bundle is staged beside `directory`, verified as a loader would, synced and moved into place; a reader
    sees the old bundle, with its signature, or the new one. The next write removes leftovers of an
    interrupted one. Equal contents give equal bytes.

    Raises:
        BundleError: The contents contradict themselves: an engine without a file or altered since it was
            built, a sample that does not fit the model, a name that a bundle may not hold.
        OutputError: The place cannot be written, or holds something that is not a bundle.
        ConfigError: The key cannot be read or is no Ed25519 private key.
        MissingPackage: There is a key, and no `cryptography` to sign with.
    """
    destination = Path(os.path.realpath(directory))
    check_replaceable(destination)
    sample = _checked_sample(contents)
    signer = None if key is None else read_private_key(key)
    with staged_directory(destination) as stage:
        manifest = _write_files(contents, sample, _Stage(stage))
        if len(manifest.files) > MAX_FILES:
            raise BundleError(
                "E1232 the bundle has too many files",
                evidence=f"{len(manifest.files)}, the limit is {MAX_FILES}",
                remedy="ship fewer engines",
            )
        text = seal(serde.dumps(manifest))
        if len(text.encode()) > MAX_MANIFEST_BYTES:
            raise BundleError(
                "E1233 the manifest is too large",
                evidence=f"{len(text.encode())} bytes, the limit is {MAX_MANIFEST_BYTES}",
                remedy="ship fewer engines",
            )
        (stage / MANIFEST_NAME).write_text(text, encoding="utf-8")
        if signer is not None:
            (stage / SIGNATURE_NAME).write_text(signature_text(text.encode(), signer), encoding="utf-8")
        # What was just copied is read back: a bundle that does not verify never takes the place of one
        # that does.
        verify_bundle(stage)
    return destination


def requirements_of(
    backend: str, version: str, architecture: str, instructions: str = ""
) -> tuple[Requirement, ...]:
    """Libraries, drivers and instructions that an engine needs, whose library had this version."""
    spec = get_spec(backend)
    library = Requirement(spec.title, *spec.requirement(version, architecture))
    if architecture == CPU:
        needed = (Requirement(INSTRUCTIONS, Need.EXACTLY, instructions),) if instructions else ()
        return (library, *needed)
    if not architecture.startswith("sm"):
        return (library, Requirement("AMD GPU driver", Need.NOT_STATED))
    toolkit = re.search(r"\+cu(\d+)\d$", version)
    least = LEAST_DRIVER.get(int(toolkit.group(1))) if toolkit else None
    if least is None:
        return (library, Requirement("NVIDIA driver", Need.NOT_STATED))
    return (library, Requirement("NVIDIA driver", Need.AT_LEAST, least))


class Copies:
    """Copies files in chunks; a source that was copied before becomes a hard link to that copy."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Path, str]] = {}

    def copy(self, source: Path, target: Path) -> str:
        """Copy a file and return its SHA-256."""
        state = hashlib.sha256()
        with source.open("rb") as reader:
            status = source.stat()
            file = (status.st_dev, status.st_ino)
            if file in self._known:
                earlier, digest = self._known[file]
                try:
                    target.hardlink_to(earlier)
                    return digest
                except OSError:
                    # No links here, no more of them, or the name is taken.
                    pass
            with target.open("wb") as writer:
                while chunk := reader.read(CHUNK_BYTES):
                    writer.write(chunk)
                    state.update(chunk)
        self._known.setdefault(file, (target, state.hexdigest()))
        return state.hexdigest()


class _Stage:
    """A bundle being filled; knows the digest of everything that was put in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, BundleFile] = {}
        self._copies = Copies()

    def copy(self, source: Path, path: str) -> BundleFile:
        """Copy a file; a source that was copied before, under any name, becomes a link to that copy."""
        target = self._place(path)
        with BundleError(
            f"E1234 '{source}' is missing", remedy="run the stage that writes it again"
        ).in_place_of(FileNotFoundError):
            return self._record(path, self._copies.copy(source, target))

    def write_text(self, text: str, path: str) -> BundleFile:
        """Writes a text file."""
        self._place(path).write_text(text, encoding="utf-8")
        return self._record(path, digest_file(self.root / path))

    def write_arrays(self, arrays: Mapping[str, npt.NDArray[Any]], path: str) -> BundleFile:
        """Writes an npz without pickled objects."""
        # Keys hold names of the model; as keyword arguments they could shadow those of savez.
        with self._place(path).open("wb") as stream:
            np.savez(stream, allow_pickle=False, **{name: arrays[name] for name in sorted(arrays)})
        return self._record(path, digest_file(self.root / path))

    def _place(self, path: str) -> Path:
        problem = path_problem(path)
        if problem is not None:
            raise BundleError(
                f"E1235 a bundle may not hold '{path}': the path {problem}",
                remedy="rename the target, plan or file that it is made from",
            )
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _record(self, path: str, digest: str) -> BundleFile:
        if path in self.files:
            raise BundleError(
                f"E1236 two files of the bundle would be '{path}'", remedy="give them distinct names"
            )
        self.files[path] = BundleFile(path, (self.root / path).stat().st_size, digest)
        return self.files[path]


def _write_files(contents: BundleContents, sample: ArrayMap, stage: _Stage) -> Manifest:
    engines = tuple(_write_engine(contents, engine, stage) for engine in contents.engines)
    fallback = _write_fallback(contents, stage)
    cut = _write_lookup(contents, stage)
    shipped = {e.plan for e in engines}
    plans = PlanSet(tuple(p for p in contents.plans.plans if p.id in shipped))
    if shipped - {p.id for p in plans.plans}:
        raise BundleError(
            "E1237 an engine's plan is not among the plans",
            evidence=f"engines {sorted(shipped)}, plans {[p.id for p in contents.plans.plans]}",
        )
    stage.write_text(serde.dumps(plans), PLANS_NAME)
    stage.write_arrays(sample, SAMPLE_NAME)
    report = tuple(stage.copy(path, f"report/{path.name}").path for path in contents.report)
    return Manifest(
        created_by=f"loka-onnx {metadata.version('loka-onnx')}",
        model_digest=contents.model.digest,
        inputs=contents.model.inputs,
        outputs=contents.model.outputs,
        judged=contents.judged,
        engines=engines,
        fallback=fallback,
        choice=contents.choice,
        plans=PLANS_NAME,
        sample=SAMPLE_NAME,
        report=report,
        lineage=contents.lineage,
        lineage_digest=digest_lineage(contents.lineage),
        versions=contents.versions,
        files=tuple(stage.files[path] for path in sorted(stage.files)),
        cut=cut,
        shared=contents.shared,
    )


def _write_engine(contents: BundleContents, engine: BundleEngine, stage: _Stage) -> EngineEntry:
    artifact = engine.artifact
    if artifact.path is None:
        raise BundleError(
            f"E1238 engine '{artifact.id}' has no file and cannot be shipped",
            evidence=f"{artifact.status}: {artifact.detail}",
            remedy="leave it out",
        )
    source = contents.root / artifact.path
    beside = get_spec(artifact.backend).files_beside(source)
    copied = _copy_with_external_data(source, f"engines/{artifact.id}", stage, beside)
    file = copied[0]
    digest = file.sha256 if len(copied) == 1 else digest_files(stage.root / f.path for f in copied)
    if digest != artifact.digest:
        raise BundleError(
            f"E1239 engine '{artifact.id}' was altered since it was built",
            where=str(source),
            evidence=f"sha256 {digest[:16]}…, the build recorded {artifact.digest[:16]}…",
            remedy="build it again",
        )
    return EngineEntry(
        id=artifact.id,
        backend=artifact.backend,
        version=artifact.backend_version,
        target=artifact.target,
        architecture=artifact.architecture,
        portability=artifact.portability,
        plan=artifact.plan,
        simulated=artifact.simulated,
        batch=contents.batch,
        path=file.path,
        bytes=file.bytes,
        digest=file.sha256,
        tolerance=dict(engine.expectation.tolerance),
        evaluation=engine.evaluation,
        part=artifact.part,
        requires=requirements_of(
            artifact.backend, artifact.backend_version, artifact.architecture, artifact.instructions
        ),
    )


def _write_fallback(contents: BundleContents, stage: _Stage) -> EngineEntry:
    file = _copy_with_external_data(contents.root / contents.model.path, "fallback", stage)[0]
    return EngineEntry(
        id=FALLBACK_ID,
        backend="onnxruntime",
        version=contents.versions.get("onnxruntime", ""),
        target="any",
        architecture=CPU,
        portability="any host with ONNX Runtime",
        plan="fp32",
        simulated=False,
        batch=contents.batch,
        path=file.path,
        bytes=file.bytes,
        digest=file.sha256,
        tolerance=dict(contents.fallback.tolerance),
        evaluation=None,
        requires=requirements_of("onnxruntime", contents.versions.get("onnxruntime", ""), CPU),
    )


def _write_lookup(contents: BundleContents, stage: _Stage) -> SparseCut | None:
    if contents.lookup is None:
        return None
    halves = contents.lookup.halves
    file = _copy_with_external_data(contents.root / halves.lookup.path, "lookup", stage)[0]
    return SparseCut(file.path, tuple(i.name for i in halves.lookup.inputs), halves.passed, halves.cut)


def _copy_with_external_data(
    source: Path, folder: str, stage: _Stage, beside: tuple[str, ...] = ()
) -> list[BundleFile]:
    # The model first: a file that is not one must fail before its weights are copied.
    file = stage.copy(source, f"{folder}/{source.name}")
    data = data_locations(read_model(source)) if source.suffix == ".onnx" else ()
    return [file, *(stage.copy(source.parent / name, f"{folder}/{name}") for name in (*data, *beside))]


def _checked_sample(contents: BundleContents) -> dict[str, npt.NDArray[Any]]:
    """Arrays of the sample by their keys; `BundleError` where they do not fit the model or one another."""
    arrays: dict[str, npt.NDArray[Any]] = {}

    def add(what: str, values: ArrayMap, specs: tuple[TensorSpec, ...], *prefix: str) -> None:
        _check_arrays(what, values, specs)
        arrays.update({sample_key(*prefix, name): np.asarray(value) for name, value in values.items()})

    add("sample", contents.sample, contents.model.inputs, "input")
    lookup, outputs = contents.lookup, contents.model.outputs
    if lookup is not None:
        add("looked-up rows of the sample", lookup.looked_up, lookup.halves.cut, "looked_up")
    elif any(engine.artifact.part is Part.DENSE for engine in contents.engines):
        raise BundleError(
            "E1240 an engine takes looked-up rows, and there is no lookup model to ship",
            remedy="pass the halves of the cut as `lookup`",
        )
    rows = {value.shape[0] for value in arrays.values()}
    if len(rows) != 1 or not contents.batch.min <= min(rows) <= contents.batch.max:
        raise BundleError(
            "E1241 the sample is not one batch that the engines accept",
            evidence=f"{sorted(rows)} rows, batches of {contents.batch.min} to {contents.batch.max}",
            remedy="pass as many rows of every input as one request may have",
        )
    expectations = [(e.artifact.id, e.expectation) for e in contents.engines]
    for engine, expectation in (*expectations, (FALLBACK_ID, contents.fallback)):
        add(f"expected outputs of '{engine}'", expectation.outputs, outputs, "expected", engine)
        names, bounds = {o.name for o in outputs}, expectation.tolerance
        if set(bounds) != names or not all(math.isfinite(t) and t >= 0 for t in bounds.values()):
            raise BundleError(
                f"E1242 engine '{engine}' needs one finite tolerance for each output",
                evidence=f"tolerances {dict(bounds)}, outputs {sorted(names)}",
            )
    return arrays


def _check_arrays(what: str, arrays: Mapping[str, npt.NDArray[Any]], specs: tuple[TensorSpec, ...]) -> None:
    if set(arrays) != {s.name for s in specs}:
        raise BundleError(
            f"E1243 the {what} do not fit the model",
            evidence=f"arrays {sorted(arrays)}, the model has {sorted(s.name for s in specs)}",
        )
    for spec in specs:
        value = arrays[spec.name]
        if value.dtype != np.dtype(spec.dtype) or value.ndim == 0 or value.ndim != len(spec.shape):
            raise BundleError(
                f"E1244 array '{spec.name}' of the {what} does not fit the model",
                evidence=f"{value.dtype}{value.shape}, the model has {spec.dtype}{spec.shape}",
            )
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise BundleError(
                f"E1245 array '{spec.name}' of the {what} holds a value that is not finite",
                remedy="pass rows that the model answers with finite numbers",
            )
