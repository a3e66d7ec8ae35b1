"""A product in BF16 or FP16 with its epilogue.

With A and W in one of these types::

    Z  =  A · W + b,    its epilogue (`epilogue`),    Z, Q(Z)

become one node, like FP8 products (`float8_product`), even without an epilogue: measurement selects a
library's kernel or a tile of ours there too.
"""

from __future__ import annotations

from functools import partial

from loka_onnx.engines.inductor.fusions.base import DOMAIN, HALVES, DeclinedFusion, Findings, Fused, fuse_each
from loka_onnx.engines.inductor.fusions.epilogue import ends_of, is_plain, read_epilogue, transposed
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph

OP = f"{DOMAIN}::HalfProduct"
MULTIPLE = 16
"""Required divisor of K and N in the kernel (`kernels.triton_product`)."""


def fuse_half_product(graph: PlannedGraph) -> Findings:
    """Fuse every product of a constant in BF16 or FP16; see the module."""
    return fuse_each((node.name, partial(_fuse, graph, node)) for node in list(graph.nodes) if _is_half(node))


def _is_half(node: Node) -> bool:
    if not is_plain(node):
        return False
    activation, weight = node.reads(0), node.reads(1)
    if activation.is_constant or not weight.is_constant or len(weight.shape or ()) != 2:
        return False
    sizes = [length or 1 for length in weight.shape or ()]
    return activation.kind == weight.kind and weight.kind in HALVES and not any(n % MULTIPLE for n in sizes)


def _fuse(graph: PlannedGraph, node: Node) -> Fused:
    epilogue = read_epilogue(graph, node)
    ends = ends_of(graph, epilogue.end)
    if epilogue.end.kind != node.reads(1).kind:
        raise DeclinedFusion("its result has another type than its factors")
    inputs = [node.reads(0), None, transposed(graph, node, node.reads(1)), None, epilogue.bias]
    inputs += [*(epilogue.cross or (None, None)), ends.scale]
    attrs = {"relu": int(epilogue.relu), "wide": int(ends.wide), "base": epilogue.end.kind}
    graph.replace(OP, node.name, inputs, ends.replaced(epilogue.end), attrs)
    return Fused(node.name, (node.name,))
