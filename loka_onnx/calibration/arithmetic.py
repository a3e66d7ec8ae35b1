"""Sites in low precision, written in FP32 arithmetic: shared by the error pass and the sensitivity pass."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx

from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.graph.fake_quantize import FakeQuantized, fake_quantize
from loka_onnx.graph.model import GraphModel, Tensor, is_constant, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.float8 import fake_quantize as fake_quantize_array
from loka_onnx.numerics.scales import weight_scales

NORM_PRECISION = "bf16"
"""What a norm is tried in: BF16 operands and results, FP32 statistics."""


@dataclass(frozen=True)
class QuantizedSite:
    """A site's product under a recipe.

    Attributes:
        output: What the site would return.
        activations: The quantized activations by tensor name.
    """

    output: Tensor
    activations: dict[str, FakeQuantized]


def quantized_product(
    model: GraphModel,
    site: Site,
    recipe: Recipe,
    scales: dict[str, float],
    shared: dict[str, FakeQuantized] | None = None,
) -> QuantizedSite:
    """Add the product of a site with both operands rounded to FP8.

    Args:
        model: The graph to add to.
        site: A linear or interaction site.
        recipe: Format, granularities and scale rule.
        scales: Activation scale by tensor name.
        shared: Activations that are already quantized; extended when given.
    """
    node = model.node(site.name)
    quantized: dict[str, FakeQuantized] = {} if shared is None else shared
    inputs = list(node.inputs)
    for operand in site.operands:
        tensor = node.inputs[operand.index]
        if operand.constant:
            weight = values_of(tensor).astype(np.float32)
            axis = channel_axis(operand)
            rounded = fake_quantize_array(
                weight,
                weight_scales(weight, recipe.weight, axis, recipe.format),
                recipe.format,
                axis if recipe.weight == "per_channel" else None,
            )
            inputs[operand.index] = model.constant(f"{site.name}.weight_fp8", rounded)
        else:
            if operand.tensor not in quantized:
                quantized[operand.tensor] = fake_quantize(
                    model, tensor, scales[operand.tensor], recipe.format, f"{site.name}.in{operand.index}"
                )
            inputs[operand.index] = quantized[operand.tensor].values
    return QuantizedSite(model.add_like(node, inputs, f"{site.name}.fp8"), quantized)


def bfloat16_norm(model: GraphModel, site: Site) -> Tensor:
    """Add a norm whose operands and results are rounded to BF16, with FP32 statistics."""
    node = model.node(site.name)
    inputs = [
        model.constant(f"{site.name}.param_bf16", values_of(t).astype(ml_dtypes.bfloat16).astype(np.float32))
        if is_constant(t)
        else _through_bfloat16(model, t, f"{site.name}.in")
        for t in node.inputs
    ]
    return _through_bfloat16(model, model.add_like(node, inputs, f"{site.name}.bf16"), f"{site.name}.out")


def low_precision(model: GraphModel, site: Site, recipe: Recipe, scales: dict[str, float]) -> Tensor:
    """Add the site in the low precision that is a question for its kind; returns its output."""
    if site.kind is SiteKind.NORM:
        return bfloat16_norm(model, site)
    return quantized_product(model, site, recipe, scales).output


def _through_bfloat16(model: GraphModel, tensor: Tensor, name: str) -> Tensor:
    narrow = model.add(
        "Cast", [tensor], f"{name}.narrow", ml_dtypes.bfloat16, {"to": onnx.TensorProto.BFLOAT16}
    )
    return model.add("Cast", [narrow], f"{name}.wide", np.float32, {"to": onnx.TensorProto.FLOAT})
