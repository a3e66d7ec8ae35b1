"""An earlier plan for a retrained model: the same decisions, with the scales of now; and what moved."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import log

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.evaluation import EvaluationSet
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval
from loka_onnx.core.lineage import OutputMove, SiteMove
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, Protection
from loka_onnx.core.profile import Profile
from loka_onnx.graph.model import GraphModel
from loka_onnx.operations.refresh.earlier import EarlierRun
from loka_onnx.planning.base import Bases, with_scales
from loka_onnx.planning.costs import Costs
from loka_onnx.planning.fp16 import scale_fits

CERTIFICATION = "certification"


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
    """Reason why a plan in FP16 does not hold for the new weights; empty if it does.

    FP16 is used where the magnitudes of a model were shown to fit (`planning.fp16`): those of the retrained
    model must fit in the same places.
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
