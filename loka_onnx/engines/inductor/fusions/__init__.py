"""Fusions that the compiler does not find, written into the planned graph as nodes of an own domain.

A fusion tries to match at one node and edits the graph, in which the next node is tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loka_onnx.engines.inductor.fusions.attention import exact_attention
from loka_onnx.engines.inductor.fusions.base import DOMAIN, DeclinedFusion, Fused
from loka_onnx.engines.inductor.fusions.branches import stacked_branches
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph
from loka_onnx.engines.inductor.fusions.products import (
    grouped_concat,
    half_product,
    merged_bias,
    quantized_concat,
    quantized_product,
)
from loka_onnx.engines.inductor.fusions.tokens import factorization_norm, token_concat, token_residual_norm

__all__ = ["DOMAIN", "Fused", "FusionReport", "fuse"]

FUSIONS: Mapping[str, Callable[[PlannedGraph, Node], Fused | None]] = {
    "factorization-norm": factorization_norm,
    "token-residual-norm": token_residual_norm,
    "attention": exact_attention,
    "token-concat": token_concat,
    "stacked-branches": stacked_branches,
    "concat-quantize": quantized_concat,
    "grouped-concat": grouped_concat,
    "merged-bias": merged_bias,
    "quantized-product": quantized_product,
    "half-product": half_product,
}
"""Fusions by name: None where a node does not match. Products come last, after the fusions that move biases
to them or give a Q to a norm. Token mixers without a norm come after those with one."""


@dataclass(frozen=True)
class FusionReport:
    """Fused matches by fusion, and declined ones with node and reason by fusion."""

    fused: Mapping[str, tuple[Fused, ...]]
    declined: Mapping[str, tuple[str, ...]]

    @property
    def joined(self) -> dict[str, str]:
        """Fusion of each site that shares a kernel with others; eight bits there would split the kernel."""
        return {
            site: name
            for name, matches in self.fused.items()
            for each in matches
            if len(each.sites) > 1
            for site in each.sites
        }


def fuse(graph: PlannedGraph) -> FusionReport:
    """Run all fusions on a planned graph, which is edited."""
    fused, declined = defaultdict[str, list[Fused]](list), defaultdict[str, list[str]](list)
    for name, fusion in FUSIONS.items():
        # Nodes that were fused are still listed, but dead.
        live = {id(node) for node in graph.live_nodes()}
        for node in [each for each in graph.nodes if id(each) in live]:
            try:
                done = fusion(graph, node) if node.outputs else None
            except DeclinedFusion as error:
                declined[name].append(f"{(error.node or node).name}: {error}")
            else:
                fused[name] += [done] if done else []
    return FusionReport(
        {name: tuple(each) for name, each in fused.items() if each},
        {name: tuple(each) for name, each in declined.items()},
    )
