"""Read the norm that ends at a product, a quotient or a sum.

With r = 1/sqrt(mean(d·d) + ε) and d = x − mean(x), or d = x::

    d · r      d / sqrt(…)      (γ·d) · r      d · (r·γ)      x·(r·γ) + (β − mean(x)·(r·γ))

are one norm, with factors in any order, and a constant scale and shift behind it. `statistics` reads the
statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loka_onnx.graph.model import Node, Tensor, consumers, is_constant, producer, shape_of
from loka_onnx.transforms.norms.statistics import (
    Centred,
    Moment,
    NotANorm,
    Root,
    holds_same_values,
    lossless_chain,
    origin,
    read_centred,
    read_mean,
    read_root,
    scalar,
    static_lengths,
)

_LARGEST_PATTERN = 100
"""Nodes; the longest exported pattern has about forty."""


@dataclass(frozen=True)
class DecomposedNorm:
    """A normalization read from primitives, over negative, ascending `axes`.

    `epsilon` is added to the mean of squares, or to their sum unless `is_mean`. `module` is the path in the
    name of the last node (``<module>/<op>``); empty at the top of the model. `inner` is every node of the
    pattern, of which only `result` may be read from outside. `factor`, a power of two, multiplies the scale.
    """

    source: Tensor
    axes: tuple[int, ...]
    epsilon: float
    is_centred: bool
    is_mean: bool
    scale: Tensor | None
    bias: Tensor | None
    result: Tensor
    module: str
    inner: tuple[Node, ...] = ()
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Lengths of the normalized axes; None where one is unknown."""
        return static_lengths(self.source, self.axes)

    def varies_within(self, constant: Tensor | None) -> bool:
        """Return whether a constant varies over normalized axes only; True for None or unknown lengths."""
        shape = self.shape
        if constant is None or shape is None:
            return True
        rank, own = len(shape_of(self.source)), shape_of(constant)
        padded = (1,) * (rank - len(own)) + own
        target = (1,) * (rank - len(shape)) + shape
        return len(padded) == rank and all(a in (1, b) for a, b in zip(padded, target, strict=True))


def read_norm(node: Node) -> DecomposedNorm:
    """Return the norm that ends at a node, without a scale and shift behind it; NotANorm for others."""
    if node.op in {"Add", "Sub"}:
        return _read_distributed(node)
    if node.op in {"Div", "Mul"}:
        return _read_quotient(node)
    raise NotANorm(f"a {node.op}")


def with_scale(norm: DecomposedNorm) -> DecomposedNorm:
    """Return the norm with a Mul by a constant, its only reader, taken in as its scale; else unchanged."""
    step = _constant_step(norm, "Mul") if norm.scale is None and norm.bias is None else None
    return norm if step is None else replace(_extended(norm, step[0]), scale=step[1])


def with_bias(norm: DecomposedNorm) -> DecomposedNorm:
    """Return the norm with an Add of a constant, its only reader, taken in as its bias; else unchanged."""
    step = _constant_step(norm, "Add") if norm.bias is None else None
    return norm if step is None else replace(_extended(norm, step[0]), bias=step[1])


def _extended(norm: DecomposedNorm, node: Node) -> DecomposedNorm:
    return replace(norm, result=node.outputs[0], inner=(*norm.inner, node))


def _constant_step(norm: DecomposedNorm, op: str) -> tuple[Node, Tensor] | None:
    """Return the only reader of the result, of that operator, and its other operand, which is constant."""
    readers = consumers(norm.result)
    if norm.shape is None or len(readers) != 1 or readers[0].op != op:
        return None
    constant = next((tensor for tensor in readers[0].inputs if is_constant(tensor)), None)
    return None if constant is None or not norm.varies_within(constant) else (readers[0], constant)


def _norm(
    node: Node, source: Tensor, root: Root, is_centred: bool, bias: Tensor | None = None
) -> DecomposedNorm:
    """Return the norm of a source by a root that ends at a node, scaled by the constant of the root."""
    moment, result = root.moment, node.outputs[0]
    known = (source, moment.axes, root.epsilon, is_centred, moment.is_mean, root.constant, bias, result)
    return DecomposedNorm(*known, str(node.name).rpartition("/")[0], _nodes_between(source, result))


def _nodes_between(source: Tensor, result: Tensor) -> tuple[Node, ...]:
    """Return the nodes that compute a tensor from another one and from constants."""
    stops = {id(tensor) for tensor in lossless_chain(source)}
    between: dict[int, Node] = {}
    pending = [result]
    while pending:
        tensor = pending.pop()
        node = producer(tensor)
        if id(tensor) in stops or is_constant(tensor) or not tensor.name:
            continue
        if node is None or len(between) > _LARGEST_PATTERN:
            raise NotANorm("it depends on another tensor")
        if id(node) not in between:
            between[id(node)] = node
            # The origin of a shape does not matter: its value was read.
            pending += [] if node.op == "Shape" else list(node.inputs)
    return tuple(between.values())


# Quotients ---------------------------------------------------------------------------------------------


