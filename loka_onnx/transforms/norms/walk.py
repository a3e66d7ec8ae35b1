"""Trace the use of a statistic back to its reduction.

Between the two stand elementwise operators, and nodes that restore a dropped axis: Unsqueeze, Reshape to a
shape computed from other shapes, Expand. Elementwise operators ignore the arrangement of axes, so these may
stand anywhere; they are collected on the way and judged at the reduction: the statistic must arrive as if
every axis had been kept.

`NotANorm` is raised for another computation, `NearMiss` for one so close to a norm that its user should know
the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from loka_onnx.graph.model import Node, Tensor, element_type, is_constant, producer, values_of
from loka_onnx.graph.shape_values import Dim, dimensions, read_dimensions, reshaped

_FURTHEST = 40
"""Most nodes between a statistic's use and its reduction; exporters write up to ten."""
_LAYOUT = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Expand"})
_T = onnx.TensorProto
_WIDENING = frozenset(
    {(_T.FLOAT16, _T.FLOAT), (_T.BFLOAT16, _T.FLOAT), (_T.FLOAT16, _T.DOUBLE)}
    | {(_T.BFLOAT16, _T.DOUBLE), (_T.FLOAT, _T.DOUBLE)}
)


class NotANorm(Exception):
    """The nodes compute something else; the message says what was read."""


@dataclass(frozen=True)
class Moment:
    """Mean or sum of squares.

    Attributes:
        squared: Tensor whose squares are averaged or added.
        axes: Axes of the reduction, negative, ascending.
        is_mean: Whether it is a mean, else a sum.
        is_central: Whether the square of the mean was subtracted: the variance of `squared`.
    """

    squared: Tensor
    axes: tuple[int, ...]
    is_mean: bool
    is_central: bool = False

    @property
    def length(self) -> int | None:
        """Number of squares in each sum; None where unknown."""
        return static_length(self.squared, self.axes)


class NearMiss(NotANorm):
    """The nodes come close to a norm; the message names the difference.

    Attributes:
        moment: Mean or sum of squares that was read; None for none.
        part: A node that would be reported as a near miss of its own; None for none.
    """

    def __init__(self, reason: str, moment: Moment | None = None, part: Node | None = None) -> None:
        super().__init__(reason)
        self.moment, self.part = moment, part


class Walk:
    """One way back from a statistic's use.

    Args:
        is_vector: Whether the statistic is used as a vector, one number for each position: then any
            arrangement that keeps the order of its elements is equal.
    """

    def __init__(self, *, is_vector: bool = False) -> None:
        self._layout: list[Node] = []
        self._roundings: list[str] = []
        self._steps, self._is_vector = 0, is_vector

    def fork(self) -> Walk:
        """Return another way from the same point."""
        other = Walk(is_vector=self._is_vector)
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

    def arrive(self, reduction: Node, axes: tuple[int, ...], moment: Moment | None = None) -> None:
        """Check the way from a reduction over these axes."""
        if self._roundings:
            raise NearMiss(f"its statistics pass through {self._roundings[-1]}", moment)
        is_arranged = (
            all(node.op != "Expand" for node in self._layout)
            if self._is_vector
            else _is_arranged(reduction, axes, tuple(reversed(self._layout)))
        )
        if not is_arranged:
            raise NearMiss("its statistics are not aligned with the axes that they were taken over", moment)


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
    elif "axes" in reduce.attrs:
        axes = [int(axis) for axis in reduce.attrs["axes"]]
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


# Arrangement of axes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """One axis of a statistic.

    Attributes:
        axis: Axis of the reduced tensor, negative; None where it does not vary.
        size: Length or name.
    """

    axis: int | None
    size: Dim


def _is_arranged(reduction: Node, axes: tuple[int, ...], layout: tuple[Node, ...]) -> bool:
    """Return whether a statistic broadcasts against its source as if every axis had been kept."""
    is_kept = bool(reduction.attrs.get("keepdims", 1))
    if is_kept and not layout:
        return True
    sizes = dimensions(reduction.inputs[0])
    if sizes is None:
        return False
    places = _left_by(sizes, axes, is_kept)
    for node in layout:
        moved = _moved(node, places)
        if moved is None:
            return False
        places = moved
    first = -len(places)
    if -first > len(sizes):
        return False
    return all(
        place.axis == position or (place.axis is None and place.size in (1, sizes[position]))
        for position, place in enumerate(places, start=first)
    )


def _left_by(sizes: tuple[Dim, ...], axes: tuple[int, ...], is_kept: bool) -> list[_Place]:
    """Return the axes of a reduction's result."""
    places = []
    for position, size in enumerate(sizes, start=-len(sizes)):
        if position not in axes:
            places.append(_Place(None if size == 1 else position, size))
        elif is_kept:
            places.append(_Place(None, 1))
    return places


def _moved(node: Node, places: list[_Place]) -> list[_Place] | None:
    """Return the axes after a layout node; None where they are unknown."""
    if node.op in {"Squeeze", "Unsqueeze"}:
        axes = _constant_axes(node)
        return (
            None
            if axes is None
            else _squeezed(places, axes)
            if node.op == "Squeeze"
            else _widened(places, axes)
        )
    target = read_dimensions(node.inputs[1])
    if target is None:
        return None
    if node.op == "Expand":
        return _expanded(places, target)
    sizes = reshaped(tuple(p.size for p in places), target, zero_copies=not node.attrs.get("allowzero", 0))
    varying = [place for place in places if place.size != 1]
    if sizes is None or [size for size in sizes if size != 1] != [place.size for place in varying]:
        return None
    rest = iter(varying)
    return [_Place(None, 1) if size == 1 else next(rest) for size in sizes]


def _constant_axes(node: Node) -> tuple[int, ...] | None:
    if "axes" in node.attrs:
        return tuple(int(axis) for axis in node.attrs["axes"])
    if len(node.inputs) < 2 or not is_constant(node.inputs[1]):
        return None
    return tuple(int(axis) for axis in np.atleast_1d(values_of(node.inputs[1])))


def _squeezed(places: list[_Place], axes: tuple[int, ...]) -> list[_Place] | None:
    gone = {axis % len(places) for axis in axes} if places else set()
    if any(places[axis].size != 1 for axis in gone):
        return None
    return [place for axis, place in enumerate(places) if axis not in gone]


def _widened(places: list[_Place], axes: tuple[int, ...]) -> list[_Place]:
    rank = len(places) + len(axes)
    new, rest = {axis % rank for axis in axes}, iter(places)
    return [_Place(None, 1) if axis in new else next(rest) for axis in range(rank)]


def _expanded(places: list[_Place], target: tuple[Dim, ...]) -> list[_Place] | None:
    rank = max(len(places), len(target))
    before = [_Place(None, 1)] * (rank - len(places)) + places
    entries: list[Dim] = [*([1] * (rank - len(target))), *target]
    result = []
    for place, entry in zip(before, entries, strict=True):
        if entry in (1, place.size):
            result.append(place)
        elif place.size == 1:
            result.append(_Place(None, entry))
        else:
            return None
    return result
