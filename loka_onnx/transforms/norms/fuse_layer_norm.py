"""Fuse a decomposed LayerNorm into LayerNormalization.

With μ = mean(x) and d = x − μ over the trailing axes::

    d / sqrt(mean(d·d) + ε) · γ + β   =   LayerNormalization(x, γ, β; axis, ε)

which is the operator's definition (ONNX operator set 17, LayerNormalization). γ and β may be absent: then γ =
1. Where squares are added instead of averaged over K elements, sum(d·d) + ε = K·(mean(d·d) + ε/K), so that
γ/√K and ε/K take the place of γ and ε; K must be a power of four, so that neither is rounded. The statistics
stay in FP32 (`stash_type` 1). `reading` lists the forms that exporters write, `from_batch_norm` that of
Keras 2.
"""

from __future__ import annotations

from loka_onnx.core.rewrite import Applied
from loka_onnx.graph.model import GraphModel, Node
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.norms.from_batch_norm import read_batch_norm_of_rows
from loka_onnx.transforms.norms.pattern import DecomposedNorm, over_last_axes, with_bias, with_scale
from loka_onnx.transforms.norms.reading import read_norm
from loka_onnx.transforms.norms.rewrite import NormKind, find_norms, replace_by_norm
from loka_onnx.transforms.norms.walk import NotANorm

_OP = "LayerNormalization"


class FuseLayerNorm(Mod[DecomposedNorm]):
    """Decomposed LayerNorm → LayerNormalization."""

    name = "fuse-layer-norm"

    def match(self, model: GraphModel) -> Found[DecomposedNorm]:
        """Match quotients of a centred tensor and the root of its variance."""
        return find_norms(model, NormKind.LAYER, _read)

    def rewrite(self, model: GraphModel, match: DecomposedNorm) -> Applied:
        """Replace the primitives by one node."""
        return replace_by_norm(model, match, _OP)


def _read(node: Node) -> DecomposedNorm:
    norm = read_batch_norm_of_rows(node) if node.op == "BatchNormalization" else read_norm(node)
    if not norm.is_centred:
        raise NotANorm("an RMSNorm")
    return with_bias(with_scale(over_last_axes(norm)))
