"""Write an Einsum as matrix products, because no engine quantizes an Einsum, and it is no site.

An Einsum of two operands that sums over one letter is a batched matrix product of its transposed operands:
with batch letters B (in both operands and the output), k (in both, summed), m (in the first only) and n (in
the second only)::

    Einsum(A, C; → …)   =   Transpose(MatMul(A as [B, m, k], C as [B, k, n]))

Without batch letters one operand may have several letters of its own, which MatMul broadcasts over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type, is_constant, values_of
from loka_onnx.graph.products import equation_of
from loka_onnx.transforms.base import Mod, NotRewritten, find

_T = onnx.TensorProto
_FLOATS = frozenset({_T.FLOAT, _T.DOUBLE, _T.FLOAT16, _T.BFLOAT16})


@dataclass(frozen=True)
class Contraction:
    """An Einsum and the product that computes it, by letters of axes.

    `terms` are the letters of the operands, that of the left factor first (the second operand, if
    `is_swapped`), and `factors` those of the product; `output` and `result` are letters of their results.
    """

    node: Node
    terms: tuple[str, str]
    factors: tuple[str, str]
    output: str
    result: str
    is_swapped: bool


class EinsumToMatMul(Mod[Contraction]):
    """Einsum of two operands → MatMul."""

    name = "einsum-to-matmul"

    def _find(self, model: GraphModel) -> Iterator[Contraction | Declined]:
        return find((node for node in model.nodes if node.op == "Einsum"), _read)

    def rewrite(self, model: GraphModel, match: Contraction) -> Applied:
        """Replace the Einsum by a MatMul of its name, with dots for slashes, and Transposes where needed."""
        node = match.node
        base = str(node.name).replace("/", ".").strip(".")
        operands = node.inputs[::-1] if match.is_swapped else node.inputs
        left, right = (
            _arranged(model, term, tensor, factor, base)
            for term, tensor, factor in zip(match.terms, operands, match.factors, strict=True)
        )
        result = model.add("MatMul", [left, right], f"{base}/matmul", node.outputs[0].dtype)
        site = result.inputs[0]
        model.hand_over(node.outputs[0], _arranged(model, match.result, result, match.output, base))
        model.rename(site, base)
        terms = match.terms[::-1] if match.is_swapped else match.terms
        return Applied(site.name, f"Einsum {','.join(terms)}->{match.output} → MatMul")


def _read(node: Node) -> Contraction:
    text = equation_of(node)
    terms, arrow, output = text.partition("->")
    operands = tuple(terms.split(","))
    if not arrow or "." in text:
        raise NotRewritten(f"'{text}' leaves its output or its batch axes implicit")
    if len(operands) != 2:
        raise NotRewritten(f"'{text}' has {len(operands)} operands, not 2")
    if any(len(set(term)) < len(term) for term in (*operands, output)):
        raise NotRewritten(f"'{text}' reads a diagonal")
    if node.outputs[0].dtype is None or element_type(node.outputs[0].dtype) not in _FLOATS:
        raise NotRewritten("its operands are not known to be of a floating type")
    one, other = operands
    head = "".join(letter for letter in one if letter in other and letter in output)
    summed = "".join(letter for letter in one if letter in other and letter not in output)
    left = "".join(letter for letter in one if letter not in other)
    right = "".join(letter for letter in other if letter not in one)
    if any(letter not in output for letter in left + right):
        raise NotRewritten(f"'{text}' sums over an axis of one operand")
    if len(summed) != 1:
        raise NotRewritten(f"'{text}' sums over {len(summed)} axes, a matrix product over one")
    if not left or not right or len(left) + len(right) > (2 if head else 1 + max(len(left), len(right))):
        raise NotRewritten(f"'{text}' is not a product of two matrices, or a stack of them")
    candidates = [
        Contraction(
            node, given, (head + rows + summed, head + summed + column), output, head + rows + column, swapped
        )
        for rows, column, given, swapped in (
            (left, right, (one, other), False),
            (right, left, (other, one), True),
        )
        if len(column) == 1
    ]
    return min(candidates, key=_transposes)


def _transposes(match: Contraction) -> int:
    return sum(map(str.__ne__, match.terms, match.factors)) + (match.result != match.output)


def _arranged(model: GraphModel, letters: str, tensor: Tensor, wanted: str, name: str) -> Tensor:
    if letters == wanted:
        return tensor
    permutation = [letters.index(letter) for letter in wanted]
    if is_constant(tensor):
        return model.constant(f"{tensor.name}.transposed", np.transpose(values_of(tensor), permutation))
    return model.add("Transpose", [tensor], f"{name}/transpose", tensor.dtype, {"perm": permutation})
