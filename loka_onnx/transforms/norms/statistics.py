"""Read statistics of a normalization exported as primitives: means, mean squares, their roots.

Exporters spell a statistic in several ways:

- a mean is ReduceMean, a sum divided by its count, or GlobalAveragePool; axes are an attribute or an input;
- a square is Pow or Mul, a sum of squares ReduceSumSquare, its root ReduceL2;
- a variance is the mean of (x − mean(x))², where the mean may be computed twice, or mean(x²) − mean(x)²;
- a reciprocal root is Reciprocal, one divided by the root, or a power of −1/2.

Every reader follows the graph backwards. Between the use of a statistic and its reduction stand elementwise
operators, and nodes that restore a dropped axis: Unsqueeze, Reshape to a shape computed from other shapes,
Expand. Elementwise operators ignore the arrangement of axes, so these may stand anywhere; a `Walk` collects
them, and judges them at the reduction: the statistic must arrive as if every axis had been kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isfinite, prod

import numpy as np
import onnx

from loka_onnx.graph.model import Node, Tensor, element_type, is_constant, producer, values_of
from loka_onnx.graph.moves import move
from loka_onnx.graph.shape_values import dimensions, read_number
from loka_onnx.transforms.linears.pattern import static_dim

_FURTHEST = 40
"""Most nodes between a statistic's use and its reduction; exporters write up to ten."""
_LAYOUT = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Expand"})
_LENGTHS = (7, 11, 13, 17, 19)
"""Of named dimensions, where the layout of a statistic is followed."""
_T = onnx.TensorProto
_WIDENING = frozenset(
    {(_T.FLOAT16, _T.FLOAT), (_T.BFLOAT16, _T.FLOAT), (_T.FLOAT16, _T.DOUBLE)}
    | {(_T.BFLOAT16, _T.DOUBLE), (_T.FLOAT, _T.DOUBLE)}
)


class NotANorm(Exception):
    """The nodes compute something else; the message says what was read."""


@dataclass(frozen=True)
class Moment:
    """Mean or sum of squares over negative, ascending axes; if `is_central`, the variance of `squared`."""

    squared: Tensor
    axes: tuple[int, ...]
    is_mean: bool
    is_central: bool = False


@dataclass(frozen=True)
class Root:
    """sqrt(moment + ε), its reciprocal if `is_inverted`; times `constant`, if any."""

    moment: Moment
    epsilon: float = 0.0
    is_inverted: bool = False
    constant: Tensor | None = None


@dataclass(frozen=True)
class Centred:
    """``source − mean(source)`` over some axes; the mean alone where `read_mean` returns it."""

    source: Tensor
    axes: tuple[int, ...]


@dataclass
class Walk:
    """One way back from a statistic's use: its layout nodes, and whether a conversion changed its values."""

    layout: list[Node] = field(default_factory=list)
    is_rounded: bool = False
    steps: int = 0

    def fork(self) -> Walk:
        """Return another way from the same point."""
        return Walk(list(self.layout), self.is_rounded)

    def to(self, tensor: Tensor) -> Node:
        """Return the maker of a tensor in front of layout nodes and Casts, and note these; or NotANorm."""
        while True:
            node = producer(tensor)
            self.steps += 1
            if node is None or self.steps > _FURTHEST:
                raise NotANorm("a constant or input")
            if node.op in _LAYOUT:
                self.layout.append(node)
            elif node.op == "Cast":
                self.is_rounded |= element_type(node.attrs["to"]) != type_of(node.inputs[0])
            elif node.op != "Identity":
                return node
            tensor = node.inputs[0]

    def arrive(self, reduction: Node, axes: tuple[int, ...]) -> None:
        """Raise NotANorm if the statistic was rounded, or does not broadcast as with its axes kept."""
        if self.is_rounded or not _is_arranged(reduction, axes, self.layout[::-1]):
            raise NotANorm(
                "its statistics are rounded, or not aligned with the axes that they were taken over"
            )


def read_root(tensor: Tensor, walk: Walk | None = None) -> Root:
    """Return the root that a tensor is, traced back to its mean or sum of squares; NotANorm for others."""
    walk = walk or Walk()
    node = walk.to(tensor)
    if node.op == "Reciprocal" or (node.op == "Div" and scalar(node.inputs[0]) == 1.0):
        root = read_root(node.inputs[-1], walk)
        return replace(root, is_inverted=not root.is_inverted)
    if node.op == "ReduceL2":
        return Root(_read_moment(node, walk))
    exponent = 0.5 if node.op == "Sqrt" else scalar(node.inputs[1]) if node.op == "Pow" else None
    if exponent is None or abs(exponent) != 0.5:
        raise NotANorm(f"a {node.op}")
    return replace(_read_radicand(node.inputs[0], walk), is_inverted=exponent < 0)


