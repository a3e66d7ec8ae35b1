"""Multiply three matrices in the cheaper order.

    (A·B)·C   =   A·(B·C)          A (m, p), B (p, q), C (q, r)

cost 2·(m·p·q + m·q·r) against 2·(p·q·r + m·p·r) operations. For the interaction of n tokens of width d with a
projection Y (n, k), ``(X·Xᵀ)·Y`` costs 2·n²·(d + k) and ``X·(Xᵀ·Y)`` 4·n·d·k: linear in n (Wukong,
arXiv 2403.02545, section 3, "optimized FM"). Axes in front of the last two are batches, and broadcast.

Rewritten where at least `least` operations exist, `MARGIN` of them is saved and the intermediate result does
not grow: small batched products are bound by memory and launches (`benchmarks/micro/site_shapes.py`).
Products of two weights stay: one weight rounded once is another model.

The nodes keep their names, except that a product with a weight (Y is learned) swaps names with the product of
activations, so that each site stays of its kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.transforms.base import Mod, NotRewritten
from loka_onnx.transforms.linears.pattern import NOMINAL_LENGTH, Work, made_by

MARGIN = 0.25
"""Least share of the operations that is saved."""


@dataclass(frozen=True)
class Chain:
    """Two MatMuls, only the second of which reads the first; the factors are A, B and C.

    `is_left` if the inner product is A·B; `now` and `then` are the work in this order and in the other,
    with the elements of the intermediate result.
    """

    inner: Node
    outer: Node
    factors: tuple[Tensor, Tensor, Tensor]
    is_left: bool
    now: Work
    then: Work


class ReassociateInteraction(Mod[Chain]):
    """(A·B)·C ↔ A·(B·C), the cheaper one, from `least` operations at the nominal batch on."""

    name = "reassociate-interaction"
    tolerance = 3e-5
    """Rounding of other sums is relative to the largest of them, not to the result."""

    def __init__(self, least: int = 1 << 29) -> None:
        self._least = least

    def _find(self, model: GraphModel) -> Iterator[Chain | Declined]:
        taken: set[int] = set()
        for outer in (node for node in model.sorted_nodes() if node.op == "MatMul"):
            for position in (0, 1):
                inner = made_by(outer.inputs[position], "MatMul")
                if inner is None or model.only_reader(inner.outputs[0]) is None:
                    continue
                try:
                    chain = self._read(inner, outer, position == 0)
                except NotRewritten as reason:
                    yield Declined(outer.name, str(reason))
                    continue
                # A node is in at most one match.
                if not taken & {id(inner), id(outer)}:
                    taken |= {id(inner), id(outer)}
                    yield chain

    def rewrite(self, model: GraphModel, match: Chain) -> Applied:
        """Let the inner node multiply the other two factors, and the outer one its result and the third."""
        inner, outer = match.inner, match.outer
        were = (_is_linear(inner), _is_linear(outer))
        a, b, c = match.factors
        inner.inputs = [b, c] if match.is_left else [a, b]
        between = model.renew_output(inner)
        outer.inputs = [a, between] if match.is_left else [between, c]
        if were != (_is_linear(inner), _is_linear(outer)):
            inner.name, outer.name = outer.name, inner.name
        order = "(A·B)·C → A·(B·C)" if match.is_left else "A·(B·C) → (A·B)·C"
        what = f"{order} with '{inner.name}': {match.now.flops} → {match.then.flops} operations at a batch of"
        return Applied(outer.name, f"{what} {NOMINAL_LENGTH}")

    def _read(self, inner: Node, outer: Node, is_left: bool) -> Chain:
        """Return the chain, where the other order pays."""
        pair = (inner.inputs[0], inner.inputs[1])
        factors = (*pair, outer.inputs[1]) if is_left else (outer.inputs[0], *pair)
        a, b, c = map(_shape, factors)
        left, right = _work(a, b), _work(b, c)
        now = Work(left.flops + _work(_product(a, b), c).flops, left.elements)
        then = Work(right.flops + _work(a, _product(b, c)).flops, right.elements)
        if not is_left:
            now, then = then, now
        if sum(is_constant(factor) for factor in factors) > 1:
            raise NotRewritten("two of the three factors are weights: their product would be rounded to one")
        costs = (
            f"it takes {now.flops} operations at a batch of {NOMINAL_LENGTH}, the other order {then.flops}"
        )
        if now.flops < self._least:
            raise NotRewritten(f"{costs}: under {self._least} they do not decide the time")
        if then.flops > (1 - MARGIN) * now.flops:
            raise NotRewritten(f"{costs}: less than {MARGIN:.0%} saved")
        if then.elements > now.elements:
            raise NotRewritten(
                f"the other order takes {then.flops} operations instead of {now.flops}, but its intermediate "
                f"result has {then.elements} elements instead of {now.elements}"
            )
        return Chain(inner, outer, factors, is_left, now, then)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return lengths, nominal for a dynamic batch."""
    shape = static_shape(tensor)
    if len(shape) < 2 or not all(shape[-2:]):
        raise NotRewritten("a rank is below 2, or a length besides the batch is not known")
    return tuple(length or NOMINAL_LENGTH for length in shape)


def _product(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a product, its batch axes broadcast."""
    rank = max(len(one), len(other)) - 2
    first, second = ((1,) * (rank - len(s) + 2) + s[:-2] for s in (one, other))
    return (*(max(x, y) for x, y in zip(first, second, strict=True)), one[-2], other[-1])


def _work(one: tuple[int, ...], other: tuple[int, ...]) -> Work:
    elements = prod(_product(one, other))
    return Work(2 * elements * one[-1], elements)


def _is_linear(node: Node) -> bool:
    return any(is_constant(tensor) for tensor in node.inputs)
