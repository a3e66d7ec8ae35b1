"""A residual block over tokens: LayerNorm of the block's own tokens and a token mixer, plus the tokens.

With tokens X (batch, n, d), F (batch, n_F, d) and a learned W (n_L, n), n_F + n_L = n (Wukong, arXiv
2403.02545, section 3)::

    LN(concat(F, W · X) + X)   →   one kernel that reads X and F once

The kernel keeps the sums in FP32 for the norm; the graph rounds them in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from loka_onnx.engines.inductor.fusions.base import (
    DOMAIN,
    HALVES,
    MOST_ELEMENTS,
    DeclinedFusion,
    Findings,
    Fused,
    attributes,
    fuse_each,
    made_by,
    normalizes_last_axis,
    only_reader,
    padded,
    static,
    through_casts,
)
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor
from loka_onnx.engines.inductor.fusions.tokens import TokenMix, token_mix, transposed

OP = f"{DOMAIN}::TokenResidualNorm"


@dataclass(frozen=True)
class _Block:
    """A matched residual block."""

    norm: Node
    own: Tensor
    mix: TokenMix


def fuse_token_residual_norm(graph: PlannedGraph) -> Findings:
    """Fuse every such block; see the module."""
    return fuse_each(
        (norm.name, partial(_fuse, graph, block))
        for norm in list(graph.nodes)
        if norm.op == "LayerNormalization" and norm.outputs and (block := _block(norm)) is not None
    )


def _block(norm: Node) -> _Block | None:
    total = made_by(norm.reads(0), "Add")
    if total is None:
        return None
    both = (total.reads(0), total.reads(1))
    for joined, residual in (both, both[::-1]):
        concat = made_by(joined, "Concat")
        if concat is None or len(concat.inputs) != 2 or concat.attrs.get("axis") not in {1, -2}:
            continue
        mixed = transposed(concat.reads(1))
        mix = None if mixed is None else token_mix(mixed)
        if mix is not None and mix.x is through_casts(residual):
            return _Block(norm, through_casts(concat.reads(0)), mix)
    return None


def _fuse(graph: PlannedGraph, block: _Block) -> Fused:
    norm, own, x = block.norm, block.own, block.mix.x
    n, later = block.mix.weight.shape
    lengths, first = static(x, 3), static(own, 3)
    if lengths is None or first is None or lengths[0] != n or first != (n - later, lengths[1]):
        raise DeclinedFusion("the shape of the tokens is not known, or is another behind the block")
    if x.kind not in HALVES or own.kind != x.kind:
        raise DeclinedFusion("the kernel multiplies BF16 and FP16")
    d = lengths[1]
    if not normalizes_last_axis(norm, (None, n, d)):
        raise DeclinedFusion("it does not normalize each token, and that alone")
    if max(padded(n), padded(later)) * padded(d) > MOST_ELEMENTS or padded(n) * padded(later) > MOST_ELEMENTS:
        raise DeclinedFusion(f"{n}×{d} tokens are too large for one program")
    affine = [tensor for tensor in norm.inputs[1:] if tensor is not None]
    if not all(tensor.is_constant and tensor.values.size == d for tensor in affine):
        raise DeclinedFusion("it does not normalize over the last axis alone")
    out = norm.outputs[0]
    reader = only_reader(graph, out)
    if reader is not None and reader.op == "Cast" and reader.outputs[0].kind == x.kind:
        out = reader.outputs[0]
    if out.kind != x.kind:
        raise DeclinedFusion("its output is read in another precision than that of the tokens")
    scale = affine[0].values
    shift = affine[1].values if len(affine) > 1 else np.zeros_like(scale)
    name = graph.fresh_name(f"{norm.name}/residual")
    inputs = [
        x,
        own,
        graph.constant(f"{name}.w", np.ascontiguousarray(block.mix.weight.T)),
        graph.constant(f"{name}.gamma", scale.reshape(-1)),
        graph.constant(f"{name}.beta", shift.reshape(-1)),
    ]
    attrs = attributes(norm, (block.mix.product.name,))
    graph.replace(OP, name, inputs, [out], attrs)
    return Fused(name, (block.mix.product.name, norm.name))
