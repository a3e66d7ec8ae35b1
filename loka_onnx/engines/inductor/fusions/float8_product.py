"""An FP8 product with its epilogue.

With A and W in FP8 behind their DQ::

    Z  =  DQ(A) · DQ(W) + b,    its epilogue (`epilogue`),    Z, Q(Z)

become one node, which the lowering computes by one kernel, or by a library's product and kernels of the
compiler, whichever measured faster at that shape.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from loka_onnx.engines.inductor.fusions.base import DOMAIN, E4M3FN, DeclinedFusion, Findings, Fused, fuse_each
from loka_onnx.engines.inductor.fusions.epilogue import ends_of, is_plain, read_epilogue, transposed
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor

OP = f"{DOMAIN}::Float8Product"


def fuse_float8_product(graph: PlannedGraph) -> Findings:
    """Fuse every FP8 product of a constant; see the module."""
    return fuse_each(
        (node.name, partial(_fuse, graph, node, *operands))
        for node in list(graph.nodes)
        if (operands := _operands(node)) is not None
    )


def _operands(node: Node) -> tuple[Node, Node] | None:
    """The two DQ of a product of an activation and a constant, both in E4M3FN; or None."""
    if not is_plain(node):
        return None
    activation, weight = (node.reads(position).producer for position in (0, 1))
    if activation is None or weight is None or not all(map(_is_dequantize, (activation, weight))):
        return None
    values, stored = activation.reads(0), weight.reads(0)
    if values.is_constant or not stored.is_constant or len(stored.shape or ()) != 2:
        return None
    # The product takes one scale, or one for each column.
    columns = 0 if node.attrs.get("transB", 0) else 1
    is_outer = weight.reads(1).values.size == 1 or weight.attrs.get("axis", 1) % 2 == columns
    if not is_outer or weight.attrs.get("block_size", 0):
        return None
    return (activation, weight) if values.kind == stored.kind == E4M3FN else None


def _is_dequantize(node: Node) -> bool:
    return node.op == "DequantizeLinear" and node.reads(1).is_constant


def _fuse(graph: PlannedGraph, node: Node, activation: Node, weight: Node) -> Fused:
    if activation.reads(1).values.size != 1:
        raise DeclinedFusion("its activation has several scales")
    epilogue = read_epilogue(graph, node)
    ends = ends_of(graph, epilogue.end)
    inputs: list[Tensor | None] = [activation.reads(0), activation.reads(1)]
    inputs += [transposed(graph, node, weight.reads(0)), weight.reads(1), epilogue.bias]
    inputs += [*(epilogue.cross or (None, None)), ends.scale, _column_scale(graph, node, activation, weight)]
    attrs = {"relu": int(epilogue.relu), "wide": int(ends.wide), "base": epilogue.end.kind}
    # The new node takes the site's name; the old node has no outputs left.
    graph.replace(OP, node.name, inputs, ends.replaced(epilogue.end), attrs)
    return Fused(node.name, (node.name,))


def _column_scale(graph: PlannedGraph, node: Node, activation: Node, weight: Node) -> Tensor:
    """Product of both scales for each column, precomputed because engines would compute it in every
    request.
    """
    stored = weight.reads(0).values.shape
    columns = stored[0] if node.attrs.get("transB", 0) else stored[1]
    both = [each.reads(1).values.astype(np.float32).reshape(-1) for each in (activation, weight)]
    return graph.constant(f"{node.name}/scale", np.broadcast_to(both[0] * both[1], (columns,)))
