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
from collections.abc import Iterator
from dataclasses import replace
from math import isqrt, prod
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, values_of
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.norms.reading import DecomposedNorm, read_norm, with_bias, with_scale
from loka_onnx.transforms.norms.statistics import NotANorm, type_of

RMS_OPSET = 23
_INTEGERS = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32})


class NotFused(NotANorm):
    """The operator of a rule does not compute this norm; the message names the difference."""

    def __init__(self, reason: str, norm: DecomposedNorm) -> None:
        super().__init__(reason)
        self.norm = norm


class FuseNorm(Mod[DecomposedNorm]):
    """Nodes that compute a norm → one operator.

    Conversions between float types may stand around a norm, never inside: from its squares to its quotient
    all must be FP32, as PyTorch and Keras write the norms of FP16 and BF16 models.
    """

    op: ClassVar[str]

    @abstractmethod
    def read(self, node: Node) -> DecomposedNorm:
        """Return the norm that ends at a node; `NotFused` for one of another form, `NotANorm` for none."""

    def _find(self, model: GraphModel) -> Iterator[DecomposedNorm | Declined]:
        declined: list[tuple[Node, str]] = []
        claimed: set[int] = set()
        # A part of a norm may be another one.
        parts: set[int] = set()
        for node in model.nodes:
            try:
                norm = self.read(node)
                _check(model, norm)
            except NotFused as refusal:
                declined.append((node, str(refusal)))
                parts |= {id(other) for other in refusal.norm.inner} - {id(node)}
            except NotANorm:
                continue
            else:
                inner = {id(other) for other in norm.inner}
                if not claimed & inner:
                    claimed |= inner
                    yield norm
        parts |= claimed
        yield from (Declined(node.name, reason) for node, reason in declined if id(node) not in parts)

    def rewrite(self, model: GraphModel, match: DecomposedNorm) -> Applied:
        """Replace the primitives by one node, in place, named after their module, else after its operator."""
        shape, base = match.shape or (), match.module or self.op.lower()
        scale = np.ones(shape, np.float32) if match.scale is None else _spread(match.scale, shape)
        inputs = [match.source, model.constant(f"{base}.scale", scale * np.float32(match.factor))]
        if match.bias is not None:
            inputs.append(model.constant(f"{base}.bias", _spread(match.bias, shape)))
        epsilon = float(np.float32(match.epsilon))
        attrs = {"axis": match.axes[0], "epsilon": epsilon, "stash_type": 1}
        fused = model.add(self.op, inputs, base, match.result.dtype, attrs)
        node = fused.inputs[0]
        model.hand_over(match.result, fused)
        model.rename(node, base)
        what = f"{self.op}(axis={match.axes[0]}, epsilon={epsilon:.3g})"
        return Applied(node.name, f"{len(match.inner)} nodes → {what}")


class FuseLayerNorm(FuseNorm):
    """Decomposed LayerNorm → LayerNormalization."""

    name = "fuse-layer-norm"
    op = "LayerNormalization"

    def read(self, node: Node) -> DecomposedNorm:
        """Return the LayerNorm that ends at a node, with scale and bias; raises as `FuseNorm.read`."""
        norm = read_norm(node)
        if not norm.is_centred:
            raise NotANorm("an RMSNorm")
        return with_bias(with_scale(_over_last_axes(norm)))


class FuseRMSNorm(FuseNorm):
    """Decomposed RMSNorm → RMSNormalization."""

    name = "fuse-rms-norm"
    op = "RMSNormalization"

    def read(self, node: Node) -> DecomposedNorm:
        """Return the RMSNorm that ends at a node, with its scale; raises as `FuseNorm.read`."""
        norm = read_norm(node)
        if norm.is_centred:
            raise NotANorm("a LayerNorm")
        if not norm.is_mean and not norm.epsilon and norm.scale is None:
            raise NotANorm("an L2-norm")
        # RMSNormalization has no bias: an Add behind it stays.
        return with_scale(_over_last_axes(norm))

    def rewrite(self, model: GraphModel, match: DecomposedNorm) -> Applied:
        """Rewrite as `FuseNorm` does; the opset of the graph becomes 23 at least."""
        model.opset = max(model.opset, RMS_OPSET)
        return super().rewrite(model, match)


def _over_last_axes(norm: DecomposedNorm) -> DecomposedNorm:
    """Return the norm in operator form: last axes, averaged squares, scale along the axes."""
    if norm.axes != tuple(range(-len(norm.axes), 0)):
        raise NotFused(f"it normalizes axes {list(norm.axes)}, which are not the last ones", norm)
    if not norm.varies_within(norm.scale) or not norm.varies_within(norm.bias):
        raise NotFused("its scale or bias varies along other axes than the normalized ones", norm)
    if norm.is_mean or norm.shape is None:
        return norm
    length = prod(norm.shape)
    root = isqrt(length)
    if root * root != length or root & (root - 1):
        reason = f"it adds {length} squares, and 1/√{length}, the scale of the operator that averages them,"
        raise NotFused(f"{reason} is no FP32 number", norm)
    return replace(norm, is_mean=True, epsilon=norm.epsilon / length, factor=1 / root)


def _check(model: GraphModel, norm: DecomposedNorm) -> None:
    """Check type, shape, and that only nodes of the pattern read its inner results."""
    if type_of(norm.source) != onnx.TensorProto.FLOAT:
        raise NotFused("only FP32 norms are fused: the fused node takes its statistics in FP32", norm)
    if norm.shape is None:
        raise NotFused("the length of a normalized axis is not known", norm)
    inner = {id(node) for node in norm.inner}
    for tensor in (tensor for node in norm.inner for tensor in node.outputs):
        # Shapes are computed once for many readers.
        if tensor is norm.result or type_of(tensor) in _INTEGERS:
            continue
        if model.is_output(tensor) or any(id(reader) not in inner for reader in tensor.outputs):
            raise NotFused("an intermediate result of the norm is read elsewhere", norm)


def _spread(tensor: Tensor, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return a scale or bias spread over the normalized axes."""
    values = values_of(tensor)
    without_batch = values.reshape(values.shape[max(values.ndim - len(shape), 0) :])
    return np.ascontiguousarray(np.broadcast_to(without_batch, shape), dtype=np.float32)
