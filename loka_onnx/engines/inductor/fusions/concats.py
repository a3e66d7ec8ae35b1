"""Concatenations with the Q behind them.

Of two matrices, rounded to the type of X on reading::

    X  =  concat(A, B),    X, Q(X)

Inductor fuses this too, but its kernel took 35 µs, and 15 without the Q, for an unknown reason (DLRM-DCNv2 at
2048 on an H100, where X is x0 of every cross layer). Our kernel is not timed on a GPU yet.

Of a token mixer without a norm and other tokens, or the mixer alone, flattened or not. With tokens X
(batch, n, d), F (batch, n_F, d) and a learned W (m, n)::

    Z  =  W · X,   concat(F, W · X)   or   concat(W · X, F),      Z, Q(Z)

Exporters write W · X as (Xᵀ · Wᵀ)ᵀ. A compiler makes both transposes strides: the product then runs on a
kernel for unaligned operands, and the cast or Q of Z reads across rows. With n = 11 and Z of 27 × 128 at
2,048 examples (MovieLens' columns in front of a DLRM-DCNv2, on an H100, the record `trained-dlrm-dcnv2` of
tree 005134e) the product took 22 µs, the cast of its input 7 µs, and the concatenation 8 µs, or 36 µs with a
Q.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from loka_onnx.engines.inductor.fusions.base import (
    DOMAIN,
    HALVES,
    MOST_ELEMENTS,
    DeclinedFusion,
    Ends,
    Fused,
    Match,
    TokenMix,
    only_reader,
    padded,
    static,
    swaps_tokens,
    token_mix,
    unrounded,
    untransposed,
)
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor


def quantized_concats(graph: PlannedGraph) -> Iterator[Match]:
    """Concatenations that a Q reads."""
    for node in list(graph.nodes):
        if node.op == "Concat" and not node.domain and node.outputs:
            ends = Ends.of(graph, node.outputs[0])
            if ends.quantize:
                yield node.name, partial(_fuse_concat, graph, node, ends)


def _fuse_concat(graph: PlannedGraph, node: Node, ends: Ends) -> Fused:
    joined = node.outputs[0]
    if joined.kind not in HALVES:
        raise DeclinedFusion("the kernel writes BF16 and FP16")
    if len(node.inputs) != 2:
        raise DeclinedFusion(f"it joins {len(node.inputs)} tensors, the kernel two")
    parts = [node.reads(0), node.reads(1)]
    if static(joined, 2) is None or any(static(part, 2) is None for part in parts):
        raise DeclinedFusion("what it joins are not matrices of known widths")
    if node.attrs.get("axis") not in {1, -1} or any(part.is_constant for part in parts):
        raise DeclinedFusion("it does not join computed columns")
    inputs = [*(unrounded(graph, part) for part in parts), ends.scale]
    name = graph.fresh_name(f"{node.name}/quantized")
    attrs = {"wide": int(ends.wide), "base": joined.kind}
    graph.replace(f"{DOMAIN}::ConcatQuantize", name, inputs, ends.replaced(joined), attrs)
    return Fused(name)


@dataclass(frozen=True)
class _TokenConcat:
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


def token_concats(graph: PlannedGraph) -> Iterator[Match]:
    """Token mixers without a norm."""
    # Nodes that were fused with norms are still listed, but dead.
    for node in graph.live_nodes():
        match = _token_concat(graph, node) if node.op == "Transpose" and node.outputs else None
        if match is not None:
            yield match.mix.product.name, partial(_fuse_tokens, graph, match)


def _token_concat(graph: PlannedGraph, node: Node) -> _TokenConcat | None:
    """Match a Transpose whose output is W · X, and the Concat behind it; None for any other."""
    mixed = node.outputs[0]
    product = untransposed(mixed)
    mix = None if product is None or product.kind not in HALVES else token_mix(product)
    if mix is None:
        return None
    reader = only_reader(graph, mixed)
    if reader is None or reader.op != "Concat" or reader.domain or len(reader.inputs) != 2:
        return _TokenConcat(mix, mixed)
    first, second = reader.reads(0), reader.reads(1)
    beside = second if first is mixed else first
    if first is second or reader.attrs.get("axis") not in {1, -2} or beside.is_constant:
        return _TokenConcat(mix, mixed)
    return _TokenConcat(mix, reader.outputs[0], beside, first is mixed)


def _fuse_tokens(graph: PlannedGraph, match: _TokenConcat) -> Fused:
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
    largest = max(padded(count) for count in rows) * padded(d)
    if max(largest, padded(n) * padded(m)) > MOST_ELEMENTS:
        raise DeclinedFusion(f"{max(rows)}×{d} tokens are too large for one program")
    end = _flattened(graph, match.end, (m + (0 if others is None else others[0])) * d)
    ends = Ends.of(graph, end)
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
    graph.replace(f"{DOMAIN}::TokenConcat", name, inputs, ends.replaced(end), attrs)
    return Fused(name, (mix.product.name,))


def _is_all_mixed(product: Node) -> bool:
    """True if all readers of a product and its parts are replaced by this fusion."""
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
