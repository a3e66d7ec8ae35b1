"""Fusions that the compiler does not find, written into the planned graph as nodes of an own domain.

A fusion yields its matches lazily, because each edits the graph in which the next match is searched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from loka_onnx.engines.inductor.fusions.attention import attentions
from loka_onnx.engines.inductor.fusions.base import DOMAIN, DeclinedFusion, Fused, Match
from loka_onnx.engines.inductor.fusions.concats import quantized_concats, token_concats
from loka_onnx.engines.inductor.fusions.norms import factorization_norms, token_residual_norms
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.inductor.fusions.products import float8_products, half_products, merged_biases

__all__ = ["DOMAIN", "Fused", "FusionReport", "fuse"]

FUSIONS: Mapping[str, Callable[[PlannedGraph], Iterator[Match]]] = {
    "factorization-norm": factorization_norms,
    "token-residual-norm": token_residual_norms,
    "attention": attentions,
    "token-concat": token_concats,
    "concat-quantize": quantized_concats,
    "merged-bias": merged_biases,
    "float8-product": float8_products,
    "half-product": half_products,
}
"""Fusions by name. Products come last, after the fusions that move biases to them or give a Q to a norm.
Token mixers without a norm come after those with one."""


@dataclass(frozen=True)
class FusionReport:
    """Fused matches by fusion, and declined ones with node and reason by fusion."""

    fused: Mapping[str, tuple[Fused, ...]]
    declined: Mapping[str, tuple[str, ...]]

    @property
    def joined(self) -> dict[str, str]:
        """Fusion of each site that shares a kernel with others; FP8 there would split the kernel."""
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
    for name, matches in FUSIONS.items():
        for node, write in matches(graph):
            try:
                fused[name].append(write())
            except DeclinedFusion as reason:
                declined[name].append(f"{node}: {reason}")
    return FusionReport(
        {name: tuple(each) for name, each in fused.items() if each},
        {name: tuple(each) for name, each in declined.items()},
    )
