"""Parts of a model that fit FP16, which ends at 65504 and has no normal number below 2⁻¹⁴ (BF16 has FP32's
range).

Shown on the calibration rows, node by node:

- every tensor that a node reads or writes stays below 65504 / `MARGIN`, because other rows may be larger;
- no sum over an axis can pass 65504, whatever the order and signs of its terms: their largest magnitude (its
  square, for sums of squares) times their number;
- constants fit, and no nonzero one becomes 0;
- no divisor or argument of a logarithm is below the normal numbers, or guarded by a constant that becomes 0
  (an ε of 1e-12): FP32 would divide by ε where FP16 makes an infinity. The nodes that compute such a divisor
  stay in FP32 with it, because the square of a small number underflows first.

Inside of an operator FP32 is assumed: sums of products (tensor cores accumulate in FP32), statistics of norms
(`stash_type`), exponentials of Softmax. A norm, Softmax or sigmoid exported in parts is checked part by part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from loka_onnx.core.statistics import TensorRange
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import (
    GraphModel,
    Node,
    Tensor,
    consumers,
    is_constant,
    producer,
    values_of,
)
from loka_onnx.graph.protected import Divisor, divisors, is_fp32

MARGIN = 8.0
"""Factor by which other rows may exceed the calibration rows: three of FP16's 40 binades. Normalized models
have far more room; in others this finds the tensors that lack it."""
FEW = 4
"""Most places that stay in FP32 in an FP16 model; with more, BF16 is better: it needs no casts there."""
LARGEST = 65504.0
SMALLEST_NORMAL = 2.0**-14
BECOMES_ZERO = 2.0**-25
"""Half of the smallest subnormal number: this much and less is rounded to 0 (to even)."""

_READS_ANY_TYPE = frozenset({"Cast", "Shape", "Size"})
_FIRST_POWER = frozenset({"ReduceSum", "ReduceMean", "ReduceL1", "GlobalAveragePool", "CumSum"})
_SQUARES = frozenset({"ReduceL2", "ReduceSumSquare"})


@dataclass(frozen=True)
class Unproven:
    """A tensor or node not shown to fit FP16, the nodes that stay in FP32 for it, and why, as a sentence."""

    at: str
    nodes: tuple[str, ...]
    reason: str


def unproven_places(
    model: GraphModel, ranges: Mapping[str, TensorRange], wide: Collection[str] = ()
) -> tuple[Unproven, ...]:
    """Return places not shown to fit FP16 by the calibration rows' magnitudes, `wide` nodes left out."""
    judge = _Judge(model, ranges)
    places = (*judge.tensors(), *judge.sums(), *judge.constants(), *judge.divisors())
    return tuple(place for place in places if not set(wide).issuperset(place.nodes))


def count_places(places: Sequence[Unproven]) -> int:
    """Count the places with nodes of no earlier place, so that a constant and its result count once."""
    seen: set[str] = set()
    count = 0
    for place in places:
        count += not seen.issuperset(place.nodes)
        seen.update(place.nodes)
    return count


def scale_fits(scale: float) -> bool:
    """True if a Q/DQ scale, which is a BF16 number, is exact and normal in FP16."""
    return SMALLEST_NORMAL <= scale <= LARGEST and float(np.float16(scale)) == scale


