"""Write an Einsum as matrix products, because no engine quantizes an Einsum, and it is no site.

An Einsum of two operands that sums over one letter is a batched matrix product of its transposed operands:
with batch letters B (in both operands and the output), k (in both, summed), m (in the first only) and n (in
the second only)::

    Einsum(A, C; → …)   =   Transpose(MatMul(A as [B, m, k], C as [B, k, n]))

Without batch letters one operand may have several letters of its own, which MatMul broadcasts over. Three
operands are two such products, in the order that costs fewer multiplications: ``bnd,bmd,mk->bnk``, the
interaction of a Wukong layer, is X·(Xᵀ·Y) or (X·Xᵀ)·Y.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from loka_onnx.core.rewrite import Applied
from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type, is_constant, values_of
from loka_onnx.transforms.base import Found, Mod, NotRewritten, find

NOMINAL_LENGTH = 256
"""Length of a dynamic axis where costs are compared."""
_T = onnx.TensorProto
_FLOATS = frozenset({_T.FLOAT, _T.DOUBLE, _T.FLOAT16, _T.BFLOAT16})


@dataclass(frozen=True)
class Product:
    """One matrix product: letters of both operands and the result, and positions among the remaining
    operands.
    """

    left: str
    right: str
    result: str
    first: int
    second: int


@dataclass(frozen=True)
class Contraction:
    """An Einsum, and the products that compute it, each result appended to the remaining operands."""

    node: Node
    operands: tuple[str, ...]
    output: str
    products: tuple[Product, ...]


class EinsumToMatMul(Mod[Contraction]):
    """Einsum of two or three operands → MatMul."""

    name = "einsum-to-matmul"
    tolerance = 3e-5
    """Three operands may be multiplied in another order than the engine's."""

    def match(self, model: GraphModel) -> Found[Contraction]:
        """Match Einsums that are matrix products."""
        return find((node for node in model.nodes if node.op == "Einsum"), _read)

    def rewrite(self, model: GraphModel, match: Contraction) -> Applied:
        """Replace the Einsum; the last product takes its name."""
        node = match.node
        base = str(node.name).replace("/", ".").strip(".")
        held = list(zip(match.operands, node.inputs, strict=True))
        sites = []
        for product in match.products:
            left = _arranged(model, *held[product.first], product.left, base)
            right = _arranged(model, *held[product.second], product.right, base)
            result = model.add("MatMul", [left, right], f"{base}/matmul", node.outputs[0].dtype)
            sites.append(result.inputs[0])
            held = [pair for i, pair in enumerate(held) if i not in (product.first, product.second)]
            held.append((product.result, result))
        letters, result = held[0]
        model.hand_over(node.outputs[0], _arranged(model, letters, result, match.output, base))
        for site, name in zip(sites[::-1], (base, f"{base}.inner"), strict=False):
            model.rename(site, name)
        equation = f"{','.join(match.operands)}->{match.output}"
        return Applied(sites[-1].name, f"Einsum {equation} → {len(sites)} MatMul")


def _read(node: Node) -> Contraction:
    equation = node.attrs["equation"]
    text = (equation.decode() if isinstance(equation, bytes) else str(equation)).replace(" ", "")
    terms, arrow, output = text.partition("->")
    operands = tuple(terms.split(","))
    if not arrow or "." in text:
        raise NotRewritten(f"'{text}' leaves its output or its batch axes implicit")
    if len(operands) not in (2, 3):
        raise NotRewritten(f"'{text}' has {len(operands)} operands, not 2 or 3")
    if any(len(set(term)) < len(term) for term in (*operands, output)):
        raise NotRewritten(f"'{text}' reads a diagonal")
    if node.outputs[0].dtype is None or element_type(node.outputs[0].dtype) not in _FLOATS:
        raise NotRewritten("its operands are not known to be of a floating type")
    if len(operands) == 2:
        return Contraction(node, operands, output, (_pair(operands[0], operands[1], output, 0, 1),))
    return Contraction(node, operands, output, _cheapest(operands, output, _lengths(node, operands)))


def _pair(one: str, other: str, output: str, first: int, second: int) -> Product:
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
    candidates = [
        Product(
            f"{head}{''.join(rows)}{k}", f"{head}{k}{columns[0]}", f"{head}{''.join(rows)}{columns[0]}", *at
        )
        for rows, columns, at in ((left, right, (first, second)), (right, left, (second, first)))
        if len(columns) == 1
    ]
    terms = {first: one, second: other}
    return min(
        candidates,
        key=lambda p: (p.left != terms[p.first]) + (p.right != terms[p.second]) + (p.result != output),
    )


def _cheapest(operands: Sequence[str], output: str, lengths: dict[str, int]) -> tuple[Product, Product]:
    """Two products of three operands, in the order that costs least."""
    found: list[tuple[int, tuple[Product, Product]]] = []
    refusals: list[str] = []
    for last in range(3):
        first, second = (position for position in range(3) if position != last)
        needed = {*output, *operands[last]}
        between = "".join(dict.fromkeys(c for c in operands[first] + operands[second] if c in needed))
        try:
            inner = _pair(operands[first], operands[second], between, first, second)
            outer = _pair(operands[last], inner.result, output, 0, 1)
        except NotRewritten as reason:
            refusals.append(str(reason))
            continue
        cost = sum(prod(lengths[letter] for letter in {*p.left, *p.right}) for p in (inner, outer))
        found.append((cost, (inner, outer)))
    if not found:
        raise NotRewritten("; ".join(refusals))
    return min(found, key=lambda item: item[0])[1]


def _lengths(node: Node, operands: Sequence[str]) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for term, tensor in zip(operands, node.inputs, strict=True):
        for letter, length in zip(term, tensor.shape or (), strict=False):
            if isinstance(length, int):
                lengths[letter] = max(length, lengths.get(letter, 1))
    return {letter: lengths.get(letter, NOMINAL_LENGTH) for letter in "".join(operands)}


def _arranged(model: GraphModel, letters: str, tensor: Tensor, wanted: str, name: str) -> Tensor:
    """A tensor with its axes in another order."""
    if letters == wanted:
        return tensor
    permutation = [letters.index(letter) for letter in wanted]
    if is_constant(tensor):
        return model.constant(f"{tensor.name}.transposed", np.transpose(values_of(tensor), permutation))
    return model.add("Transpose", [tensor], f"{name}/transpose", tensor.dtype, {"perm": permutation})
