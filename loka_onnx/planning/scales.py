"""Scales of a planned site: of activations as measured, and of its weights."""

from __future__ import annotations

from dataclasses import replace

from loka_onnx.core.plan import Decision
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Recipe, Scaling
from loka_onnx.core.site import Operand, Site
from loka_onnx.errors import PlanningError
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.scales import weight_scales


class ScaleReader:
    """Scales of the sites of one model."""

    def __init__(self, graph: GraphModel, profile: Profile) -> None:
        self._graph, self._scales = graph, profile.scales

    def scaled(self, decision: Decision, site: Site, recipe: Recipe) -> Decision:
        """Return a decision with the scales of a site under a recipe: those of its first activation and of
        its other operand.

        The latter are one per output channel or one for the weight, or that of the second activation. Raises
        PlanningError if the profile holds none for an activation of the site.
        """
        first = self._of_activation(site.activation, recipe)
        other = next(operand for operand in site.operands if operand is not site.activation)
        scaled = replace(
            decision, recipe=recipe, activation_scale=first.scale, activation_zero_point=first.zero_point
        )
        if not other.constant:
            second = self._of_activation(other, recipe)
            return replace(scaled, weight_scale=(second.scale,), weight_zero_point=second.zero_point)
        values = values_of(self._graph.node(site.name).inputs[other.index])
        scales = weight_scales(values, recipe.weight, channel_axis(other), recipe.format.of_weights)
        return replace(scaled, weight_scale=tuple(float(scale) for scale in scales.reshape(-1)))

    def _of_activation(self, operand: Operand, recipe: Recipe) -> Scaling:
        known = self._scales.get(recipe.activation_id, {})
        if operand.tensor not in known:
            raise PlanningError(
                f"E0708 the profile has no scale of tensor '{operand.tensor}' for the recipe {recipe.id}",
                evidence=f"under '{recipe.activation_id}' it has scales of {len(known)} tensors",
                remedy="calibrate this model with this recipe again",
            )
        return recipe.scaling(self._scales, operand.tensor)
