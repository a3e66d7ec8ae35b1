"""Refresh: apply the decisions of an earlier run to a retrained checkpoint.

Kept: which sites there are, which of them run in FP8 and under which recipe, which engines are built, kernel
timings and tuning. Done again: the export, the mods (they write weights), ranges and the scales that follow,
corrections, the engines that the earlier run chose, and their certification. Where that does not hold on the
new weights, everything is done anew, in the same directory, and its certification counts as the second look
at those rows (`core.refresh`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loka_onnx.bundle.signing import signer_of
from loka_onnx.config import RunConfig, build_run_config
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import BuildStatus, EngineArtifact, EngineSet
from loka_onnx.core.evaluation import BudgetStatus, EvaluationSet
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.refresh import DOCUMENT, LOOKS, Refresh
from loka_onnx.errors import BudgetMissed, ConfigError, ModelError
from loka_onnx.graph.structure import differences
from loka_onnx.numerics.intervals import CONFIDENCE
from loka_onnx.operations.refresh.earlier import EarlierRun
from loka_onnx.operations.refresh.moves import output_moves, site_moves
from loka_onnx.operations.refresh.replanning import planned_recipe_ids, replan, unproven_reason
from loka_onnx.pipeline.candidates import build_engines
from loka_onnx.pipeline.directory import Outcome, RunDirectory, Stage
from loka_onnx.pipeline.emission import CHOOSE, Results, describe_run, emit_bundle, write_report
from loka_onnx.pipeline.job_results import choosable
from loka_onnx.pipeline.judging import EVALUATE
from loka_onnx.pipeline.run import RunOptions, RunResult, recorded, run, write_build_sample
from loka_onnx.pipeline.splitting import source_of
from loka_onnx.pipeline.steps import Steps
from loka_onnx.pipeline.versions import library_versions

REPLAN = Stage("replan", "plan.json", PlanSet)
CERTIFICATION = "certification"
STAGES = (
    "export",
    "check data",
    "compare",
    "mods",
    "loud channels",
    "split",
    "refresh",
    "replan",
    "correct",
    "build",
    "evaluate",
    "choose",
    "report",
    "bundle",
)
"""Stages of a refresh, as its record names them."""
CORRECTION_ROWS = 16_384
"""Rows that corrections are fitted to, and selection rows that decide which are kept, at most: a mean is then
known to .008 of its spread, and certification judges what comes of it."""


@dataclass(frozen=True)
class RefreshOptions:
    """Options of a refresh: its directory, and how it reports itself.

    Attributes:
        output: The run directory; None for one beside the earlier run, named after both.
        overrides: Values that replace those of the earlier run file, by dotted key.
        force: Start over in a directory that holds an earlier run.
        resume: Go on with a refresh that was interrupted, or that waited for build jobs.
        may_fall_back: Whether everything is done anew where the earlier decisions do not hold.
        sign: Private key (PEM) that the bundle is signed with; None to leave it unsigned.
        progress: Called as work is done.
        on_stage: Called when a stage begins (with None) and when it ends.
        on_stages: Called with the names of the stages that are to come; again where everything is done anew.
    """

    output: Path | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)
    force: bool = False
    resume: bool = False
    may_fall_back: bool = True
    sign: Path | None = None
    progress: Progress = silent
    on_stage: Callable[[str, Outcome | None], None] = field(default=lambda stage, outcome: None)
    on_stages: Callable[[Sequence[str]], None] = field(default=lambda stages: None)


@dataclass(frozen=True)
class RefreshResult:
    """The run directory with choice, report and bundle, and the changes from the earlier run."""

    run: RunResult
    refresh: Refresh


class _Outdated(Exception):
    """The earlier decisions do not hold: no error, but another way to go on.

    Args:
        error: What is raised where there is no other way.
    """

    def __init__(self, reason: str, error: type[ModelError | BudgetMissed]) -> None:
        super().__init__(reason)
        self.reason, self.error = reason, error


def refresh(earlier: str | Path, model: str | Path, options: RefreshOptions | None = None) -> RefreshResult:
    """Bring a run to a retrained model of the same structure.

    Args:
        model: The retrained model: an ``.onnx`` file, or a checkpoint for the run's torch module.

    Raises:
        UserError: The earlier run is not finished or waits for build jobs, or an input is wrong; without
            `may_fall_back` also where the structure differs.
        BudgetMissed: Without `may_fall_back`: an engine is not inside the budget on the certification split.
        StageError: A stage could not finish.
    """
    options, began = options or RefreshOptions(), time.perf_counter()
    if options.sign is not None:
        signer_of(options.sign)
    before = EarlierRun.read(Path(earlier).absolute())
    config = _configured(before, Path(model).absolute(), options)
    with RunDirectory.create(
        config.output, recorded(config), library_versions(), force=options.force, resume=options.resume
    ) as directory:
        directory.on_stage = options.on_stage
        options.on_stages(tuple(name for name in STAGES if name != "split" or config.model.split_sparse))
        steps = Steps(config, directory, options.progress, looks=LOOKS, signing_key=options.sign)
        attempt = _Attempt(steps, before)
        found = attempt.earlier_failure() if options.resume else None
        if found is None:
            try:
                result = attempt.run()
            except _Outdated as outdated:
                if not options.may_fall_back:
                    raise _refusal(before, outdated) from outdated
                found = attempt.described(outdated.reason, time.perf_counter() - began)
                # A look at the certification rows is never forgotten, also where the full run is interrupted.
                serde.write(found, directory.path / DOCUMENT)
            else:
                found = attempt.described("", time.perf_counter() - began)
                serde.write(found, directory.path / DOCUMENT)
                return RefreshResult(result, found)
        for stage in ("refresh", "replan"):
            directory.forget(stage)
    looks = LOOKS if found.confidence > CONFIDENCE else 1
    full = RunOptions(
        resume=True,
        looks=looks,
        sign=options.sign,
        progress=options.progress,
        on_stage=options.on_stage,
        on_stages=options.on_stages,
    )
    result = run(config, full)
    found = replace(found, seconds=time.perf_counter() - began)
    serde.write(found, result.directory / DOCUMENT)
    return RefreshResult(result, found)


def _refusal(before: EarlierRun, outdated: _Outdated) -> ModelError | BudgetMissed:
    remedy = "leave out --no-fallback, or run the whole pipeline on it"
    if outdated.error is BudgetMissed:
        remedy = (
            "leave out --no-fallback, which counts both looks at the certification rows, or run the whole "
            "pipeline on it with other certification rows"
        )
    return outdated.error(
        "the decisions of the earlier run do not hold for this model",
        where=str(before.directory),
        evidence=outdated.reason,
        remedy=remedy,
    )


def _configured(before: EarlierRun, model: Path, options: RefreshOptions) -> RunConfig:
    """The earlier run file with the retrained model in it."""
    values: dict[str, Any] = dict(before.config)
    section = dict(values["model"])
    if not model.is_file():
        raise ModelError("the retrained model is missing", where=str(model), evidence="there is no such file")
    if model.suffix == ".onnx":
        kept = {key: value for key, value in section.items() if key == "split_sparse"}
        section = {**kept, "onnx": str(model)}
    elif section.get("torch") is None:
        raise ConfigError(
            f"'{model.name}' is no ONNX file, and the earlier run began with one",
            where="--model",
            evidence=f"'{before.directory}' was made from '{section.get('onnx')}'",
            remedy="give the retrained model as .onnx",
        )
    else:
        section["checkpoint"] = str(model)
    name = f"{before.directory.name}-{model.stem}"
    output = options.output or before.directory.with_name(name)
    values |= {"model": section, "output": str(output.absolute())}
    config = build_run_config(
        values, before.base, source=f"the run file of '{before.directory}'", overrides=options.overrides
    )
    if config.output == before.directory:
        raise ConfigError(
            "a refresh needs a directory of its own",
            where="--output",
            evidence=f"'{config.output}' is the run that is refreshed",
            remedy="name another directory",
        )
    return config


class _Attempt:
    """One try to keep what the earlier run decided."""

    def __init__(self, steps: Steps, before: EarlierRun) -> None:
        self.steps, self.before = steps, before
        self.exported: ModelArtifact | None = None
        self.profile: Profile | None = None
        self.plans = PlanSet(())
        self.evaluations = EvaluationSet(())

    def earlier_failure(self) -> Refresh | None:
        """Outcome of a refresh whose full run was interrupted; None if there is none."""
        document = self.steps.directory.path / DOCUMENT
        if not document.is_file():
            return None
        found = serde.read(Refresh, document)
        with self.steps.directory.undone_on_error():
            model = self.steps.export(self.before.export).digest
        is_same = (found.earlier, found.model) == (self.before.directory, model)
        return found if is_same and found.fallback else None

    def described(self, fallback: str, seconds: float) -> Refresh:
        """Return the changes against the earlier run that are known so far.

        Args:
            fallback: Why everything is done anew; empty where it is not.
            seconds: Time that the refresh has taken.
        """
        profile, before = self.profile, self.before
        has_looked = bool(self.evaluations.evaluations) or not fallback
        return Refresh(
            earlier=before.directory,
            earlier_model=before.exported.digest,
            model=self.exported.digest if self.exported is not None else "",
            sites=() if profile is None else site_moves(before, profile, self.plans),
            outputs=output_moves(before.evaluations, self.evaluations),
            fallback=fallback,
            confidence=self.steps.judging.certification.confidence if has_looked else CONFIDENCE,
            seconds=seconds,
            earlier_seconds=before.seconds,
        )

    def run(self) -> RunResult:
        """Every stage of a refresh.

        Raises:
            _Outdated: An earlier decision does not hold.
        """
        steps, before = self.steps, self.before
        directory = steps.directory
        with directory.undone_on_error():
            exported = self.exported = steps.export(before.export)
            with directory.watched("check data"):
                steps.check_data()
        with directory.watched("compare"):
            self._compare(exported)
        modified = steps.split_high_error(steps.modify(exported, None), before.high_error_channels)
        self._compare_sites(modified.model)
        split = steps.cut(modified.model)
        profile = steps.probing.refresh(modified.model, planned_recipe_ids(before.profile))
        self.profile = profile
        plans = self.plans = self._replanned(modified.model, profile)
        sample = write_build_sample(steps)
        corrections = steps.correct(exported, modified.model, plans, CORRECTION_ROWS)
        builder = steps.builder(sample, corrections, before.wanted)
        built = build_engines(builder, source_of(modified.model, plans, split))
        self._check_built(built.engines)
        self.evaluations = self._certify(exported, built.engines)
        self._check_certified(built.engines)

        cut = {} if split is None else {"split": split.log}
        results = Results(
            exported,
            modified.model,
            profile,
            plans,
            {"mods": modified.log, **cut, **built.rewrites.logs},
            built.engines,
            self.evaluations,
            corrections,
        )
        return self._emit(results)

    def _emit(self, results: Results) -> RunResult:
        steps, before = self.steps, self.before

        # As in a full run: a target that waits for its build job has no choice yet.
        choice = steps.directory.document(
            CHOOSE,
            {"choice": before.choice, "engines": results.engines},
            lambda: before.choice_again(choosable(results.engines.engines, "refresh --resume")),
        )
        data = describe_run(steps, results, choice, "")
        data = replace(data, notes=(*data.notes, before.note))
        files = write_report(steps, data)
        bundle = emit_bundle(steps, results, choice, files)
        return RunResult(steps.directory.path, choice, data, files, bundle)

    def _compare(self, exported: ModelArtifact) -> None:
        found = differences(self.before.exported.path, exported.path)
        if found:
            raise _Outdated(f"the structure of the model differs: {'; '.join(found)}", ModelError)

    def _compare_sites(self, modified: ModelArtifact) -> None:
        """Refuse other sites: mods read weights, and may rewrite a model of the same structure otherwise."""
        was, now = (
            {site.name: (site.kind, site.k, site.n, site.rows) for site in model.sites}
            for model in (self.before.modified, modified)
        )
        if was != now:
            names = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
            reason = f"mods lead to other sites: {', '.join(names[:8])}"
            raise _Outdated(reason, ModelError)

    def _replanned(self, modified: ModelArtifact, profile: Profile) -> PlanSet:
        """Write the plans of the engines to build, with new scales → `plan.json`."""
        wanted = [plan for plan in self.before.plans.plans if plan.id in self.before.wanted_plans]
        reason = unproven_reason(wanted, modified, profile, self.steps.config.plan.protect)
        if reason:
            raise _Outdated(reason, ModelError)

        def make() -> PlanSet:
            again = tuple(replan(plan, modified, profile, self.steps.specs) for plan in wanted)
            return PlanSet(again, self.before.plans.notes, able_share=self.before.plans.able_share)

        return self.steps.directory.document(REPLAN, {"plans": wanted, "profile": profile}, make)

    def _check_built(self, engines: EngineSet) -> None:
        for engine in self._chosen(engines):
            if not engine.is_built and engine.status is not BuildStatus.WAITING:
                raise _Outdated(f"engine '{engine.id}' {engine.status}: {engine.detail}", ModelError)

    def _chosen(self, engines: EngineSet) -> list[EngineArtifact]:
        chosen = set(self.before.chosen)
        return [engine for engine in engines.engines if engine.id in chosen]

    def _certify(self, exported: ModelArtifact, engines: EngineSet) -> EvaluationSet:
        """Judge the chosen engines, or their simulations, on certification → `evaluation.json`."""
        steps, config, judging = self.steps, self.steps.config, self.steps.judging
        split = judging.certification
        judged = [engine for engine in engines.engines if engine.id in self.before.judged]

        reads = {
            "refresh": [engine.digest or engine.detail for engine in judged],
            "elsewhere": judging.elsewhere.key(judged),
            "exported": exported,
            "data": split.data,
            "looks": judging.looks,
            "outputs": config.outputs,
            "group": config.data.group,
            "slices": config.data.slices,
        }
        return steps.directory.document(
            EVALUATE, reads, lambda: EvaluationSet(tuple(judging.judge(split, exported, judged)))
        )

    def _check_certified(self, engines: EngineSet) -> None:
        """Check every emitted engine against the budget: on its own outputs, or on its plan's."""
        for engine in self._chosen(engines):
            own = [e for e in self.evaluations.evaluations if e.engine == engine.id and e.outputs]
            of_plan = [e for e in self.evaluations.evaluations if e.plan == engine.plan and e.outputs]
            judged = own or [e for e in of_plan if e.engine in self.before.judged]
            if not judged and engine.status is BuildStatus.WAITING:
                continue
            if not judged:
                raise _Outdated(f"engine '{engine.id}' cannot be judged: {engine.detail}", BudgetMissed)
            for evaluation in judged:
                if not evaluation.is_within_budget:
                    reason = "; ".join(_beyond(evaluation.engine, self.evaluations))
                    raise _Outdated(f"certification failed: {reason}", BudgetMissed)


def _beyond(engine: str, evaluations: EvaluationSet) -> Iterator[str]:
    for output in evaluations.of(engine, CERTIFICATION).outputs:
        if output.difference is None or output.budget_status == BudgetStatus.WITHIN:
            continue
        upper, name = output.difference.judged.upper, output.difference.judged_name
        said = [f"upper bound of {name} {upper:+.3%} against {output.budget:.3%}", *output.remarks]
        yield f"engine '{engine}', output '{output.output}': {output.verdict}, {'; '.join(said)}"
