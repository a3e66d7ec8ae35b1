"""Build jobs: what this host cannot build, written down so that another can.

``jobs/<candidate>/`` holds ``job.json``, the planned model with its weights, the generated sample and, only
where the run file allows it (`build.job_data`), the engine's inputs for the rows that it is judged on. Labels
never leave: the outputs come back, and are judged here. Jobs and results hold exactly the files that their
documents list.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from loka_onnx.core import serde
from loka_onnx.core.digests import digest_file
from loka_onnx.core.evaluation import InputPlace
from loka_onnx.core.job import BuildJob, JobRows
from loka_onnx.core.rewrite import Part
from loka_onnx.engines.isolation import replace_directory, staged
from loka_onnx.engines.request import BuildLimits, BuildRequest
from loka_onnx.errors import ModelError, UserError
from loka_onnx.graph.storage import link_or_copy, model_files, read_proto

JOBS, JOB, RESULT = "jobs", "job.json", "result"
"""Names: of the directory of all jobs in a run, of a job's document, of its result."""
BUILD_JOB = "loka-onnx build --job"
"""Command that executes a job; the job's directory follows."""
_MODEL, _SAMPLE, _DATA = "model", "sample.npz", "data"

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class SplitRows:
    """The rows of a split, as an engine takes them; every call of `batches` reads them anew, in order."""

    split: str
    rows: int
    batch_size: int
    batches: Callable[[], Iterator[Arrays]]
    digest: str = ""


@dataclass(frozen=True)
class JobOrigin:
    """Fields of a job (`core.job.BuildJob`) that its build request has not, with the rows that it carries."""

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
        job = BuildJob(
            **{**vars(origin), "rows": rows, "timed": timed},
            target=request.target,
            architecture=request.architecture,
            plan=request.plan,
            sites=request.sites,
            model=Path(_MODEL) / request.model.name,
            model_digest=request.plan.model_digest,
            sample=Path(_SAMPLE),
            batch=request.batch,
            timeout_seconds=request.limits.seconds,
            memory_bytes=request.limits.memory_bytes,
            options=dict(request.options),
            files=list_files(new, JOB),
            version=version("loka-onnx"),
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
    """Read and verify a job; ModelError if it is none or its files differ, UserError for another version."""
    if not (directory / JOB).is_file():
        raise ModelError(
            "E1516 there is no build job here",
            where=str(directory),
            evidence=f"it holds no '{JOB}'",
            remedy=f"name a directory that a run wrote below its '{JOBS}/'",
        )
    job = serde.read(BuildJob, directory / JOB)
    verify_files(directory, job.files, JOB, besides=(RESULT,))
    carried = (*job.rows, job.timed) if job.timed else job.rows
    for path in (job.model, job.sample, *(Path(name) for rows in carried for name in rows.inputs.values())):
        if path.as_posix() not in job.files:
            raise ModelError(
                f"E1517 '{JOB}' names '{path}', which is no file of the job", where=str(directory)
            )
    read_proto(directory / job.model)
    return job


def request_of(job: BuildJob, directory: Path, output: Path) -> BuildRequest:
    """Return the build request of a job; the artifact's path is relative to the parent of `output`."""
    return BuildRequest(
        model=directory / job.model,
        plan=job.plan,
        sites=job.sites,
        target=job.target,
        architecture=job.architecture,
        batch=job.batch,
        output=output,
        sample=directory / job.sample,
        relative_to=output.parent,
        limits=BuildLimits(job.timeout_seconds, job.memory_bytes),
        options=dict(job.options),
    )


def find_jobs(place: Path) -> list[Path]:
    """Return the job at a place, or all jobs in it, by name; a ModelError if there is none."""
    if (place / JOB).is_file():
        return [place]
    jobs = sorted(path.parent for path in place.glob(f"*/{JOB}"))
    if not jobs:
        raise ModelError(
            "E1518 there is no build job here",
            where=str(place),
            evidence=f"neither it nor a directory in it holds '{JOB}'",
            remedy=f"name a job, or the '{JOBS}/' of a run",
        )
    return jobs


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


# Closed-world directories ---------------------------------------------------------------------------


def list_files(directory: Path, document: str, besides: Collection[str] = ()) -> dict[str, str]:
    """SHA-256 of every file below a directory but its document, by path relative to it.

    `besides` are names of directories at its top that are no part of it. ModelError for a link or device.
    """
    files = dict[str, str]()
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        top = name.partition("/")[0]
        # What is being written there has a hidden name that begins with its own (`engines.publishing`).
        if any(top == other or top.startswith(f".{other}.") for other in besides):
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            _refuse(directory, f"'{name}' is neither a file nor a directory", "links are refused")
        if path.is_file() and name != document:
            files[name] = digest_file(path)
    return dict(sorted(files.items()))


def verify_files(
    directory: Path, files: Mapping[str, str], document: str, besides: Collection[str] = ()
) -> None:
    """Hold a directory against SHA-256 by path that its document lists; `besides` as of `list_files`.

    Raises ModelError for a missing, extra, altered or special file; a path that leaves it is of none in it.
    """
    present = list_files(directory, document, besides)
    for name in sorted({*files, *present}):
        if name not in files:
            evidence = f"{len(files)} files are listed"
            _refuse(directory, f"file '{name}' is not listed in '{document}'", evidence)
        if name not in present:
            _refuse(directory, f"file '{name}' is missing", f"'{document}' lists it")
        if present[name] != files[name]:
            evidence = f"its SHA-256 is {present[name][:16]}…, '{document}' says {files[name][:16]}…"
            _refuse(directory, f"file '{name}' was altered", evidence)


def _refuse(directory: Path, what: str, evidence: str) -> NoReturn:
    raise ModelError(what, where=str(directory), evidence=evidence, remedy="copy the whole directory again")
