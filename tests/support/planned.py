"""Plans that quantize products, with weight scales of their values."""

from __future__ import annotations

import numpy as np

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.scales import amax_scale, weight_scales


def quantized_site(
    graph: GraphModel, site: Site, recipe: Recipe, scale: float, second: float = 0.0
) -> Decision:
    """The scale of the activation is given, and that of a second one where it is another."""
    other = next(operand for operand in site.operands if operand is not site.activation)
    scales: tuple[float, ...] = (second or scale,)
    if other.constant:
        values = values_of(graph.node(site.name).inputs[other.index])
        found = weight_scales(values, recipe.weight, channel_axis(other), recipe.format.of_weights)
        scales = tuple(np.ravel(found).tolist())
    return Decision(site.name, recipe.precision, recipe, Verdict.SAFE, "test", scale, scales)


def quantized_model(model: ModelArtifact, recipe: Recipe, base: Precision, amax: float) -> PrecisionPlan:
    """Every product, interactions too, under one range of activations; norms in the base."""
    graph, scale = GraphModel.load(model.path), amax_scale(amax, recipe.format)
    decisions = tuple(
        Decision(site.name, base, None, Verdict.SAFE, "")
        if site.kind is SiteKind.NORM
        else quantized_site(graph, site, recipe, scale)
        for site in model.sites
    )
    return PrecisionPlan("fp8-all", model.digest, base, decisions, {}, 1.0)


def plan_of_one(base: Precision = Precision.BF16, recipe: Recipe | None = None) -> PrecisionPlan:
    """A plan of the site ``fc``, quantized where there is a recipe."""
    decision = Decision("fc", base, None, Verdict.NOT_JUDGED, "test")
    if recipe is not None:
        decision = Decision("fc", recipe.precision, recipe, Verdict.SAFE, "test", 0.25, (0.5,))
    name = base.value if recipe is None else "fp8-all"
    return PrecisionPlan(name, "digest", base, (decision,), {}, float(recipe is not None))
