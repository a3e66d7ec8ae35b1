"""Find decomposed normalizations with a reader, and replace them by one operator."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.errors import InternalError
from loka_onnx.graph.model import GraphModel, Node, Tensor, producer, values_of
from loka_onnx.transforms.base import Found
from loka_onnx.transforms.norms.pattern import DecomposedNorm, NotFused, why_not_fused
from loka_onnx.transforms.norms.reading import looks_centred
from loka_onnx.transforms.norms.statistics import is_centred
from loka_onnx.transforms.norms.walk import NearMiss, NotANorm


class NormKind(Enum):
    """Norm whose near misses a rule reports."""

    LAYER = "layer"
    RMS = "rms"
    L2 = "l2"
    GROUP = "group"


N = TypeVar("N", bound=DecomposedNorm)


def find_norms(model: GraphModel, kind: NormKind, read: Callable[[Node], N]) -> Found[N]:
    """Offer every node of the graph to a reader.

    Args:
        kind: Norm whose near misses are reported.
        read: Returns the norm that ends at a node, or raises `NotANorm`.
    """
    matches: list[N] = []
    declined: list[tuple[Node, str]] = []
    claimed: set[int] = set()
    told: set[int] = set()
    for node in model.nodes:
        try:
            norm = read(node)
        except NotFused as refusal:
            declined.append((node, str(refusal)))
            told |= {id(other) for other in refusal.norm.inner} - {id(node)}
            continue
        except NearMiss as miss:
            if _kind(node, miss) is kind:
                declined.append((node, str(miss)))
            told |= set() if miss.part is None else {id(miss.part)}
            continue
        except NotANorm:
            continue
        reason = why_not_fused(model, norm)
        inner = {id(other) for other in norm.inner}
        if reason is not None:
            declined.append((node, reason))
            told |= inner - {id(node)}
        elif not claimed & inner:
            matches.append(norm)
            claimed |= inner
    # Part of a norm may look like a near miss.
    parts = claimed | told
    return Found(tuple(matches), tuple(Declined(n.name, why) for n, why in declined if id(n) not in parts))


def replace_by_norm(model: GraphModel, norm: DecomposedNorm, op: str) -> Applied:
    """Replace the primitives by one LayerNormalization or RMSNormalization."""
    shape, base = norm.shape or (), norm.module or op.lower()
    scale = np.ones(shape, np.float32) if norm.scale is None else spread(norm.scale, shape)
    inputs = [norm.source, model.constant(f"{base}.scale", scale * np.float32(norm.factor))]
    if norm.bias is not None:
        inputs.append(model.constant(f"{base}.bias", spread(norm.bias, shape)))
    epsilon = float(np.float32(norm.epsilon))
    attrs = {"axis": norm.axes[0], "epsilon": epsilon, "stash_type": 1}
    name = put_in_place(model, norm, model.add(op, inputs, base, norm.result.dtype, attrs))
    return Applied(name, f"{len(norm.inner)} nodes → {op}(axis={norm.axes[0]}, epsilon={epsilon:.3g})")


def put_in_place(model: GraphModel, norm: DecomposedNorm, fused: Tensor) -> str:
    """Let the node of a new tensor compute the result of a norm; return the node's name.

    The result keeps its name, its readers, and a match that starts from it. The node is named after the
    module of the primitives, else after its operator.
    """
    node = producer(fused)
    if node is None:
        raise InternalError(f"the norm of '{norm.result.name}' has no producer")
    model.hand_over(norm.result, fused)
    model.rename(node, norm.module or node.op.lower())
    return str(node.name)


def spread(tensor: Tensor, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return a scale or bias spread over the normalized axes."""
    values = values_of(tensor)
    without_batch = values.reshape(values.shape[max(values.ndim - len(shape), 0) :])
    return np.ascontiguousarray(np.broadcast_to(without_batch, shape), dtype=np.float32)


def _kind(node: Node, miss: NearMiss) -> NormKind:
    moment = miss.moment
    if looks_centred(node) or (moment is not None and (moment.is_central or is_centred(moment.squared))):
        return NormKind.LAYER
    return NormKind.L2 if moment is not None and not moment.is_mean else NormKind.RMS
