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


@dataclass(frozen=True)
class JobBatch:
    """Rows per request.

    Attributes:
        minimum: Fewest.
        serve: Size that the engine is tuned for.
        maximum: Most.
        sizes: Served batch sizes, ascending; latency is measured at each.
    """

    minimum: int
    serve: int
    maximum: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class JobRows:
    """Engine inputs of a split's rows.

    Attributes:
        split: ``selection`` or ``certification``; ``timed`` for generated rows.
        batch_size: Rows of one request.
        inputs: ``.npy`` file of each input of the engine, rows on axis 0; relative to the job.
    """

    split: Component
    rows: int
    batch_size: int
    inputs: dict[str, InsideFile]


@dataclass(frozen=True)
class BuildJob:
    """One engine to build on another host.

    Attributes:
        candidate: Directory name of the job, and of the engine in the run.
        target: Device in the run file.
        architecture: As the backend names it.
        plan: The precision assignment of the model.
        part: The whole model, or its dense half.
        model: The planned model, relative to the job.
        model_digest: Digest of the model before the plan.
        sample: Generated inputs for the first batches and for latencies, relative to the job.
        rows: Rows to run the engine on; empty where data stays with the run.
        timed: Generated rows of latency requests; None for the sample's.
        inputs: Memory of the inputs of timed requests.
        files: SHA-256 of every file of the job but ``job.json``, by path relative to the job.
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
    batch: JobBatch
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
    """Result of a job from its host.

    Attributes:
        model_digest: Digest of the model before the plan.
        artifact: Result of the build; the path is relative to the result.
        latencies: Measured there on generated inputs; empty where the engine was not run.
        outputs: ``.npz`` file of the engine's judged outputs on the rows of each split; relative to the
            result, empty where the job carried no rows.
        failure: Error after the build; else empty.
        devices: Devices of the host that the backend runs on.
        files: SHA-256 of every file of the result but ``result.json``, by path relative to the result.
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
