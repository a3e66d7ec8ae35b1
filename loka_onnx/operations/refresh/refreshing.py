"""Refresh: apply the decisions of an earlier run to a retrained checkpoint.

Kept: sites, which of them run in eight bits and under which recipe, which engines are built, timings. Done
again: the export, the mods (they write weights), ranges and scales, corrections, the engines that the earlier
run chose, and their certification. Where that does not hold on the new weights, everything is done anew, in
the same directory, and its certification counts as the second look at those rows (`core.lineage`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import log
from pathlib import Path
from typing import Any

from loka_onnx.bundle.signing import signer_of
from loka_onnx.calibration.calibrate import measured_recipes
from loka_onnx.config import RunConfig, build_run_config
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.engine import BuildStatus, EngineArtifact, EngineSet
from loka_onnx.core.evaluation import BudgetStatus, Evaluation, EvaluationSet
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval
from loka_onnx.core.lineage import LOOKS, REFRESH_NAME, OutputMove, Refresh, SiteMove
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, Protection
from loka_onnx.core.profile import Profile
from loka_onnx.errors import BudgetMissed, ConfigError, ModelError
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.structure import differences
from loka_onnx.numerics.intervals import CONFIDENCE
from loka_onnx.operations.refresh.earlier import EarlierRun
from loka_onnx.pipeline.accepting import accept, export_model
from loka_onnx.pipeline.candidates import build_engines
from loka_onnx.pipeline.context import Context, RunSettings
from loka_onnx.pipeline.correcting import Correcting
from loka_onnx.pipeline.directory import DocumentStage, RunDirectory
from loka_onnx.pipeline.emission import CHOOSE, Results, emit_bundle, notes_of, write_report
from loka_onnx.pipeline.job_results import choosable
from loka_onnx.pipeline.judging import EVALUATE, Judging
from loka_onnx.pipeline.mods import modify, split_high_error
from loka_onnx.pipeline.probing import Probing
from loka_onnx.pipeline.run import Reporting, RunOptions, RunResult, recorded, rewrites_of, run
from loka_onnx.pipeline.sharing import share_features
from loka_onnx.pipeline.splitting import cut_model
from loka_onnx.pipeline.versions import library_versions
from loka_onnx.planning.base import Bases, with_scales
from loka_onnx.planning.costs import Costs
from loka_onnx.planning.fp16 import scale_fits
from loka_onnx.report.data import CERTIFICATION

REPLAN = DocumentStage("replan", "plan.json", PlanSet)
STAGES = (
    "export", "check data", "compare", "mods", "loud channels", "split", "refresh", "replan", "correct",
    "build", "evaluate", "choose", "report", "bundle",
)  # fmt: skip
"""Stages of a refresh, as its record names them."""
CORRECTION_ROWS = 16_384
"""Rows that corrections are fitted to, and selection rows that decide which are kept, at most: a mean is then
known to .008 of its spread, and certification judges what comes of it."""


@dataclass(frozen=True, kw_only=True)
class RefreshOptions(Reporting):
    """Options of a refresh: its directory, and how it reports itself.

    Attributes:
        output: The run directory; None for one beside the earlier run, named after both.
        overrides: Values that replace those of the earlier run file, by dotted key.
        force: Start over in a directory that holds an earlier run.
        resume: Go on with a refresh that was interrupted, or that waited for build jobs.
        may_fall_back: Whether everything is done anew where the earlier decisions do not hold.
    """

    output: Path | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)
    force: bool = False
    resume: bool = False
    may_fall_back: bool = True


@dataclass(frozen=True)
class RefreshResult:
    """The run directory with choice, report and bundle, and the changes from the earlier run."""

    run: RunResult
    refresh: Refresh


class _Outdated(Exception):
    """The earlier decisions do not hold: no error, but another way to go on."""

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
        settings = RunSettings(config, directory, options.progress, LOOKS, options.sign)
        attempt = _Attempt(settings, before)
        outcome = attempt.earlier_failure() if options.resume else None
        if outcome is None:
            result, reason = None, ""
            try:
                result = attempt.run()
            except _Outdated as outdated:
                if not options.may_fall_back:
                    raise _refusal(before, outdated) from outdated
                reason = outdated.reason
            outcome = attempt.described(reason, time.perf_counter() - began)
            # A look at the certification rows is never forgotten, also where the full run is interrupted.
            serde.write(outcome, directory.path / REFRESH_NAME)
            if result is not None:
                return RefreshResult(result, outcome)
        for stage in ("refresh", "replan"):
            directory.forget(stage)
    looks = LOOKS if outcome.confidence > CONFIDENCE else 1
    result = run(config, RunOptions(resume=True, looks=looks, **options.reporting()))
    outcome = replace(outcome, seconds=time.perf_counter() - began)
    serde.write(outcome, result.directory / REFRESH_NAME)
    return RefreshResult(result, outcome)


def _refusal(before: EarlierRun, outdated: _Outdated) -> ModelError | BudgetMissed:
    looks, rows = "", ""
    if outdated.error is BudgetMissed:
        looks, rows = ", which counts both looks at the certification rows", " with other certification rows"
    return outdated.error(
        "the decisions of the earlier run do not hold for this model",
        where=str(before.directory),
        evidence=outdated.reason,
        remedy=f"leave out --no-fallback{looks}, or run the whole pipeline on it{rows}",
    )


def _configured(before: EarlierRun, model: Path, options: RefreshOptions) -> RunConfig:
    """The earlier run file with the retrained model in it."""
    values: dict[str, Any] = dict(before.config)
    section = dict(values["model"])
    if not model.is_file():
        raise ModelError(
            "E1636 the retrained model is missing", where=str(model), evidence="there is no such file"
        )
    if model.suffix == ".onnx":
        kept = {key: value for key, value in section.items() if key == "split_sparse"}
        section = {**kept, "onnx": str(model)}
    elif section.get("torch") is None:
        raise ConfigError(
            f"E1637 '{model.name}' is no ONNX file, and the earlier run began with one",
            where="--model",
            evidence=f"'{before.directory}' was made from '{section.get('onnx')}'",
            remedy="give the retrained model as .onnx",
        )
    else:
        section["checkpoint"] = str(model)
    name = f"{before.directory.name}-{model.stem}"
    output = options.output or before.directory.with_name(name)
    values |= {"model": section, "output": str(output.absolute())}
    # This host may detect other formats of the targets.
    plan = values.get("plan") or {}
    if not plan.get("formats") and before.profile.precisions:
        values["plan"] = {**plan, "formats": [str(precision) for precision in before.profile.precisions]}
    config = build_run_config(
        values, before.base, source=f"the run file of '{before.directory}'", overrides=options.overrides
    )
    if config.output == before.directory:
        raise ConfigError(
            "E1638 a refresh needs a directory of its own",
            where="--output",
            evidence=f"'{config.output}' is the run that is refreshed",
            remedy="name another directory",
        )
    return config


@dataclass
class _Attempt:
    """An attempt to keep the earlier run's decisions, with its results so far."""

    settings: RunSettings
    before: EarlierRun
    context: Context | None = None
    profile: Profile | None = None
    plans: PlanSet = field(default_factory=lambda: PlanSet(()))
    evaluations: EvaluationSet = field(default_factory=lambda: EvaluationSet(()))

    def earlier_failure(self) -> Refresh | None:
        """Outcome of a refresh whose full run was interrupted; None if there is none."""
        document = self.settings.path(REFRESH_NAME)
        if not document.is_file():
            return None
        earlier = serde.read(Refresh, document)
        with self.settings.directory.undone_on_error():
            model = export_model(self.settings).digest
        is_same = (earlier.earlier, earlier.model) == (self.before.directory, model)
        return earlier if is_same and earlier.fallback else None

    def described(self, fallback: str, seconds: float) -> Refresh:
        """Changes against the earlier run that are known so far."""
        profile, before = self.profile, self.before
        has_looked = bool(self.evaluations.evaluations) or not fallback
        return Refresh(
            earlier=before.directory,
            earlier_model=before.exported.digest,
            model="" if self.context is None else self.context.exported.digest,
            sites=() if profile is None else site_moves(before, profile, self.plans),
            outputs=output_moves(before.evaluations, self.evaluations),
            fallback=fallback,
            confidence=self.context.certification.confidence if self.context and has_looked else CONFIDENCE,
            seconds=seconds,
            earlier_seconds=before.seconds,
        )

    def run(self) -> RunResult:
        """Every stage of a refresh."""
        before, directory = self.before, self.settings.directory
        with directory.undone_on_error():
            accepted = accept(self.settings, goes_on=False)
        context = self.context = accepted.context
        with directory.watched("compare"):
            if changed := differences(before.exported.path, context.exported.path):
                raise _Outdated(f"the structure of the model differs: {'; '.join(changed)}", ModelError)
        modified = split_high_error(context, modify(context), before.high_error_channels)
        _compare_sites(before.modified, modified.model)
        judging = Judging(
            context, cut_model(context, modified.model), share_features(context, modified.model)
        )
        profile = Probing(context).refresh(modified.model, measured_recipes(before.profile))
        self.profile = profile
        plans = self.plans = _replanned(context, before, modified.model, profile)
        corrections = Correcting(context, modified.model, CORRECTION_ROWS).correct(plans)
        built = build_engines(judging, modified.model, plans, corrections, before.wanted)
        for engine in _chosen(before, built.engines):
            if not engine.is_built and engine.status is not BuildStatus.WAITING:
                raise _Outdated(f"engine '{engine.id}' {engine.status}: {engine.detail}", ModelError)
        evaluations = self.evaluations = _certify(judging, before, built.engines)
        _check_certified(before, built.engines, evaluations)

        rewrites = rewrites_of(modified, judging.split, built)
        results = Results(modified.model, profile, plans, rewrites, built.engines, corrections, evaluations)
        # As in a full run: a target that waits for its build job has no choice yet.
        choice = directory.document(
            CHOOSE,
            {"choice": before.choice, "engines": built.engines},
            lambda: before.choice_again(choosable(built.engines.engines, "refresh --resume")),
        )
        notes = (*accepted.notes, *notes_of(judging), before.note)
        report, files = write_report(judging, results, choice, notes)
        return RunResult(directory.path, choice, report, files, emit_bundle(judging, results, choice, files))


