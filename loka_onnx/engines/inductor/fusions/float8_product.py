"""An FP8 product with everything that follows it and needs no other element of its output.

With A and W in FP8 behind their DQ, in this order and each where it stands in the graph::

    Z  =  DQ(A) · DQ(W) + b
    Z  =  relu(Z)                   or, of a cross layer (arXiv 2008.13535, equation 1),   Z  =  x0 ⊙ Z + x
    Z, Q(Z)

become one node, of which the lowering makes one kernel, or a library's product and what the compiler fuses,
whichever was measured to be faster at that shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from loka_onnx.engines.inductor.fusions.base import (
    DOMAIN,
    E4M3FN,
    DeclinedFusion,
    Findings,
    Fused,
    is_float8_quantize,
    only_reader,
)
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor

OP = f"{DOMAIN}::Float8Product"


@dataclass
class _Epilogue:
    """What follows a product, as it is read.

    Attributes:
        end: The tensor that holds Z.
        bias: b.
        relu: Whether negative values become 0.
        cross: x0 and x, of a cross layer.
    """

    end: Tensor
    bias: Tensor | None = None
    relu: bool = False
    cross: tuple[Tensor, ...] = field(default=())


def fuse_float8_product(graph: PlannedGraph) -> Findings:
    """Fuse every FP8 product of a constant; see the module."""
    found = Findings([], [])
    for node in list(graph.nodes):
        operands = _operands(node)
        if operands is None:
            continue
        activation, weight = operands
        if activation.reads(1).values.size != 1:
            found.declined.append(f"{node.name}: its activation has several scales")
            continue
        try:
            found.fused.append(_fuse(graph, node, activation, weight))
        except DeclinedFusion as reason:
            found.declined.append(f"{node.name}: {reason}")
    return found


def _operands(node: Node) -> tuple[Node, Node] | None:
    """The two DQ of a product of an activation and a constant, both in E4M3FN."""
    if node.op not in {"Gemm", "MatMul"} or node.domain or not node.outputs:
        return None
    if node.op == "Gemm" and (
        node.attrs.get("transA", 0)
        or node.attrs.get("alpha", 1.0) != 1.0
        or node.attrs.get("beta", 1.0) != 1.0
    ):
        return None
    activation, weight = (node.reads(position).producer for position in (0, 1))
    if activation is None or weight is None or not all(map(_is_dequantize, (activation, weight))):
        return None
    values, stored = activation.reads(0), weight.reads(0)
    if values.is_constant or not stored.is_constant or len(stored.shape or ()) != 2:
        return None
    # The product takes one scale, or one for each of its columns.
    columns = 0 if node.attrs.get("transB", 0) else 1
    is_outer = weight.reads(1).values.size == 1 or weight.attrs.get("axis", 1) % 2 == columns
    if not is_outer or weight.attrs.get("block_size", 0):
        return None
    return (activation, weight) if values.kind == stored.kind == E4M3FN else None


def _is_dequantize(node: Node) -> bool:
    return node.op == "DequantizeLinear" and node.reads(1).is_constant


def _fuse(graph: PlannedGraph, node: Node, activation: Node, weight: Node) -> Fused:
    epilogue = _epilogue(graph, node)
    end, quantized, others = epilogue.end, [], 0
    for reader in end.readers:
        if not reader.outputs:
            continue
        if is_float8_quantize(reader):
            quantized.append(reader)
        else:
            others += 1
    # Several Q of one tensor have different scales: the kernel writes one of them.
    narrow = quantized[0] if len(quantized) == 1 else None
    is_wide = narrow is None or others > 0 or graph.is_output(end)
    inputs: list[Tensor | None] = [activation.reads(0), activation.reads(1)]
    inputs += [_transposed(graph, node, weight), weight.reads(1), epilogue.bias]
    inputs += [*(epilogue.cross or (None, None)), narrow.reads(1) if narrow is not None else None]
    replaced = ([end] if is_wide else []) + ([narrow.outputs[0]] if narrow is not None else [])
    attrs = {
        "relu": int(epilogue.relu),
        "wide": int(is_wide),
        "base": end.kind,
    }
    # What computes the site carries its name; the node that did computes nothing any more.
    graph.replace(OP, node.name, inputs, replaced, attrs)
    return Fused(node.name, (node.name,))


def _transposed(graph: PlannedGraph, node: Node, weight: Node) -> Tensor:
    """The weight as (N, K), the one layout in which matrix units read FP8 from both factors."""
    stored = weight.reads(0)
    if node.attrs.get("transB", 0):
        return stored
    return graph.constant(f"{stored.name}.transposed", np.ascontiguousarray(stored.values.T))


def _epilogue(graph: PlannedGraph, node: Node) -> _Epilogue:
    found = _Epilogue(node.outputs[0])
    if node.op == "Gemm" and node.has(2):
        if not _is_bias(node.reads(2), found.end):
            raise DeclinedFusion("what it adds is not one number a column")
        found.bias = node.reads(2)
    reader = only_reader(graph, found.end)
    if found.bias is None and reader is not None and reader.op == "Add":
        other = _other(reader, found.end)
        if other is not None and _is_bias(other, found.end):
            found.bias, found.end = other, reader.outputs[0]
            reader = only_reader(graph, found.end)
    if reader is None:
        return found
    if reader.op == "Relu":
        found.relu, found.end = True, reader.outputs[0]
        return found
    factor = _other(reader, found.end) if reader.op == "Mul" else None
    total = None if factor is None else only_reader(graph, reader.outputs[0])
    if factor is None or total is None or total.op != "Add":
        return found
    term = _other(total, reader.outputs[0])
    if term is not None and _is_alike(factor, found.end) and _is_alike(term, found.end):
        found.cross, found.end = (factor, term), total.outputs[0]
    return found


def _other(node: Node, tensor: Tensor) -> Tensor | None:
    """The other operand of a commutative node of two; None where it is the same tensor twice."""
    others = [each for each in node.inputs if each is not None and each is not tensor]
    return others[0] if len(others) == 1 else None


def _is_bias(tensor: Tensor, end: Tensor) -> bool:
    if not tensor.is_constant or end.shape is None or tensor.kind != end.kind:
        return False
    shape = tensor.shape or ()
    if len(shape) > len(end.shape):
        return False
    return shape[-1:] == end.shape[-1:] and all(length == 1 for length in shape[:-1])


def _is_alike(tensor: Tensor, end: Tensor) -> bool:
    """Whether a tensor surely has the shape and type of another, so that nothing is broadcast."""
    if tensor.is_constant or tensor.shape is None or end.shape is None or tensor.kind != end.kind:
        return False
    return len(end.shape) == 2 and tensor.shape == end.shape
