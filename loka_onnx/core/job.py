"""A build that another host is to do, and what it sends back.

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
from loka_onnx.core.serde import STRICT, Component, InsideFile, InsidePath
from loka_onnx.core.site import Site
from loka_onnx.core.split import Part


@dataclass(frozen=True)
class JobBatch:
    """Rows per request.

    Attributes:
        minimum: Fewest.
        serve: What the engine is tuned for.
        maximum: Most.
        sizes: Batch sizes that will be served, ascending; latency is measured at each.
    """

    minimum: int
    serve: int
    maximum: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class JobRows:
    """What an engine takes for the rows of a split.

    Attributes:
        split: ``selection`` or ``certification``; ``timed`` for generated rows.
        rows: How many.
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
        run: Name of the run that wants it.
        candidate: Name of the directory of the job, and of the engine in the run.
        backend: Backend that builds it.
        target: Device as named in the run file.
        architecture: As the backend names it.
        plan: The precision assignment that the model was written for.
        sites: Sites of the model.
        part: What is built: the whole model, or its dense half.
        model: The planned model, relative to the job.
        model_digest: Digest of the model that the plan is for.
        sample: Generated inputs for the first batches and for latencies, relative to the job.
        batch: Rows per request.
        timeout_seconds: Time limit of the build.
        memory_bytes: Memory limit of the build.
        options: Settings of the backend.
        outputs: Names of the outputs that are judged.
        rows: Rows to run the engine on; empty where data stays with the run.
        timed: Generated rows that the requests of latencies are drawn from; None for those of the sample.
        inputs: Where the inputs of timed requests lie.
        files: SHA-256 of every file of the job but ``job.json``, by path relative to the job.
        version: Version of this package that wrote it.
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
    """What the host of a job made of it.

    Attributes:
        job: Digest of the job.
        candidate: Its candidate.
        plan: Id of its plan.
        model_digest: Digest of the model that its plan is for.
        artifact: How the build ended; the path is relative to the result.
        latencies: Measured there on generated inputs; empty where the engine was not run.
        outputs: ``.npz`` file of the engine's judged outputs on the rows of each split; relative to the
            result, empty where the job carried no rows.
        failure: What went wrong behind the build; empty where nothing did.
        host: Name of the host.
        devices: Devices of the host that the backend runs on.
        versions: Versions of the libraries there.
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
