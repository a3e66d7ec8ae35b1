"""The whole pipeline: the list of its stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from loka_onnx.bundle.signing import signer_of
from loka_onnx.config import RunConfig, load_run_file
from loka_onnx.core import serde
from loka_onnx.core.evaluation import Choice
from loka_onnx.core.lineage import REFRESH_NAME, Refresh
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.rewrite import ModelSplit, RewriteLog
from loka_onnx.core.tables import Rows, Tabular
from loka_onnx.errors import ConfigError
from loka_onnx.numerics.intervals import CONFIDENCE
from loka_onnx.pipeline.accepting import accept
from loka_onnx.pipeline.candidates import Built, build_engines
from loka_onnx.pipeline.context import RunSettings
from loka_onnx.pipeline.correcting import Correcting
from loka_onnx.pipeline.directory import RunDirectory, StageOutcome
from loka_onnx.pipeline.emission import Results, choose_engines, emit_bundle, notes_of, write_report
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.ladder_stage import attempt_again, climb_ladders
from loka_onnx.pipeline.mods import allowed_errors, modify_and_measure, split_high_error
from loka_onnx.pipeline.outlook import Outlook
from loka_onnx.pipeline.plans import decide_plans
from loka_onnx.pipeline.probing import Probing
from loka_onnx.pipeline.refining import refine_engines
from loka_onnx.pipeline.serving import measure_throughput
from loka_onnx.pipeline.sharing import share_features
from loka_onnx.pipeline.splitting import cut_model
from loka_onnx.pipeline.versions import library_versions
from loka_onnx.planning.choice import check_built
from loka_onnx.report import ReportData
from loka_onnx.report.summary import engine_rows, target_rows
from loka_onnx.transforms.sequence import Rewritten

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
    Stage.TRANSFORM: ("mods", "loud channels", "recalibrate", "split", "request"),
    Stage.PLAN: ("ladder", "plan"),
    Stage.BUILD: ("correct", "build"),
    Stage.EVALUATE: ("refine", "evaluate"),
    Stage.REPORT: ("choose", "throughput", "report"),
    Stage.BUNDLE: ("bundle",),
}
"""Stages up to each end, as the record names them."""


def expected_stages(config: RunConfig | None, until: Stage = Stage.BUNDLE) -> tuple[str, ...]:
    """Names of the stages of a run, in order; ``refine`` begins only where a device here runs FP8."""
    left_out = {
        "split": config is None or not config.model.split_sparse,
        "request": config is None or config.data.request is None,
        "refine": config is not None and config.refine.rounds == 0,
        "throughput": config is None or config.serving.p99_ms is None,
    }
    ends = list(Stage)
    names = (name for end in ends[: ends.index(until) + 1] for name in STAGES[end])
    return tuple(name for name in names if not left_out.get(name, False))


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """Reporting of a run, and the private key (PEM) to `sign` its bundle with.

    `on_stage` is called when a stage begins (with None) and when it ends; `on_stages` with the names of the
    stages to come, also where a refresh becomes a full run (unnecessary ones never begin); `on_outlook` with
    what to expect, before the first long stage.
    """

    sign: Path | None = None
    progress: Progress = silent
    on_stage: Callable[[str, StageOutcome | None], None] = field(default=lambda stage, outcome: None)
    on_stages: Callable[[Sequence[str]], None] = field(default=lambda stages: None)
    on_outlook: Callable[[Outlook], None] = field(default=lambda outlook: None)

    def reporting(self) -> dict[str, Any]:
        """These options alone."""
        return {item.name: getattr(self, item.name) for item in fields(Reporting)}


@dataclass(frozen=True, kw_only=True)
class RunOptions(Reporting):
    """Options of a run: its directory, and how it reports itself.

    `force` starts over in the directory of an earlier run, `resume` takes over its finished stages, `until`
    is the last stage to run. Rows of the data file `added` join the profile; `label_rule` says what labels
    mean. `looks` are the certification attempts for this model, which divide the error.
    """

    force: bool = False
    resume: bool = False
    until: Stage = Stage.BUNDLE
    added: Path | None = None
    label_rule: str = ""
    looks: int = 1


@dataclass(frozen=True, repr=False)
class RunResult(Tabular):
    """Result of a run; None for what a run that ended earlier has not made."""

    directory: Path
    choice: Choice | None = None
    report: ReportData | None = None
    report_files: tuple[Path, ...] = ()
    bundle: Path | None = None

    @property
    def title(self) -> str:
        """The directory, and the result on each target in a line."""
        sentences = [row["sentence"] for row in target_rows(self.report)] if self.report else []
        return "\n".join([f"RunResult({str(self.directory)!r})", *sentences])

    def records(self) -> Rows:
        """Return every candidate on the last split that it was judged on: fractions and microseconds."""
        return engine_rows(self.report) if self.report else []


def run(config: RunConfig | str | Path, options: RunOptions | None = None) -> RunResult:
    """Turn a trained model into the fastest engine that is still accurate.

    Raises UserError if the configuration or an input is wrong, or another run is at work in the directory;
    StageError if a stage cannot finish.
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
        config.output, recorded(config), library_versions(), force=options.force, resume=options.resume
    ) as directory:
        directory.on_stage = options.on_stage
        settings = RunSettings(config, directory, options.progress, options.looks, options.sign)
        return next(result for stage, result in _stages(settings, options) if stage is options.until)


