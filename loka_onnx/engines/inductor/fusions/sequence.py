"""All fusions in their order."""

from __future__ import annotations

from collections.abc import Mapping

from loka_onnx.engines.inductor.fusions.attention import fuse_attention
from loka_onnx.engines.inductor.fusions.base import Findings, Fusion, FusionReport
from loka_onnx.engines.inductor.fusions.concat_quantize import fuse_concat_quantize
from loka_onnx.engines.inductor.fusions.factorization_norm import fuse_factorization_norm
from loka_onnx.engines.inductor.fusions.float8_product import fuse_float8_product
from loka_onnx.engines.inductor.fusions.half_product import fuse_half_product
from loka_onnx.engines.inductor.fusions.merged_bias import fuse_merged_bias
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.inductor.fusions.token_concat import fuse_token_concat
from loka_onnx.engines.inductor.fusions.token_residual_norm import fuse_token_residual_norm

FUSIONS: Mapping[str, Fusion] = {
    "factorization-norm": fuse_factorization_norm,
    "token-residual-norm": fuse_token_residual_norm,
    "attention": fuse_attention,
    "token-concat": fuse_token_concat,
    "concat-quantize": fuse_concat_quantize,
    "merged-bias": fuse_merged_bias,
    "float8-product": fuse_float8_product,
    "half-product": fuse_half_product,
}
"""Fusions by name. Products come last, after the fusions that move biases to them or give a Q to a norm.
Token mixers without a norm come after those with one."""


def fuse(graph: PlannedGraph) -> FusionReport:
    """Run all fusions on a planned graph, which is edited."""
    found: dict[str, Findings] = {name: fusion(graph) for name, fusion in FUSIONS.items()}
    return FusionReport(
        {name: tuple(each.fused) for name, each in found.items() if each.fused},
        {name: tuple(each.declined) for name, each in found.items() if each.declined},
    )
