"""The manifest of a bundle, and the rules for its file names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from operator import not_
from typing import Annotated, ClassVar

from pydantic import Field

from loka_onnx.core.artifact import OutputSpec, TensorSpec
from loka_onnx.core.digests import UNSEALED, digest_json
from loka_onnx.core.evaluation import Choice, Evaluation
from loka_onnx.core.lineage import StageRecord
from loka_onnx.core.rewrite import INDEX, Part
from loka_onnx.core.serde import STRICT

MANIFEST_NAME = "manifest.json"
SAMPLE_NAME = "sample.npz"
PLANS_NAME = "plans.json"

MAX_MANIFEST_BYTES = 16 << 20
"""A manifest lists files and measurements; weights and scales are in other files."""

MAX_FILES = 20_000
"""Most files of a manifest; a file system may need a copy of a content for each of its names."""
MAX_PATH_CHARACTERS = 400
MAX_PATH_DEPTH = 8

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@=-]*")
# Windows opens a device under these names, whatever the extension.
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


@dataclass(frozen=True)
class BundleFile:
    """One file of a bundle, by its path relative to the bundle with ``/`` between components."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class BatchRange:
    """Rows per request that an engine accepts, both ends included."""

    min: int
    max: int


class Need(StrEnum):
    """Meaning of a required version."""

    EXACTLY = "exactly"
    RELEASE = "same major and minor version"
    AT_LEAST = "at least"
    NOT_STATED = "not stated"
    """The version is not known; the self-test of a loader decides."""


INSTRUCTIONS = "CPU instructions"
"""Name of the requirement of an instruction set, as the kernel names its flag."""


@dataclass(frozen=True)
class Requirement:
    """Host requirement of an engine: a library by its makers' name, ``NVIDIA driver`` or `INSTRUCTIONS`."""

    name: str
    need: Need
    version: str = ""

    def __str__(self) -> str:
        if self.need is Need.NOT_STATED:
            return f"{self.name} (version not stated)"
        if self.need is Need.RELEASE:
            return f"{self.name} {self.version} (same major and minor version)"
        return f"{self.name} {self.need} {self.version}"


@dataclass(frozen=True)
class EngineEntry:
    """One engine of a bundle.

    Attributes:
        id: Names its arrays in the sample.
        target: Device in the run file.
        architecture: Device architecture as the backend names it (``sm89``, ``cpu``).
        portability: Hosts that may load the engine file.
        simulated: Its FP8 is simulated, and slower than high precision.
        path: The engine file; further files lie beside it and are listed like any file.
        tolerance: Largest absolute difference from the sample's expected outputs in the self-test, by output.
        evaluation: Measured accuracy and latency; None when it was not measured.
        part: ``whole`` where it takes the inputs of the manifest, ``dense`` where it takes passed and
            looked-up inputs, ``request`` where it takes users and candidates (`Manifest.inputs_of`).
        requires: Libraries and drivers that the host must have, beside a device of the architecture.
    """

    id: str
    backend: str
    version: str
    target: str
    architecture: str
    portability: str
    plan: str
    simulated: bool
    batch: BatchRange
    path: str
    bytes: int
    digest: str
    tolerance: dict[str, float]
    evaluation: Evaluation | None
    part: Part = Part.WHOLE
    requires: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class SparseCut:
    """Cut of the model at its embeddings.

    `lookup` is the path of the model from `lookup_inputs` to `tensors`, with tables beside it that are listed
    like any file. Dense engines read `passed` inputs and `tensors`, whose batch is on axis 0.
    """

    lookup: str
    lookup_inputs: tuple[str, ...]
    passed: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Manifest:
    """The manifest of a bundle (`manifest.json`); it lists every file but itself and the signature.

    Attributes:
        engines: Selected engines, the preferred one of each target first; of any number of architectures.
        fallback: The exported FP32 model, which runs wherever ONNX Runtime does.
        sample: Path of the sample: an npz with ``input/<name>``, ``expected/<engine>/<name>`` and, for a cut
            model, ``looked_up/<name>``.
        lineage: Stages behind the bundle; `lineage_digest` is `digest_lineage` of them.
        files: Every other file of the bundle, sorted by path; `MAX_FILES` at most.
        cut: Cut at the embeddings; None where every engine is of the whole.
        shared: Inputs that are equal within a request; empty where requests hold a row for each candidate.
        seal: SHA-256 of the manifest's bytes with these digits as zeros (`core.digests`). It covers the
            digests of all files, so it names the content of the whole bundle.
    """

    SCHEMA: ClassVar[str] = "bundle-format/1"
    __pydantic_config__ = STRICT

    created_by: str
    model_digest: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    judged: tuple[OutputSpec, ...]
    engines: tuple[EngineEntry, ...]
    fallback: EngineEntry
    choice: Choice
    plans: str
    sample: str
    report: tuple[str, ...]
    lineage: tuple[StageRecord, ...]
    lineage_digest: str
    versions: dict[str, str]
    files: tuple[BundleFile, ...]
    cut: SparseCut | None = None
    shared: Annotated[tuple[str, ...], Field(exclude_if=not_)] = ()
    seal: str = UNSEALED

    @property
    def total_bytes(self) -> int:
        """Size of all listed files."""
        return sum(f.bytes for f in self.files)

    @property
    def candidates(self) -> tuple[EngineEntry, ...]:
        """Engines in a loader's order; the fallback is last."""
        return (*self.engines, self.fallback)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Device architectures that engines were built for, in their order."""
        return tuple(dict.fromkeys(entry.architecture for entry in self.engines))

    def file(self, path: str) -> BundleFile:
        """Return the entry of that path."""
        for entry in self.files:
            if entry.path == path:
                return entry
        raise KeyError(path)

    def inputs_of(self, part: Part) -> tuple[TensorSpec, ...]:
        """Return the inputs of a part's engines; `KeyError` for the dense part without a cut."""
        if part is Part.WHOLE:
            return self.inputs
        if part is Part.REQUEST:
            return (*self.inputs, TensorSpec(INDEX, "int64", (None,)))
        if self.cut is None:
            raise KeyError(part)
        passed = set(self.cut.passed)
        return (*(spec for spec in self.inputs if spec.name in passed), *self.cut.tensors)