def _compare_sites(before: ModelArtifact, modified: ModelArtifact) -> None:
    """Refuse other sites: mods read weights, and may rewrite a model of the same structure otherwise."""
    was, now = (
        {site.name: (site.kind, site.k, site.n, site.rows) for site in model.sites}
        for model in (before, modified)
    )
    if was != now:
        names = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
        raise _Outdated(f"mods lead to other sites: {', '.join(names[:8])}", ModelError)


def _replanned(context: Context, before: EarlierRun, modified: ModelArtifact, profile: Profile) -> PlanSet:
    """Write the plans of the engines to build, with new scales → `plan.json`."""
    wanted = [plan for plan in before.plans.plans if plan.id in before.wanted_plans]
    models = {plan.id: context.exported if plan.untouched else modified for plan in wanted}
    for plan in wanted:
        if reason := unproven_reason(plan, models[plan.id], profile, context.config.plan.protect):
            raise _Outdated(reason, ModelError)

    def make() -> PlanSet:
        again = tuple(with_new_scales(plan, models[plan.id], profile, context.specs) for plan in wanted)
        return PlanSet(again, before.plans.notes, able_share=before.plans.able_share)

    return context.directory.document(REPLAN, {"plans": wanted, "profile": profile}, make)


def _chosen(before: EarlierRun, engines: EngineSet) -> list[EngineArtifact]:
    return [engine for engine in engines.engines if engine.id in before.chosen]


