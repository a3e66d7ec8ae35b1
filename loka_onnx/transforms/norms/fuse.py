"""Fuse decomposed norms into one operator.

Over the trailing axes, with μ = mean(x) and d = x − μ (ONNX operator sets 17 and 23; RMSNorm: Zhang and
Sennrich, arXiv 1910.07467, equation 4)::

    d / sqrt(mean(d·d) + ε) · γ + β   =   LayerNormalization(x, γ, β; axis, ε)
    x / sqrt(mean(x·x) + ε) · γ       =   RMSNormalization(x, γ; axis, ε)

γ and β may be absent: then γ = 1. Where squares are added instead of averaged over K elements,
sum(d·d) + ε = K·(mean(d·d) + ε/K), so that γ/√K and ε/K take the place of γ and ε; K must be a power of four,
so that neither is rounded. The statistics stay in FP32 (`stash_type` 1). `reading` lists the forms that
exporters write.

RMSNormalization moves the graph to operator set 23: between 21 and 23 operators gained types and none changed
its meaning (ONNX changelog).

Lengths stay as they are: ``x / ‖x‖``, ``x / max(‖x‖, ε)`` (`torch.nn.functional.normalize`, Keras'
UnitNormalization) and ``x / (‖x‖ + ε)``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, values_of
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.norms.pattern import (
    DecomposedNorm,
    NotFused,
    over_last_axes,
    why_not_fused,
    with_bias,
    with_scale,
)
from loka_onnx.transforms.norms.reading import read_norm
from loka_onnx.transforms.norms.walk import NotANorm

RMS_OPSET = 23


class FuseNorm(Mod[DecomposedNorm]):
    """Nodes that compute a norm → one operator."""

    op: ClassVar[str]

    @abstractmethod
    def read(self, node: Node) -> DecomposedNorm:
        """Return the norm that ends at a node, or raise `NotANorm`."""

    def match(self, model: GraphModel) -> Found[DecomposedNorm]:
        """Offer every node of the graph to the reader."""
        matches: list[DecomposedNorm] = []
        declined: list[tuple[Node, str]] = []
        claimed: set[int] = set()
        reported: set[int] = set()
        for node in model.nodes:
            try:
                norm = self.read(node)
            except NotFused as refusal:
                declined.append((node, str(refusal)))
                reported |= {id(other) for other in refusal.norm.inner} - {id(node)}
                continue
            except NotANorm:
                continue
            reason = why_not_fused(model, norm)
            inner = {id(other) for other in norm.inner}
            if reason is not None:
                declined.append((node, reason))
                reported |= inner - {id(node)}
            elif not claimed & inner:
                matches.append(norm)
                claimed |= inner
        # A part of a norm may be another one.
        parts = claimed | reported
        return Found(
            tuple(matches), tuple(Declined(n.name, why) for n, why in declined if id(n) not in parts)
        )

    def rewrite(self, model: GraphModel, match: DecomposedNorm) -> Applied:
        """Replace the primitives by one node, named after their module, else after its operator."""
        shape, base = match.shape or (), match.module or self.op.lower()
        scale = np.ones(shape, np.float32) if match.scale is None else spread(match.scale, shape)
        inputs = [match.source, model.constant(f"{base}.scale", scale * np.float32(match.factor))]
        if match.bias is not None:
            inputs.append(model.constant(f"{base}.bias", spread(match.bias, shape)))
        epsilon = float(np.float32(match.epsilon))
        attrs = {"axis": match.axes[0], "epsilon": epsilon, "stash_type": 1}
        name = put_in_place(model, match, model.add(self.op, inputs, base, match.result.dtype, attrs))
        what = f"{self.op}(axis={match.axes[0]}, epsilon={epsilon:.3g})"
        return Applied(name, f"{len(match.inner)} nodes → {what}")


class FuseLayerNorm(FuseNorm):
    """Decomposed LayerNorm → LayerNormalization."""

    name = "fuse-layer-norm"
    op = "LayerNormalization"

    def read(self, node: Node) -> DecomposedNorm:
        """Read the quotient of a centred tensor and the root of its variance."""
        norm = read_norm(node)
        if not norm.is_centred:
            raise NotANorm("an RMSNorm")
        return with_bias(with_scale(over_last_axes(norm)))


class FuseRMSNorm(FuseNorm):
    """Decomposed RMSNorm → RMSNormalization."""

    name = "fuse-rms-norm"
    op = "RMSNormalization"

    def read(self, node: Node) -> DecomposedNorm:
        """Read the quotient of a tensor and the root of its own mean square."""
        norm = read_norm(node)
        if norm.is_centred:
            raise NotANorm("a LayerNorm")
        if not norm.is_mean and not norm.epsilon and norm.scale is None:
            raise NotANorm("an L2-norm")
        # RMSNormalization has no bias: an Add behind it stays.
        return with_scale(over_last_axes(norm))

    def rewrite(self, model: GraphModel, match: DecomposedNorm) -> Applied:
        """Replace the primitives by one node."""
        model.opset = max(model.opset, RMS_OPSET)
        return super().rewrite(model, match)


def put_in_place(model: GraphModel, norm: DecomposedNorm, fused: Tensor) -> str:
    """Let the node of a new tensor compute the result of a norm, whose readers stay; return its name."""
    node = fused.inputs[0]
    model.hand_over(norm.result, fused)
    model.rename(node, norm.module or node.op.lower())
    return str(node.name)


def spread(tensor: Tensor, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return a scale or bias spread over the normalized axes."""
    values = values_of(tensor)
    without_batch = values.reshape(values.shape[max(values.ndim - len(shape), 0) :])
    return np.ascontiguousarray(np.broadcast_to(without_batch, shape), dtype=np.float32)