def digest_lineage(lineage: Iterable[StageRecord]) -> str:
    """Return the SHA-256 of stages, keys and files behind a bundle, without durations."""
    return digest_json([[s.stage, s.key, s.parents, s.files] for s in lineage])


def sample_key(*parts: str) -> str:
    """Key of an array in a sample: input/<name>, looked_up/<name> or expected/<engine>/<output>."""
    return "/".join(parts)


def path_problem(path: str) -> str | None:
    """Return why a path is not a portable ASCII path inside the bundle; None if it is."""
    if "\\" in path:
        return "has a backslash"
    if path.startswith("/") or re.match(r"[A-Za-z]:", path):
        return "is absolute"
    components = path.split("/")
    if any(c in {".", ".."} for c in components):
        return "leaves or repeats a directory with '.' or '..'"
    if len(path) > MAX_PATH_CHARACTERS or len(components) > MAX_PATH_DEPTH:
        return f"is longer than {MAX_PATH_CHARACTERS} characters or deeper than {MAX_PATH_DEPTH} directories"
    if any(not _COMPONENT.fullmatch(c) or c.endswith(".") for c in components):
        return "has characters other than letters, digits and ._+@=-, or an empty or hidden component"
    return "is a reserved device name" if any(_DEVICE.fullmatch(c) for c in components) else None


def paths_problem(paths: Iterable[str]) -> str | None:
    """Return why these paths may not be listed together; None if they may.

    Refused are invalid paths, a path listed twice, a file that is also a directory, and paths that differ
    only in case, on every system.
    """
    seen: dict[str, str] = {}
    files: set[str] = set()
    for path in paths:
        if (problem := path_problem(path)) is not None:
            return f"path {path!r} {problem}"
        if path in files:
            return f"path {path!r} is listed twice"
        files.add(path)
        for prefix in accumulate(path.split("/"), "{}/{}".format):
            earlier = seen.setdefault(prefix.lower(), prefix)
            if earlier != prefix:
                return f"paths {earlier!r} and {prefix!r} differ only in case"
    for path in files:
        for parent in accumulate(path.split("/")[:-1], "{}/{}".format):
            if parent in files:
                return f"path {parent!r} is listed as a file and used as a directory"
    return None
