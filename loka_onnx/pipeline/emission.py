"""Outputs of a run: choice, report and bundle."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.signing import signer_of
from loka_onnx.bundle.writer import (
    DEFAULT_TOLERANCE,
    FP8_TOLERANCE,
    BundleContents,
    BundleEngine,
    BundleLookup,
    Expectation,
    write_bundle,
)
from loka_onnx.config import RunConfig
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.digests import digest_file
from loka_onnx.core.engine import BuildStatus, EngineArtifact, EngineSet
from loka_onnx.core.evaluation import Choice, EvaluationSet
from loka_onnx.core.manifest import BatchRange, Manifest
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.core.refinement import RefinedRun, Refinement
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.core.throughput import ThroughputSet
from loka_onnx.graph.model_graph import read_model_graph
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.pipeline.job_results import choosable
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.rows import split_rule
from loka_onnx.pipeline.versions import backend_versions
from loka_onnx.planning.choice import ChoiceOptions, choose
from loka_onnx.report import (
    HTML_NAME,
    JSON_NAME,
    MARKDOWN_NAME,
    DataDescription,
    ReportData,
    SplitDescription,
    render,
)
from loka_onnx.sessions.runner import Arrays

CHOOSE = DocumentStage("choose", "choice.json", Choice)
SAMPLE_ROWS = 16
"""Rows of the sample that a bundle carries, where engines take so many."""
SIMULATION_MARGIN = 4.0
"""A loader's tolerance for an engine that could not run here: this many times the largest change of the
output that the simulation of its plan showed."""


@dataclass(frozen=True)
class Results:
    """Everything that a run found, before it is emitted."""

    modified: ModelArtifact
    profile: Profile
    plans: PlanSet
    rewrites: dict[str, RewriteLog]
    engines: EngineSet
    corrections: CorrectionSet
    evaluations: EvaluationSet = field(default_factory=lambda: EvaluationSet(()))
    refinement: Refinement = field(default_factory=Refinement)
    throughput: ThroughputSet = field(default_factory=ThroughputSet)

    def with_added(self, added: RefinedRun) -> Results:
        """Return the results with further plans, their engines and what was judged of them."""
        judged = (*self.evaluations.evaluations, *added.evaluations.evaluations)
        return replace(
            self,
            plans=replace(self.plans, plans=(*self.plans.plans, *added.plans)),
            engines=EngineSet((*self.engines.engines, *added.engines)),
            corrections=CorrectionSet((*self.corrections.plans, *added.corrections.plans)),
            rewrites={**self.rewrites, **added.rewrites.logs},
            evaluations=replace(self.evaluations, evaluations=judged),
        )


def choice_options(config: RunConfig) -> ChoiceOptions:
    """Return the options of the choice."""
    return ChoiceOptions(config.serving.by_batch, config.serving.margin)


def choose_engines(context: Context, results: Results) -> Choice:
    """Choose one engine per target, or several by batch size → `choice.json`."""
    options = choice_options(context.config)
    reads = {
        "engines": results.engines,
        "evaluations": results.evaluations,
        "plans": results.plans,
        "options": [options.by_batch, options.margin, options.noise],
    }
    return context.directory.document(
        CHOOSE,
        reads,
        lambda: choose(choosable(results.engines.engines), results.evaluations, results.plans, options),
    )


def write_report(
    judging: Judging, results: Results, choice: Choice, notes: Sequence[str], label_rule: str = ""
) -> tuple[ReportData, tuple[Path, ...]]:
    """Collect the facts of the report, and write its files → `report.json`, `report.md`, `report.html`.

    `notes` are facts of the model and of the run for the reader; `label_rule` says what the labels mean.
    """
    context, model = judging.context, results.modified
    rule, root = split_rule(context.config), context.directory.path
    named = ((name, getattr(context.splits, name)) for name in ("calibration", "selection", "certification"))
    labels = (
        f"{s.name}: no labels" if s.label is None else f"{s.name}: column '{s.label}' as given"
        for s in context.specs
    )
    data = ReportData(
        title=context.config.name,
        exported=context.exported,
        **{**vars(results), "engines": results.engines.engines},
        choice=choice,
        data=DataDescription(
            tuple(SplitDescription(name, d.name, d.rows, d.digest, rule, d.path.name) for name, d in named),
            label_rule or ", ".join(labels),
            context.config.data.synthetic,
        ),
        versions=_versions(context),
        lineage=context.directory.before("report"),
        notes=tuple(notes),
        graph=read_model_graph(root / model.path, [site.name for site in model.sites]),
    )
    files = tuple(root / name for name in (JSON_NAME, MARKDOWN_NAME, HTML_NAME))
    # Of another schema it is written anew, from equal facts too.
    reads = {"schema": ReportData.SCHEMA, "facts": serde.to_plain(data)}
    context.directory.stage("report", reads, lambda: render(data, root), lambda: files)
    return data, files


def notes_of(judging: Judging) -> tuple[str, ...]:
    """Notes on the cut of the model, its request form and the looks at certification, for the report."""
    context, asked = judging.context, (judging.split, judging.users)
    cut = tuple(each.note for each in asked if each is not None)
    if context.looks == 1:
        return cut
    return (
        *cut,
        f"The certification rows may be looked at {context.looks} times for this model: to certify what "
        "a refresh kept and, where that fails, what a full run then chooses. Their error of 5 % is "
        f"divided (Bonferroni): intervals on certification hold with {context.certification.confidence:.1%}.",
    )


def _versions(context: Context) -> dict[str, str]:
    """Libraries of every stage, and those that engines were built with."""
    return context.directory.record.versions | backend_versions(context.config.targets)


def emit_bundle(judging: Judging, results: Results, choice: Choice, report: Sequence[Path]) -> Path:
    """Write the chosen engines, the exact model and a sample → `bundle/`."""
    context, bundle = judging.context, judging.context.path("bundle")

    def produce() -> list[Path]:
        write_bundle(_contents(judging, results, choice, report), bundle, key=context.signing_key)
        return [path for path in sorted(bundle.rglob("*")) if path.is_file()]

    def load() -> Path:
        verify_bundle(bundle)
        return bundle

    reads = {
        "choice": choice,
        "engines": results.engines,
        "exported": context.exported,
        "split": () if judging.split is None else judging.split.digests,
        "users": judging.users,
        "batch": context.config.batch,
        "report": [digest_file(path) for path in report],
        "schema": Manifest.SCHEMA,
        "signer": None if context.signing_key is None else signer_of(context.signing_key),
    }
    return context.directory.stage("bundle", reads, produce, load)


def _contents(judging: Judging, results: Results, choice: Choice, report: Sequence[Path]) -> BundleContents:
    context = judging.context
    sample = context.requests.sample(context.as_batch(SAMPLE_ROWS))
    exact = context.open_exported().run(sample)
    fallback = Expectation(exact, dict.fromkeys(exact, DEFAULT_TOLERANCE))
    by_id = {engine.id: engine for engine in results.engines.engines}
    chosen = dict.fromkeys(name for target in choice.targets for name in target.engines)
    built = [by_id[name] for name in chosen if by_id[name].is_built]
    lookup = None
    if judging.split is not None and (halves := judging.split.halves) is not None:
        taken = judging.taken_by_engines(sample)
        lookup = BundleLookup(halves, {spec.name: taken[spec.name] for spec in halves.cut})
    return BundleContents(
        root=context.directory.path,
        model=context.exported,
        judged=context.specs,
        batch=BatchRange(context.config.batch.min, context.config.batch.max),
        engines=tuple(_bundled(judging, results, engine, sample, fallback) for engine in built),
        fallback=fallback,
        sample=sample,
        plans=results.plans,
        choice=choice,
        report=tuple(report),
        lineage=context.directory.before("bundle"),
        versions=_versions(context),
        lookup=lookup,
        shared=() if judging.users is None else judging.users.inputs,
    )


def _bundled(
    judging: Judging, results: Results, engine: EngineArtifact, sample: Arrays, fallback: Expectation
) -> BundleEngine:
    evaluations = results.evaluations.evaluations
    same = (e for e in evaluations if (e.engine, e.split) == (engine.id, "certification"))
    if (evaluation := next(same, None)) is not None:
        # Slices may be thousands, and a loader reads the manifest at every start.
        outputs = (replace(output, slices=(), slices_left_out={}) for output in evaluation.outputs)
        evaluation = replace(evaluation, outputs=tuple(outputs))
    if engine.status is BuildStatus.READY:
        with ExitStack() as stack:
            answers = dict(judging.open_engine(engine, stack)(sample))
        expected = Expectation(answers, dict.fromkeys(answers, DEFAULT_TOLERANCE))
        return BundleEngine(engine, expected, evaluation)
    # The largest change of each output in the simulation of the plan.
    moved = {
        output.output: output.difference.delta_max
        for judged in evaluations
        if judged.plan == engine.plan
        for output in judged.outputs
        if output.difference is not None
    }
    tolerance = {
        name: max(FP8_TOLERANCE, SIMULATION_MARGIN * moved.get(name, 0.0)) for name in fallback.outputs
    }
    return BundleEngine(engine, Expectation(fallback.outputs, tolerance), evaluation)
