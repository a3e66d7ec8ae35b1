"""Low-precision sites in FP32 arithmetic, for the error pass and the sensitivity pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from loka_onnx.calibration.effects.perturbation import moved
from loka_onnx.core.formats import NumberFormat
from loka_onnx.core.recipe import Granularity, Recipe, Scales, Scaling
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.core.statistics import RangeStats
from loka_onnx.graph.fake_quantize import Bounds, FakeQuantized, fake_quantize, round_to_bfloat16
from loka_onnx.graph.layout import layout_root, reapply
from loka_onnx.graph.model import GraphModel, Tensor, is_constant, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.rounding import fake_quantize as fake_quantize_array
from loka_onnx.numerics.scales import weight_scales

NORM_PRECISION = "bf16"
"""What a norm is tried in: BF16 operands and results, FP32 statistics."""


@dataclass
class ActivationQuantizer:
    """Rounds activations of one graph to one format, each tensor and its layouts once.

    `scalings` are by tensor name; `ranges`, where known, over the very rows that the graph will see.
    """

    model: GraphModel
    format: NumberFormat
    scalings: Mapping[str, Scaling]
    ranges: Mapping[str, RangeStats] = field(default_factory=dict)
    _roots: dict[str, FakeQuantized] = field(default_factory=dict)
    _views: dict[str, Tensor] = field(default_factory=dict)

    def root(self, tensor: Tensor, name: str) -> FakeQuantized:
        """Return the rounding of the tensor before layout operations."""
        source = layout_root(tensor).tensor
        if source.name not in self._roots:
            scaling = self.scalings[tensor.name]
            self._roots[source.name] = fake_quantize(
                self.model, source, scaling, self.format, name, self._bounds(tensor, scaling)
            )
        return self._roots[source.name]

    def values(self, tensor: Tensor, name: str) -> Tensor:
        """Return the rounded tensor."""
        if tensor.name not in self._views:
            chain = layout_root(tensor).chain
            self._views[tensor.name] = reapply(self.model, chain, self.root(tensor, name).values, name)
        return self._views[tensor.name]

    def _bounds(self, tensor: Tensor, scaling: Scaling) -> Bounds:
        if tensor.name not in self.ranges:
            return Bounds()
        known = self.ranges[tensor.name]
        # The zero point is rounded, so the ends of the range may lie beyond.
        saturates = self.format.has_zero_point or known.amax > self.format.max * scaling.scale
        return Bounds(saturates, known.minimum < 0.0)


def quantized_product(
    quantizer: ActivationQuantizer, site: Site, recipe: Recipe, weight_factor: float = 1.0
) -> Tensor:
    """Add the product of a linear or interaction site with both operands rounded; return its output.

    `weight_factor` multiplies the scales of the weight (`calibration.effects.perturbation`).
    """
    model = quantizer.model
    node = model.node(site.name)
    inputs = list(node.inputs)
    for operand in site.operands:
        tensor = node.inputs[operand.index]
        inputs[operand.index] = (
            _rounded_weight(model, site, operand, recipe, weight_factor)
            if operand.constant
            else quantizer.values(tensor, f"{site.name}.in{operand.index}")
        )
    return model.add_like(node, inputs, f"{site.name}.quantized")


def bfloat16_norm(model: GraphModel, site: Site) -> Tensor:
    """Add a norm with operands and results rounded to BF16 and FP32 statistics; return its output."""
    node = model.node(site.name)
    inputs = [
        model.constant(f"{site.name}.param_bf16", values_of(t).astype(ml_dtypes.bfloat16).astype(np.float32))
        if is_constant(t)
        else round_to_bfloat16(model, t, f"{site.name}.in")
        for t in node.inputs
    ]
    return round_to_bfloat16(model, model.add_like(node, inputs, f"{site.name}.norm"), f"{site.name}.out")


def low_precision(
    model: GraphModel, site: Site, recipe: Recipe, scales: Scales, weight_factor: float = 1.0
) -> Tensor:
    """Add the site in the low precision of its kind; return its output."""
    if site.kind is SiteKind.NORM:
        return bfloat16_norm(model, site)
    node = model.node(site.name)
    # The activation of a switched site has another name here than when its range was measured.
    present = {
        node.inputs[o.index].name: recipe.scaling(scales, o.tensor) for o in site.operands if not o.constant
    }
    quantizer = ActivationQuantizer(model, recipe.format, present)
    return quantized_product(quantizer, site, recipe, weight_factor)


def _rounded_weight(model: GraphModel, site: Site, operand: Operand, recipe: Recipe, factor: float) -> Tensor:
    weight = values_of(model.node(site.name).inputs[operand.index]).astype(np.float32)
    axis = channel_axis(operand)
    format = recipe.format.of_weights
    scales = moved(weight_scales(weight, recipe.weight, axis, format), factor, format)
    per_channel = axis if recipe.weight is Granularity.PER_CHANNEL else None
    rounded = fake_quantize_array(weight, scales, format, per_channel)
    return model.constant(f"{site.name}.weight_quantized", rounded)
