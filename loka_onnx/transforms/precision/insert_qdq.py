"""Write a plan into the graph: Q/DQ around the planned sites, weights stored in eight bits.

A planned linear site ``y = x · W`` becomes ``y = DQ(Q(x)) · DQ(W₈)``: the activation is quantized once for
all sites that read it under one scale, the weight is an initializer in the recipe's format. Every Q and DQ
has an explicit zero point and a rank-0 scale (rank 1 per channel): the form that loses nothing in any engine
maker (ONNX operator set 21, QuantizeLinear).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loka_onnx.core.formats import NumberFormat
from loka_onnx.core.plan import Decision, PrecisionPlan
from loka_onnx.core.recipe import Granularity, Recipe, Scaling
from loka_onnx.core.rewrite import Applied, RewriteRecord
from loka_onnx.core.site import Operand, Site
from loka_onnx.errors import TransformError
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, values_of
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.rounding import quantize, storage_type

_Shared = dict[tuple[str, Scaling, NumberFormat], Tensor]
"""Dequantized tensors by the name of the exact one and its rounding."""


def insert_qdq(model: GraphModel, sites: tuple[Site, ...], plan: PrecisionPlan) -> RewriteRecord:
    """Quantize the planned sites of an FP32 graph in place; TransformError if graph and plan do not fit."""
    shared: _Shared = {}
    names = set(plan.quantized_sites)
    applied = tuple(
        _quantize_site(model, site, plan.decision(site.name), shared) for site in sites if site.name in names
    )
    return RewriteRecord("insert-qdq", applied, ())


def check_decision(site: Site, decision: Decision) -> tuple[Recipe, Scaling, tuple[float, ...]]:
    """Return recipe, activation scaling and weight scales of a site; TransformError if they do not fit."""
    recipe, scaling, scales = decision.recipe, decision.activation_scaling, decision.weight_scale
    if recipe is None or scaling is None or not scales:
        raise _altered(
            site, f"the plan puts it in {decision.precision} and lacks its recipe, or scales of it"
        )
    is_per_channel = recipe.weight is Granularity.PER_CHANNEL and site.weight is not None
    if len(scales) != (max(site.n, 1) if is_per_channel else 1):
        per = f"its {site.n} channels" if is_per_channel else "the whole weight"
        raise _altered(site, f"the plan has {len(scales)} scales for {per}")
    return recipe, scaling, scales


def _quantize_site(model: GraphModel, site: Site, decision: Decision, shared: _Shared) -> Applied:
    recipe, scaling, scales = check_decision(site, decision)
    node = _described(model, site)
    reused = False
    for operand in site.operands:
        tensor = node.inputs[operand.index]
        if operand.constant:
            node.inputs[operand.index] = _stored_weight(model, site, operand, recipe, scales)
            continue
        if operand is not site.activation:
            scaling = Scaling(scales[0], decision.weight_zero_point)
        key = (tensor.name, scaling, recipe.format)
        reused = reused or key in shared
        if key not in shared:
            shared[key] = _quantized(model, tensor, scaling, recipe.format, f"{site.name}/in{operand.index}")
        node.inputs[operand.index] = shared[key]
    how = "shares the Q/DQ of its input" if reused else "Q/DQ"
    return Applied(site.name, f"{recipe.id}: {how}")


def _described(model: GraphModel, site: Site) -> Node:
    """Return the node of a site; TransformError if there is none, or it has other operands or weights."""
    node = next((node for node in model.nodes if node.name == site.name), None)
    constant = [operand.index for operand in site.operands if operand.constant]
    if node is None or constant != [i for i, tensor in enumerate(node.inputs[:2]) if is_constant(tensor)]:
        raise _altered(site, "the model does not have it, or other operands of it are constant")
    if any(static_shape(node.inputs[each.index]) != each.shape for each in site.operands if each.constant):
        raise _altered(site, f"the weight has another shape than {site.weight and site.weight.shape}")
    return node


def _altered(site: Site, evidence: str) -> TransformError:
    return TransformError(
        "E0607 the plan, the model and its description do not belong together",
        where=f"site '{site.name}'",
        evidence=evidence,
        remedy="take the run directory from where it was made, or run the pipeline again",
    )


def _quantized(
    model: GraphModel, tensor: Tensor, scaling: Scaling, format: NumberFormat, name: str
) -> Tensor:
    dtype = storage_type(format)
    factor = model.constant(f"{name}/scale", np.array(scaling.scale, dtype=np.float32))
    zero = model.constant(f"{name}/zero_point", np.array(scaling.zero_point, dtype=dtype))
    narrow = model.add("QuantizeLinear", [tensor, factor, zero], f"{name}/q", dtype)
    wide = model.add("DequantizeLinear", [narrow, factor, zero], f"{name}/dq", np.float32)
    narrow.shape = wide.shape = tensor.shape
    return wide


def _stored_weight(
    model: GraphModel, site: Site, operand: Operand, recipe: Recipe, scale: tuple[float, ...]
) -> Tensor:
    values = values_of(model.node(site.name).inputs[operand.index]).astype(np.float32)
    format, per_channel = recipe.format.of_weights, recipe.weight is Granularity.PER_CHANNEL
    axis = channel_axis(operand)
    scales: npt.NDArray[np.float32] = np.array(scale if per_channel else scale[0], dtype=np.float32)
    stored = quantize(values, scales, format, axis if per_channel else None)
    name = f"{site.name}/weight"
    inputs = [
        model.constant(f"{name}/{recipe.precision}", stored),
        model.constant(f"{name}/scale", scales),
        model.constant(f"{name}/zero_point", np.zeros(scales.shape, dtype=stored.dtype)),
    ]
    return model.add(
        "DequantizeLinear", inputs, f"{name}/dq", np.float32, {"axis": axis} if per_channel else None
    )
