"""Find the products of a graph that are no sites, with their operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from string import ascii_letters
from types import MappingProxyType

import onnx_graphsurgeon as gs

from loka_onnx.core.site import OtherProduct
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.graph.sites import BATCH, PRODUCT_OPS, Shape, Shapes


def other_products(model: GraphModel) -> tuple[OtherProduct, ...]:
    """Return products that are no sites: Conv, Einsum, …, and any in a branch or (once) a loop's body."""
    is_any = any(node.op in _COUNTS for node in model.nodes)
    return tuple(_found(model.nodes, "", model.shapes_at(BATCH) if is_any else {}))


def _found(nodes: Iterable[Node], inside: str, shapes: Shapes) -> Iterator[OtherProduct]:
    for node in nodes:
        is_other = node.op in _COUNTS and (inside or node.op not in PRODUCT_OPS) and _sums(node)
        if is_other and not all(map(is_constant, node.inputs[:2])):
            reason = f"inside of {inside}" if inside else _REASONS.get(node.op) or _why_conv(node)
            flops = _COUNTS[node.op](node, shapes)
            yield OtherProduct(node.name or node.outputs[0].name, node.op, reason, flops)
        for value in node.attrs.values():
            for graph in value if isinstance(value, list) else [value]:
                if isinstance(graph, gs.Graph):
                    yield from _found(graph.nodes, f"{node.op} '{node.name}'", {})


def _at_batch(tensor: Tensor, shapes: Shapes) -> Shape:
    """Return the shape at `BATCH` rows; as it stands, if that is not known to the last axis."""
    inferred = shapes.get(tensor.name, (None,))
    return static_shape(tensor) if None in inferred else inferred


def _size(tensor: Tensor, shapes: Shapes = MappingProxyType({})) -> int | None:
    """Return the elements for one example."""
    return _per_example(_at_batch(tensor, shapes), None in static_shape(tensor))


def _per_example(shape: Shape, is_dynamic: bool) -> int | None:
    """Return the elements for one example. One unknown axis is the batch; None with more of them."""
    if not shape or shape.count(None) > 1:
        return None
    elements = prod(length for length in shape if length is not None)
    return elements // BATCH if is_dynamic and None not in shape else elements


def _times(*factors: int | None) -> int | None:
    return None if None in factors else prod(factor for factor in factors if factor is not None)


def _conv(node: Node, shapes: Shapes) -> int | None:
    """Each output is a sum over the kernel and the channels of its group: W is (O, C ÷ groups, …)."""
    weight = static_shape(node.inputs[3 if node.op == "QLinearConv" else 1])
    return _times(2, _size(node.outputs[0], shapes), *weight[1:]) if weight else None


def _conv_transpose(node: Node, shapes: Shapes) -> int | None:
    """Each input meets the kernel of every output channel of its group: W is (C, O ÷ groups, …)."""
    weight = static_shape(node.inputs[1])
    return _times(2, _size(node.inputs[0], shapes), *weight[1:]) if weight else None


def _matmul(node: Node, shapes: Shapes) -> int | None:
    left = static_shape(node.inputs[0])
    if not left:
        return None
    k = left[0] if node.op == "Gemm" and node.attrs.get("transA", 0) else left[-1]
    return _times(2, _size(node.outputs[0], shapes), k)


def einsum_terms(node: Node) -> tuple[list[str], str] | None:
    """Return the letters of an Einsum's operands and output, with implicit ones and letters for `...`, which
    aligns at the right; None where a rank that this needs is not known.
    """
    equation = node.attrs["equation"]
    text = (equation.decode() if isinstance(equation, bytes) else str(equation)).replace(" ", "")
    given, arrow, output = text.partition("->")
    if not arrow:
        once = sorted(letter for letter in {*given} - {*",."} if given.count(letter) == 1)
        output = "".join(["..." if "." in given else "", *once])
    terms = given.split(",")
    if "." not in text:
        return terms, output
    ranks = [-1 if tensor.shape is None else len(tensor.shape) for tensor in node.inputs]
    hidden = [rank - len(term) + 3 if "." in term else 0 for term, rank in zip(terms, ranks, strict=False)]
    if min(hidden) < 0:
        return None
    letters = "".join(letter for letter in ascii_letters if letter not in text)[: max(hidden)]
    spelled = [t.replace("...", letters[len(letters) - n :]) for t, n in zip(terms, hidden, strict=False)]
    return spelled, output.replace("...", letters)


def _sums(node: Node) -> bool:
    """Return False of an Einsum that sums no products: an outer product, or of one operand."""
    read = einsum_terms(node) if node.op == "Einsum" else None
    return read is None or (len(read[0]) > 1 and not {*"".join(read[0])} <= {*read[1]})


def _einsum(node: Node, shapes: Shapes) -> int | None:
    read = einsum_terms(node)
    lengths: dict[str, int | None] = {}
    for term, tensor in zip(read[0] if read else (), node.inputs, strict=False):
        shape = _at_batch(tensor, shapes)
        if len(term) != len(shape):
            return None
        # A length of 1 is broadcast.
        lengths |= {c: n for c, n in zip(term, shape, strict=True) if n != 1 or c not in lengths}
    is_dynamic = any(None in static_shape(tensor) for tensor in node.inputs)
    return _times(2, _per_example(tuple(lengths.values()), is_dynamic)) if read else None


def _recurrent(node: Node, _: Shapes) -> int | None:
    """X (steps, batch, inputs) or, by `layout`, (batch, steps, inputs); W and R (directions, gates·H, …)."""
    steps = static_shape(node.inputs[0])[int(node.attrs.get("layout", 0)) :][:1]
    per_step = [_size(weight) for weight in node.inputs[1:3]]
    if not steps or None in per_step:
        return None
    return _times(2, *steps, sum(size for size in per_step if size is not None))


def _attention(node: Node, shapes: Shapes) -> int | None:
    """Q·Kᵀ multiplies each element of Q, and the product with V each of the output, once for each key."""
    keys = static_shape(node.inputs[1])[-2:-1]
    sizes = [_size(tensor, shapes) for tensor in (node.inputs[0], node.outputs[0])]
    return None if not keys or None in sizes else _times(2, *keys, sum(size or 0 for size in sizes))


_COUNTS: Mapping[str, Callable[[Node, Shapes], int | None]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "QLinearConv"), _conv),
    "ConvTranspose": _conv_transpose,
    **dict.fromkeys(("MatMul", "Gemm", "MatMulInteger", "QLinearMatMul"), _matmul),
    "Einsum": _einsum,
    **dict.fromkeys(("RNN", "GRU", "LSTM"), _recurrent),
    "Attention": _attention,
}


def _why_conv(node: Node) -> str:
    weight = node.inputs[1]
    kernel, groups = static_shape(weight)[2:], int(node.attrs.get("group", 1))
    said = f"a convolution, kernel {' × '.join('?' if n is None else str(n) for n in kernel)}"
    return f"{said}, {groups} groups" if groups > 1 else said


_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("ConvInteger", "QLinearConv", "MatMulInteger", "QLinearMatMul"), "multiplies integers"),
    "Einsum": "an Einsum, which no engine quantizes",
    **dict.fromkeys(("RNN", "GRU", "LSTM"), "a recurrent layer"),
    "Attention": "attention in one operator",
}
