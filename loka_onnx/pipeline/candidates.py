"""Every backend × every plan: the planned models and the engines built from them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loka_onnx.config import Executor, RunConfig
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.backends import Fusions
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.devices import CPU
from loka_onnx.core.digests import digest_file
from loka_onnx.core.engine import BuildStatus, EngineArtifact, EngineSet
from loka_onnx.core.formats import Precision
from loka_onnx.core.installation import cache_directory
from loka_onnx.core.job import BatchSizes, BuildJob
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.refinement import RefinedRun
from loka_onnx.core.rewrite import Part, RewriteLog, RewriteLogs
from loka_onnx.engines.base import Backend
from loka_onnx.engines.cache import EngineCache
from loka_onnx.engines.request import BuildLimits, BuildRequest
from loka_onnx.errors import EngineError, MissingPackage, TransformError
from loka_onnx.pipeline.building import Task, build_all, how_many
from loka_onnx.pipeline.correcting import Correcting
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.pipeline.job_execution import execute_on_cluster
from loka_onnx.pipeline.job_results import RESULT_DOCUMENT, merge_result, read_result
from loka_onnx.pipeline.jobs import BUILD_JOB, JOBS, RESULT, JobOrigin, write_job
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.plans import buildable, moot_precisions
from loka_onnx.pipeline.splitting import Source, source_of
from loka_onnx.pipeline.versions import backend_versions
from loka_onnx.transforms.precision.apply_plan import PlanForm, PlannedModel, apply_plan

SAMPLE = "calibration/sample.npz"
"""Generated engine inputs for the first inference of builds, below the run directory."""
BUILD_ROWS = 256
"""Rows of that inference; as many as `batch.min` where that is more."""


@dataclass(frozen=True)
class Candidate:
    """One engine to build; the target is a device, as the run file names it."""

    backend: Backend
    target: str
    architecture: str
    plan: PrecisionPlan
    options: dict[str, int] = field(default_factory=dict)

    @property
    def base(self) -> Precision:
        """Precision of everything that is not FP8 in the graph for this backend."""
        return self.backend.base_precision(self.plan)

    @property
    def directory(self) -> str:
        """``<target>-<backend>-<architecture>-<plan>``."""
        return f"{self.target}-{self.backend.name}-{self.architecture}-{self.plan.id}"


@dataclass(frozen=True)
class Built:
    """Every candidate, and what was written into the planned models."""

    engines: EngineSet
    rewrites: RewriteLogs


BUILD = DocumentStage("build", {"engines": "engines.json", "rewrites": "rewrites.json"}, Built)


@dataclass(frozen=True)
class WrittenJob:
    """A candidate that another host is to build, with the reason why this one does not."""

    candidate: Candidate
    job: BuildJob
    directory: Path
    reason: str


@dataclass
class EngineBuilder:
    """Builds every candidate of a run; a failure costs that candidate only.

    `corrections` are fitted constants, of which accepted ones are written. `only` names the candidates to
    build, None for all. With `is_addition` the jobs of an earlier builder stay.
    """

    judging: Judging
    corrections: CorrectionSet
    only: Collection[str] | None = None
    is_addition: bool = False
    _planned: dict[tuple[str, Precision, Fusions, tuple[str, ...]], PlannedModel] = field(
        default_factory=dict, init=False
    )
    _logs: dict[str, RewriteLog] = field(default_factory=dict, init=False)
    _jobs: dict[str, WrittenJob] = field(default_factory=dict, init=False)

    @property
    def _config(self) -> RunConfig:
        return self.judging.context.config

    @property
    def _root(self) -> Path:
        return self.judging.context.directory.path

    def build(self, source: Source) -> Built:
        """Build every candidate, or write a job for it, and take in the results of jobs."""
        wanted = [c for c in self._candidates(source.plans) if self.only is None or c.directory in self.only]
        workers = min(how_many(self._config.build.parallel, self._limits.memory_bytes), len(wanted) or 1)
        tasks = (Task(c.directory, self._work(source, c)) for c in wanted)

        def on_change(running: Sequence[str], done: int) -> None:
            self.judging.context.progress(f"build {', '.join(running)}".rstrip(), done, len(wanted))

        engines = build_all(tasks, workers, on_change)
        failures = self._execute_jobs()
        engines = [
            self._merged(self._jobs[c.directory], failures) if c.directory in self._jobs else engine
            for c, engine in zip(wanted, engines, strict=True)
        ]
        for place in () if self.is_addition else (self._root / JOBS).glob("*"):
            # Jobs without a candidate are removed, unless they have a result: another host built it.
            if place.is_dir() and place.name not in self._jobs and not (place / RESULT).exists():
                shutil.rmtree(place)
        parts = tuple(
            replace(engine, part=Part.REQUEST if self._shared(c) else source.part)
            for c, engine in zip(wanted, engines, strict=True)
        )
        return Built(EngineSet(parts), RewriteLogs(self._logs))

    @property
    def _limits(self) -> BuildLimits:
        limits = self._config.build
        return BuildLimits(limits.timeout_seconds, int(limits.memory_gb * 1e9))

    def _candidates(self, plans: PlanSet) -> Iterator[Candidate]:
        moot = moot_precisions(self._config)
        for target, backend, architecture in buildable(self._config):
            options = target.options.get(backend.name, {})
            for plan in plans.plans:
                # A plan that rests on the speed of one device is no candidate for another.
                is_moot = plan.quantized_sites and {*plan.precisions} <= {*moot.get(target.device, ())}
                if plan.device not in {"", target.device} or is_moot:
                    continue
                if not plan.untouched:
                    yield Candidate(backend, target.device, architecture, plan, dict(options))
                elif backend.untouched and (architecture != CPU or self._config.plan.plans is not None):
                    # It gains no time on a CPU: only if the run file lists plans.
                    yield Candidate(
                        backend, target.device, architecture, plan, {**options, **backend.untouched}
                    )

    def _work(self, source: Source, candidate: Candidate) -> Callable[[], EngineArtifact]:
        """Return the build of a candidate as a function; the planned model is written here, once."""
        backend, plan, architecture = candidate.backend, candidate.plan, candidate.architecture
        reason, away = backend.decline(plan, architecture), ""
        if reason is None:
            away = backend.build_blocker(architecture)
            reason = away if away and not self._config.build.jobs else None
        if reason is not None:
            return partial(backend.declined_artifact, plan, candidate.target, architecture, reason)
        try:
            whole = self.judging.context.exported
            request = self._request(whole if plan.untouched else source.model, candidate)
        except TransformError as error:
            return partial(backend.failed_artifact, plan, candidate.target, architecture, str(error))
        if not away:
            build = self._config.build
            cache = EngineCache(build.cache or cache_directory() / "engines", int(build.cache_gb * 1e9))
            return partial(cache.build, backend, request)
        origin = JobOrigin(
            run=self._config.name,
            candidate=candidate.directory,
            backend=backend.name,
            part=source.part,
            outputs=tuple(output.name for output in self._config.outputs),
            rows=self.judging.job_rows() if self._config.build.job_data else (),
            timed=self.judging.timed_rows(),
            inputs=self._config.serving.inputs,
        )
        place = self._root / JOBS / candidate.directory
        written = WrittenJob(candidate, write_job(place, request, origin), place, away)
        self._jobs[candidate.directory] = written
        return partial(self._waiting, written, "")

    def _request(self, model: ModelArtifact, candidate: Candidate) -> BuildRequest:
        batch = self._config.batch
        serve = sorted(batch.serve)[len(batch.serve) // 2]
        planned = self._planned_model(model, candidate)
        return BuildRequest(
            model=planned.path,
            plan=candidate.plan,
            sites=planned.sites,
            target=candidate.target,
            architecture=candidate.architecture,
            batch=BatchSizes(batch.min, serve, batch.max, tuple(sorted({*batch.serve}))),
            output=self._root / "engines" / candidate.directory,
            sample=self._root / SAMPLE,
            relative_to=self._root,
            limits=self._limits,
            options=candidate.options,
        )

    def _shared(self, candidate: Candidate) -> tuple[str, ...]:
        """Inputs of an engine in request form that are equal within a request; build jobs have plain rows."""
        backend, architecture = candidate.backend, candidate.architecture
        is_here = architecture in backend.spec.request_form and not backend.build_blocker(architecture)
        return self.judging.shared if is_here else ()

    def _execute_jobs(self) -> dict[Path, str]:
        """Hand jobs without a result to the cluster, if there is one; return why some still have none."""
        settings = self._config.build
        missing = {
            written.directory: written.candidate.target
            for written in self._jobs.values()
            if settings.executor is Executor.RAY and read_result(written.directory, written.job) is None
        }
        if not missing:
            return {}
        try:
            return execute_on_cluster(missing, settings.ray_address, self.judging.context.progress)
        except (EngineError, MissingPackage) as error:
            # What was built here stands; the jobs wait.
            return dict.fromkeys(missing, str(error))

    def _merged(self, written: WrittenJob, failures: dict[Path, str]) -> EngineArtifact:
        """Return the engine of a job's result, or one that waits."""
        result = read_result(written.directory, written.job)
        if result is None:
            return self._waiting(written, failures.get(written.directory, ""))
        output = self._root / "engines" / written.candidate.directory
        return merge_result(result, written.directory, output, self._root)

    def _waiting(self, written: WrittenJob, failure: str) -> EngineArtifact:
        c, place = written.candidate, written.directory.relative_to(self._root)
        detail = f"{written.reason}; `{BUILD_JOB} {place}` builds it on a host with {c.target}"
        detail += f"; the cluster: {failure}" if failure else ""
        artifact = c.backend.failed_artifact(c.plan, c.target, c.architecture, detail)
        return replace(artifact, status=BuildStatus.WAITING)

    def _planned_model(self, model: ModelArtifact, candidate: Candidate) -> PlannedModel:
        """Write the plan into a model in the form that the backend asks for; once for each form."""
        plan, backend, shared = candidate.plan, candidate.backend, self._shared(candidate)
        # Fusions decide where Q/DQ are placed.
        fusions = backend.spec.fusions if plan.quantized_sites else Fusions()
        key = (plan.id, candidate.base, fusions, shared)
        if key not in self._planned:
            name = f"{plan.id}-{candidate.base}{'-request' if shared else ''}"
            if name in self._logs:
                name = f"{name}-{backend.name}"
            target = self._root / "planned" / name / "model.onnx"
            form = PlanForm(candidate.base, fusions, self.corrections.accepted(plan.id), shared)
            planned = apply_plan(model, plan, form, target)
            self._planned[key] = planned
            self._logs[name] = planned.log
        return self._planned[key]

    def files(self, built: Built) -> list[Path]:
        """Files of the engines in `only`, and of their planned models."""
        places = [self._root / "engines" / name for name in sorted(self.only or ())]
        return _files_below(*places, *(self._root / "planned" / name for name in sorted(built.rewrites.logs)))


