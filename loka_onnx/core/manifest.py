"""What a bundle says of itself: the manifest, and which names a bundled file may have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from loka_onnx.core.artifact import OutputSpec, TensorSpec
from loka_onnx.core.digests import digest_json
from loka_onnx.core.evaluation import Choice, Evaluation
from loka_onnx.core.lineage import StageRecord
from loka_onnx.core.seal import UNSEALED
from loka_onnx.core.serde import STRICT
from loka_onnx.core.split import Part

MANIFEST_NAME = "manifest.json"
SAMPLE_NAME = "sample.npz"
PLANS_NAME = "plans.json"

MAX_MANIFEST_BYTES = 16 << 20
"""A manifest lists files and measurements; weights and scales are in files of their own."""

MAX_FILES = 20_000
"""Files that a manifest may list; a file system may need a copy of a content for each of its names."""
MAX_PATH_CHARACTERS = 400
MAX_PATH_DEPTH = 8

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@=-]*")
# Windows opens a device instead of a file under these names, whatever the extension.
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


@dataclass(frozen=True)
class BundleFile:
    """One file of a bundle.

    Attributes:
        path: Relative to the bundle, with ``/`` between components.
        bytes: Its size.
        sha256: SHA-256 of its content, hexadecimal.
    """

    __pydantic_config__ = STRICT

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class BatchRange:
    """Rows per request that an engine accepts, both ends included."""

    __pydantic_config__ = STRICT

    min: int
    max: int


class Need(StrEnum):
    """How a version that an engine needs is meant."""

    EXACTLY = "exactly"
    RELEASE = "same major and minor version"
    AT_LEAST = "at least"
    NOT_STATED = "not stated"
    """It is needed, and nobody has said which version; the self-test of a loader decides."""


@dataclass(frozen=True)
class Requirement:
    """What a host must have for an engine.

    Attributes:
        name: The library by the name that its makers use, or ``NVIDIA driver``.
        need: How `version` is meant.
        version: The version; empty where it is not stated.
    """

    __pydantic_config__ = STRICT

    name: str
    need: Need
    version: str = ""

    def __str__(self) -> str:
        """In words, for people."""
        if self.need is Need.NOT_STATED:
            return f"{self.name} (version not stated)"
        if self.need is Need.RELEASE:
            return f"{self.name} {self.version} (same major and minor version)"
        return f"{self.name} {self.need} {self.version}"


@dataclass(frozen=True)
class EngineEntry:
    """One engine of a bundle.

    Attributes:
        id: Id of the engine; names its arrays in the sample.
        backend: Backend that built it, and that loads it.
        version: Version of the library that built it.
        target: Device it was built for, as named in the run file.
        architecture: Device architecture as the backend names it (``sm89``, ``cpu``).
        portability: Where the engine file may be loaded.
        plan: Id of its plan in the bundle's plans.
        simulated: Its FP8 is simulated: it runs slower than high precision, not faster.
        batch: Rows per request that it accepts.
        path: The engine file; other files it needs lie beside it and are listed like any file.
        bytes: Size of the engine file.
        digest: SHA-256 of the engine file.
        tolerance: Largest absolute difference from the expected outputs of the sample that the self-test
            of a loader accepts, per output.
        evaluation: Measured accuracy and latency; None when it was not measured.
        part: ``whole`` where it takes the inputs of the manifest, ``dense`` where it takes what
            the cut passes on and looks up (`Manifest.inputs_of`).
        requires: Libraries and drivers that the host must have, beside a device of the architecture.
    """

    __pydantic_config__ = STRICT

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
    """Where the model was cut at its embeddings.

    Attributes:
        lookup: Path of the lookup model: from the inputs of the manifest (those that it names) to `tensors`.
            Its tables lie beside it, unless they are in it, and are listed like any file.
        lookup_inputs: Names of the inputs that the lookup model reads.
        passed: Names of the inputs that the dense engines read themselves.
        tensors: What the lookup model gives and the dense engines take, the batch on axis 0.
    """

    __pydantic_config__ = STRICT

    lookup: str
    lookup_inputs: tuple[str, ...]
    passed: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Manifest:
    """The manifest of a bundle (`manifest.json`); it lists every file but itself and the signature.

    Attributes:
        created_by: Package and version that wrote the bundle.
        model_digest: Digest of the exported model.
        inputs: What a request holds.
        outputs: What an answer holds.
        judged: The outputs whose accuracy was judged, with their budgets.
        engines: Emitted engines, the preferred one of each target first; of any number of architectures.
        fallback: The exported FP32 model, which runs wherever ONNX Runtime does.
        choice: Why these engines were emitted.
        plans: Path of the plans document.
        sample: Path of the sample: an npz with ``input/<name>`` and ``expected/<engine>/<name>``, and with
            ``looked_up/<name>`` where the model was cut.
        report: Paths of the report's files.
        lineage: Stages that led here.
        lineage_digest: `digest_lineage` of them.
        versions: Version of every library that took part.
        files: Every other file of the bundle, sorted by path; `MAX_FILES` at most.
        cut: Where the model was cut at its embeddings; None where every engine is of the whole.
        seal: SHA-256 of the manifest's bytes with these digits as zeros (`core.seal`). As the manifest holds
            the digest of every file, it names the content of the whole bundle.
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
    seal: str = UNSEALED

    @property
    def total_bytes(self) -> int:
        """Size of all listed files."""
        return sum(f.bytes for f in self.files)

    @property
    def candidates(self) -> tuple[EngineEntry, ...]:
        """Engines in the order a loader tries them; the fallback is last."""
        return (*self.engines, self.fallback)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Device architectures that engines were built for, in their order."""
        return tuple(dict.fromkeys(entry.architecture for entry in self.engines))

    def file(self, path: str) -> BundleFile:
        """The entry of that path.

        Raises:
            KeyError: It is not listed.
        """
        for entry in self.files:
            if entry.path == path:
                return entry
        raise KeyError(path)

    def inputs_of(self, part: Part) -> tuple[TensorSpec, ...]:
        """What an engine of the whole, or of the dense part alone, takes.

        Raises:
            KeyError: The model was not cut, and there is no dense part.
        """
        if part is Part.WHOLE:
            return self.inputs
        if self.cut is None:
            raise KeyError(part)
        passed = set(self.cut.passed)
        return (*(spec for spec in self.inputs if spec.name in passed), *self.cut.tensors)


def digest_lineage(lineage: Iterable[StageRecord]) -> str:
    """SHA-256 of what led to a bundle: stages, their keys and files, but not how long they took."""
    return digest_json([[s.stage, s.key, s.parents, s.files] for s in lineage])


def sample_input_key(name: str) -> str:
    """Key of an input in the sample."""
    return f"input/{name}"


def sample_looked_up_key(name: str) -> str:
    """Key of a cut tensor in the sample."""
    return f"looked_up/{name}"


def sample_expected_key(engine: str, output: str) -> str:
    """Key of an engine's expected output in the sample."""
    return f"expected/{engine}/{output}"


def path_problem(path: str) -> str | None:
    """Why a path may not stand in a manifest; None when it may.

    A path is made of plain ASCII components, so that it means the same file on every system and cannot
    leave the bundle.
    """
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
    """Why these paths may not stand together in a manifest; None when they may.

    Systems that ignore case would lay two spellings over one another, so they are refused everywhere.
    """
    seen: dict[str, str] = {}
    files: set[str] = set()
    for path in paths:
        problem = path_problem(path)
        if problem is not None:
            return f"path {path!r} {problem}"
        if path in files:
            return f"path {path!r} is listed twice"
        files.add(path)
        components = path.split("/")
        for end in range(1, len(components) + 1):
            prefix = "/".join(components[:end])
            earlier = seen.setdefault(prefix.lower(), prefix)
            if earlier != prefix:
                return f"paths {earlier!r} and {prefix!r} differ only in case"
    for path in files:
        parents = path.split("/")[:-1]
        for end in range(1, len(parents) + 1):
            if "/".join(parents[:end]) in files:
                return f"path {'/'.join(parents[:end])!r} is listed as a file and used as a directory"
    return None
