"""Positions of a model graph's nodes: in layers from top to bottom, after Sugiyama, Tagawa and Toda (1981):
assign layers, order them so that few lines cross, then place each node beside its neighbours.

Models have three peculiarities. A tensor with many readers (the input of a cross network, a mask) is one line
with branches, a *trunk*, and takes one position in every layer that it passes. A layer with more nodes than
fit beside each other (the lookups of a thousand tables) is staggered over several rows. The layers of a deep
model are broken into columns, like the lines of a newspaper, where the fewest tensors cross.

No library does it: fast-sugiyama 0.5.3 takes 15 s where one tensor is read in 250 of 5,000 layers and does
not end in a minute where each of 300 operators reads all before it; networkx has neither orders nor
positions. Equal graphs give equal layouts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, log, sqrt

import numpy as np
from scipy.optimize import isotonic_regression

from loka_onnx.core.model_graph import GraphNode, ModelGraph, NodeKind

SITE_WIDTH = 160
OPERATOR_WIDTH = 92
NODE_HEIGHT = 34
ROW_PITCH = 62
_PASSING_WIDTH = 14
_GAP = 18
_COLUMN_GAP = 70
_LANE = 9
_MOST_PASSING = 30_000
"""Most trunk positions in layers; the longest beyond are drawn straight, over what lies between."""
_ASPECT = 1.7
_SWEEPS = 8
_MOST_COLUMNS = 40
_STRAIGHTENED_OVER = 12
"""Layers to either side whose middles define the slant to remove."""


@dataclass(frozen=True)
class Wire:
    """All tensors of one node: a line with branches.

    Attributes:
        trunk: Points (x, y) in order.
        branches: For each reader its index, and the number of trunk points in front of it.
    """

    source: int
    trunk: tuple[tuple[int, int], ...]
    branches: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class GraphLayout:
    """All positions, in pixels at full size; y grows downwards.

    Attributes:
        layers: Layer of each node; every edge leads to a higher one.
        places: Middle of each node's box.
        wires: The edges, grouped by source.
    """

    layers: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    wires: tuple[Wire, ...]
    columns: int


def width_of(node: GraphNode) -> int:
    """Width of the box of a node."""
    return OPERATOR_WIDTH if node.kind is NodeKind.OPERATOR and not node.sites else SITE_WIDTH


def lay_out(graph: ModelGraph) -> GraphLayout:
    """Lay out the nodes of a graph; takes about a second for 5,000."""
    if not graph.nodes:
        return GraphLayout((), (), (), 0)
    targets: list[list[int]] = [[] for _ in graph.nodes]
    for edge in graph.edges:
        targets[edge.source].append(edge.target)
    layers = _layers(targets)
    net = _Net(graph, layers, targets)
    for sweep in range(_SWEEPS):
        net.order(upwards=bool(sweep % 2))
    for sweep in range(_SWEEPS):
        net.align(upwards=bool(sweep % 2), both=sweep >= _SWEEPS - 2)
    net.straighten()
    return _Page(net).layout()


def _layers(targets: Sequence[Sequence[int]]) -> list[int]:
    """Return the longest way to each node, then moved down to its readers where that shortens lines."""
    layers = [0] * len(targets)
    arriving = [0] * len(targets)
    for source, read_by in enumerate(targets):
        for target in read_by:
            layers[target] = max(layers[target], layers[source] + 1)
            arriving[target] += 1
    for source in reversed(range(len(targets))):
        if targets[source] and arriving[source] <= len(targets[source]):
            layers[source] = min(layers[target] for target in targets[source]) - 1
    # A node that moved down may have left a layer empty.
    used = {layer: index for index, layer in enumerate(sorted(set(layers)))}
    return [used[layer] for layer in layers]


class _Net:
    """Nodes, and trunk positions between them; each is joined to adjacent layers only."""

    def __init__(self, graph: ModelGraph, layers: Sequence[int], targets: Sequence[Sequence[int]]) -> None:
        self.layers = list(layers)
        self.targets = targets
        self.widths = [width_of(node) for node in graph.nodes]
        self.trunks: dict[int, list[int]] = {}
        self.nodes = len(graph.nodes)
        self.above: list[list[int]] = [[] for _ in graph.nodes]
        self.below: list[list[int]] = [[] for _ in graph.nodes]
        self._add_trunks()
        self.rows: list[list[int]] = [[] for _ in range(max(self.layers) + 1)]
        for vertex in self._first_order():
            self.rows[self.layers[vertex]].append(vertex)
        counts = [sum(vertex < self.nodes for vertex in row) for row in self.rows]
        widest = max(10, ceil(1.1 * sqrt(self.nodes)))
        self.staggered = [ceil(count / widest) or 1 for count in counts]
        self.x = [0.0] * len(self.layers)
        for layer in range(len(self.rows)):
            self._spread(layer)

    def _add_trunks(self) -> None:
        spans = [
            (max(self.layers[t] for t in read_by) - self.layers[source] - 1, source)
            for source, read_by in enumerate(self.targets)
            if read_by
        ]
        left = _MOST_PASSING
        for span, source in sorted(spans):
            left -= span
            trunk = [source]
            for step in range(span if left >= 0 else 0):
                self.layers.append(self.layers[source] + 1 + step)
                self.widths.append(_PASSING_WIDTH)
                self.above.append([])
                self.below.append([])
                self._join(trunk[-1], len(self.layers) - 1)
                trunk.append(len(self.layers) - 1)
            self.trunks[source] = trunk
            for target in self.targets[source]:
                passed = self.layers[target] - self.layers[source] - 1
                self._join(trunk[passed if left >= 0 else 0], target)

    def _join(self, upper: int, lower: int) -> None:
        self.below[upper].append(lower)
        self.above[lower].append(upper)

    def _first_order(self) -> list[int]:
        """Order depth first from the inputs, so that related nodes begin together."""
        seen: dict[int, None] = {}
        for root in range(self.nodes):
            pending = [] if self.above[root] else [root]
            while pending:
                vertex = pending.pop()
                if vertex not in seen:
                    seen[vertex] = None
                    pending += reversed(self.below[vertex])
        return list(seen)

    def order(self, *, upwards: bool) -> None:
        """Sweep once: order each layer by the mean position of its neighbours in the layer before."""
        joined = self.below if upwards else self.above
        for layer in range(len(self.rows) - 1, -1, -1) if upwards else range(len(self.rows)):
            row = self.rows[layer]
            if len(row) > 1:
                means = {v: self._mean(joined[v], self.x[v]) for v in row}
                row.sort(key=means.__getitem__)
                self._spread(layer)

    def _mean(self, vertices: Sequence[int], otherwise: float) -> float:
        return sum(self.x[v] for v in vertices) / len(vertices) if vertices else otherwise

    def _spread(self, layer: int) -> None:
        row = self.rows[layer]
        offsets = self._offsets(layer)
        for vertex, offset in zip(row, offsets, strict=True):
            self.x[vertex] = offset - offsets[-1] / 2

    def _offsets(self, layer: int) -> list[float]:
        """Return the least distance of each vertex of a layer from the first.

        In a staggered layer every so many-th node is in one row; all count as wide as the widest.
        """
        row, rows = self.rows[layer], self.staggered[layer]
        widths = [self.widths[vertex] for vertex in row]
        if rows > 1:
            widest = max(widths)
            widths = [widest if v < self.nodes else w for v, w in zip(row, widths, strict=True)]
        offsets = [0.0]
        for one, other in pairwise(widths):
            offsets.append(offsets[-1] + ((one + other) / 2 + _GAP) / rows)
        return offsets

    def align(self, *, upwards: bool, both: bool) -> None:
        """Sweep once: move each vertex towards its neighbours in adjacent layers, as far as its row allows.

        With the least distances taken off, ordered positions are a monotone regression on the wished ones.

        Args:
            upwards: Whether the sweep goes from the last layer to the first.
            both: Whether a vertex uses the layer to come as well as the one before.
        """
        for layer in range(len(self.rows) - 1, -1, -1) if upwards else range(len(self.rows)):
            row = self.rows[layer]
            wished = [self._wish(vertex, upwards, both) for vertex in row]
            if len(row) == 1:
                self.x[row[0]] = wished[0]
                continue
            offsets = np.array(self._offsets(layer))
            weights = [1.0 if vertex < self.nodes else 4.0 for vertex in row]
            placed = isotonic_regression(np.array(wished) - offsets, weights=weights).x + offsets
            for vertex, x in zip(row, placed.tolist(), strict=True):
                self.x[vertex] = x

    def straighten(self) -> None:
        """Remove the slant: repeated blocks lean the same way, one after the other."""
        middles = np.array([sum(self.extent(layer)) / 2 for layer in range(len(self.rows))])
        reach = min(_STRAIGHTENED_OVER, len(middles) // 4)
        padded = np.pad(middles, reach, mode="edge")
        slant = np.convolve(padded, np.full(2 * reach + 1, 1 / (2 * reach + 1)), mode="valid")
        for row, off in zip(self.rows, slant.tolist(), strict=True):
            for vertex in row:
                self.x[vertex] -= off

    def extent(self, layer: int) -> tuple[float, float]:
        """Return the ends of a layer."""
        ends = [(self.x[v] - self.widths[v] / 2, self.x[v] + self.widths[v] / 2) for v in self.rows[layer]]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def _wish(self, vertex: int, upwards: bool, both: bool) -> float:
        before, after = self.above[vertex], self.below[vertex]
        if upwards:
            before, after = after, before
        if not before:
            return self._median(after, self.x[vertex])
        wish = self._median(before, 0.0)
        return (wish + self._median(after, wish)) / 2 if both else wish

    def _median(self, vertices: Sequence[int], otherwise: float) -> float:
        if not vertices:
            return otherwise
        places = sorted(self.x[v] for v in vertices)
        half = len(places) // 2
        return places[half] if len(places) % 2 else (places[half - 1] + places[half]) / 2


class _Page:
    """A net broken into columns."""

    def __init__(self, net: _Net) -> None:
        self.net = net
        heights = [ROW_PITCH * rows for rows in net.staggered]
        self.starts = _running(heights)
        self.crossing = [self._crossing(layer) for layer in range(len(net.rows))]
        self.ends = [net.extent(layer) for layer in range(len(net.rows))]
        options = (self._breaks(count) for count in range(1, min(_MOST_COLUMNS, len(net.rows)) + 1))
        self.breaks = min(options, key=self._unlike)
        self.column_of = [0] * len(net.rows)
        self.lefts: list[float] = []
        self.lanes: list[float] = []
        left = 0.0
        for column, (begin, end) in enumerate(pairwise(self.breaks)):
            lowest, highest = self._width_of(begin, end)
            self.lefts.append(left - lowest)
            left += highest - lowest + _COLUMN_GAP
            left += _LANE * len(self.crossing[end]) if end < len(net.rows) else 0
            self.lanes.append(left - _COLUMN_GAP / 2)
            self.column_of[begin:end] = [column] * (end - begin)

    def _crossing(self, layer: int) -> list[int]:
        """Return the sources of lines into a layer, from left to right."""
        uppers = dict.fromkeys(upper for vertex in self.net.rows[layer] for upper in self.net.above[vertex])
        return sorted(uppers, key=self.net.x.__getitem__)

    def _breaks(self, count: int) -> list[int]:
        """Return column starts and the end: near equal heights, where few lines cross."""
        breaks, height = [0], self.starts[-1] / count
        reach = 0.15 * height
        for number in range(1, count):
            low = max(bisect_left(self.starts, number * height - reach), breaks[-1] + 1)
            high = min(bisect_left(self.starts, number * height + reach), len(self.net.rows) - 1)
            if low > high:
                continue
            ideal = number * height
            near = range(low, high + 1)
            breaks.append(min(near, key=lambda at: (len(self.crossing[at]), abs(self.starts[at] - ideal))))
        return [*breaks, len(self.net.rows)]

    def _width_of(self, begin: int, end: int) -> tuple[float, float]:
        return min(low for low, _ in self.ends[begin:end]), max(high for _, high in self.ends[begin:end])

    def _unlike(self, breaks: Sequence[int]) -> float:
        """Return the difference from the aspect of a screen."""
        spans = [self._width_of(begin, end) for begin, end in pairwise(breaks)]
        width = sum(high - low + _COLUMN_GAP for low, high in spans)
        height = max(self.starts[end] - self.starts[begin] for begin, end in pairwise(breaks))
        return abs(log(width / height / _ASPECT))

    def layout(self) -> GraphLayout:
        """The layout."""
        net = self.net
        places: list[tuple[int, int]] = [(0, 0)] * len(net.layers)
        for layer, row in enumerate(net.rows):
            column, rows = self.column_of[layer], net.staggered[layer]
            top = self.starts[layer] - self.starts[self.breaks[column]]
            number = 0
            for vertex in row:
                passes = vertex >= net.nodes
                y = top + ROW_PITCH * ((rows - 1) / 2 if passes else number % rows)
                number += not passes
                places[vertex] = (round(net.x[vertex] + self.lefts[column]), round(y))
        return GraphLayout(
            tuple(net.layers[: net.nodes]),
            tuple(places[: net.nodes]),
            tuple(self._wire(source, places) for source in sorted(net.trunks)),
            len(self.breaks) - 1,
        )

    def _wire(self, source: int, places: Sequence[tuple[int, int]]) -> Wire:
        net = self.net
        trunk = net.trunks[source]
        readers: dict[int, list[int]] = {}
        for target in net.targets[source]:
            passed = min(net.layers[target] - net.layers[source] - 1, len(trunk) - 1)
            readers.setdefault(passed, []).append(target)
        points: list[tuple[int, int]] = []
        branches: list[tuple[int, int]] = []
        for step, vertex in enumerate(trunk):
            points += [places[vertex]] if step else []
            points += self._lane(vertex, places)
            branches += [(target, len(points)) for target in readers.get(step, ())]
        return _straightened(Wire(source, tuple(points), tuple(branches)), places[source])

    def _lane(self, vertex: int, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Leave at the bottom of a column and enter at the top of the next; empty within one column."""
        layer = self.net.layers[vertex]
        nexts = [v for v in self.net.below[vertex] if self.net.layers[v] == layer + 1]
        if not nexts or self.column_of[layer + 1] == self.column_of[layer]:
            return []
        lane = _LANE * self.crossing[layer + 1].index(vertex)
        x = round(self.lanes[self.column_of[layer]] - lane)
        below = places[vertex][1] + ROW_PITCH // 2 + lane
        over = -ROW_PITCH // 2 - lane
        return [(places[vertex][0], below), (x, below), (x, over), (places[nexts[0]][0], over)]


def _straightened(wire: Wire, start: tuple[int, int]) -> Wire:
    """Return the wire without trunk points that lie on a straight line and have no branch."""
    kept: list[tuple[int, int]] = []
    before: dict[int, int] = {0: 0}
    branching = {passed for _, passed in wire.branches}
    last = start
    for number, point in enumerate(wire.trunk, 1):
        following = wire.trunk[number] if number < len(wire.trunk) else None
        if number in branching or following is None or not _is_between(last, point, following):
            kept.append(point)
            last = point
        before[number] = len(kept)
    return Wire(wire.source, tuple(kept), tuple((target, before[passed]) for target, passed in wire.branches))


def _is_between(one: tuple[int, int], point: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether a point lies within a pixel of the line between two others, between them."""
    (ax, ay), (px, py), (bx, by) = one, point, other
    length = max(abs(bx - ax), abs(by - ay), 1)
    off = abs((bx - ax) * (py - ay) - (by - ay) * (px - ax)) / length
    ahead = (px - ax) * (bx - px) + (py - ay) * (by - py)
    return off <= 1 and ahead >= 0


def _running(values: Sequence[int]) -> list[int]:
    """Return sums of the values before each, and of all."""
    return [0, *accumulate(values)]
