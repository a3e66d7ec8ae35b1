"""Which products of a graph read FP8 on both sides, whoever wrote the graph.

A matrix operand counts as FP8 when it comes from a DequantizeLinear of an FP8 tensor, through nothing but
operators that move values: tools put their pairs in front of a Transpose or behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from loka_onnx.core.artifact import ModelArtifact

MOVES = frozenset(
    {"Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze"}
    | {"Tile", "Transpose", "Unsqueeze"}
)
PRODUCTS = frozenset({"MatMul", "Gemm"})
FLOAT8 = frozenset(
    {
        onnx.TensorProto.FLOAT8E4M3FN,
        onnx.TensorProto.FLOAT8E4M3FNUZ,
        onnx.TensorProto.FLOAT8E5M2,
        onnx.TensorProto.FLOAT8E5M2FNUZ,
    }
)


@dataclass(frozen=True)
class QuantizedSites:
    """What runs in FP8.

    Attributes:
        sites: Linear sites of the exported model whose product reads FP8 on both sides.
        linear_sites: All linear sites of the exported model.
        share: Part of the FP8-able FLOPs of the exported model that these sites have.
        products: Names of all products that read FP8 on both sides, interactions included.
        unknown: Those among them that no site of the exported model is known for.
        pairs: QuantizeLinear nodes, those that no product benefits from included.
    """

    sites: tuple[str, ...]
    linear_sites: int
    share: float
    products: tuple[str, ...]
    unknown: tuple[str, ...]
    pairs: int


def quantized_products(model: onnx.ModelProto) -> tuple[str, ...]:
    """Names of the products of the main graph of which both matrix operands come from FP8."""
    trace = _Trace(model)
    return tuple(
        node.name or node.output[0]
        for node in model.graph.node
        if node.op_type in PRODUCTS and all(trace.is_float8(name) for name in node.input[:2])
    )


def quantized_sites(
    model: onnx.ModelProto, exported: ModelArtifact, origins: Mapping[str, Sequence[str]] | None = None
) -> QuantizedSites:
    """What of the exported model runs in FP8 in a graph that was made from it.

    Args:
        model: The graph that a tool wrote.
        exported: The model that the tool was given, whose sites carry the names of their nodes.
        origins: Sites of the exported model that a node of the graph replaces; None where names were kept.
    """
    origins = origins or {}
    linear = {site.name: site for site in exported.linear_sites}
    known = {site.name for site in exported.sites}
    products = quantized_products(model)
    found: set[str] = set()
    unknown = []
    for product in products:
        names = origins.get(product, (_site_of(product, known),))
        if not any(name in known for name in names):
            unknown.append(product)
        found.update(name for name in names if name in linear)
    able = exported.fp8_able_flops
    covered = sum(linear[name].flops_per_example for name in found if linear[name].is_fp8_able)
    return QuantizedSites(
        tuple(name for name in linear if name in found),
        len(linear),
        covered / able if able else 0.0,
        products,
        tuple(unknown),
        sum(node.op_type == "QuantizeLinear" for node in model.graph.node),
    )


def _site_of(node: str, known: set[str]) -> str:
    """The site that a node's name belongs to: tools append to names, as in ``head/MatMulAddFusion``."""
    fitting = [name for name in known if node == name or node.startswith((f"{name}/", f"{name}_"))]
    return max(fitting, key=len, default=node)


class _Trace:
    """Follows tensors of a graph back to what made them."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._made_by = {name: node for node in model.graph.node for name in node.output}
        self._types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}

    def is_float8(self, tensor: str) -> bool:
        """Whether a tensor is what came out of an FP8 DequantizeLinear, moved at most."""
        node = self._made_by.get(tensor)
        if node is None:
            return False
        if node.op_type == "DequantizeLinear":
            return self._holds_float8(node.input[0])
        if node.op_type not in MOVES:
            return False
        moved = node.input if node.op_type == "Concat" else node.input[:1]
        return all(self.is_float8(name) for name in moved)

    def _holds_float8(self, tensor: str) -> bool:
        node = self._made_by.get(tensor)
        if node is None:
            return self._types.get(tensor) in FLOAT8
        if node.op_type == "Constant":
            return any(attribute.t.data_type in FLOAT8 for attribute in node.attribute)
        if node.op_type == "QuantizeLinear":
            zero_point = node.input[2] if len(node.input) > 2 else ""
            written = {attribute.name: attribute.i for attribute in node.attribute}
            return (
                written.get("output_dtype") in FLOAT8
                or self._types.get(zero_point) in FLOAT8
                or (zero_point in self._made_by and self._holds_float8(zero_point))
            )
        return node.op_type in MOVES and self._holds_float8(node.input[0])
