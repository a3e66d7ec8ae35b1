"""Build jobs: what this host cannot build, written down so that another can.

``jobs/<candidate>/`` holds ``job.json``, the planned model with its weights, the generated sample and, only
where the run file allows it (`build.job_data`), the engine's inputs for the rows that it is judged on. Labels
never leave: the outputs come back, and are judged here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core import serde
from loka_onnx.core.evaluation import InputPlace
from loka_onnx.core.job import BuildJob, JobBatch, JobRows
from loka_onnx.core.rewrite import Part
from loka_onnx.engines.publishing import replace_directory, staged
from loka_onnx.engines.request import BatchRange, BuildRequest, Limits
from loka_onnx.errors import ModelError, UserError
from loka_onnx.graph.storage import link_or_copy, model_files, read_proto
from loka_onnx.pipeline.closed_world import list_files, verify_files

JOBS, JOB, RESULT = "jobs", "job.json", "result"
"""Names: of the directory of all jobs in a run, of a job's document, of its result."""
BUILD_JOB = "loka-onnx build --job"
"""Command that executes a job; the job's directory follows."""
_MODEL, _SAMPLE, _DATA = "model", "sample.npz", "data"

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class SplitRows:
    """The rows of a split, as an engine takes them.

    Attributes:
        batch_size: Rows of each batch but the last.
        batches: Reads them, in order; every call starts anew.
        digest: Of the split, and of the columns that inputs are made of.
    """

    split: str
    rows: int
    batch_size: int
    batches: Callable[[], Iterator[Arrays]]
    digest: str = ""


@dataclass(frozen=True)
class JobOrigin:
    """Origin of a job: run, name of the candidate's directory, and names of the judged outputs.

    Attributes:
        rows: Rows that the job carries; empty for none.
        timed: Generated rows that the requests of latencies are drawn from; None for those of the sample.
        inputs: Memory of the inputs of timed requests.
    """

    run: str
    candidate: str
    backend: str
    part: Part
    outputs: tuple[str, ...]
    rows: Sequence[SplitRows] = ()
    timed: SplitRows | None = None
    inputs: InputPlace = InputPlace.HOST


def write_job(directory: Path, request: BuildRequest, origin: JobOrigin) -> BuildJob:
    """Write a job, or leave the one that is there and is the same, with its result.

    A job that asked for something else is replaced, and its result goes with it. Limits and options of the
    request go along, its places do not.

    Raises:
        OutputError: The place cannot be written.
    """
    with staged(directory) as staging:
        new = staging / "job"
        (new / _MODEL).mkdir(parents=True)
        for file in model_files(request.model):
            place = new / _MODEL / file.relative_to(request.model.parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(file, place)
        shutil.copyfile(request.sample, new / _SAMPLE)
        rows = tuple(_write_rows(new, split) for split in origin.rows)
        timed = None if origin.timed is None else _write_rows(new, origin.timed)
        batch = request.batch
        job = BuildJob(
            run=origin.run,
            candidate=origin.candidate,
            backend=origin.backend,
            target=request.target,
            architecture=request.architecture,
            plan=request.plan,
            sites=request.sites,
            part=origin.part,
            model=Path(_MODEL) / request.model.name,
            model_digest=request.plan.model_digest,
            sample=Path(_SAMPLE),
            batch=JobBatch(batch.minimum, batch.serve, batch.maximum, batch.sizes),
            timeout_seconds=request.limits.seconds,
            memory_bytes=request.limits.memory_bytes,
            options=dict(request.options),
            outputs=origin.outputs,
            rows=rows,
            files=list_files(new, JOB),
            version=version("loka-onnx"),
            timed=timed,
            inputs=origin.inputs,
        )
        try:
            is_there = read_job(directory) == job
        except UserError:
            is_there = False
        if not is_there:
            serde.write(job, new / JOB)
            replace_directory(new, directory, staging)
        return job


def read_job(directory: Path) -> BuildJob:
    """Read a job and hold its directory against it.

    Raises:
        ModelError: It is not a job, or a file is missing, extra or altered.
        UserError: It was written by another version of this package.
    """
    if not (directory / JOB).is_file():
        raise ModelError(
            "E1516 there is no build job here",
            where=str(directory),
            evidence=f"it holds no '{JOB}'",
            remedy=f"name a directory that a run wrote below its '{JOBS}/'",
        )
    job = serde.read(BuildJob, directory / JOB)
    verify_files(directory, job.files, JOB, besides=(RESULT,))
    carried = (*job.rows, *([] if job.timed is None else [job.timed]))
    for path in (job.model, job.sample, *(Path(name) for rows in carried for name in rows.inputs.values())):
        if path.as_posix() not in job.files:
            raise ModelError(
                f"E1517 '{JOB}' names '{path}', which is no file of the job", where=str(directory)
            )
    read_proto(directory / job.model)
    return job


def request_of(job: BuildJob, directory: Path, output: Path) -> BuildRequest:
    """Return the build request of a job; the artifact's path is relative to the parent of `output`."""
    batch = job.batch
    return BuildRequest(
        model=directory / job.model,
        plan=job.plan,
        sites=job.sites,
        target=job.target,
        architecture=job.architecture,
        batch=BatchRange(batch.minimum, batch.serve, batch.maximum, batch.sizes),
        output=output,
        sample=directory / job.sample,
        relative_to=output.parent,
        limits=Limits(job.timeout_seconds, job.memory_bytes),
        options=dict(job.options),
    )


def find_jobs(place: Path) -> list[Path]:
    """Return the job at a place, or all jobs in it, in order of their names.

    Raises:
        ModelError: There is none.
    """
    if (place / JOB).is_file():
        return [place]
    found = sorted(path.parent for path in place.glob(f"*/{JOB}"))
    if not found:
        raise ModelError(
            "E1518 there is no build job here",
            where=str(place),
            evidence=f"neither it nor a directory in it holds '{JOB}'",
            remedy=f"name a job, or the '{JOBS}/' of a run",
        )
    return found


def _write_rows(directory: Path, split: SplitRows) -> JobRows:
    """Write what an engine takes for each row, batch by batch, one file an input."""
    (directory / _DATA).mkdir(exist_ok=True)
    names: dict[str, str] = {}
    files: dict[str, np.memmap[Any, Any]] = {}
    done = 0
    for batch in split.batches():
        for name, values in batch.items():
            if name not in files:
                names[name] = f"{_DATA}/{split.split}-{len(names)}.npy"
                files[name] = np.lib.format.open_memmap(
                    directory / names[name], "w+", values.dtype, (split.rows, *values.shape[1:])
                )
            files[name][done : done + len(values)] = values
        done += len(next(iter(batch.values())))
    for file in files.values():
        file.flush()
    return JobRows(split.split, done, split.batch_size, names)
