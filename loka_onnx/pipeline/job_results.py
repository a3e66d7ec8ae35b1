"""Results of build jobs: held against their jobs, merged into the run, and judged like any other engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core import serde
from loka_onnx.core.digests import digest_file
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Latency
from loka_onnx.core.job import BuildJob, JobResult
from loka_onnx.engines.isolation import replace_directory, staged
from loka_onnx.errors import EngineError, EvaluationError, ModelError
from loka_onnx.evaluation.predictions import Run
from loka_onnx.pipeline.jobs import JOBS, RESULT, verify_files

RESULT_DOCUMENT = "result.json"
SPLITS = ("selection", "certification")


def read_result(directory: Path, job: BuildJob) -> JobResult | None:
    """Return the result of a job; None if there is none yet.

    Raises ModelError if the result is of another job, or a file is missing, extra or altered; UserError if
    another version of this package wrote it.
    """
    place = directory / RESULT
    if not place.exists():
        return None
    if not (place / RESULT_DOCUMENT).is_file():
        raise ModelError(
            f"E1509 the result of job '{job.candidate}' is not whole",
            where=str(place),
            evidence=f"it holds no '{RESULT_DOCUMENT}', which is written last",
            remedy="copy the whole directory again, or remove it to wait for the job",
        )
    result = _read_document(place / RESULT_DOCUMENT)
    for what, was, wanted in (
        ("candidate", result.candidate, job.candidate),
        ("model", result.model_digest, job.model_digest),
        ("plan", result.plan, job.plan.id),
        ("engine", result.artifact.id, f"{job.target}-{job.backend}-{job.architecture}-{job.plan.id}"),
        ("job", result.job, job.digest),
    ):
        if was != wanted:
            raise ModelError(
                f"E1510 the result of job '{job.candidate}' is of another {what}",
                where=str(place),
                evidence=f"it says {_short(was)}, the job says {_short(wanted)}",
                remedy="execute this job (`loka-onnx build --job`), or remove the result to wait for it",
            )
    verify_files(place, result.files, RESULT_DOCUMENT)
    return result


def _read_document(document: Path) -> JobResult:
    """Read the result document of a job and check that it lists its engine and outputs."""
    result = serde.read(JobResult, document)
    path = result.artifact.path
    named = {f"outputs of {split}": name for split, name in result.outputs.items()}
    if path is not None:
        # The engine has a directory of its own, which is what is copied.
        named["the engine"] = path.as_posix() if len(path.parts) > 1 else ""
    for what, name in named.items():
        if name not in result.files:
            raise ModelError(
                f"E1511 the result of job '{result.candidate}' names {what} and does not list it",
                where=str(document),
                evidence=f"it names '{path if what == 'the engine' else name}' and lists "
                f"{len(result.files)} files",
                remedy="execute the job again (`loka-onnx build --job`)",
            )
    return result


def merge_result(result: JobResult, directory: Path, output: Path, root: Path) -> EngineArtifact:
    """Move a result's engine to `output` in the run directory `root`, as a candidate of the run."""
    artifact = result.artifact
    where = f"on '{result.host}' ({', '.join(result.devices) or 'no device'})"
    if not artifact.is_built or artifact.path is None:
        return replace(artifact, detail=f"{where}: {artifact.detail}")
    if result.failure:
        # An engine that fails on its own device has failed, as on this host.
        detail = f"built {where}, where it failed behind its first batches: {result.failure}"
        return replace(artifact, path=None, bytes=0, digest="", status=BuildStatus.FAILED, detail=detail)
    inner = artifact.path.relative_to(artifact.path.parts[0])
    with staged(output) as staging:
        shutil.copytree(directory / RESULT / artifact.path.parts[0], staging / "engine")
        replace_directory(staging / "engine", output, staging)
    path = (output / inner).relative_to(root)
    if artifact.status is BuildStatus.BUILT_NOT_RUN:
        return replace(artifact, path=path, detail=f"built {where}; {artifact.detail}")
    if set(result.outputs) >= set(SPLITS):
        return replace(artifact, path=path, status=BuildStatus.RUN_ELSEWHERE, detail=f"built and run {where}")
    detail = (
        f"built {where}, where its first batches ran; its job carried no rows (`build.job_data`), so that "
        "its accuracy is not measured"
    )
    return replace(artifact, path=path, status=BuildStatus.BUILT_NOT_RUN, detail=detail)


