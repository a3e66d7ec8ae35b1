"""Concatenation of the inputs of a dense part, with the Q behind it.

    X  =  concat(A, B),    X, Q(X)

of two matrices, rounded to the type of X on reading. Inductor fuses this too, but its kernel took 35 µs, and
15 without the Q, for an unknown reason (DLRM-DCNv2 at 2048 on an H100, where X is x0 of every cross layer).
Our kernel is not timed on a GPU yet.
"""

from __future__ import annotations

from functools import partial

from loka_onnx.engines.inductor.fusions.base import (
    DOMAIN,
    HALVES,
    DeclinedFusion,
    Findings,
    Fused,
    fuse_each,
    static,
    unrounded,
)
from loka_onnx.engines.inductor.fusions.epilogue import ends_of
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph

OP = f"{DOMAIN}::ConcatQuantize"


def fuse_concat_quantize(graph: PlannedGraph) -> Findings:
    """Fuse every such concatenation; see the module."""
    return fuse_each(
        (node.name, partial(_fuse, graph, node))
        for node in list(graph.nodes)
        if node.op == "Concat"
        and not node.domain
        and node.outputs
        and ends_of(graph, node.outputs[0]).quantize
    )


def _fuse(graph: PlannedGraph, node: Node) -> Fused:
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
    ends = ends_of(graph, joined)
    inputs = [*(unrounded(graph, part) for part in parts), ends.scale]
    name = graph.fresh_name(f"{node.name}/quantized")
    attrs = {"wide": int(ends.wide), "base": joined.kind}
    graph.replace(OP, name, inputs, ends.replaced(joined), attrs)
    return Fused(name)
