"""Fuse a decomposed RMSNorm into RMSNormalization.

Over the trailing axes::

    x / sqrt(mean(x·x) + ε) · γ   =   RMSNormalization(x, γ; axis, ε)

which is the operator's definition (ONNX operator set 23, RMSNormalization; Zhang and Sennrich,
arXiv 1910.07467, equation 4). Where squares are added instead of averaged over K elements,
sum(x·x) + ε = K·(mean(x·x) + ε/K), so that γ/√K and ε/K take the place of γ and ε; K must be a power of four,
so that neither is rounded. The graph moves to operator set 23: between 21 and 23 operators gained types and
none changed its meaning (ONNX changelog).
"""

from __future__ import annotations

from loka_onnx.core.rewrite import Applied
from loka_onnx.graph.model import GraphModel, Node
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.norms.pattern import DecomposedNorm, over_last_axes, with_scale
from loka_onnx.transforms.norms.reading import read_norm
from loka_onnx.transforms.norms.rewrite import NormKind, find_norms, replace_by_norm
from loka_onnx.transforms.norms.walk import NotANorm

RMS_OPSET = 23
_OP = "RMSNormalization"


class FuseRMSNorm(Mod[DecomposedNorm]):
    """Decomposed RMSNorm → RMSNormalization."""

    name = "fuse-rms-norm"

    def match(self, model: GraphModel) -> Found[DecomposedNorm]:
        """Match quotients of a tensor and the root of its own mean square."""
        return find_norms(model, NormKind.RMS, _read)

    def rewrite(self, model: GraphModel, match: DecomposedNorm) -> Applied:
        """Replace the primitives by one node."""
        model.opset = max(model.opset, RMS_OPSET)
        return replace_by_norm(model, match, _OP)


def _read(node: Node) -> DecomposedNorm:
    norm = read_norm(node)
    if norm.is_centred:
        raise NotANorm("a LayerNorm")
    if not norm.is_mean and not norm.epsilon and norm.scale is None:
        raise NotANorm("an L2-norm")
    # RMSNormalization has no bias: an Add behind it stays.
    return with_scale(over_last_axes(norm))