def read_mean(tensor: Tensor, walk: Walk | None = None) -> Centred:
    """Return the tensor that this one is the mean of, and the axes; NotANorm for others."""
    walk = walk or Walk()
    node, factor = _unscaled(walk.to(tensor), walk)
    if node.op not in {"ReduceMean", "GlobalAveragePool", "ReduceSum"}:
        raise NotANorm(f"a {node.op}")
    axes = _reduced_axes(node)
    lengths = static_lengths(node.inputs[0], axes) if node.op == "ReduceSum" else ()
    if lengths is None or factor * prod(lengths) != 1:
        raise NotANorm("a sum")
    walk.arrive(node, axes)
    return Centred(node.inputs[0], axes)


def read_centred(tensor: Tensor) -> Centred | None:
    """Read ``x − mean(x)``; None for anything else."""
    node = producer(tensor)
    if node is None or node.op not in {"Sub", "Add"}:
        return None
    minuend, mean = node.inputs
    if node.op == "Add":
        negated = producer(mean)
        if negated is None or negated.op != "Neg":
            return None
        mean = negated.inputs[0]
    try:
        centred = read_mean(mean)
    except NotANorm:
        return None
    return Centred(minuend, centred.axes) if origin(centred.source) is origin(minuend) else None


def holds_same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same values: one tensor, or a centring computed twice."""
    if origin(one) is origin(other):
        return True
    left, right = read_centred(one), read_centred(other)
    if left is None or right is None:
        return False
    return left.axes == right.axes and origin(left.source) is origin(right.source)


def type_of(tensor: Tensor) -> int:
    """Return the element type of a tensor; UNDEFINED where unknown."""
    return _T.UNDEFINED if tensor.dtype is None else element_type(tensor.dtype)


def lossless_chain(tensor: Tensor) -> list[Tensor]:
    """Return a tensor, then those that it is converted from without loss."""
    chain = [tensor]
    while (node := producer(chain[-1])) is not None and _keeps_values(node):
        chain.append(node.inputs[0])
    return chain


def origin(tensor: Tensor) -> Tensor:
    """Return the tensor behind lossless conversions."""
    return lossless_chain(tensor)[-1]


def scalar(tensor: Tensor) -> float | None:
    """Return the value of a constant with one element; None otherwise."""
    return read_number(tensor) if is_constant(tensor) else None


def static_lengths(tensor: Tensor, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the lengths of some axes; None where one is unknown or 0."""
    lengths = tuple(static_dim(tensor, axis) or 0 for axis in axes)
    return lengths if all(lengths) else None


def _keeps_values(node: Node) -> bool:
    if node.op != "Cast":
        return node.op == "Identity"
    before, after = type_of(node.inputs[0]), element_type(node.attrs["to"])
    return before == after or (before, after) in _WIDENING


def _reduced_axes(reduce: Node) -> tuple[int, ...]:
    """Return axes of a reduction, negative and ascending."""
    shape = reduce.inputs[0].shape
    every = [0] if shape is None else list(range(len(shape)))
    if reduce.op == "GlobalAveragePool":
        axes = every[2:]
    elif len(reduce.inputs) > 1 and reduce.inputs[1].name:
        if not is_constant(reduce.inputs[1]):
            raise NotANorm("a reduction over axes that are not constant")
        axes = [int(axis) for axis in np.atleast_1d(values_of(reduce.inputs[1]))]
    else:
        axes = [] if reduce.attrs.get("noop_with_empty_axes", 0) else every
    if not axes or (shape is None and any(axis >= 0 for axis in axes)):
        raise NotANorm("a reduction over no axis, or of a tensor of unknown rank")
    return tuple(sorted(axis - len(every) if axis >= 0 else axis for axis in axes))


def _is_arranged(reduction: Node, axes: tuple[int, ...], layout: list[Node]) -> bool:
    """Return whether a statistic broadcasts against its source as if every axis had been kept."""
    is_kept = bool(reduction.attrs.get("keepdims", 1))
    if is_kept and not layout:
        return True
    sizes = dimensions(reduction.inputs[0])
    if sizes is None:
        return False
    names = dict.fromkeys(size for size in sizes if isinstance(size, str))
    lengths = dict(zip(names, _LENGTHS, strict=False))
    if len(lengths) < len(names):
        return False
    whole = [lengths[size] if isinstance(size, str) else size for size in sizes]
    reduced = [1 if axis in axes else whole[axis] for axis in range(-len(whole), 0)]
    # A number for each statistic.
    kept = np.arange(prod(reduced), dtype=np.int64).reshape(reduced)
    numbers = kept if is_kept else np.squeeze(kept, axes)
    try:
        for node in layout:
            (numbers,) = move(node, node.inputs[0], numbers, lengths)
        numbers = numbers.reshape([1] * (len(whole) - numbers.ndim) + list(numbers.shape))
        shape = np.broadcast_shapes(numbers.shape, kept.shape)
        is_equal = np.array_equal(np.broadcast_to(numbers, shape), np.broadcast_to(kept, shape))
        return is_equal and np.broadcast_shapes(shape, tuple(whole)) == tuple(whole)
    except (ValueError, IndexError):
        return False