def _files_below(*places: Path) -> list[Path]:
    return [file for place in places for file in sorted(place.rglob("*")) if file.is_file()]


@dataclass
class Additions:
    """Engines of further plans for the modified model; corrections, rewrites and files are theirs."""

    judging: Judging
    model: ModelArtifact
    corrections: CorrectionSet = field(default_factory=CorrectionSet)
    rewrites: RewriteLogs = field(default_factory=lambda: RewriteLogs({}))
    files: list[Path] = field(default_factory=list)

    def build(self, plans: Sequence[PrecisionPlan], only: Collection[str]) -> tuple[EngineArtifact, ...]:
        """Fit the constants of plans and build the engines of these names."""
        fitted = Correcting(self.judging.context, self.model).fit(plans)
        builder = EngineBuilder(self.judging, fitted, only, is_addition=True)
        built = builder.build(source_of(self.model, PlanSet(tuple(plans)), self.judging.split))
        self.corrections = replace(self.corrections, plans=(*self.corrections.plans, *fitted.plans))
        self.rewrites = RewriteLogs({**self.rewrites.logs, **built.rewrites.logs})
        self.files += builder.files(built)
        return built.engines.engines

    def completed(self, added: RefinedRun) -> RefinedRun:
        """Return what was added, with the corrections and rewrites of its builds."""
        return replace(added, corrections=self.corrections, rewrites=self.rewrites)


