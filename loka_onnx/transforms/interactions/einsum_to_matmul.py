"""Write an Einsum as matrix products, because no engine quantizes an Einsum, and it is no site.

An Einsum of two operands is a batched matrix product of its transposed operands: with batch letters B (in
both operands and the output), k (in both, summed), m (in the first only) and n (in the second only)::

    Einsum(A, C; → …)   =   Transpose(MatMul(A as [B, m, k], C as [B, k, n]))

Several letters of a kind, as heads and channels, become one axis by a Reshape; without batch letters those of
one operand stay, which MatMul broadcasts over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type, is_constant, values_of
from loka_onnx.graph.products import einsum_terms
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.transforms.base import Mod, NotRewritten, find

_T = onnx.TensorProto
_FLOATS = frozenset({_T.FLOAT, _T.DOUBLE, _T.FLOAT16, _T.BFLOAT16})
Axes = tuple[str, ...]
"""The letters of each axis of a tensor."""


@dataclass(frozen=True)
class Contraction:
    """An Einsum and the product that computes it, by letters of axes.

    `terms` are the operands, the left factor first, which `is_swapped` says is the second one; `output` is
    the result. `axes` are those of the two factors and the result of the product, `lengths` those of letters.
    """

    node: Node
    terms: tuple[str, str]
    output: str
    axes: tuple[Axes, Axes, Axes]
    is_swapped: bool
    lengths: Mapping[str, int | None]


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
            _reshaped(model, _transposed(model, term, tensor, "".join(axes), base), axes, match)
            for term, tensor, axes in zip(match.terms, operands, match.axes, strict=False)
        )
        product = model.add("MatMul", [left, right], f"{base}/matmul", node.outputs[0].dtype)
        site = product.inputs[0]
        apart, given = _reshaped(model, product, match.axes[2], match), "".join(match.axes[2])
        model.hand_over(node.outputs[0], _transposed(model, given, apart, match.output, base))
        model.rename(site, base)
        terms = match.terms[::-1] if match.is_swapped else match.terms
        return Applied(site.name, f"Einsum {','.join(terms)}->{match.output} → MatMul")


def _read(node: Node) -> Contraction:
    read = einsum_terms(node)
    if read is None:
        raise NotRewritten("it has '...' for axes of a tensor whose rank is not known")
    operands, output = read
    text = f"{','.join(operands)}->{output}"
    if len(operands) != 2:
        raise NotRewritten(f"'{text}' has {len(operands)} operands, not 2")
    if any(len(set(term)) < len(term) for term in (*operands, output)):
        raise NotRewritten(f"'{text}' reads a diagonal")
    if node.outputs[0].dtype is None or element_type(node.outputs[0].dtype) not in _FLOATS:
        raise NotRewritten("its operands are not known to be of a floating type")
    one, other = operands
    head = tuple(letter for letter in one if letter in other and letter in output)
    summed = "".join(letter for letter in one if letter in other and letter not in output)
    left = "".join(letter for letter in one if letter not in other)
    right = "".join(letter for letter in other if letter not in one)
    if any(letter not in output for letter in left + right):
        raise NotRewritten(f"'{text}' sums over an axis of one operand")
    if not left or not right or not summed:
        raise NotRewritten(f"'{text}' is not a product of two matrices, or a stack of them")
    sizes, more = (
        dict.fromkeys(term) | dict(zip(term, static_shape(operand), strict=False))
        for term, operand in zip(operands, node.inputs, strict=True)
    )
    if len(summed) > 1 and any(sizes[c] is None or sizes[c] != more[c] for c in summed):
        raise NotRewritten(f"'{text}' sums over {len(summed)} axes, and their lengths are not known")
    candidates = [
        Contraction(node, given, output, axes, swapped, sizes | more)
        for rows, columns, given, swapped in (
            ((left,) if head else (*left,), right, (one, other), False),
            ((right,) if head else (*right,), left, (other, one), True),
        )
        for axes in [((*head, *rows, summed), (*head, summed, columns), (*head, *rows, columns))]
    ]
    known = [match for match in candidates if all(_target(a, match).count(-1) < 2 for a in match.axes)]
    if not known:
        raise NotRewritten(f"'{text}' has several axes of lengths that are not known")
    return min(known, key=_steps)


def _steps(match: Contraction) -> int:
    """Count transposes and reshapes."""
    pairs = zip((*match.terms, match.output), match.axes, strict=True)
    return sum(("".join(axes) != term) + (max(map(len, axes)) > 1) for term, axes in pairs)


def _target(axes: Axes, match: Contraction) -> list[int]:
    """Return the shape of the axes, or of each letter of the result; 0 copies a length, -1 is not known."""
    plain = next((i for i, letters in enumerate(axes) if len(letters) > 1), len(axes))
    rest = [*"".join(axes[plain:])] if axes == match.axes[2] else axes[plain:]
    lengths = [[match.lengths[letter] for letter in letters] for letters in rest]
    return [0] * plain + [-1 if None in each else prod(n for n in each if n is not None) for each in lengths]


def _reshaped(model: GraphModel, tensor: Tensor, axes: Axes, match: Contraction) -> Tensor:
    target = _target(axes, match)
    if not any(target):
        return tensor
    if is_constant(tensor):
        values = values_of(tensor)
        sizes = [size or length for size, length in zip(target, values.shape, strict=False)]
        return model.constant(f"{tensor.name}.reshaped", values.reshape(sizes))
    shape = model.constant(f"{tensor.name}.shape", np.array(target, np.int64))
    return model.add("Reshape", [tensor, shape], f"{tensor.name}/reshape", tensor.dtype)


def _transposed(model: GraphModel, letters: str, tensor: Tensor, wanted: str, name: str) -> Tensor:
    if letters == wanted:
        return tensor
    permutation = [letters.index(letter) for letter in wanted]
    if is_constant(tensor):
        return model.constant(f"{tensor.name}.transposed", np.transpose(values_of(tensor), permutation))
    return model.add("Transpose", [tensor], f"{name}/transpose", tensor.dtype, {"perm": permutation})
