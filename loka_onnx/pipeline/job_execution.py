"""Executing a build job, on a host with its device: build, first inference, latency, outputs.

On a Ray cluster a node offers a device as a custom resource of its name (``ray start --resources
'{"nvidia-h100": 1}'``), of which a job takes one. As with calibration (`calibration.passes.ray_executor`),
nodes reach the run directory under the same path, and have this package in the same version.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loka_onnx.calibration.passes.ray_executor import connect, import_ray
from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus
from loka_onnx.core.evaluation import Latency
from loka_onnx.core.job import BuildJob, JobResult, JobRows
from loka_onnx.core.progress import Progress, silent
from loka_onnx.data import Batch
from loka_onnx.engines.device_lock import device_alone
from loka_onnx.engines.isolation import replace_directory, staged
from loka_onnx.engines.registry import get_backend
from loka_onnx.errors import EngineError, LokaError, MissingPackage, StageError, line_of
from loka_onnx.evaluation.latency import LatencyOptions, measure_latency, prepared
from loka_onnx.evaluation.predictions import any_size, predict
from loka_onnx.pipeline.job_results import RESULT_DOCUMENT
from loka_onnx.pipeline.jobs import RESULT, list_files, read_job, request_of
from loka_onnx.pipeline.versions import library_versions
from loka_onnx.sessions.host_devices import device_of_architecture, is_target
from loka_onnx.sessions.runner import Arrays, Runner

ENGINE = "engine"
LATENCY = LatencyOptions(max_seconds=1.0, max_repeats=200)
_SEED = 0
POLL_SECONDS = 1.0


def execute_job(directory: Path, progress: Progress = silent) -> JobResult:
    """Build what a job asks for, and leave ``result/`` in it; an earlier one is replaced.

    A build that fails is a result. Latency is measured on generated rows, those that the job carries for it;
    outputs are those on the rows of the splits, where it carries them. Raises ModelError if the job is not
    whole, EngineError if this host cannot build such an engine, OutputError if the result cannot be written.
    """
    directory = directory.absolute()
    job = read_job(directory)
    backend = get_backend(job.backend)
    reason = backend.build_blocker(job.architecture)
    if reason:
        raise EngineError(
            f"E1508 this host cannot execute the job '{job.candidate}'",
            where=str(directory),
            evidence=reason,
            remedy=f"copy the directory to a host with '{job.target}' and run `loka-onnx build --job` there",
        )
    result = directory / RESULT
    with staged(result) as staging:
        new = staging / RESULT
        new.mkdir()
        progress(f"build {job.candidate}", 0, 0)
        artifact = backend.build(request_of(job, directory, new / ENGINE))
        # Paths in the log must be those of the place where the result will be.
        artifact = replace(artifact, part=job.part, detail=artifact.detail.replace(str(new), str(result)))
        latencies: tuple[Latency, ...] = ()
        outputs: dict[str, str] = {}
        failure = ""
        if artifact.status is BuildStatus.READY and artifact.path is not None:
            try:
                place = new / artifact.path
                with device_alone(job.architecture), backend.open(artifact, place) as runner:
                    execution = _Execution(job, directory, progress)
                    latencies = execution.latencies(runner, counts=not artifact.simulated)
                    outputs = {rows.split: f"outputs-{rows.split}.npz" for rows in job.rows}
                    for rows in job.rows:
                        execution.write_outputs(runner, rows, new / outputs[rows.split])
            except StageError as error:
                for name in outputs.values():
                    with suppress(OSError):
                        (new / name).unlink(missing_ok=True)
                latencies, outputs, failure = (), {}, str(error)
        executed = JobResult(
            job=job.digest,
            candidate=job.candidate,
            plan=job.plan.id,
            model_digest=job.model_digest,
            artifact=artifact,
            latencies=latencies,
            outputs=outputs,
            failure=failure,
            host=socket.gethostname(),
            devices=backend.availability().devices,
            versions=library_versions() | backend.versions(),
            files=list_files(new, RESULT_DOCUMENT),
        )
        serde.write(executed, new / RESULT_DOCUMENT)
        replace_directory(new, result, staging)
        return executed


@dataclass(frozen=True)
class _Execution:
    """One execution of a job, whose engine is built."""

    job: BuildJob
    directory: Path
    progress: Progress

    def latencies(self, runner: Runner, counts: bool) -> tuple[Latency, ...]:
        """At the batch sizes that are served; on another device of the architecture they do not count."""
        job, known = self.job, self._timed_rows()
        rows = min(len(values) for values in known.values())
        generator = np.random.default_rng(_SEED)

        def drawn(wanted: int) -> Arrays:
            # Every row once before any comes twice.
            turns = [generator.permutation(rows) for _ in range(-(-wanted // rows))]
            places = np.concatenate(turns)[:wanted]
            return {name: np.asarray(values[places]) for name, values in known.items()}

        self.progress("latency", 0, 0)
        return measure_latency(
            prepared(runner, job.inputs),
            drawn,
            job.batch.sizes,
            LATENCY,
            device_of_architecture(job.architecture) or job.target,
            counts_for_choice=counts and is_target(job.target, job.architecture),
        )

    def _timed_rows(self) -> Arrays:
        """Generated rows by input: those that the job carries for this, else its sample."""
        if self.job.timed is not None:
            return self._columns(self.job.timed)
        with np.load(self.directory / self.job.sample, allow_pickle=False) as arrays:
            return {name: np.asarray(arrays[name]) for name in arrays.files}

    def write_outputs(self, runner: Runner, rows: JobRows, file: Path) -> None:
        """The judged outputs on the rows of a split."""
        task = f"{self.job.plan.id} on {rows.split}"
        predicted = predict(
            any_size(runner.run, self.job.batch.minimum),
            self._batches(rows),
            self.job.outputs,
            progress=lambda done: self.progress(task, done, rows.rows),
        )
        np.savez(file, **predicted.outputs)  # type: ignore[arg-type]

    def _batches(self, rows: JobRows) -> Iterator[Batch]:
        columns = self._columns(rows)
        for start in range(0, rows.rows, rows.batch_size):
            stop = start + rows.batch_size
            yield Batch({name: np.array(values[start:stop]) for name, values in columns.items()}, {}, start)

    def _columns(self, rows: JobRows) -> Arrays:
        return {
            name: np.load(self.directory / file, mmap_mode="r", allow_pickle=False)
            for name, file in rows.inputs.items()
        }


# On a cluster ----------------------------------------------------------------------------------------


def execute_on_cluster(jobs: Mapping[Path, str], address: str | None, progress: Progress) -> dict[Path, str]:
    """Execute jobs, each on a node that has its device; returns by directory why a job has no result.

    `address` is as in ``10.0.0.5:6379``; None for the cluster that this machine belongs to. A connection that
    this process already has is used as it is. Raises EngineError if no cluster answers; MissingPackage if Ray
    is not installed.
    """
    without = "or leave out `build.executor`"
    ray = import_ray(
        MissingPackage(
            "E1506 Ray is not installed",
            remedy=f"pip install 'loka-onnx[ray]', {without} and carry the jobs yourself",
        )
    )
    is_ours = not ray.is_initialized()
    if is_ours:
        with EngineError(
            f"E1507 no Ray cluster answers at '{address or 'auto'}'",
            remedy=f"correct `build.ray_address`, {without}: jobs then wait in `jobs/`",
        ).in_place_of(OSError, RuntimeError, ValueError, words=line_of):
            connect(ray, address or "auto")
    waiting: dict[Any, Path] = {}
    failures: dict[Path, str] = {}
    try:
        offered = ray.cluster_resources()
        task = ray.remote(num_cpus=1, max_retries=0)(_execute)
        for directory, device in jobs.items():
            if offered.get(device, 0) < 1:
                failures[directory] = f"no node of the Ray cluster has the resource '{device}'"
                continue
            waiting[task.options(resources={device: 1}).remote(str(directory))] = directory
        total = len(waiting)
        while waiting:
            progress("build jobs on the cluster", total - len(waiting), total)
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL_SECONDS)
            for reference in done:
                directory = waiting.pop(reference)
                if failure := _failure(ray, reference):
                    failures[directory] = failure
    finally:
        for reference in waiting:
            with suppress(Exception):
                ray.cancel(reference, force=True)
        if is_ours:
            ray.shutdown()
    return failures


def _failure(ray: Any, reference: Any) -> str:
    """Error of a task; empty if it succeeded."""
    try:
        failure: str = ray.get(reference)
    except ray.exceptions.RayError as error:
        return f"{type(error).__name__}: {line_of(error, -1)}"
    return failure


def _execute(directory: str) -> str:
    """In a worker: execute a job; returns what this node cannot do, and raises nothing of its own making."""
    try:
        execute_job(Path(directory))
    except LokaError as error:
        return str(error)
    return ""
