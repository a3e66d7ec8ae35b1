"""The whole pipeline: the list of its stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from loka_onnx.bundle.signing import signer_of
from loka_onnx.config import RunConfig, load_run_file
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.evaluation import Choice, EvaluationSet
from loka_onnx.core.profile import Profile
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.refresh import DOCUMENT as REFRESH_DOCUMENT
from loka_onnx.core.refresh import Refresh
from loka_onnx.data import Dataset
from loka_onnx.errors import ConfigError
from loka_onnx.numerics.intervals import CONFIDENCE
from loka_onnx.pipeline.attempts import attempt_again
from loka_onnx.pipeline.candidates import build_engines
from loka_onnx.pipeline.competing import check_options
from loka_onnx.pipeline.directory import Outcome, RunDirectory
from loka_onnx.pipeline.emission import (
    Results,
    choose_engines,
    describe_run,
    emit_bundle,
    write_report,
)
from loka_onnx.pipeline.ladder_stage import climb_ladder
from loka_onnx.pipeline.plan_patterns import check_plan_patterns
from loka_onnx.pipeline.refine_stage import refine_engines
from loka_onnx.pipeline.sample import write_sample
from loka_onnx.pipeline.serving import measure_throughput
from loka_onnx.pipeline.splitting import source_of
from loka_onnx.pipeline.steps import Steps
from loka_onnx.pipeline.versions import library_versions
from loka_onnx.report import ReportData

BUILD_ROWS = 256
"""Rows of the first inference in a build process; as many as `batch.min` where that is more."""
GIVEN = "run_file"
"""Key, in the record of a run, of what its run file gave and of the directory that it stood in."""


class Stage(StrEnum):
    """Stages at which a run may end."""

    EXPORT = "export"
    CALIBRATE = "calibrate"
    TRANSFORM = "transform"
    PLAN = "plan"
    BUILD = "build"
    EVALUATE = "evaluate"
    REPORT = "report"
    BUNDLE = "bundle"


STAGES = {
    Stage.EXPORT: ("export", "check data"),
    Stage.CALIBRATE: ("calibrate",),
    Stage.TRANSFORM: ("mods", "loud channels", "recalibrate", "split"),
    Stage.PLAN: ("ladder", "plan"),
    Stage.BUILD: ("correct", "build"),
    Stage.EVALUATE: ("refine", "evaluate"),
    Stage.REPORT: ("choose", "throughput", "report"),
    Stage.BUNDLE: ("bundle",),
}
"""Stages up to each end, as the record names them."""


def expected_stages(config: RunConfig | None, until: Stage = Stage.BUNDLE) -> tuple[str, ...]:
    """Names of the stages of a run, in order; ``refine`` begins only where a device here runs FP8.

    Args:
        config: The run file; None for one that says nothing of the stages.
    """
    left_out = {
        "split": config is None or not config.model.split_sparse,
        "refine": config is not None and config.refine.rounds == 0,
        "throughput": config is None or config.serving.p99_ms is None,
    }
    ends = list(Stage)
    names = (name for end in ends[: ends.index(until) + 1] for name in STAGES[end])
    return tuple(name for name in names if not left_out.get(name, False))


@dataclass(frozen=True)
class RunOptions:
    """Options of a run: its directory, and how it reports itself.

    Attributes:
        force: Start over in a directory that holds an earlier run.
        resume: Take over the finished stages of an earlier run.
        until: Last stage to run.
        only: Patterns of sites to calibrate again in a run that holds a profile; empty for what is not
            finished.
        added: Data file whose rows are added to the profile; None for none.
        label_rule: What the labels mean, for the report.
        looks: Times that the certification rows are looked at for this model, this run included; their error
            is divided among them.
        sign: Private key (PEM) that the bundle is signed with; None to leave it unsigned.
        progress: Called as work is done.
        on_stage: Called when a stage begins (with None) and when it ends.
        on_stages: Called with the names of the stages that are to come, in order; those that turn out to be
            unnecessary never begin.
    """

    force: bool = False
    resume: bool = False
    until: Stage = Stage.BUNDLE
    only: tuple[str, ...] = ()
    added: Path | None = None
    label_rule: str = ""
    looks: int = 1
    sign: Path | None = None
    progress: Progress = silent
    on_stage: Callable[[str, Outcome | None], None] = field(default=lambda stage, outcome: None)
    on_stages: Callable[[Sequence[str]], None] = field(default=lambda stages: None)


@dataclass(frozen=True)
class RunResult:
    """Result of a run; None for what a run that ended earlier has not made."""

    directory: Path
    choice: Choice | None = None
    report: ReportData | None = None
    report_files: tuple[Path, ...] = ()
    bundle: Path | None = None


def run(config: RunConfig | str | Path, options: RunOptions | None = None) -> RunResult:
    """Turn a trained model into the fastest engine that is still accurate.

    Raises:
        UserError: The configuration or an input is wrong, or another run is at work in the directory.
        StageError: A stage could not finish.
    """
    options = options or RunOptions()
    if not isinstance(config, RunConfig):
        config = load_run_file(config)
    if options.sign is not None:
        # A key that cannot be read is refused now, not when everything else is done.
        signer_of(options.sign)
    options.on_stages(expected_stages(config, options.until))
    if options.resume and options.looks == 1:
        _check_no_look_is_forgotten(config.output)
    with RunDirectory.create(
        config.output,
        recorded(config),
        library_versions(),
        force=options.force,
        resume=options.resume,
    ) as directory:
        directory.on_stage = options.on_stage
        steps = Steps(config, directory, options.progress, looks=options.looks, signing_key=options.sign)
        return _run_stages(steps, options)


def _check_no_look_is_forgotten(directory: Path) -> None:
    """Refuse to go on, as if nothing had been seen, where a refresh looked at the certification rows.

    Raises:
        ConfigError: It did, and did not pass.
    """
    document = directory / REFRESH_DOCUMENT
    if not document.is_file():
        return
    found = serde.read(Refresh, document)
    if found.fallback and found.confidence > CONFIDENCE:
        raise ConfigError(
            "this directory is of a refresh that has looked at the certification rows once",
            where=str(document),
            evidence=f"{found.fallback}; a second look is held against {found.confidence:.1%} intervals",
            remedy="go on with `loka-onnx refresh --resume`, or start over with --force",
        )


def write_build_sample(steps: Steps) -> Path:
    """Write generated engine inputs for the first batches of builds → `calibration/sample.npz`."""
    rows = max(BUILD_ROWS, steps.config.batch.min)
    path = steps.directory.path / "calibration" / "sample.npz"
    return write_sample(steps.requests.taken_by_engines(steps.requests.sample(rows)), path)


def recorded(config: RunConfig) -> dict[str, Any]:
    """Return a run file for the record of its run: every key, and the given ones to read it again from.

    Those are JSON as text: a document sorts its keys, and the order of a builder's arguments may be
    that of the model's embedding tables.
    """
    given = json.dumps(config.model_dump(mode="json", exclude_unset=True))
    return {
        **config.model_dump(mode="json"),
        GIVEN: {"directory": str(config.directory), "values": given},
    }


def _run_stages(steps: Steps, options: RunOptions) -> RunResult:  # noqa: PLR0911 - one for each end
    config, directory = steps.config, steps.directory
    ended = RunResult(directory.path)

    with directory.undone_on_error():
        check_options(config)
        exported = steps.export()
        with directory.watched("check data"):
            steps.check_data()
            added = None if options.added is None else steps.open_added(options.added)
            if options.until is not Stage.EXPORT:
                # `export` lists the names that a wrong pattern should have had.
                check_plan_patterns(steps, exported)
    if options.until is Stage.EXPORT:
        return ended

    probed = _calibrated(steps, exported, options.only, added)
    if options.until is Stage.CALIBRATE:
        return ended

    merged = steps.modify(exported, probed)
    modified = steps.split_high_error(merged, steps.errors_to_leave(merged.model, steps.probing.merged))
    profile = steps.probing.recalibrate(modified.model, merged.model)
    split = steps.cut(modified.model)
    if options.until is Stage.TRANSFORM:
        return ended

    safe = climb_ladder(steps, exported, modified.model, profile)
    plans = steps.plan(modified.model, profile, safe)
    if options.until is Stage.PLAN:
        return ended

    sample = write_build_sample(steps)
    source = source_of(modified.model, plans, split)
    corrections = steps.correct(exported, modified.model, plans)
    built = build_engines(steps.builder(sample, corrections), source)
    if options.until is Stage.BUILD:
        return ended

    cut = {} if split is None else {"split": split.log}
    rewrites = {"mods": modified.log, **cut, **built.rewrites.logs}
    nothing = EvaluationSet(())
    results = Results(exported, modified.model, profile, plans, rewrites, built.engines, nothing, corrections)
    results = refine_engines(steps, results, sample)
    evaluations = steps.judging.evaluate(exported, results.engines, results.evaluations)
    results = replace(results, evaluations=evaluations)
    if options.until is Stage.EVALUATE:
        return ended

    results = attempt_again(steps, results, sample)
    choice = choose_engines(steps, results)
    engines, plans = results.engines.engines, results.plans
    loaded = measure_throughput(steps, engines, results.evaluations, plans, choice)
    results = replace(results, throughput=loaded)
    data = describe_run(steps, results, choice, options.label_rule)
    files = write_report(steps, data)
    if options.until is Stage.REPORT:
        return RunResult(directory.path, choice, data, files)

    bundle = emit_bundle(steps, results, choice, files)
    return RunResult(directory.path, choice, data, files, bundle)


def _calibrated(
    steps: Steps, exported: ModelArtifact, only: tuple[str, ...], added: Dataset | None
) -> Profile:
    if only:
        return steps.probing.again(exported, only)
    profile = steps.probing.calibrate(exported)
    return profile if added is None else steps.probing.add_rows(exported, profile, added)