def _certify(judging: Judging, before: EarlierRun, engines: EngineSet) -> EvaluationSet:
    """Judge the chosen engines, or their simulations, on certification → `evaluation.json`."""
    context, config = judging.context, judging.context.config
    split = context.certification
    judged = [engine for engine in engines.engines if engine.id in before.judged]
    reads = {
        "refresh": [engine.digest or engine.detail for engine in judged],
        "elsewhere": judging.elsewhere.key(judged),
        "exported": context.exported,
        "data": split.data,
        "looks": context.looks,
        "outputs": config.outputs,
        "group": config.data.group,
        "slices": config.data.slices,
    }
    return context.directory.document(
        EVALUATE, reads, lambda: EvaluationSet(tuple(judging.judge(split, judged)), f"{datetime.now(UTC):%F}")
    )


def _check_certified(before: EarlierRun, engines: EngineSet, evaluations: EvaluationSet) -> None:
    """Check every emitted engine against the budget: on its own outputs, or on its plan's."""
    measured = [evaluation for evaluation in evaluations.evaluations if evaluation.outputs]
    for engine in _chosen(before, engines):
        own = [e for e in measured if e.engine == engine.id]
        judged = own or [e for e in measured if e.plan == engine.plan and e.engine in before.judged]
        if not judged and engine.status is not BuildStatus.WAITING:
            raise _Outdated(f"engine '{engine.id}' cannot be judged: {engine.detail}", BudgetMissed)
        for evaluation in judged:
            if not evaluation.is_within_budget:
                raise _Outdated(f"certification failed: {'; '.join(_beyond(evaluation))}", BudgetMissed)


def _beyond(evaluation: Evaluation) -> Iterator[str]:
    for output in evaluation.outputs:
        if output.difference is None or output.budget_status == BudgetStatus.WITHIN:
            continue
        upper, name = output.difference.judged.upper, output.difference.judged_name
        said = [f"upper bound of {name} {upper:+.3%} against {output.budget:.3%}", *output.remarks]
        yield f"engine '{evaluation.engine}', output '{output.output}': {output.verdict}, {'; '.join(said)}"


