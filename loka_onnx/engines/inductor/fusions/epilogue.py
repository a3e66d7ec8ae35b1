"""Epilogue of a product: operators behind it that need no other element of its output.

In this order, each optional::

    Z  =  A · W + b
    Z  =  relu(Z)                   or, of a cross layer (arXiv 2008.13535, equation 1),   Z  =  x0 ⊙ Z + x
    Z, Q(Z)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loka_onnx.engines.inductor.fusions.base import DeclinedFusion, is_float8_quantize, only_reader
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor


@dataclass
class Epilogue:
    """Matched epilogue of a product."""

    end: Tensor
    bias: Tensor | None = None
    relu: bool = False
    cross: tuple[Tensor, ...] = field(default=())


@dataclass(frozen=True)
class Ends:
    """Outputs of a kernel that computes Z: Z itself if `wide`, and the output of `quantize` if there is
    one.
    """

    wide: bool
    quantize: Node | None

    def replaced(self, end: Tensor) -> list[Tensor]:
        """Tensors that the kernel computes, Z first."""
        return ([end] if self.wide else []) + ([self.quantize.outputs[0]] if self.quantize else [])

    @property
    def scale(self) -> Tensor | None:
        """Scale of the Q."""
        return None if self.quantize is None else self.quantize.reads(1)


def ends_of(graph: PlannedGraph, end: Tensor) -> Ends:
    """Find the outputs for Z's readers; of several Q with different scales, the kernel computes none."""
    readers = [reader for reader in end.readers if reader.outputs]
    quantized = [reader for reader in readers if is_float8_quantize(reader)]
    narrow = quantized[0] if len(quantized) == 1 else None
    is_wide = narrow is None or len(readers) > 1 or graph.is_output(end)
    return Ends(is_wide, narrow)


def is_plain(node: Node) -> bool:
    """Tell whether a node is a MatMul, or a Gemm A · W + b or A · Wᵀ + b."""
    if node.op not in {"Gemm", "MatMul"} or node.domain or not node.outputs:
        return False
    attrs = node.attrs
    return not attrs.get("transA", 0) and attrs.get("alpha", 1.0) == attrs.get("beta", 1.0) == 1.0


def transposed(graph: PlannedGraph, node: Node, stored: Tensor) -> Tensor:
    """Transpose a product's weight to (N, K), the only layout in which matrix units read FP8 from both
    factors.

    A weight that was not loaded is unchanged: such a graph is only analysed.
    """
    if node.attrs.get("transB", 0) or not stored.is_read:
        return stored
    return graph.transposed(stored)


def read_epilogue(graph: PlannedGraph, node: Node) -> Epilogue:
    """Match the epilogue of a product.

    Raises:
        DeclinedFusion: A Gemm adds something other than one number per column.
    """
    found = Epilogue(node.outputs[0])
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
    """The other operand of a commutative binary node; None where both operands are the same tensor."""
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
    """Tell whether a tensor certainly has the shape and type of another, so that nothing is broadcast."""
    if tensor.is_constant or tensor.shape is None or end.shape is None or tensor.kind != end.kind:
        return False
    return len(end.shape) == 2 and tensor.shape == end.shape
