"""Scales of a planned site, from its profile and its weights."""

from __future__ import annotations

from dataclasses import dataclass

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.profile import SiteProfile
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Operand, Site
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.scale_choice import activation_scale
from loka_onnx.numerics.scales import weight_scales


@dataclass(frozen=True)
class SiteScales:
    """Scales of one site.

    Attributes:
        activation: Of the first activation.
        other: Of the weight (one, or one per output channel), or of the second activation.
    """

    activation: float
    other: tuple[float, ...]


class ScaleReader:
    """Reads scales of the sites of one model; the weights are loaded once."""

    def __init__(self, model: ModelArtifact) -> None:
        self._graph = GraphModel.load(model.path)

    def read(self, site: Site, profile: SiteProfile, recipe: Recipe) -> SiteScales:
        """The scales that a recipe gives at a site."""
        activation = site.activation
        first = activation_scale(profile.operands[activation.tensor], recipe)
        second = next(operand for operand in site.operands if operand is not activation)
        return SiteScales(first, self._other(site, second, profile, recipe))

    def _other(self, site: Site, operand: Operand, profile: SiteProfile, recipe: Recipe) -> tuple[float, ...]:
        if not operand.constant:
            return (activation_scale(profile.operands[operand.tensor], recipe),)
        values = values_of(self._graph.node(site.name).inputs[operand.index])
        scales = weight_scales(values, recipe.weight, channel_axis(operand), recipe.format)
        return tuple(float(scale) for scale in scales.reshape(-1))
