"""Fuse a decomposed L2-norm into LpNormalization.

Over one axis::

    x / sqrt(sum(x·x))   =   LpNormalization(x; axis, p = 2)

which is the operator's definition (ONNX operator sets 1 and 22, LpNormalization), except that a row of zeros
gives NaN on the left and zeros in the operator.

The operator has no epsilon, so these forms stay as they are:
- ``x / max(‖x‖, ε)`` (`torch.nn.functional.normalize`, Keras' UnitNormalization) and ``x / sqrt(max(‖x‖²,
  ε))`` (`tf.math.l2_normalize`) differ from it where 0 < ‖x‖ < ε;
- ``x / sqrt(‖x‖² + ε)`` is an RMSNorm of scale 1/√K (`fuse_rms_norm`);
- ``x / (‖x‖ + ε)`` is neither.

Engines lose nothing: TensorRT for RTX 1.7.1 makes one kernel of the primitives and the quantization behind
them, as of the operator, and casts their sums to FP32 in both. The operator gives the site a name.
"""

from __future__ import annotations

from loka_onnx.core.rewrite import Applied
from loka_onnx.graph.model import GraphModel, Node
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.norms.pattern import DecomposedNorm, NotFused
from loka_onnx.transforms.norms.reading import read_norm
from loka_onnx.transforms.norms.rewrite import NormKind, find_norms, put_in_place
from loka_onnx.transforms.norms.walk import NotANorm

_OP = "LpNormalization"


class FuseL2Norm(Mod[DecomposedNorm]):
    """Decomposed L2-norm → LpNormalization."""

    name = "fuse-l2-norm"

    def match(self, model: GraphModel) -> Found[DecomposedNorm]:
        """Match quotients of a tensor and its own length."""
        return find_norms(model, NormKind.L2, _read)

    def rewrite(self, model: GraphModel, match: DecomposedNorm) -> Applied:
        """Replace the nodes that compute an L2 norm by one LpNormalization."""
        attrs = {"axis": match.axes[0], "p": 2}
        fused = model.add(_OP, [match.source], match.module or _OP.lower(), match.result.dtype, attrs)
        name = put_in_place(model, match, fused)
        return Applied(name, f"{len(match.inner)} nodes → {_OP}(axis={match.axes[0]})")


def _read(node: Node) -> DecomposedNorm:
    norm = read_norm(node)
    if norm.is_centred or norm.is_mean or norm.epsilon or norm.scale is not None:
        raise NotANorm("another norm")
    if len(norm.axes) != 1:
        raise NotFused(f"it takes the length over axes {list(norm.axes)}, {_OP} over one", norm)
    return norm
