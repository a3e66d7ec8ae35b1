"""Outputs of a run: choice, report and bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from loka_onnx.bundle.contents import (
    DEFAULT_TOLERANCE,
    FP8_TOLERANCE,
    BundleContents,
    BundleEngine,
    BundleLookup,
    Expectation,
)
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.signing import signer_of
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.digests import digest_file
from loka_onnx.core.engine import BuildStatus, EngineArtifact, EngineSet
from loka_onnx.core.evaluation import Choice, Evaluation, EvaluationSet
from loka_onnx.core.manifest import BatchRange, Manifest
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.core.refined_run import RefinedRun
from loka_onnx.core.refinement import Refinement
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.core.throughput import ThroughputSet
from loka_onnx.graph.model_graph import read_model_graph
from loka_onnx.pipeline.directory import Stage, keyed
from loka_onnx.pipeline.job_results import choosable
from loka_onnx.pipeline.sample import Arrays
from loka_onnx.pipeline.splits import split_rule
from loka_onnx.pipeline.steps import Steps
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
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

CHOOSE = Stage("choose", "choice.json", Choice)
SAMPLE_ROWS = 16
"""Rows of the sample that a bundle carries, where engines take so many."""
SIMULATION_MARGIN = 4.0
"""A loader's tolerance for an engine that could not run here: this many times the largest change of the
output that the simulation of its plan showed."""


@dataclass(frozen=True)
class Results:
    """Everything that a run found, before it is emitted."""

    exported: ModelArtifact
    modified: ModelArtifact
    profile: Profile
    plans: PlanSet
    rewrites: dict[str, RewriteLog]
    engines: EngineSet
    evaluations: EvaluationSet
    corrections: CorrectionSet
    refinement: Refinement = field(default_factory=Refinement)
    throughput: ThroughputSet = field(default_factory=ThroughputSet)

    def with_added(self, added: RefinedRun) -> Results:
        """Return the results with further plans, their engines and what was judged of them."""
        plans, engines, corrections = self.plans, self.engines, self.corrections
        return replace(
            self,
            plans=replace(plans, plans=(*plans.plans, *added.plans)),
            engines=replace(engines, engines=(*engines.engines, *added.engines)),
            corrections=replace(corrections, plans=(*corrections.plans, *added.corrections.plans)),
            rewrites={**self.rewrites, **added.rewrites.logs},
            evaluations=EvaluationSet((*self.evaluations.evaluations, *added.evaluations.evaluations)),
        )


def choice_options(steps: Steps) -> ChoiceOptions:
    """Return the options of the choice."""
    serving = steps.config.serving
    return ChoiceOptions(serving.by_batch, serving.margin)


def choose_engines(steps: Steps, results: Results) -> Choice:
    """Choose one engine per target, or several by batch size → `choice.json`."""
    options = choice_options(steps)
    reads = {
        "engines": results.engines,
        "evaluations": results.evaluations,
        "plans": results.plans,
        "options": [options.by_batch, options.margin, options.noise],
    }
    return steps.directory.document(
        CHOOSE,
        reads,
        lambda: choose(choosable(results.engines.engines), results.evaluations, results.plans, options),
    )


def describe_run(steps: Steps, results: Results, choice: Choice, label_rule: str) -> ReportData:
    """Collect the facts of the report."""
    rule = split_rule(steps.config)
    splits = steps.splits
    named = {
        "calibration": splits.calibration,
        "selection": splits.selection,
        "certification": splits.certification,
    }
    model = results.modified
    return ReportData(
        title=steps.config.name,
        exported=results.exported,
        modified=results.modified,
        profile=results.profile,
        plans=results.plans,
        rewrites=results.rewrites,
        engines=results.engines.engines,
        evaluations=results.evaluations,
        choice=choice,
        corrections=results.corrections,
        refinement=results.refinement,
        throughput=results.throughput,
        data=DataDescription(
            tuple(SplitDescription(name, d.name, d.rows, d.digest, rule) for name, d in named.items()),
            label_rule or ", ".join(_label_rule(spec) for spec in steps.specs),
            steps.config.data.synthetic,
        ),
        versions=_versions(steps),
        lineage=steps.directory.before("report"),
        notes=tuple(_notes(steps)),
        graph=read_model_graph(steps.directory.path / model.path, [site.name for site in model.sites]),
    )


def _versions(steps: Steps) -> dict[str, str]:
    """Libraries of every stage, and those that engines were built with."""
    return steps.directory.record.versions | backend_versions(steps.config.targets)


def _notes(steps: Steps) -> Iterator[str]:
    yield from steps.notes
    if steps.split is not None:
        yield steps.split.note
    if steps.looks > 1:
        confidence = steps.judging.certification.confidence
        yield (
            f"The certification rows may be looked at {steps.looks} times for this model: to certify what a "
            "refresh kept and, where that fails, what a full run then chooses. Their error of 5 % is divided "
            f"(Bonferroni): intervals on certification hold with {confidence:.1%}."
        )


def _label_rule(spec: OutputSpec) -> str:
    return f"{spec.name}: no labels" if spec.label is None else f"{spec.name}: column '{spec.label}' as given"


def write_report(steps: Steps, data: ReportData) -> tuple[Path, ...]:
    """Write the report → `report.json`, `report.md`, `report.html`."""
    root = steps.directory.path
    files = tuple(root / name for name in (JSON_NAME, MARKDOWN_NAME, HTML_NAME))
    # Of another schema it is written anew, from equal facts too.
    key = {"schema": ReportData.SCHEMA, "facts": serde.to_plain(data)}
    return steps.directory.stage("report", key, lambda: render(data, root), lambda: files)


def emit_bundle(steps: Steps, results: Results, choice: Choice, report: Sequence[Path]) -> Path:
    """Write the chosen engines, the exact model and a sample → `bundle/`."""
    bundle = steps.directory.path / "bundle"

    def produce() -> Sequence[Path]:
        written = _write_bundle(steps, results, choice, report)
        return [path for path in sorted(written.rglob("*")) if path.is_file()]

    def load() -> Path:
        verify_bundle(bundle)
        return bundle

    reads = {
        "choice": choice,
        "engines": results.engines,
        "exported": results.exported,
        "split": () if steps.split is None else steps.split.digests,
        "batch": steps.config.batch,
        "report": [digest_file(path) for path in report],
        "schema": Manifest.SCHEMA,
        "signer": None if steps.signing_key is None else signer_of(steps.signing_key),
    }
    return steps.directory.stage("bundle", keyed(reads), produce, load)


def _write_bundle(steps: Steps, results: Results, choice: Choice, report: Sequence[Path]) -> Path:
    root = steps.directory.path
    sample = steps.requests.sample(steps.judging.as_batch(SAMPLE_ROWS))
    exact = OnnxSession(results.exported.path, SessionOptions(threads=steps.threads)).run(sample)
    fallback = Expectation(exact, dict.fromkeys(exact, DEFAULT_TOLERANCE))
    by_id = {engine.id: engine for engine in results.engines.engines}
    chosen = dict.fromkeys(name for target in choice.targets for name in target.engines)
    engines = [
        _bundled(steps, results, by_id[name], sample, fallback) for name in chosen if by_id[name].is_built
    ]
    batch = steps.config.batch
    return write_bundle(
        BundleContents(
            root=root,
            model=results.exported,
            judged=steps.specs,
            batch=BatchRange(batch.min, batch.max),
            engines=tuple(engines),
            fallback=fallback,
            sample=sample,
            plans=results.plans,
            choice=choice,
            report=tuple(report),
            lineage=steps.directory.before("bundle"),
            versions=_versions(steps),
            lookup=_bundled_lookup(steps, sample),
        ),
        root / "bundle",
        key=steps.signing_key,
    )


def _bundled_lookup(steps: Steps, sample: Arrays) -> BundleLookup | None:
    if steps.split is None or steps.split.halves is None:
        return None
    halves, taken = steps.split.halves, steps.requests.taken_by_engines(sample)
    return BundleLookup(halves, {spec.name: taken[spec.name] for spec in halves.cut})


def _bundled(
    steps: Steps, results: Results, engine: EngineArtifact, sample: Arrays, fallback: Expectation
) -> BundleEngine:
    try:
        evaluation = _without_slices(results.evaluations.of(engine.id, "certification"))
    except KeyError:
        evaluation = None
    if engine.status is BuildStatus.READY:
        with ExitStack() as stack:
            outputs = dict(steps.judging.open_engine(engine, stack)(sample))
        return BundleEngine(
            engine, Expectation(outputs, dict.fromkeys(outputs, DEFAULT_TOLERANCE)), evaluation
        )
    moved = _simulated_change(results, engine.plan)
    tolerance = {
        name: max(FP8_TOLERANCE, SIMULATION_MARGIN * moved.get(name, 0.0)) for name in fallback.outputs
    }
    return BundleEngine(engine, Expectation(fallback.outputs, tolerance), evaluation)


def _without_slices(evaluation: Evaluation) -> Evaluation:
    """Drop slices, which may be thousands: a loader reads the manifest at every start."""
    outputs = (replace(output, slices=(), slices_left_out={}) for output in evaluation.outputs)
    return replace(evaluation, outputs=tuple(outputs))


def _simulated_change(results: Results, plan: str) -> dict[str, float]:
    """Return the largest change of each output in the simulation of a plan."""
    return {
        output.output: output.difference.delta_max
        for evaluation in results.evaluations.evaluations
        if evaluation.plan == plan
        for output in evaluation.outputs
        if output.difference is not None
    }
