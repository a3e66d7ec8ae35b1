"""Matching of token mixers: products of tokens with a learned matrix.

X (batch, n, d) holds tokens. Exporters write a mixer as Xᵀ · W, with W (n, m), and mods merge several that
read the same Xᵀ into one product with a Split behind it.

A kernel for a mixer holds whole operands, 2 bytes an element, in registers and shared memory. Their limit
`base.MOST_ELEMENTS` is set for the H100: two operands of 2¹⁵ are 128 KiB, and a block has at most 227 KB
(CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 163 KB on sm80, 227 KB on sm90
and sm100, 99 KB on sm89 and sm120). Where that is too much, Triton refuses the kernel and the build of the
candidate fails; sm89 and sm120 were not tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.engines.inductor.fusions.base import made_by, through_casts
from loka_onnx.engines.inductor.fusions.planned import Node, Tensor


@dataclass(frozen=True)
class TokenMix:
    """Xᵀ · W: the tensor X, the weight W (n, m), and the node that computes it, perhaps merged with
    others.
    """

    x: Tensor
    weight: npt.NDArray[Any]
    product: Node


def token_mix(tensor: Tensor) -> TokenMix | None:
    """Match a tensor (batch, d, m) as Xᵀ · W; or None."""
    tensor = through_casts(tensor)
    node, columns = tensor.producer, slice(None)
    if node is not None and node.op == "Split":
        part = _part(node, tensor)
        if part is None:
            return None
        columns, node = part, node.reads(0).producer
    if node is None or node.op != "MatMul" or not node.reads(1).is_constant:
        return None
    weight = node.reads(1).values
    x = transposed(node.reads(0))
    if x is None or weight.ndim != 2 or node.reads(1).kind != x.kind:
        return None
    return TokenMix(x, weight[:, columns], node)


def transposed(tensor: Tensor) -> Tensor | None:
    """Return the tensor of rank 3 whose last two axes this one transposes; None where it is no transpose."""
    node = made_by(tensor, "Transpose")
    return None if node is None or not swaps_tokens(node) else through_casts(node.reads(0))


def swaps_tokens(node: Node) -> bool:
    """Tell whether a node transposes (batch, n, d) to (batch, d, n)."""
    return node.op == "Transpose" and list(node.attrs.get("perm", ())) == [0, 2, 1]


def _part(split: Node, tensor: Tensor) -> slice | None:
    """Columns that one output of a Split along the last axis holds; or None."""
    if split.attrs.get("axis", 0) not in {-1, 2} or not split.has(1) or not split.reads(1).is_constant:
        return None
    if len(split.reads(1).values) != len(split.outputs):
        return None
    ends = np.cumsum(split.reads(1).values)
    position = next(i for i, output in enumerate(split.outputs) if output is tensor)
    return slice(int(ends[position - 1]) if position else 0, int(ends[position]))