def _read_quotient(node: Node) -> DecomposedNorm:
    numerator, root = _divided(node)
    for tensor, factor in ((numerator, None), _factored(numerator)):
        try:
            source, is_centred = _source(tensor, root.moment)
        except NotANorm:
            continue
        if factor is not None and root.constant is not None:
            raise NotANorm("two constant factors")
        return _norm(node, source, root if factor is None else replace(root, constant=factor), is_centred)
    raise NotANorm("a quotient of something else")


def _divided(node: Node) -> tuple[Tensor, Root]:
    """Return the numerator of a quotient, and its multiplier."""
    if node.op == "Div":
        root = read_root(node.inputs[1])
        if is_constant(node.inputs[0]) or root.is_inverted:
            raise NotANorm("a constant over a root: part of a norm at most, or a product with a root")
        return node.inputs[0], root
    for numerator, multiplier in (node.inputs, node.inputs[::-1]):
        if not is_constant(numerator):
            try:
                return numerator, _read_inverse(multiplier)
            except NotANorm:
                continue
    raise NotANorm("a product without a reciprocal root")


def _read_inverse(tensor: Tensor) -> Root:
    """Read a reciprocal root, or a constant multiple of it."""
    node, is_quotient = producer(tensor), False
    constant: Tensor | None = None
    if node is not None and node.op == "Mul":
        tensor, constant = _factored(tensor)
        if constant is None:
            raise NotANorm("a product of two tensors")
    elif node is not None and node.op == "Div" and is_constant(node.inputs[0]):
        is_quotient = scalar(node.inputs[0]) != 1.0
        if is_quotient:
            constant, tensor = node.inputs
    root = read_root(tensor)
    if root.is_inverted == is_quotient:
        raise NotANorm("a product with a root")
    return replace(root, is_inverted=True, constant=constant)


def _source(numerator: Tensor, moment: Moment) -> tuple[Tensor, bool]:
    """Return what a numerator normalizes over the root of a moment, and whether its mean is subtracted."""
    centred = read_centred(numerator)
    if centred is not None and centred.axes == moment.axes:
        squared = centred.source if moment.is_central else numerator
        if holds_same_values(squared, moment.squared):
            return centred.source, True
    if not moment.is_central and origin(numerator) is origin(moment.squared):
        return numerator, False
    raise NotANorm("a tensor over the root of another one's mean of squares")


def _factored(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the tensor that this one is a constant multiple of, and the constant; else itself and None."""
    node = producer(tensor)
    if node is None or node.op != "Mul" or is_constant(node.inputs[0]) == is_constant(node.inputs[1]):
        return tensor, None
    constant, other = node.inputs if is_constant(node.inputs[0]) else node.inputs[::-1]
    return other, constant


# x·s + (β − mean(x)·s) --------------------------------------------------------------------------------


def _read_distributed(node: Node) -> DecomposedNorm:
    """Read ``x·s + (β − m·s)``, the form of tf.nn.batch_normalization, which Keras uses for LayerNorm."""
    for position in (0, 1) if node.op == "Add" else (0,):
        product = producer(node.inputs[position])
        if product is None or product.op != "Mul":
            continue
        for factor, source in (product.inputs, product.inputs[::-1]):
            try:
                root = _read_inverse(factor)
                if not _is_variance_of(root.moment, source):
                    continue
                bias = _read_offset(node, 1 - position, factor, Centred(source, root.moment.axes))
            except NotANorm:
                continue
            return _norm(node, source, root, True, bias)
    raise NotANorm("a sum")


def _is_variance_of(moment: Moment, source: Tensor) -> bool:
    squared = Centred(moment.squared, moment.axes) if moment.is_central else read_centred(moment.squared)
    return squared is not None and squared.axes == moment.axes and origin(squared.source) is origin(source)


def _read_offset(node: Node, position: int, factor: Tensor, mean: Centred) -> Tensor | None:
    """Read ``β − m·s`` or ``−m·s``, or ``m·s`` where it is subtracted; return β."""
    product, is_negative = node.inputs[position], node.op == "Add"
    bias: Tensor | None = None
    inner = producer(product) if is_negative else None
    if inner is not None and inner.op == "Sub" and is_constant(inner.inputs[0]):
        (bias, product), is_negative = inner.inputs, False
    elif inner is not None and inner.op == "Add" and any(map(is_constant, inner.inputs)):
        bias, product = inner.inputs if is_constant(inner.inputs[0]) else inner.inputs[::-1]
    _check_product(product, factor, mean, is_negative=is_negative)
    return bias


def _check_product(tensor: Tensor, factor: Tensor, mean: Centred, *, is_negative: bool) -> None:
    """Check that a tensor is ``m·s``, or its negative."""
    node = producer(tensor)
    if node is not None and node.op == "Neg":
        node, is_negative = producer(node.inputs[0]), not is_negative
    others = [] if node is None or node.op != "Mul" else [t for t in node.inputs if t is not factor]
    if len(others) != 1:
        raise NotANorm("no product with the reciprocal root")
    inner = producer(others[0])
    if inner is not None and inner.op == "Neg":
        others, is_negative = [inner.inputs[0]], not is_negative
    read = read_mean(others[0])
    if is_negative or read.axes != mean.axes or origin(read.source) is not origin(mean.source):
        raise NotANorm("not the mean")
