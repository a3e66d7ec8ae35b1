"""Fuse a decomposed RMSNorm into RMSNormalization.

Over the trailing axes::

    x / sqrt(mean(x·x) + ε) · γ   =   RMSNormalization(x, γ; axis, ε)

which is the operator's definition (ONNX operator set 23, RMSNormalization; Zhang and Sennrich,
arXiv 1910.07467, equation 4). The graph moves to operator set 23: between 21 and 23 operators gained types
and none changed its meaning (ONNX changelog).
"""

from __future__ import annotations

from loka_onnx.core.rewrite import Applied
from loka_onnx.graph.model import GraphModel, Node, Tensor
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.norm_pattern import (
    DecomposedNorm,
    NotANorm,
    module_of,
    read_centred,
    read_quotient,
    with_scale,
)
from loka_onnx.transforms.norm_rewrite import find_norms, replace_by_norm

RMS_OPSET = 23


class FuseRMSNorm(Mod[DecomposedNorm]):
    """Decomposed RMSNorm → RMSNormalization."""

    name = "fuse-rms-norm"

    def match(self, model: GraphModel) -> Found[DecomposedNorm]:
        """Find quotients of a tensor and the root of its own mean square."""
        return find_norms(model, _read)

    def rewrite(self, model: GraphModel, match: DecomposedNorm) -> Applied:
        """Replace the primitives by one node."""
        model.opset = max(model.opset, RMS_OPSET)
        return replace_by_norm(model, match, "RMSNormalization")


def _read(node: Node) -> DecomposedNorm:
    source, root = read_quotient(node)
    if root.squared is not source:
        raise NotANorm("the divisor belongs to another tensor")
    if _is_centred(source, root.axis):
        raise NotANorm("a LayerNorm")
    inner = (*root.nodes, node)
    # RMSNormalization has no bias: an addition that follows stays where it is.
    return with_scale(
        DecomposedNorm(source, root.axis, root.epsilon, None, None, node.outputs[0], module_of(inner), inner)
    )


def _is_centred(source: Tensor, axis: int) -> bool:
    """Whether the tensor had its own mean removed: then the whole is a LayerNorm."""
    try:
        read_centred(source, axis)
    except NotANorm:
        return False
    return True
