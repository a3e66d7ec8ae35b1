"""Base precision of a plan (of everything not quantized), nodes that stay in FP32, and scales of sites."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Protection, Verdict, Wide
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Recipe, Scaling
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.core.statistics import TensorRange
from loka_onnx.errors import PlanningError
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.protected import logit_ends, residual_streams
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.scales import weight_scales
from loka_onnx.planning.fp16 import FEW, MARGIN, Unproven, count_places, scale_fits, unproven_places
from loka_onnx.planning.patterns import find_places

UNTOUCHED = "untouched"
"""The plan of the exported model, which no mod has changed."""


@dataclass(frozen=True)
class Base:
    """A base precision, its reason (empty if asked for), and `wide` nodes that stay in FP32, with reasons."""

    precision: Precision
    wide: Mapping[str, str]
    reason: str = ""

    def decide(self, site: str, usual: str) -> Decision:
        """Return the decision of a site that is not judged; `usual` is the reason where it is not wide."""
        precision = Precision.FP32 if site in self.wide else self.precision
        return Decision(site, precision, None, Verdict.NOT_JUDGED, self.wide.get(site, usual))

    def other_nodes(self, sites: Collection[str]) -> tuple[Wide, ...]:
        """Return the wide nodes that are no sites."""
        return tuple(Wide(node, reason) for node, reason in self.wide.items() if node not in sites)


class Bases:
    """Base precisions of one model; `protected` nodes stay in FP32 in all its plans, each with the reason.

    `model` is after mods; `tensors` are magnitudes, if measured. `named` nodes have the pattern that the user
    named them by; `forced` sites are not protected.
    """

    def __init__(
        self,
        model: GraphModel,
        tensors: Mapping[str, TensorRange],
        protect: Collection[Protection],
        named: Mapping[str, str],
        forced: Collection[str] = (),
    ) -> None:
        self._model, self._tensors = model, tensors
        # Of several reasons the first counts: the user's own.
        self.protected = {node: f"kept by '{pattern}'" for node, pattern in named.items()}
        for wanted, find in ((Protection.LOGITS, logit_ends), (Protection.RESIDUAL, residual_streams)):
            for place in find(model) if wanted in protect else ():
                if place.node not in forced:
                    self.protected.setdefault(place.node, place.reason)

    def fixed(self, precision: Precision) -> Base:
        """Return the base that the user asked for; PlanningError for FP16 without magnitudes."""
        if precision is Precision.FP32:
            return Base(precision, {})
        if precision is Precision.BF16:
            return Base(precision, self.protected)
        wide = dict(self.protected)
        for place in self._unproven:
            for node in place.nodes:
                wide.setdefault(node, place.reason)
        return Base(precision, wide)

    def chosen(self, quantized: Iterable[Decision]) -> Base:
        """Return FP16 if the magnitudes and scales of `quantized` sites are known to fit, else BF16."""
        places = self._unproven
        count = count_places(places)
        if count > FEW:
            reason = f"{count} places are not shown to fit fp16, first of them: {places[0].reason}"
            return Base(Precision.BF16, self.protected, reason)
        for decision in quantized:
            for scale in decision.scales:
                if not scale_fits(scale):
                    reason = f"site '{decision.site}' has a scale of {scale:.4g}, which fp16 does not hold"
                    return Base(Precision.BF16, self.protected, reason)
        but = f"; what does not ({count} of at most {FEW} places) stays in fp32" if count else ""
        reason = f"{MARGIN:g} times what was measured fits fp16{but}"
        return Base(Precision.FP16, self.fixed(Precision.FP16).wide, reason)

    @cached_property
    def _unproven(self) -> tuple[Unproven, ...]:
        if not self._tensors:
            raise PlanningError(
                "E0701 the profile does not say what fits fp16",
                evidence="it holds magnitudes of no tensor",
                remedy="calibrate this model again, with fp16 among `plan.plans` or as `plan.base`",
            )
        return unproven_places(self._model, self._tensors, self.protected)


def with_scales(
    decision: Decision, site: Site, recipe: Recipe, graph: GraphModel, profile: Profile
) -> Decision:
    """Return a decision with the scales of its first activation and of its other operand.

    The latter are one for the weight or one per output channel, or that of the second activation.
    PlanningError if the profile holds none for an activation.
    """

    def scaling_of(operand: Operand) -> Scaling:
        known = profile.scales.get(recipe.activation_id, {})
        if operand.tensor not in known:
            raise PlanningError(
                f"E0708 the profile has no scale of tensor '{operand.tensor}' for the recipe {recipe.id}",
                evidence=f"under '{recipe.activation_id}' it has scales of {len(known)} tensors",
                remedy="calibrate this model with this recipe again",
            )
        return recipe.scaling(profile.scales, operand.tensor)

    first = scaling_of(site.activation)
    other = next(operand for operand in site.operands if operand is not site.activation)
    scaled = replace(
        decision, recipe=recipe, activation_scale=first.scale, activation_zero_point=first.zero_point
    )
    if not other.constant:
        second = scaling_of(other)
        return replace(scaled, weight_scale=(second.scale,), weight_zero_point=second.zero_point)
    values = values_of(graph.node(site.name).inputs[other.index])
    scales = weight_scales(values, recipe.weight, channel_axis(other), recipe.format.of_weights)
    return replace(scaled, weight_scale=tuple(float(scale) for scale in scales.reshape(-1)))


def untouched_plan(
    model: ModelArtifact,
    tensors: Mapping[str, TensorRange],
    keep: Sequence[str],
    protect: Collection[Protection],
) -> PrecisionPlan:
    """Return the plan of the exported model: FP16 is as fast as BF16 and more exact, where it fits.

    A tensor that mods removed has no magnitude in `tensors`: it counts as one that does not fit.
    """
    graph = GraphModel.load(model.path)
    kept = find_places(keep, model.sites, (node.name for node in graph.nodes))
    norms = {s.name for s in model.sites if s.kind is SiteKind.NORM}
    named = {**kept.nodes, **{name: why for name, why in kept.sites.items() if name in norms}}
    bases = Bases(graph, tensors, protect, named)
    base = bases.chosen(()) if tensors else bases.fixed(Precision.BF16)
    usual = f"everything of the exported model runs in {base.precision}"
    decisions = tuple(base.decide(site.name, usual) for site in model.sites)
    wide = base.other_nodes({site.name for site in model.sites})
    return PrecisionPlan(
        UNTOUCHED, model.digest, base.precision, decisions, {}, 0.0, wide, base.reason, untouched=True
    )
