"""Read the norm that ends at a product, a quotient or a sum.

With r = 1/sqrt(mean(d·d) + ε) and d = x − mean(x), or d = x::

    d · r      d / sqrt(…)      (γ·d) · r      d · (r·γ)      x·(r·γ) + (β − mean(x)·(r·γ))

are one norm, with factors in any order. `statistics` reads the statistics; `pattern` takes in further scale
and shift and decides on fusing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loka_onnx.graph.model import Node, Tensor, is_constant, producer
from loka_onnx.transforms.norms.pattern import DecomposedNorm, module_of, nodes_between
from loka_onnx.transforms.norms.statistics import (
    Centred,
    Root,
    centred_or_none,
    is_same,
    read_mean,
    read_root,
)
from loka_onnx.transforms.norms.walk import Moment, NotANorm, origin, scalar


def read_norm(node: Node) -> DecomposedNorm:
    """Read the norm that ends at a node, without a further scale and shift."""
    if node.op in {"Add", "Sub"}:
        norm = _read_distributed(node)
    elif node.op in {"Div", "Mul"}:
        norm = _read_quotient(node)
    else:
        raise NotANorm(f"a {node.op}")
    return replace(norm, inner=nodes_between(norm.source, norm.result))


# Quotients ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Inverse:
    """A reciprocal root, and a constant that multiplies it."""

    root: Root
    constant: Tensor | None = None


def _read_quotient(node: Node) -> DecomposedNorm:
    numerator, inverse = _divided(node)
    root = inverse.root
    for tensor in _with_and_without_factor(numerator):
        try:
            source, is_centred = _source(tensor, root.moment)
        except NotANorm:
            continue
        factor = None if tensor is numerator else _constant_factor(numerator)
        if factor is not None and inverse.constant is not None:
            raise NotANorm("two constant factors")
        return DecomposedNorm(
            source,
            root.moment.axes,
            root.epsilon,
            is_centred,
            root.moment.is_mean,
            inverse.constant if factor is None else factor,
            None,
            node.outputs[0],
            module_of(node),
        )
    raise NotANorm("a quotient of something else")


def _divided(node: Node) -> tuple[Tensor, _Inverse]:
    """Return the numerator of a quotient, and its multiplier."""
    if node.op == "Div":
        if is_constant(node.inputs[0]):
            raise NotANorm("a constant over a root: part of a norm at most")
        root = read_root(node.inputs[1])
        if root.is_inverted:
            raise NotANorm("a product with a root")
        return node.inputs[0], _Inverse(root)
    for position in (1, 0):
        if is_constant(node.inputs[1 - position]):
            # A constant times a root is at most part of a norm.
            continue
        try:
            return node.inputs[1 - position], _read_inverse(node.inputs[position])
        except NotANorm:
            continue
    raise NotANorm("a product without a reciprocal root")


def _read_inverse(tensor: Tensor) -> _Inverse:
    """Read a reciprocal root, or a constant multiple of it."""
    node = producer(tensor)
    constant, other = None, tensor
    if node is not None and node.op == "Mul":
        constant, other = _constant_factor(tensor), _with_and_without_factor(tensor)[-1]
        if constant is None:
            raise NotANorm("a product of two tensors")
    elif (
        node is not None
        and node.op == "Div"
        and is_constant(node.inputs[0])
        and scalar(node.inputs[0]) != 1.0
    ):
        root = read_root(node.inputs[1])
        if root.is_inverted:
            raise NotANorm("a product with a root")
        return _Inverse(replace(root, is_inverted=True), node.inputs[0])
    root = read_root(other)
    if not root.is_inverted:
        raise NotANorm("a product with a root")
    return _Inverse(root, constant)


def _source(numerator: Tensor, moment: Moment) -> tuple[Tensor, bool]:
    """Return what a numerator normalizes over the root of a moment, and whether its mean is subtracted."""
    centred = centred_or_none(numerator)
    is_about_mean = centred is not None and centred.axes == moment.axes
    if moment.is_central:
        if centred is not None and is_about_mean and origin(centred.source) is origin(moment.squared):
            return centred.source, True
        raise NotANorm("a tensor over its standard deviation, with its mean")
    if centred is not None and is_about_mean and is_same(numerator, moment.squared):
        return centred.source, True
    if origin(numerator) is origin(moment.squared):
        return numerator, False
    raise NotANorm("a tensor over the root of another one's mean of squares")


def _with_and_without_factor(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor, and the tensor that it is a constant multiple of, if any."""
    node = producer(tensor)
    if node is None or node.op != "Mul" or _constant_factor(tensor) is None:
        return (tensor,)
    return (tensor, node.inputs[1] if is_constant(node.inputs[0]) else node.inputs[0])


def _constant_factor(tensor: Tensor) -> Tensor | None:
    node = producer(tensor)
    constants = [] if node is None or node.op != "Mul" else [t for t in node.inputs if is_constant(t)]
    return constants[0] if len(constants) == 1 else None


# x·s + (β − mean(x)·s) --------------------------------------------------------------------------------


def _read_distributed(node: Node) -> DecomposedNorm:
    """Read ``x·s + (β − m·s)``, the form of tf.nn.batch_normalization, which Keras uses for LayerNorm."""
    for position in (0, 1) if node.op == "Add" else (0,):
        product = producer(node.inputs[position])
        if product is None or product.op != "Mul":
            continue
        for side in (0, 1):
            try:
                inverse = _read_inverse(product.inputs[side])
                moment = inverse.root.moment
                source = product.inputs[1 - side]
                if not _is_variance_of(moment, source):
                    continue
                bias = _read_offset(node, 1 - position, product.inputs[side], Centred(source, moment.axes))
            except NotANorm:
                continue
            return DecomposedNorm(
                source,
                moment.axes,
                inverse.root.epsilon,
                True,
                moment.is_mean,
                inverse.constant,
                bias,
                node.outputs[0],
                module_of(node),
            )
    raise NotANorm("a sum")


def _is_variance_of(moment: Moment, source: Tensor) -> bool:
    if moment.is_central:
        return origin(moment.squared) is origin(source)
    deviation = centred_or_none(moment.squared)
    return (
        deviation is not None and deviation.axes == moment.axes and origin(deviation.source) is origin(source)
    )


def _read_offset(node: Node, position: int, factor: Tensor, mean: Centred) -> Tensor | None:
    """Read ``β − m·s`` or ``−m·s``, or ``m·s`` where it is subtracted; return β."""
    offset = node.inputs[position]
    if node.op == "Sub":
        _check_product(offset, factor, mean, is_negative=False)
        return None
    inner = producer(offset)
    if inner is not None and inner.op == "Sub" and is_constant(inner.inputs[0]):
        _check_product(inner.inputs[1], factor, mean, is_negative=False)
        return inner.inputs[0]
    if inner is not None and inner.op == "Add" and any(map(is_constant, inner.inputs)):
        bias = next(tensor for tensor in inner.inputs if is_constant(tensor))
        _check_product(next(t for t in inner.inputs if t is not bias), factor, mean, is_negative=True)
        return bias
    _check_product(offset, factor, mean, is_negative=True)
    return None


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
