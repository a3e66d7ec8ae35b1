"""Read statistics of a normalization exported as primitives: means, mean squares, their roots.

Exporters spell a statistic in several ways:

- a mean is ReduceMean, a sum divided by its count, or GlobalAveragePool; axes are an attribute or an input;
- a square is Pow or Mul, a sum of squares ReduceSumSquare, its root ReduceL2;
- a variance is the mean of (x − mean(x))², where the mean may be computed twice, or mean(x²) − mean(x)²;
- a reciprocal root is Reciprocal, one divided by the root, or a power of −1/2.

Every reader follows the graph backwards, and raises the errors of `walk`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite

from loka_onnx.graph.model import Node, Tensor, is_constant, producer
from loka_onnx.graph.shape_values import read_number
from loka_onnx.transforms.norms.walk import (
    Moment,
    NotANorm,
    Walk,
    origin,
    reduced_axes,
    scalar,
    static_length,
)

_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "GlobalAveragePool"})


@dataclass(frozen=True)
class Root:
    """sqrt(moment + ε), or its reciprocal."""

    moment: Moment
    epsilon: float
    is_inverted: bool


@dataclass(frozen=True)
class Centred:
    """``source − mean(source)`` over some axes; the mean alone where `read_mean` returns it."""

    source: Tensor
    axes: tuple[int, ...]


def read_root(tensor: Tensor) -> Root:
    """Trace a tensor back to the mean or sum of squares that it is the root of."""
    return _read_root(tensor, Walk())


def read_mean(tensor: Tensor, walk: Walk | None = None) -> Centred:
    """Return the tensor that this one is the mean of, and the axes, behind a walk."""
    walk = walk or Walk()
    scaled = _unscaled(walk.to(tensor), walk)
    node = scaled.node
    if node.op not in {"ReduceMean", "GlobalAveragePool", "ReduceSum"}:
        raise NotANorm(f"a {node.op}")
    axes = reduced_axes(node)
    count = static_length(node.inputs[0], axes) if node.op == "ReduceSum" else 1
    if count is None or scaled.factor * count != 1:
        raise NotANorm("a sum")
    walk.arrive(node, axes)
    return Centred(node.inputs[0], axes)


def read_centred(tensor: Tensor) -> Centred:
    """Read ``x − mean(x)``."""
    node = producer(tensor)
    if node is None or node.op not in {"Sub", "Add"}:
        raise NotANorm("no difference")
    minuend, mean = node.inputs[0], node.inputs[1]
    if node.op == "Add":
        negated = producer(mean)
        if negated is None or negated.op != "Neg":
            raise NotANorm("no difference")
        mean = negated.inputs[0]
    centred = read_mean(mean)
    if origin(centred.source) is not origin(minuend):
        raise NotANorm("what is subtracted is not the mean")
    return Centred(minuend, centred.axes)


def centred_or_none(tensor: Tensor) -> Centred | None:
    """``x − mean(x)``; None for anything else."""
    try:
        return read_centred(tensor)
    except NotANorm:
        return None


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same values: one tensor, or a centring computed twice."""
    if origin(one) is origin(other):
        return True
    left, right = centred_or_none(one), centred_or_none(other)
    if left is None or right is None:
        return False
    return left.axes == right.axes and origin(left.source) is origin(right.source)


# Roots -------------------------------------------------------------------------------------------------


def _read_root(tensor: Tensor, walk: Walk) -> Root:
    node = walk.to(tensor)
    if node.op == "Reciprocal" or (node.op == "Div" and scalar(node.inputs[0]) == 1.0):
        root = _read_root(node.inputs[0 if node.op == "Reciprocal" else 1], walk)
        return replace(root, is_inverted=not root.is_inverted)
    if node.op == "ReduceL2":
        return Root(read_moment(node, walk), 0.0, False)
    exponent = 0.5 if node.op == "Sqrt" else scalar(node.inputs[1]) if node.op == "Pow" else None
    if exponent is None:
        raise NotANorm(f"a {node.op}")
    root = _read_radicand(node.inputs[0], walk)
    if abs(exponent) != 0.5:
        raise NotANorm("another power of its mean of squares")
    return replace(root, is_inverted=exponent < 0)


