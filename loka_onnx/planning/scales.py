"""Scales of a planned site: of activations as measured, and of its weights."""

from __future__ import annotations

from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Operand, Site
from loka_onnx.errors import PlanningError
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.scales import weight_scales


class ScaleReader:
    """Scales of the sites of one model."""

    def __init__(self, graph: GraphModel, profile: Profile) -> None:
        self._graph, self._scales = graph, profile.scales

    def read(self, site: Site, recipe: Recipe) -> tuple[float, tuple[float, ...]]:
        """Return the scale of the site's first activation, and those of its other operand.

        The latter are one per output channel or one for the weight, or that of the second activation. Raises
        PlanningError if the profile holds none for an activation of the site.
        """
        activation = site.activation
        second = next(operand for operand in site.operands if operand is not activation)
        return self._of_activation(activation, recipe), self._of_other(site, second, recipe)

    def _of_activation(self, operand: Operand, recipe: Recipe) -> float:
        known = self._scales.get(recipe.activation_id, {})
        if operand.tensor not in known:
            raise PlanningError(
                f"the profile has no scale of tensor '{operand.tensor}' for the recipe {recipe.id}",
                evidence=f"under '{recipe.activation_id}' it has scales of {len(known)} tensors",
                remedy="calibrate this model with this recipe again",
            )
        return known[operand.tensor]

    def _of_other(self, site: Site, operand: Operand, recipe: Recipe) -> tuple[float, ...]:
        if not operand.constant:
            return (self._of_activation(operand, recipe),)
        values = values_of(self._graph.node(site.name).inputs[operand.index])
        scales = weight_scales(values, recipe.weight, channel_axis(operand), recipe.format)
        return tuple(float(scale) for scale in scales.reshape(-1))
