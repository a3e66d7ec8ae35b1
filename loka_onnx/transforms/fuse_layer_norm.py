"""Fuse a decomposed LayerNorm into LayerNormalization.

With μ = mean(x) and d = x − μ over the trailing axes::

    d / sqrt(mean(d·d) + ε) · γ + β   =   LayerNormalization(x, γ, β; axis, ε)

which is the operator's definition (ONNX operator set 17, LayerNormalization). γ and β may be absent: then
γ = 1. The statistics stay in FP32 (`stash_type` 1), whatever the graph runs in later.
"""

from __future__ import annotations

from loka_onnx.core.rewrite import Applied
from loka_onnx.graph.model import GraphModel, Node
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.norm_pattern import (
    DecomposedNorm,
    NotANorm,
    module_of,
    read_centred,
    read_quotient,
    with_bias,
    with_scale,
)
from loka_onnx.transforms.norm_rewrite import find_norms, replace_by_norm


class FuseLayerNorm(Mod[DecomposedNorm]):
    """Decomposed LayerNorm → LayerNormalization."""

    name = "fuse-layer-norm"

    def match(self, model: GraphModel) -> Found[DecomposedNorm]:
        """Find quotients of a centred tensor and the root of its variance."""
        return find_norms(model, _read)

    def rewrite(self, model: GraphModel, match: DecomposedNorm) -> Applied:
        """Replace the primitives by one node."""
        return replace_by_norm(model, match, "LayerNormalization")


def _read(node: Node) -> DecomposedNorm:
    centred, root = read_quotient(node)
    if root.squared is not centred:
        raise NotANorm("the divisor belongs to another tensor")
    source, centring = read_centred(centred, root.axis)
    inner = (*centring, *root.nodes, node)
    quotient = DecomposedNorm(
        source, root.axis, root.epsilon, None, None, node.outputs[0], module_of(inner), inner
    )
    return with_bias(with_scale(quotient))
