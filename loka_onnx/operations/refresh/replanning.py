"""An earlier plan for a retrained model: the same decisions, with the scales of now."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Protection
from loka_onnx.core.profile import Profile
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.base import Bases, with_scales
from loka_onnx.planning.costs import Costs
from loka_onnx.planning.fp16 import scale_fits


def planned_recipe_ids(profile: Profile) -> dict[str, str]:
    """Id of the recipe that a profile measured the effect of, by site."""
    return {entry.site: entry.sensitivities[0].recipe for entry in profile.sites if entry.sensitivities}


def replan(
    plan: PrecisionPlan, model: ModelArtifact, profile: Profile, outputs: Sequence[OutputSpec]
) -> PrecisionPlan:
    """A plan with the scales and the predicted KL of a profile.

    Args:
        model: The retrained model after mods, with the sites that the plan decides.

    Raises:
        PlanningError: The profile lacks a scale or a site.
    """
    graph = GraphModel.load(model.path)
    sites = {site.name: site for site in model.sites}

    def again(decision: Decision) -> Decision:
        if decision.recipe is None:
            return decision
        return with_scales(decision, sites[decision.site], decision.recipe, graph, profile)

    return replace(
        plan,
        model_digest=model.digest,
        decisions=tuple(again(decision) for decision in plan.decisions),
        predicted_kl=_predicted(plan, profile, outputs),
    )


def unproven_reason(
    plans: Sequence[PrecisionPlan],
    model: ModelArtifact,
    profile: Profile,
    protect: Collection[Protection],
) -> str:
    """Reason why plans in FP16 do not hold for the new weights; empty if they do.

    FP16 is used where the magnitudes of a model were shown to fit (`planning.fp16`): those of the retrained
    model must fit in the same places.
    """
    for plan in plans:
        if plan.base is not Precision.FP16:
            continue
        wide = {item.node for item in plan.wide}
        wide |= {d.site for d in plan.decisions if d.precision is Precision.FP32}
        graph = GraphModel.load(model.path)
        bases = Bases(graph, profile.tensors, protect, {}, plan.quantized_sites)
        new = {node: why for node, why in bases.fixed(Precision.FP16).wide.items() if node not in wide}
        for node, why in new.items():
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


def _predicted(plan: PrecisionPlan, profile: Profile, outputs: Sequence[OutputSpec]) -> dict[str, float]:
    """Sum of what the sites in FP8 cost, together where they were measured together, by output."""
    if not plan.predicted_kl:
        return {}
    costs = Costs(profile, outputs)
    return {spec.name: costs.predicted(plan.quantized_sites, spec) for spec in outputs}
