"""Fuse a decomposed LayerNorm into LayerNormalization.

With μ = mean(x) and d = x − μ over the trailing axes::

    d / sqrt(mean(d·d) + ε) · γ + β   =   LayerNormalization(x, γ, β; axis, ε)

which is the operator's definition (ONNX operator set 17, LayerNormalization). γ and β may be absent: then
γ = 1. The statistics stay in FP32 (`stash_type` 1), whatever the graph runs in later.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, producer, values_of
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.norm_pattern import (
    DecomposedNorm,
    NotANorm,
    is_private,
    module_of,
    normalized_shape,
    read_quotient,
    trailing_axis,
    with_bias,
    with_scale,
)


class FuseLayerNorm(Mod[DecomposedNorm]):
    """Decomposed LayerNorm → LayerNormalization."""

    name = "fuse-layer-norm"

    def match(self, model: GraphModel) -> Found[DecomposedNorm]:
        """Find quotients of a centred tensor and the root of its variance."""
        matches: list[DecomposedNorm] = []
        declined: list[Declined] = []
        for node in model.nodes:
            if node.op not in {"Div", "Mul"}:
                continue
            try:
                norm = _read(node)
            except NotANorm:
                continue
            if normalized_shape(norm.source, norm.axis) is None:
                declined.append(Declined(node.name, "LayerNorm over axes of unknown length"))
            elif not is_private(model, norm):
                declined.append(
                    Declined(node.name, "an intermediate result of the LayerNorm is read elsewhere")
                )
            else:
                matches.append(norm)
        return Found(tuple(matches), tuple(declined))

    def rewrite(self, model: GraphModel, match: DecomposedNorm) -> Applied:
        """Replace the primitives by one node."""
        return replace_by_norm(model, match, "LayerNormalization")


def replace_by_norm(model: GraphModel, norm: DecomposedNorm, op: str) -> Applied:
    """Put one norm node in place of the primitives."""
    shape = normalized_shape(norm.source, norm.axis) or ()
    scale = np.ones(shape, np.float32) if norm.scale is None else _spread(norm.scale, shape)
    inputs = [norm.source, model.constant(f"{norm.module}.scale", scale)]
    if norm.bias is not None:
        inputs.append(model.constant(f"{norm.module}.bias", _spread(norm.bias, shape)))
    attrs: dict[str, object] = {
        "axis": norm.axis,
        "epsilon": float(np.float32(norm.epsilon)),
        "stash_type": 1,
    }
    fused = model.add(op, inputs, norm.module, norm.result.dtype, attrs)
    fused.shape = norm.result.shape
    node = producer(fused)
    name = node.name if node is not None else norm.module
    # Readers keep the tensor's name: the site names of a profile refer to it.
    model.replace_uses(norm.result, fused)
    if fused.name != norm.result.name and not model.is_output(fused):
        norm.result.name, fused.name = model.fresh_name(f"{norm.result.name}.unfused"), norm.result.name
    return Applied(name, f"{len(norm.inner)} nodes → {op}(axis={norm.axis}, epsilon={norm.epsilon:.3g})")


def _spread(tensor: Tensor, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    values = values_of(tensor)
    squeezed = values.reshape(values.shape[-len(shape) :]) if values.ndim > len(shape) else values
    return np.ascontiguousarray(np.broadcast_to(squeezed, shape), dtype=np.float32)


def _read(node: Node) -> DecomposedNorm:
    centred, root = read_quotient(node)
    if root.squared is not centred:
        raise NotANorm("the divisor belongs to another tensor")
    subtract = producer(centred)
    if subtract is None or subtract.op != "Sub":
        raise NotANorm("the tensor is not centred")
    source, mean = subtract.inputs
    average = producer(mean)
    if average is None or average.op != "ReduceMean" or average.inputs[0] is not source:
        raise NotANorm("what is subtracted is not the mean")
    if trailing_axis(average) != root.axis:
        raise NotANorm("mean and variance are taken over different axes")
    inner = (subtract, average, *root.nodes, node)
    quotient = DecomposedNorm(
        source, root.axis, root.epsilon, None, None, node.outputs[0], module_of(inner), inner
    )
    return with_bias(with_scale(quotient))
