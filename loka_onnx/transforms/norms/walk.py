"""Trace the use of a statistic back to its reduction.

Between the two stand elementwise operators, and nodes that restore a dropped axis: Unsqueeze, Reshape to a
shape computed from other shapes, Expand. Elementwise operators ignore the arrangement of axes, so these may
stand anywhere; they are collected on the way and judged at the reduction: the statistic must arrive as if
every axis had been kept.

`NotANorm` is raised for any other computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from loka_onnx.graph.model import Node, Tensor, element_type, is_constant, producer, values_of
from loka_onnx.graph.moves import move
from loka_onnx.graph.shape_values import dimensions

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
    """Mean or sum of squares of a tensor, over axes that are negative, ascending.

    `is_central` if the square of the mean was subtracted: the variance of `squared`.
    """

    squared: Tensor
    axes: tuple[int, ...]
    is_mean: bool
    is_central: bool = False

    @property
    def length(self) -> int | None:
        """Number of squares in each sum; None where unknown."""
        return static_length(self.squared, self.axes)


class Walk:
    """One way back from a statistic's use."""

    def __init__(self) -> None:
        self._layout: list[Node] = []
        self._roundings: list[str] = []
        self._steps = 0

    def fork(self) -> Walk:
        """Return another way from the same point."""
        other = Walk()
        other._layout, other._roundings = list(self._layout), list(self._roundings)
        return other

    def to(self, tensor: Tensor) -> Node:
        """Return the node that computes a tensor, behind layout nodes and conversions."""
        while True:
            node = producer(tensor)
            self._steps += 1
            if node is None or self._steps > _FURTHEST:
                raise NotANorm("a constant or input")
            if node.op in _LAYOUT:
                self._layout.append(node)
            elif node.op == "Cast" and element_type(node.attrs["to"]) != type_of(node.inputs[0]):
                self._roundings.append(_T.DataType.Name(element_type(node.attrs["to"])))
            elif node.op not in {"Identity", "Cast"}:
                return node
            tensor = node.inputs[0]

    def arrive(self, reduction: Node, axes: tuple[int, ...]) -> None:
        """Check the way from a reduction over these axes."""
        if self._roundings:
            raise NotANorm(f"its statistics pass through {self._roundings[-1]}")
        if not _is_arranged(reduction, axes, tuple(reversed(self._layout))):
            raise NotANorm("its statistics are not aligned with the axes that they were taken over")


def type_of(tensor: Tensor) -> int:
    """Return the element type of a tensor; UNDEFINED where unknown."""
    return _T.UNDEFINED if tensor.dtype is None else element_type(tensor.dtype)


def lossless_chain(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor, then those that it is converted from without loss."""
    chain = [tensor]
    node = producer(tensor)
    while node is not None and (node.op == "Identity" or (node.op == "Cast" and _loses_nothing(node))):
        chain.append(node.inputs[0])
        node = producer(chain[-1])
    return tuple(chain)


def origin(tensor: Tensor) -> Tensor:
    """Return the tensor behind lossless conversions."""
    return lossless_chain(tensor)[-1]


def scalar(tensor: Tensor) -> float | None:
    """Return the value of a constant with one element; None otherwise."""
    if not is_constant(tensor) or values_of(tensor).size != 1:
        return None
    return float(values_of(tensor).reshape(-1)[0])


def static_length(tensor: Tensor, axes: tuple[int, ...]) -> int | None:
    """Return the product of the lengths of some axes; None where one is unknown."""
    if tensor.shape is None or any(-axis > len(tensor.shape) for axis in axes):
        return None
    lengths = [d for axis in axes if isinstance(d := tensor.shape[axis], int) and d > 0]
    return prod(lengths) if len(lengths) == len(axes) else None


def reduced_axes(reduce: Node) -> tuple[int, ...]:
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
    if not axes:
        raise NotANorm("a reduction over no axis")
    if shape is None and any(axis >= 0 for axis in axes):
        raise NotANorm("a reduction of a tensor of unknown rank")
    return tuple(sorted(axis - len(every) if axis >= 0 else axis for axis in axes))


def _loses_nothing(cast: Node) -> bool:
    before, after = type_of(cast.inputs[0]), element_type(cast.attrs["to"])
    return before == after or (before, after) in _WIDENING


def _is_arranged(reduction: Node, axes: tuple[int, ...], layout: tuple[Node, ...]) -> bool:
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