@dataclass(frozen=True)
class ElsewhereRuns:
    """Results of engines of a run on other hosts, in the directory of its jobs."""

    jobs: Path

    def opener(self, engine: EngineArtifact, split: str) -> Callable[[], Run] | None:
        """Return a replay of outputs from another host, if any; EvaluationError if gone or altered."""
        if engine.status is not BuildStatus.RUN_ELSEWHERE:
            return None
        result = self._result(engine)
        if result is None or split not in result.outputs:
            raise EvaluationError(
                f"E1512 the outputs of engine '{engine.id}' are gone",
                where=str(self.jobs / engine.id / RESULT),
                remedy="bring the result of its job back",
            )
        file = self.jobs / engine.id / RESULT / result.outputs[split]
        if digest_file(file) != result.files[result.outputs[split]]:
            raise EvaluationError(f"E1513 the outputs of engine '{engine.id}' were altered", where=str(file))
        return partial(replayed, file)

    def latencies(self, engines: Iterable[EngineArtifact]) -> dict[str, tuple[Latency, ...]]:
        """Return latencies that were measured elsewhere, by engine id, each with its job."""
        return {
            engine.id: tuple(replace(latency, job=result.candidate) for latency in result.latencies)
            for engine in engines
            if (result := self._result(engine)) is not None
        }

    def key(self, engines: Iterable[EngineArtifact]) -> dict[str, str]:
        """Return the digest of the result of each engine that has one."""
        return {
            engine.id: digest_file(self.jobs / engine.id / RESULT / RESULT_DOCUMENT)
            for engine in engines
            if self._result(engine) is not None
        }

    def _result(self, engine: EngineArtifact) -> JobResult | None:
        document = self.jobs / engine.id / RESULT / RESULT_DOCUMENT
        was_built = engine.status in {BuildStatus.RUN_ELSEWHERE, BuildStatus.BUILT_NOT_RUN}
        if not was_built or not document.is_file():
            return None
        result = _read_document(document)
        return result if result.artifact.digest == engine.digest else None


def replayed(file: Path) -> Run:
    """Return recorded outputs as an engine of the same rows in order; EvaluationError for further rows."""
    with np.load(file, allow_pickle=False) as arrays:
        outputs = {name: np.asarray(arrays[name]) for name in arrays.files}
    known, done = min(map(len, outputs.values())), 0

    def run(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        nonlocal done
        start, done = done, done + next(len(values) for values in inputs.values())
        if done > known:
            raise EvaluationError(
                "E1514 the outputs that came back are fewer than the rows",
                evidence=f"{known} rows came back, row {done} is wanted",
                remedy="execute the job again",
            )
        return {name: values[start:done] for name, values in outputs.items()}

    return run


def choosable(engines: Iterable[EngineArtifact], command: str = "run --resume") -> list[EngineArtifact]:
    """Return engines of targets that do not wait for all of theirs; EngineError if every target waits."""
    every = list(engines)
    waiting = {e.target for e in every if e.status is BuildStatus.WAITING}
    waiting -= {e.target for e in every if e.is_built}
    if waiting and waiting == {e.target for e in every}:
        raise EngineError(
            "E1515 there is no engine to choose from yet: all wait for their build jobs",
            where=", ".join(sorted(waiting)),
            evidence="; ".join(f"{e.id}: {e.detail}" for e in every if e.status is BuildStatus.WAITING),
            remedy=f"execute the jobs in `{JOBS}/` where their devices are, bring each `{RESULT}/` back into "
            f"its job, and go on with `{command}`",
        )
    return [
        replace(e, status=BuildStatus.READY) if e.status is BuildStatus.RUN_ELSEWHERE else e
        for e in every
        if e.target not in waiting
    ]


def _short(value: str) -> str:
    is_digest = len(value) == 64 and all(character in "0123456789abcdef" for character in value)
    return f"{value[:16]}…" if is_digest else f"'{value}'"