def _read_radicand(tensor: Tensor, walk: Walk) -> Root:
    """Read the argument of the root."""
    node = walk.to(tensor)
    if node.op in {"Max", "Clip"}:
        bound = _with_number(node)
        moment = read_moment(walk.to(bound.other), walk)
        if bound.number != 0.0 or bound.is_largest:
            raise NotANorm("a bounded mean of squares")
        # A sum of squares is negative by rounding only.
        return Root(moment, 0.0, False)
    if node.op != "Add":
        return Root(read_moment(node, walk), 0.0, False)
    for position in (0, 1):
        epsilon = scalar(node.inputs[position])
        if epsilon is not None:
            inner = _read_radicand(node.inputs[1 - position], walk)
            if inner.epsilon:
                raise NotANorm("two constants under its root")
            return replace(inner, epsilon=epsilon)
    raise NotANorm("a sum")


# Moments -----------------------------------------------------------------------------------------------


def read_moment(node: Node, walk: Walk) -> Moment:
    """Read the mean or sum of squares that a node computes, with a walk behind it."""
    if node.op == "Relu":
        # Max(variance, 0) guards against rounding: no change in exact arithmetic.
        return read_moment(walk.to(node.inputs[0]), walk)
    if node.op == "Sub":
        return _read_difference(node, walk)
    if node.op in {"Mul", "Div"}:
        return _read_scaled(node, walk)
    if node.op not in _REDUCTIONS:
        raise NotANorm(f"a {node.op}")
    axes = reduced_axes(node)
    if node.op in {"ReduceSumSquare", "ReduceL2"}:
        moment = Moment(node.inputs[0], axes, is_mean=False)
    else:
        moment = Moment(_squared(node.inputs[0]), axes, is_mean=node.op != "ReduceSum")
    walk.arrive(node, axes)
    return moment


def _squared(tensor: Tensor) -> Tensor:
    """Return the tensor that this one is the square of."""
    node = producer(tensor)
    while node is not None and node.op == "Identity":
        node = producer(node.inputs[0])
    if node is None or node.op not in {"Pow", "Mul"}:
        raise NotANorm("a mean of something that is no square")
    if node.op == "Pow" and scalar(node.inputs[1]) != 2.0:
        raise NotANorm("a mean of other powers")
    if node.op == "Mul" and not is_same(node.inputs[0], node.inputs[1]):
        raise NotANorm("a mean of products of two tensors")
    return node.inputs[0]


def _read_difference(node: Node, walk: Walk) -> Moment:
    """Read mean(x²) − mean(x)²."""
    squares = walk.fork()
    moment = read_moment(squares.to(node.inputs[0]), squares)
    mean = read_mean(_squared(node.inputs[1]), walk.fork())
    is_variance = moment.is_mean and mean.axes == moment.axes
    if not is_variance or origin(mean.source) is not origin(moment.squared):
        raise NotANorm("a mean of squares minus something else")
    return replace(moment, is_central=True)


def _read_scaled(node: Node, walk: Walk) -> Moment:
    """Read a sum of squares divided by its count."""
    scaled = _unscaled(node, walk)
    moment = read_moment(scaled.node, walk)
    # Factor of the mean of squares. The unbiased variance has K/(K − 1), whose root is irrational.
    factor = scaled.factor if moment.is_mean else scaled.factor * (moment.length or 0)
    if moment.length is None or factor != 1:
        raise NotANorm("a multiple of a mean of squares")
    return replace(moment, is_mean=True)


@dataclass(frozen=True)
class _Scaled:
    """A node behind products and quotients with numbers, and their total factor."""

    node: Node
    factor: Fraction


def _unscaled(node: Node, walk: Walk) -> _Scaled:
    factor = Fraction(1)
    while node.op in {"Mul", "Div"}:
        step = _with_number(node)
        if not step.number:
            raise NotANorm("a multiple of zero")
        factor = factor * Fraction(step.number) if node.op == "Mul" else factor / Fraction(step.number)
        node = walk.to(step.other)
    return _Scaled(node, factor)


@dataclass(frozen=True)
class _WithNumber:
    """The number among the operands of a node, its other operand, and whether it is an upper limit."""

    number: float
    other: Tensor
    is_largest: bool = False


def _with_number(node: Node) -> _WithNumber:
    if node.op == "Clip":
        for position in (1, 2):
            bound = scalar(node.inputs[position]) if position < len(node.inputs) else None
            if bound is not None:
                has_both = position == 1 and len(node.inputs) > 2 and bool(node.inputs[2].name)
                return _WithNumber(bound, node.inputs[0], position == 2 or has_both)
    elif len(node.inputs) == 2:
        for position in (1,) if node.op == "Div" else (1, 0):
            tensor = node.inputs[position]
            number = scalar(tensor) if is_constant(tensor) else read_number(tensor)
            if number is not None and isfinite(number):
                return _WithNumber(number, node.inputs[1 - position], node.op == "Min")
    raise NotANorm(f"a {node.op} of two tensors")