# Radicands and moments ---------------------------------------------------------------------------------


def _read_radicand(tensor: Tensor, walk: Walk) -> Root:
    """Read the argument of the root."""
    node = walk.to(tensor)
    if node.op in {"Max", "Clip"}:
        # A sum of squares is negative by rounding only.
        if node.op == "Clip" and len(node.inputs) > 2 and node.inputs[2].name:
            raise NotANorm("a bounded mean of squares")
        bound, other = _with_number(node)
        if bound:
            raise NotANorm("a bounded mean of squares")
        return Root(_read_moment(walk.to(other), walk))
    if node.op != "Add":
        return Root(_read_moment(node, walk))
    for position in (0, 1):
        epsilon = scalar(node.inputs[position])
        if epsilon is not None:
            inner = _read_radicand(node.inputs[1 - position], walk)
            if inner.epsilon:
                raise NotANorm("two constants under its root")
            return replace(inner, epsilon=epsilon)
    raise NotANorm("a sum")


def _read_moment(node: Node, walk: Walk) -> Moment:
    """Read the mean or sum of squares that a node computes, with a walk behind it."""
    if node.op == "Relu":
        # Max(variance, 0) guards against rounding: no change in exact arithmetic.
        return _read_moment(walk.to(node.inputs[0]), walk)
    if node.op == "Sub":
        return _read_difference(node, walk)
    if node.op in {"Mul", "Div"}:
        return _read_scaled(node, walk)
    if node.op in {"ReduceSumSquare", "ReduceL2"}:
        squared = node.inputs[0]
    elif node.op in {"ReduceMean", "ReduceSum", "GlobalAveragePool"}:
        squared = _squared(node.inputs[0])
    else:
        raise NotANorm(f"a {node.op}")
    axes = _reduced_axes(node)
    walk.arrive(node, axes)
    return Moment(squared, axes, is_mean=node.op in {"ReduceMean", "GlobalAveragePool"})


def _squared(tensor: Tensor) -> Tensor:
    """Return the tensor that this one is the square of."""
    node = producer(tensor)
    while node is not None and node.op == "Identity":
        node = producer(node.inputs[0])
    is_power = node is not None and node.op == "Pow" and scalar(node.inputs[1]) == 2.0
    is_product = node is not None and node.op == "Mul" and holds_same_values(*node.inputs)
    if node is None or not (is_power or is_product):
        raise NotANorm("a mean of something that is no square")
    return node.inputs[0]


def _read_difference(node: Node, walk: Walk) -> Moment:
    """Read mean(x²) − mean(x)²."""
    squares = walk.fork()
    moment = _read_moment(squares.to(node.inputs[0]), squares)
    mean = read_mean(_squared(node.inputs[1]), walk.fork())
    is_variance = moment.is_mean and mean.axes == moment.axes
    if not is_variance or origin(mean.source) is not origin(moment.squared):
        raise NotANorm("a mean of squares minus something else")
    return replace(moment, is_central=True)


def _read_scaled(node: Node, walk: Walk) -> Moment:
    """Read a sum of squares divided by its count."""
    inner, factor = _unscaled(node, walk)
    moment = _read_moment(inner, walk)
    lengths = static_lengths(moment.squared, moment.axes)
    # Factor of the mean of squares. The unbiased variance has K/(K − 1), whose root is irrational.
    if lengths is None or factor * (1 if moment.is_mean else prod(lengths)) != 1:
        raise NotANorm("a multiple of a mean of squares")
    return replace(moment, is_mean=True)


def _unscaled(node: Node, walk: Walk) -> tuple[Node, Fraction]:
    """Return the node behind products and quotients with numbers, and their total factor."""
    factor = Fraction(1)
    while node.op in {"Mul", "Div"}:
        number, other = _with_number(node)
        if not number:
            raise NotANorm("a multiple of zero")
        factor = factor * Fraction(number) if node.op == "Mul" else factor / Fraction(number)
        node = walk.to(other)
    return node, factor


def _with_number(node: Node) -> tuple[float, Tensor]:
    """Return the number among two operands of a node, and the other operand."""
    operands = node.inputs[:2] if node.op == "Clip" else node.inputs
    for position in (1, 0) if node.op in {"Mul", "Max"} else (1,):
        number = read_number(operands[position]) if len(operands) == 2 else None
        if number is not None and isfinite(number):
            return number, operands[1 - position]
    raise NotANorm(f"a {node.op} of two tensors")