class _Judge:
    def __init__(self, model: GraphModel, ranges: Mapping[str, TensorRange]) -> None:
        self.model, self.ranges = model, ranges
        self.nodes = model.sorted_nodes()

    def tensors(self) -> Iterator[Unproven]:
        """Tensors that may not fit."""
        computed = (tensor for node in self.nodes for tensor in node.outputs)
        places: dict[str, Unproven] = {}
        for tensor in (*self.model.inputs, *computed):
            why = self._why_not(tensor) if is_fp32(tensor) else ""
            if not why:
                continue
            # A reshaped or transposed view is the same place.
            root = layout_root(tensor).tensor.name
            place = places.get(root, Unproven(tensor.name, (), f"tensor '{tensor.name}' {why}"))
            nodes = tuple(dict.fromkeys((*place.nodes, *_touching(tensor))))
            places[root] = replace(place, nodes=nodes)
        yield from (place for place in places.values() if place.nodes)

    def sums(self) -> Iterator[Unproven]:
        """Nodes with intermediate sums that may not fit."""
        for node in self.nodes:
            if node.op not in _FIRST_POWER | _SQUARES or not is_fp32(node.outputs[0]):
                continue
            known, terms = self.ranges.get(node.inputs[0].name), _terms(node)
            if known is None:
                continue  # `tensors` has it.
            if terms is None:
                yield Unproven(node.name, (node.name,), f"'{node.name}' sums over an axis of unknown length")
                continue
            term = known.amax**2 if node.op in _SQUARES else known.amax
            if terms * term > LARGEST:
                yield Unproven(
                    node.name,
                    (node.name,),
                    f"'{node.name}' sums {terms} terms of up to {term:.4g}; FP16 ends at {LARGEST:.0f}",
                )

    def constants(self) -> Iterator[Unproven]:
        """Nodes with a constant that FP16 cannot hold."""
        limits: dict[int, str] = {}
        for node in self.nodes:
            for tensor in node.inputs:
                if not is_constant(tensor) or not is_fp32(tensor):
                    continue
                if id(tensor) not in limits:
                    limits[id(tensor)] = _why_not_constant(tensor)
                if limits[id(tensor)]:
                    why = f"constant '{tensor.name}' of '{node.name}' {limits[id(tensor)]}"
                    yield Unproven(node.name, (node.name,), why)

    def divisors(self) -> Iterator[Unproven]:
        """Nodes that may divide by 0 where FP32 does not."""
        for divisor in divisors(self.model):
            if not is_fp32(divisor.tensor):
                continue
            why = self._why_zero(divisor)
            if why:
                nodes = tuple(node.name for node in (divisor.reader, *divisor.makers))
                yield Unproven(divisor.reader.name, nodes, f"'{divisor.reader.name}' divides by {why}")

    def _why_not(self, tensor: Tensor) -> str:
        known = self.ranges.get(tensor.name)
        if known is None:
            return "was not measured"
        if known.amax * MARGIN <= LARGEST:
            return ""
        return f"reaches {known.amax:.4g}: {MARGIN:g} times that is beyond FP16's {LARGEST:.0f}"

    def _why_zero(self, divisor: Divisor) -> str:
        name = divisor.tensor.name
        known = self.ranges.get(name)
        if known is None:
            return ""  # `tensors` has it.
        if known.smallest is not None and known.smallest < SMALLEST_NORMAL:
            return (
                f"'{name}', which is as small as {known.smallest:.4g}; FP16 begins at {SMALLEST_NORMAL:.4g}"
            )
        for node in divisor.makers:
            for tensor in node.inputs:
                if is_constant(tensor) and is_fp32(tensor) and _largest(tensor) <= BECOMES_ZERO:
                    value = _largest(tensor)
                    if value > 0.0:
                        return f"'{name}', which only {value:.4g} keeps from 0; in FP16 that is 0"
        return ""


def _touching(tensor: Tensor) -> tuple[str, ...]:
    """Return the nodes in FP32 when a tensor is: its producer, and readers that need its type."""
    maker = producer(tensor)
    readers = [node for node in consumers(tensor) if node.op not in _READS_ANY_TYPE]
    return tuple(dict.fromkeys(node.name for node in ([] if maker is None else [maker]) + readers))


def _largest(tensor: Tensor) -> float:
    values = np.abs(values_of(tensor))
    return float(values[np.isfinite(values)].max(initial=0.0))


def _why_not_constant(tensor: Tensor) -> str:
    largest = _largest(tensor)
    if largest > LARGEST:
        return f"holds {largest:.4g}, FP16 ends at {LARGEST:.0f}"
    return f"is {largest:.4g}, which is 0 in FP16" if 0.0 < largest <= BECOMES_ZERO else ""


def _terms(node: Node) -> int | None:
    """Return the number of terms of a sum; None where the graph does not determine it."""
    shape = node.inputs[0].shape
    if shape is None:
        return None
    axes: Sequence[int] = range(2, len(shape)) if node.op == "GlobalAveragePool" else range(len(shape))
    if len(node.inputs) > 1 and node.inputs[1].name:
        if not is_constant(node.inputs[1]):
            return None
        given = values_of(node.inputs[1]).ravel()
        axes = [int(axis) for axis in given] if given.size else axes
    elif node.attrs.get("noop_with_empty_axes"):
        return 1
    sizes = [size for axis in axes if isinstance(size := shape[axis], int)]
    return prod(sizes) if len(sizes) == len(axes) else None