def write_build_sample(judging: Judging) -> None:
    """Write generated engine inputs for the first batches of builds → `calibration/sample.npz`."""
    context, path = judging.context, judging.context.path(SAMPLE)
    rows = context.requests.sample(max(BUILD_ROWS, context.config.batch.min))
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **judging.taken_by_engines(rows))  # type: ignore[arg-type]


def build_engines(
    judging: Judging,
    model: ModelArtifact,
    plans: PlanSet,
    corrections: CorrectionSet,
    only: Collection[str] | None = None,
) -> Built:
    """Build, or take over, candidates → `engines/`, `engines.json`, `rewrites.json`, `jobs/`."""
    context, config, settings = judging.context, judging.context.config, judging.context.config.build
    write_build_sample(judging)
    builder, source = EngineBuilder(judging, corrections, only), source_of(model, plans, judging.split)
    jobs = context.path(JOBS)
    reads: dict[str, Any] = {
        "model": source.model,
        "plans": source.plans,
        "corrections": corrections,
        "part": source.part,
        "shared": judging.shared,
        "targets": config.targets,
        "backends": backend_versions(config.targets),
        "batch": config.batch,
        "only": None if only is None else sorted(only),
        "jobs": [settings.jobs, settings.job_data, config.serving.inputs if settings.jobs else ""],
        "rows": [
            [rows.split, rows.batch_size, rows.digest] for rows in judging.job_rows() if settings.job_data
        ],
        # A build that met its limit is tried again with another one; the others come from the cache.
        "limits": [settings.timeout_seconds, settings.memory_gb],
    }
    on_cluster = settings.executor is Executor.RAY
    if not on_cluster:
        reads["results"] = results_of_jobs(jobs)

    def is_waiting(earlier: Built) -> bool:
        return on_cluster and any(e.status is BuildStatus.WAITING for e in earlier.engines.engines)

    def files(written: list[Path]) -> list[Path]:
        # Results of jobs are written by other hosts.
        of_jobs = (f for f in _files_below(jobs) if f.relative_to(jobs).parts[1:2] not in {(), (RESULT,)})
        return [*written, *_files_below(context.path("planned"), context.path("engines")), *of_jobs]

    return context.directory.document(BUILD, reads, lambda: builder.build(source), files, again=is_waiting)


def results_of_jobs(jobs: Path) -> dict[str, str]:
    """Return the digest of every result, by candidate."""
    documents = {place.parent.name: place / RESULT_DOCUMENT for place in sorted(jobs.glob(f"*/{RESULT}"))}
    return {name: digest_file(path) if path.is_file() else "" for name, path in documents.items()}
