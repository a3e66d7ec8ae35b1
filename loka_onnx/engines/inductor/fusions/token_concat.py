"""A token mixer without a norm: concatenated with other tokens or alone, flattened or not, with its Q.

With tokens X (batch, n, d), F (batch, n_F, d) and a learned W (m, n)::

    Z  =  W · X,   concat(F, W · X)   or   concat(W · X, F),      Z, Q(Z)

Exporters write W · X as (Xᵀ · Wᵀ)ᵀ. A compiler makes both transposes strides: the product then runs on a
kernel for unaligned operands, and the cast or Q of Z reads across rows. With n = 11 and Z of 27 × 128 at
2,048 examples (MovieLens' columns in front of a DLRM-DCNv2, on an H100, the record `trained-dlrm-dcnv2` of
tree 005134e) the product took 22 µs, the cast of its input 7 µs, and the concatenation 8 µs, or 36 µs with a
Q.
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
    fuse_each,
    only_reader,
    padded,
    static,
    unrounded,
)
from loka_onnx.engines.inductor.fusions.epilogue import ends_of
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor
from loka_onnx.engines.inductor.fusions.tokens import TokenMix, swaps_tokens, token_mix, transposed

OP = f"{DOMAIN}::TokenConcat"


@dataclass(frozen=True)
class _Match:
    """A matched token mixer.

    Attributes:
        mix: W · X.
        end: Z, as (batch, tokens, d).
        beside: F; None where the mix is alone.
        is_first: Whether the mix is in front of F.
    """

    mix: TokenMix
    end: Tensor
    beside: Tensor | None = None
    is_first: bool = True


def fuse_token_concat(graph: PlannedGraph) -> Findings:
    """Fuse every such mixer; see the module."""
    return fuse_each(
        (match.mix.product.name, partial(_fuse, graph, match))
        # Nodes that were fused with norms are still listed, but dead.
        for node in graph.live_nodes()
        if node.op == "Transpose" and node.outputs and (match := _match(graph, node)) is not None
    )


def _match(graph: PlannedGraph, node: Node) -> _Match | None:
    """Match a Transpose whose output is W · X, and the Concat behind it; None for any other."""
    mixed = node.outputs[0]
    product = transposed(mixed)
    mix = None if product is None or product.kind not in HALVES else token_mix(product)
    if mix is None:
        return None
    reader = only_reader(graph, mixed)
    if reader is None or reader.op != "Concat" or reader.domain or len(reader.inputs) != 2:
        return _Match(mix, mixed)
    first, second = reader.reads(0), reader.reads(1)
    beside = second if first is mixed else first
    if first is second or reader.attrs.get("axis") not in {1, -2} or beside.is_constant:
        return _Match(mix, mixed)
    return _Match(mix, reader.outputs[0], beside, first is mixed)


def _fuse(graph: PlannedGraph, match: _Match) -> Fused:
    mix, beside = match.mix, match.beside
    n, m = mix.weight.shape
    lengths = static(mix.x, 3)
    others = None if beside is None else static(beside, 3)
    if lengths is None or lengths[0] != n or (beside is not None and others is None):
        raise DeclinedFusion("the shape of the tokens is not known")
    if mix.x.kind not in HALVES or match.end.kind != mix.x.kind:
        raise DeclinedFusion("the kernel multiplies BF16 and FP16")
    if not _is_all_mixed(mix.product):
        raise DeclinedFusion("something else reads the product, which would be computed twice")
    d = lengths[1]
    rows = [n, m, *(() if others is None else others[:1])]
    if others is not None and others[1] != d:
        raise DeclinedFusion("what it joins are not tokens of one length")
    if (
        max(padded(count) for count in rows) * padded(d) > MOST_ELEMENTS
        or padded(n) * padded(m) > MOST_ELEMENTS
    ):
        raise DeclinedFusion(f"{max(rows)}×{d} tokens are too large for one program")
    end = _flattened(graph, match.end, (m + (0 if others is None else others[0])) * d)
    ends = ends_of(graph, end)
    name = graph.fresh_name(f"{mix.product.name}/tokens")
    inputs = [
        unrounded(graph, mix.x),
        graph.constant(f"{name}.w", np.ascontiguousarray(mix.weight.T)),
        None if beside is None else unrounded(graph, beside),
        ends.scale,
    ]
    attrs = {
        "products": [mix.product.name],
        "mix_first": int(match.is_first),
        "flat": int(end is not match.end),
        "wide": int(ends.wide),
        "base": match.end.kind,
    }
    graph.replace(OP, name, inputs, ends.replaced(end), attrs)
    return Fused(name, (mix.product.name,))


def _is_all_mixed(product: Node) -> bool:
    """Tell whether all readers of a product and its parts are replaced by this fusion."""
    ends = list(product.outputs)
    while ends:
        for reader in ends.pop().readers:
            if reader.op in {"Split", "Cast"} and not reader.domain:
                ends += reader.outputs
            elif reader.outputs and not swaps_tokens(reader):
                return False
    return True


def _flattened(graph: PlannedGraph, end: Tensor, width: int) -> Tensor:
    """Return Z as one row per example where its only reader flattens it; else Z."""
    reader = only_reader(graph, end)
    if reader is None or reader.op not in {"Reshape", "Flatten"} or reader.domain:
        return end
    flat = reader.outputs[0]
    return flat if static(flat, 2) == (width,) else end
