"""What follows a product and needs no other element of its output, read from the graph.

In this order and each where it stands::

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
    """Operators behind a product, as they are read.

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


@dataclass(frozen=True)
class Ends:
    """Results that a kernel computes of Z.

    Attributes:
        wide: Whether Z itself is read.
        quantize: The Q whose output it computes; None where there is none.
    """

    wide: bool
    quantize: Node | None

    def replaced(self, end: Tensor) -> list[Tensor]:
        """The tensors that the kernel computes, Z first."""
        return ([end] if self.wide else []) + ([self.quantize.outputs[0]] if self.quantize else [])

    @property
    def scale(self) -> Tensor | None:
        """Of the Q."""
        return None if self.quantize is None else self.quantize.reads(1)


def ends_of(graph: PlannedGraph, end: Tensor) -> Ends:
    """Who reads Z; several Q of one tensor have different scales, and the kernel writes one of them."""
    readers = [reader for reader in end.readers if reader.outputs]
    quantized = [reader for reader in readers if is_float8_quantize(reader)]
    narrow = quantized[0] if len(quantized) == 1 else None
    is_wide = narrow is None or len(readers) > 1 or graph.is_output(end)
    return Ends(is_wide, narrow)


def is_plain(node: Node) -> bool:
    """Whether a node is a MatMul, or a Gemm A · W + b or A · Wᵀ + b."""
    if node.op not in {"Gemm", "MatMul"} or node.domain or not node.outputs:
        return False
    attrs = node.attrs
    return not attrs.get("transA", 0) and attrs.get("alpha", 1.0) == attrs.get("beta", 1.0) == 1.0


def transposed(graph: PlannedGraph, node: Node, stored: Tensor) -> Tensor:
    """The weight of a product as (N, K), the one layout in which matrix units read FP8 from both factors.

    One that was not read stays as it is: nobody computes with such a graph.
    """
    if node.attrs.get("transB", 0) or not stored.is_read:
        return stored
    return graph.transposed(stored)


def read_epilogue(graph: PlannedGraph, node: Node) -> Epilogue:
    """What follows a product.

    Raises:
        DeclinedFusion: A Gemm adds something that is not one number a column.
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
