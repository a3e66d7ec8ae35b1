"""A build for another host, and its result.

A job is a directory, closed-world: ``job.json`` lists every other file with its digest. Its result is the
directory ``result/`` in it, closed-world as well, whose ``result.json`` names the job by digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from loka_onnx.core import serde
from loka_onnx.core.digests import digest_json
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import InputPlace, Latency
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.rewrite import Part
from loka_onnx.core.serde import STRICT, Component, InsideFile, InsidePath
from loka_onnx.core.site import Site
from loka_onnx.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """Rows per request that an engine accepts, tuned for `serve`: 1 ≤ minimum ≤ serve ≤ maximum. `sizes` are
    the served batch sizes, ascending, each with its CUDA graph or program; `serve` when empty.
    """

    minimum: int
    serve: int
    maximum: int
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.sizes:
            # A frozen type allows no other assignment.
            object.__setattr__(self, "sizes", (self.serve,))
        if not 1 <= self.minimum <= self.serve <= self.maximum:
            raise ConfigError(
                "E0885 batch sizes are out of order",
                where="batch",
                evidence=f"min {self.minimum}, serve {self.serve}, max {self.maximum}",
                remedy="choose 1 <= min <= serve <= max",
            )
        if list(self.sizes) != sorted({*self.sizes}) or not (
            self.minimum <= self.sizes[0] and self.sizes[-1] <= self.maximum
        ):
            raise ConfigError(
                "E0886 served batch sizes are out of order or out of range",
                where="batch",
                evidence=f"{', '.join(map(str, self.sizes))}; min {self.minimum}, max {self.maximum}",
                remedy="give each size once, ascending, from min to max",
            )


@dataclass(frozen=True)
class JobRows:
    """Engine inputs of a split (``timed``: generated rows): a ``.npy`` of each in the job, rows on axis 0."""

    split: Component
    rows: int
    batch_size: int
    inputs: dict[str, InsideFile]


@dataclass(frozen=True)
class BuildJob:
    """One engine to build on another host; paths are relative to the job, whose directory is `candidate`.

    `target` is the device in the run file, `architecture` its name in the backend; `model` the planned model,
    `model_digest` that of the model before the plan. `sample` has generated inputs for first batches and
    latencies, `rows` those to run the engine on (empty where data stays with the run), `timed` generated rows
    of latency requests (None for the sample's), whose memory is `inputs`. `files` has the SHA-256 of every
    file but ``job.json``.
    """

    SCHEMA: ClassVar[str] = "build-job/1"
    __pydantic_config__ = STRICT

    run: str
    candidate: Component
    backend: str
    target: str
    architecture: str
    plan: PrecisionPlan
    sites: tuple[Site, ...]
    part: Part
    model: InsidePath
    model_digest: str
    sample: InsidePath
    batch: BatchSizes
    timeout_seconds: float
    memory_bytes: int
    options: dict[str, int]
    outputs: tuple[str, ...]
    rows: tuple[JobRows, ...]
    files: dict[InsideFile, str]
    version: str
    timed: JobRows | None = None
    inputs: InputPlace = InputPlace.HOST

    @property
    def digest(self) -> str:
        """Digest of the job with all of its files."""
        return digest_json(serde.to_plain(self))


@dataclass(frozen=True)
class JobResult:
    """Result of a job from its host; paths are relative to the result.

    `latencies` were measured there on generated inputs, on `devices` that the backend runs on; `outputs` has
    an ``.npz`` of the engine's judged outputs on the rows of each split that the job carried; `failure` is an
    error after the build. `files` has the SHA-256 of every file but ``result.json``.
    """

    SCHEMA: ClassVar[str] = "build-result/1"
    __pydantic_config__ = STRICT

    job: str
    candidate: Component
    plan: str
    model_digest: str
    artifact: EngineArtifact
    latencies: tuple[Latency, ...]
    outputs: dict[str, InsideFile]
    failure: str
    host: str
    devices: tuple[str, ...]
    versions: dict[str, str]
    files: dict[InsideFile, str] = field(default_factory=dict)
