"""Write an Einsum as matrix products, because no engine quantizes an Einsum, and it is no site.

An Einsum of two operands that sums over one letter is a batched matrix product of its transposed operands:
with batch letters B (in both operands and the output), k (in both, summed), m (in the first only) and n (in
the second only)::

    Einsum(A, C; → …)   =   Transpose(MatMul(A as [B, m, k], C as [B, k, n]))

Without batch letters one operand may have several letters of its own, which MatMul broadcasts over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from loka_onnx.core.rewrite import Applied
from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type, is_constant, values_of
from loka_onnx.transforms.base import Found, Mod, NotRewritten, find

_T = onnx.TensorProto
_FLOATS = frozenset({_T.FLOAT, _T.DOUBLE, _T.FLOAT16, _T.BFLOAT16})


@dataclass(frozen=True)
class Product:
    """One matrix product; `terms` are the operands' letters, `first` the position of the left one."""

    left: str
    right: str
    result: str
    terms: tuple[str, str]
    first: int


@dataclass(frozen=True)
class Contraction:
    """An Einsum, and the product that computes it."""

    node: Node
    output: str
    product: Product


class EinsumToMatMul(Mod[Contraction]):
    """Einsum of two operands → MatMul."""

    name = "einsum-to-matmul"

    def match(self, model: GraphModel) -> Found[Contraction]:
        """Match Einsums that are matrix products."""
        return find((node for node in model.nodes if node.op == "Einsum"), _read)

    def rewrite(self, model: GraphModel, match: Contraction) -> Applied:
        """Replace the Einsum by a product of its name."""
        node = match.node
        base = str(node.name).replace("/", ".").strip(".")
        product = match.product
        first, second = node.inputs[product.first], node.inputs[1 - product.first]
        terms = product.terms if product.first == 0 else product.terms[::-1]
        left = _arranged(model, terms[0], first, product.left, base)
        right = _arranged(model, terms[1], second, product.right, base)
        result = model.add("MatMul", [left, right], f"{base}/matmul", node.outputs[0].dtype)
        site = result.inputs[0]
        model.hand_over(node.outputs[0], _arranged(model, product.result, result, match.output, base))
        model.rename(site, base)
        return Applied(site.name, f"Einsum {','.join(product.terms)}->{match.output} → MatMul")


def _read(node: Node) -> Contraction:
    equation = node.attrs["equation"]
    text = (equation.decode() if isinstance(equation, bytes) else str(equation)).replace(" ", "")
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
    return Contraction(node, output, _pair(*operands, output))


def _pair(one: str, other: str, output: str) -> Product:
    """The product of two operands whose result has the letters of `output`."""
    batch = [letter for letter in one if letter in other and letter in output]
    summed = [letter for letter in one if letter in other and letter not in output]
    left = [letter for letter in one if letter not in other]
    right = [letter for letter in other if letter not in one]
    text = f"'{one},{other}->{output}'"
    if any(letter not in output for letter in (*left, *right)):
        raise NotRewritten(f"{text} sums over an axis of one operand")
    if len(summed) != 1:
        raise NotRewritten(f"{text} sums over {len(summed)} axes, a matrix product over one")
    if not left or not right or len(left) + len(right) > (2 if batch else 1 + max(len(left), len(right))):
        raise NotRewritten(f"{text} is not a product of two matrices, or a stack of them")
    head, k = "".join(batch), summed[0]
    terms = (one, other)
    candidates = [
        Product(
            f"{head}{''.join(rows)}{k}",
            f"{head}{k}{columns[0]}",
            f"{head}{''.join(rows)}{columns[0]}",
            terms,
            at,
        )
        for rows, columns, at in ((left, right, 0), (right, left, 1))
        if len(columns) == 1
    ]
    return min(
        candidates,
        key=lambda p: (p.left != terms[p.first]) + (p.right != terms[1 - p.first]) + (p.result != output),
    )


def _arranged(model: GraphModel, letters: str, tensor: Tensor, wanted: str, name: str) -> Tensor:
    """A tensor with its axes in another order."""
    if letters == wanted:
        return tensor
    permutation = [letters.index(letter) for letter in wanted]
    if is_constant(tensor):
        return model.constant(f"{tensor.name}.transposed", np.transpose(values_of(tensor), permutation))
    return model.add("Transpose", [tensor], f"{name}/transpose", tensor.dtype, {"perm": permutation})