def _check_no_look_is_forgotten(directory: Path) -> None:
    """Refuse to go on, as if nothing had been seen, where a refresh looked at the certification rows."""
    document = directory / REFRESH_NAME
    if not document.is_file():
        return
    earlier = serde.read(Refresh, document)
    if earlier.fallback and earlier.confidence > CONFIDENCE:
        raise ConfigError(
            "E1525 this directory is of a refresh that has looked at the certification rows once",
            where=str(document),
            evidence=f"{earlier.fallback}; a second look is held against {earlier.confidence:.1%} intervals",
            remedy="go on with `loka-onnx refresh --resume`, or start over with --force",
        )


def recorded(config: RunConfig) -> dict[str, Any]:
    """Return a run file for the record of its run: every key, and the given ones as text, in their order."""
    given = json.dumps(config.model_dump(mode="json", exclude_unset=True))
    return {**config.model_dump(mode="json"), GIVEN: {"directory": str(config.directory), "values": given}}


def _stages(settings: RunSettings, options: RunOptions) -> Iterator[tuple[Stage, RunResult]]:
    """Run the stages; yields what there is at each end."""
    directory = settings.directory
    ended = RunResult(directory.path)

    with directory.undone_on_error():
        # `export` lists the names that a wrong pattern should have had.
        accepted = accept(settings, added=options.added, goes_on=options.until is not Stage.EXPORT)
    context = accepted.context
    options.on_outlook(accepted.outlook)
    yield Stage.EXPORT, ended

    probing = Probing(context)
    probed = probing.calibrate()
    if accepted.added is not None:
        probed = probing.add_rows(probed, accepted.added)
    yield Stage.CALIBRATE, ended

    merged = modify_and_measure(context, probed, probing)
    modified = split_high_error(context, merged, allowed_errors(context, merged))
    profile = probing.recalibrate(modified.model, merged.model, merged.profile)
    judging = Judging(context, cut_model(context, modified.model), share_features(context, modified.model))
    yield Stage.TRANSFORM, ended

    safe = climb_ladders(context, modified.model, profile)
    plans = decide_plans(context, modified.model, profile, safe)
    yield Stage.PLAN, ended

    corrections = Correcting(context, modified.model).correct(plans)
    built = build_engines(judging, modified.model, plans, corrections)
    yield Stage.BUILD, ended

    check_built(built.engines.engines)
    rewrites = rewrites_of(modified, judging.split, built)
    results = Results(modified.model, profile, plans, rewrites, built.engines, corrections)
    results = refine_engines(judging, results)
    results = replace(results, evaluations=judging.evaluate(results.engines, results.evaluations))
    yield Stage.EVALUATE, ended

    results = attempt_again(judging, results)
    choice = choose_engines(context, results)
    results = replace(results, throughput=measure_throughput(judging, results, choice))
    notes = (*accepted.notes, *notes_of(judging))
    report, files = write_report(judging, results, choice, notes, options.label_rule)
    ended = RunResult(directory.path, choice, report, files)
    yield Stage.REPORT, ended

    yield Stage.BUNDLE, replace(ended, bundle=emit_bundle(judging, results, choice, files))


def rewrites_of(modified: Rewritten, split: ModelSplit | None, built: Built) -> dict[str, RewriteLog]:
    """Everything that was rewritten, by its place in the report."""
    cut = {} if split is None else {"split": split.log}
    return {"mods": modified.log, **cut, **built.rewrites.logs}