def with_new_scales(
    plan: PrecisionPlan, model: ModelArtifact, profile: Profile, outputs: Sequence[OutputSpec]
) -> PrecisionPlan:
    """Return a plan with the same precisions for retrained weights.

    Scales and predicted KL are those of `profile`, the digest that of `model`: the retrained model after
    mods, or the exported one for plan `untouched`, with the same sites. Raises PlanningError if the profile
    lacks a scale, or the sensitivity of a quantized site.
    """
    graph = GraphModel.load(model.path)
    sites = {site.name: site for site in model.sites}

    def again(decision: Decision) -> Decision:
        if decision.recipe is None:
            return decision
        return with_scales(decision, sites[decision.site], decision.recipe, graph, profile)

    # The measured KL of a group replaces the sum of its sites' KLs.
    costs = Costs(profile.of(plan.formats), outputs) if plan.predicted_kl else None
    kl = {spec.name: costs.predicted(plan.quantized_sites, spec) for spec in outputs} if costs else {}
    decisions = tuple(map(again, plan.decisions))
    return replace(plan, model_digest=model.digest, decisions=decisions, predicted_kl=kl)


def unproven_reason(
    plan: PrecisionPlan, model: ModelArtifact, profile: Profile, protect: Collection[Protection]
) -> str:
    """Return why a plan with base FP16 does not hold for new weights; empty if it does, or has another base.

    FP16 is used where the magnitudes of a model were shown to fit (`planning.fp16`): those of the retrained
    model must fit in the same places. The parts `protect` stay in FP32 (`PlanOptions`).
    """
    if plan.base is not Precision.FP16:
        return ""
    wide = {item.node for item in plan.wide}
    wide |= {d.site for d in plan.decisions if d.precision is Precision.FP32}
    graph = GraphModel.load(model.path)
    bases = Bases(graph, profile.tensors, protect, {}, plan.quantized_sites)
    for node, why in bases.fixed(Precision.FP16).wide.items():
        if node not in wide:
            return f"plan '{plan.id}' runs '{node}' in fp16, which is not shown to fit any more: {why}"
    for decision in plan.decisions:
        if decision.recipe is None:
            continue
        site = model.site(decision.site)
        for scale in with_scales(decision, site, decision.recipe, graph, profile).scales:
            if not scale_fits(scale):
                return (
                    f"plan '{plan.id}' needs a scale of {scale:.4g} at site '{decision.site}' now, which "
                    "fp16 does not hold"
                )
    return ""


def site_moves(before: EarlierRun, profile: Profile, plans: PlanSet) -> tuple[SiteMove, ...]:
    """Return the sites that any plan quantizes, those whose scales moved most first."""
    moves: dict[str, SiteMove] = {}
    for plan in plans.plans:
        earlier = before.plans.plan(plan.id)
        for decision in plan.decisions:
            if decision.recipe is not None and decision.site not in moves:
                moves[decision.site] = _site_move(before, profile, earlier.decision(decision.site), decision)
    return tuple(sorted(moves.values(), key=lambda m: -max(abs(log(m.activation)), abs(log(m.weight)))))


def output_moves(before: EvaluationSet, now: EvaluationSet) -> tuple[OutputMove, ...]:
    """Return the outputs of every engine that was judged on certification now."""
    return tuple(
        OutputMove(
            engine=evaluation.engine,
            output=output.output,
            judged=output.difference.judged_name,
            before=_earlier(before, evaluation.engine, output.output),
            now=output.difference.judged,
            budget=output.budget,
            status=output.budget_status,
        )
        for evaluation in now.evaluations
        for output in evaluation.outputs
        if evaluation.split == CERTIFICATION and output.difference is not None
    )


def _earlier(before: EvaluationSet, engine: str, output: str) -> Interval | None:
    same = (e for e in before.evaluations if (e.engine, e.split) == (engine, CERTIFICATION))
    changes = (item.difference for e in same for item in e.outputs if item.output == output)
    return next((change.judged for change in changes if change is not None), None)


def _site_move(before: EarlierRun, profile: Profile, was: Decision, now: Decision) -> SiteMove:
    ratios = [b / a for a, b in zip(was.weight_scale, now.weight_scale, strict=False)]
    return SiteMove(
        now.site,
        (now.activation_scale or 1.0) / (was.activation_scale or 1.0),
        max(ratios, key=lambda ratio: abs(log(ratio)), default=1.0),
        _kl(before.profile, now),
        _kl(profile, now),
    )


def _kl(profile: Profile, decision: Decision) -> dict[str, Interval]:
    recipe = decision.recipe.id if decision.recipe is not None else ""
    items = profile.site(decision.site).sensitivities
    return {item.output: item.kl for item in items if item.recipe == recipe}
