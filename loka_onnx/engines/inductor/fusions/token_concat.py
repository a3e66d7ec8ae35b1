"""A learned mix of tokens where no norm follows: beside other tokens or alone, flattened or not, with its Q.

With tokens X (batch, n, d), F (batch, n_F, d) and a learned W (m, n)::

    Z  =  W · X,   concat(F, W · X)   or   concat(W · X, F),      Z, Q(Z)

Exporters write W · X as (Xᵀ · Wᵀ)ᵀ. A compiler keeps both transposes as strides: the product runs on a kernel
for operands that are not aligned, and what casts or quantizes Z reads it across. With n of 11 and Z of
27 × 128 at 2,048 examples (MovieLens' columns in front of a DLRM-DCNv2, on an H100, the record
`trained-dlrm-dcnv2` of tree 005134e) the product took 22 µs, the cast of what it reads 7 µs, and what joins
it 8 µs, or 36 µs with a Q.
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
class _Place:
    """Where such a mix stands.

    Attributes:
        mix: W · X.
        end: Z, as (batch, tokens, d).
        beside: F; None where the mix is alone.
        is_first: Whether the mix stands in front of F.
    """

    mix: TokenMix
    end: Tensor
    beside: Tensor | None = None
    is_first: bool = True


def fuse_token_concat(graph: PlannedGraph) -> Findings:
    """Fuse every such mix; see the module."""
    return fuse_each(
        (place.mix.product.name, partial(_fuse, graph, place))
        # What norms were fused with is still there, and nothing reads it any more.
        for node in graph.live_nodes()
        if node.op == "Transpose" and node.outputs and (place := _place(graph, node)) is not None
    )


def _place(graph: PlannedGraph, node: Node) -> _Place | None:
    """Where the output of a Transpose goes that is W · X; None when it is something else."""
    mixed = node.outputs[0]
    product = transposed(mixed)
    mix = None if product is None or product.kind not in HALVES else token_mix(product)
    if mix is None:
        return None
    reader = only_reader(graph, mixed)
    if reader is None or reader.op != "Concat" or reader.domain or len(reader.inputs) != 2:
        return _Place(mix, mixed)
    first, second = reader.reads(0), reader.reads(1)
    beside = second if first is mixed else first
    if first is second or reader.attrs.get("axis") not in {1, -2} or beside.is_constant:
        return _Place(mix, mixed)
    return _Place(mix, reader.outputs[0], beside, first is mixed)


def _fuse(graph: PlannedGraph, place: _Place) -> Fused:
    mix, beside = place.mix, place.beside
    n, m = mix.weight.shape
    lengths = static(mix.x, 3)
    others = None if beside is None else static(beside, 3)
    if lengths is None or lengths[0] != n or (beside is not None and others is None):
        raise DeclinedFusion("the shape of the tokens is not known")
    if mix.x.kind not in HALVES or place.end.kind != mix.x.kind:
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
    end = _flattened(graph, place.end, (m + (0 if others is None else others[0])) * d)
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
        "mix_first": int(place.is_first),
        "flat": int(end is not place.end),
        "wide": int(ends.wide),
        "base": place.end.kind,
    }
    graph.replace(OP, name, inputs, ends.replaced(end), attrs)
    return Fused(name, (mix.product.name,))


def _is_all_mixed(product: Node) -> bool:
    """Whether nothing reads a product, or a part of it, but what this fusion takes the place of."""
    ends = list(product.outputs)
    while ends:
        for reader in ends.pop().readers:
            if reader.op in {"Split", "Cast"} and not reader.domain:
                ends += reader.outputs
            elif reader.outputs and not swaps_tokens(reader):
                return False
    return True


def _flattened(graph: PlannedGraph, end: Tensor, width: int) -> Tensor:
    """Z as one row for each example, where it is read as that alone; itself elsewhere."""
    reader = only_reader(graph, end)
    if reader is None or reader.op not in {"Reshape", "Flatten"} or reader.domain:
        return end
    flat = reader.outputs[0]
    return flat if static(flat, 2) == (width,) else end
