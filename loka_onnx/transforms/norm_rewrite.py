"""Finding decomposed normalizations with a reader, and putting one operator in their place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.errors import InternalError
from loka_onnx.graph.model import GraphModel, Node, Tensor, producer, values_of
from loka_onnx.transforms.base import Found
from loka_onnx.transforms.norm_pattern import DecomposedNorm, NotANorm, normalized_shape, why_not_fused


def find_norms(model: GraphModel, read: Callable[[Node], DecomposedNorm]) -> Found[DecomposedNorm]:
    """Offer every quotient of the graph to a reader.

    Args:
        model: The graph.
        read: Returns the norm that a node is the quotient of, or raises `NotANorm`.
    """
    matches: list[DecomposedNorm] = []
    declined: list[Declined] = []
    for node in model.nodes:
        if node.op not in {"Div", "Mul"}:
            continue
        try:
            norm = read(node)
        except NotANorm:
            continue
        reason = why_not_fused(model, norm)
        if reason is None:
            matches.append(norm)
        else:
            declined.append(Declined(node.name, reason))
    return Found(tuple(matches), tuple(declined))


def replace_by_norm(model: GraphModel, norm: DecomposedNorm, op: str) -> Applied:
    """Put one node of the operator in place of the primitives; it is named after their module."""
    shape = normalized_shape(norm.source, norm.axis) or ()
    scale = np.ones(shape, np.float32) if norm.scale is None else _spread(norm.scale, shape)
    name = _site_name(model, norm.module or op.lower())
    inputs = [norm.source, model.constant(f"{name}.scale", scale)]
    if norm.bias is not None:
        inputs.append(model.constant(f"{name}.bias", _spread(norm.bias, shape)))
    attrs: dict[str, object] = {
        "axis": norm.axis,
        "epsilon": float(np.float32(norm.epsilon)),
        "stash_type": 1,
    }
    fused = producer(model.add(op, inputs, name, norm.result.dtype, attrs))
    replaced = producer(norm.result)
    if fused is None or replaced is None:
        raise InternalError(f"the norm '{name}' has no producer")
    fused.name = name
    # The tensor itself moves to the new node: its name, its readers, and a match that starts from it stay
    # valid.
    replaced.outputs.clear()
    fused.outputs = [norm.result]
    return Applied(name, f"{len(norm.inner)} nodes → {op}(axis={norm.axis}, epsilon={norm.epsilon:.3g})")


def _site_name(model: GraphModel, base: str) -> str:
    """`base`, or `base` with an ordinal when a node has that name; a tensor of that name does not count."""
    taken = {node.name for node in model.nodes}
    name, count = base, 0
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    return name


def _spread(tensor: Tensor, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    values = values_of(tensor)
    without_batch = values.reshape(values.shape[max(values.ndim - len(shape), 0) :])
    return np.ascontiguousarray(np.broadcast_to(without_batch, shape), dtype=np.float32)
