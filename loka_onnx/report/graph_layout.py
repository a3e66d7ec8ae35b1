"""Positions of a model graph's nodes: in layers from top to bottom, after Sugiyama, Tagawa and Toda (1981):
assign layers, order them so that few lines cross, then place each node beside its neighbours.

A tensor that passes a layer takes one position there, however many read it further down. A layer with more
nodes than fit beside each other is staggered over several rows. Equal graphs give equal layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, sqrt
from statistics import fmean, median

import numpy as np
import scipy

from loka_onnx.core.model_graph import GraphNode, ModelGraph, NodeKind

SITE_WIDTH = 160
OPERATOR_WIDTH = 92
NODE_HEIGHT = 34
ROW_PITCH = 62
_PASSING_WIDTH = 14
_GAP = 18
_SWEEPS = 8

Point = tuple[int, int]


@dataclass(frozen=True)
class GraphLayout:
    """Pixels at full size, y downwards: `places` are middles of boxes, `lines` points of each edge."""

    layers: tuple[int, ...]
    places: tuple[Point, ...]
    lines: dict[tuple[int, int], tuple[Point, ...]]


def box_width(node: GraphNode) -> int:
    """Width of the box of a node."""
    return OPERATOR_WIDTH if node.kind is NodeKind.OPERATOR and not node.sites else SITE_WIDTH


def lay_out(graph: ModelGraph) -> GraphLayout:
    """Lay out the nodes of a graph."""
    if not graph.nodes:
        return GraphLayout((), (), {})
    net = _Net(graph)
    for sweep in range(_SWEEPS):
        net.order(upwards=bool(sweep % 2))
    for sweep in range(_SWEEPS):
        net.align(upwards=bool(sweep % 2), both=sweep >= _SWEEPS - 2)
    return _placed(net)


def _layers(targets: Sequence[Sequence[int]]) -> list[int]:
    """Return the longest way to each node, then moved down to its readers where that shortens lines."""
    layers = [0] * len(targets)
    arriving = [0] * len(targets)
    for source, readers in enumerate(targets):
        for target in readers:
            layers[target] = max(layers[target], layers[source] + 1)
            arriving[target] += 1
    for source in reversed(range(len(targets))):
        if targets[source] and arriving[source] <= len(targets[source]):
            layers[source] = min(layers[target] for target in targets[source]) - 1
    # A node that moved down may have left a layer empty.
    used = {layer: index for index, layer in enumerate(sorted(set(layers)))}
    return [used[layer] for layer in layers]


class _Net:
    """Nodes, and the positions of tensors that pass layers; each is joined to adjacent layers only."""

    def __init__(self, graph: ModelGraph) -> None:
        self.nodes = len(graph.nodes)
        targets: list[list[int]] = [[] for _ in graph.nodes]
        for edge in graph.edges:
            targets[edge.source].append(edge.target)
        self.layers = _layers(targets)
        self.widths = [box_width(node) for node in graph.nodes]
        self.above: list[list[int]] = [[] for _ in graph.nodes]
        self.below: list[list[int]] = [[] for _ in graph.nodes]
        self.ways: dict[tuple[int, int], list[int]] = {}
        for source, readers in enumerate(targets):
            self._join_readers(source, sorted(readers, key=self.layers.__getitem__))
        self.rows: list[list[int]] = [[] for _ in range(max(self.layers) + 1)]
        for vertex, layer in enumerate(self.layers):
            self.rows[layer].append(vertex)
        widest = max(10, ceil(1.1 * sqrt(self.nodes)))
        self.staggered = [ceil(sum(v < self.nodes for v in row) / widest) or 1 for row in self.rows]
        self.x = [0.0] * len(self.layers)
        for layer in range(len(self.rows)):
            self._spread(layer)

    def _join_readers(self, source: int, readers: Sequence[int]) -> None:
        """Join a node to its readers, over one position in each layer between."""
        way = [source]
        for target in readers:
            for layer in range(self.layers[way[-1]] + 1, self.layers[target]):
                self.layers.append(layer)
                self.widths.append(_PASSING_WIDTH)
                self.above.append([])
                self.below.append([])
                self._join(way[-1], len(self.layers) - 1)
                way.append(len(self.layers) - 1)
            self._join(way[-1], target)
            self.ways[source, target] = [*way, target]

    def _join(self, upper: int, lower: int) -> None:
        self.below[upper].append(lower)
        self.above[lower].append(upper)

    def _sweep(self, upwards: bool) -> range:
        return range(len(self.rows) - 1, -1, -1) if upwards else range(len(self.rows))

    def order(self, *, upwards: bool) -> None:
        """Sweep once: order each layer by the mean position of its neighbours in the layer before."""
        joined = self.below if upwards else self.above
        for layer in self._sweep(upwards):
            means = {v: fmean(self.x[n] for n in joined[v] or [v]) for v in self.rows[layer]}
            self.rows[layer].sort(key=means.__getitem__)
            self._spread(layer)

    def _spread(self, layer: int) -> None:
        offsets = self._offsets(layer)
        for vertex, offset in zip(self.rows[layer], offsets, strict=True):
            self.x[vertex] = offset - offsets[-1] / 2

    def _offsets(self, layer: int) -> list[float]:
        """Return the least distance of each vertex of a layer from the first.

        In a staggered layer every so many-th node is in one row; all count as wide as the widest.
        """
        row, rows = self.rows[layer], self.staggered[layer]
        widths = [self.widths[vertex] for vertex in row]
        if rows > 1:
            widths = [max(widths) if v < self.nodes else w for v, w in zip(row, widths, strict=True)]
        return [0.0, *accumulate(((a + b) / 2 + _GAP) / rows for a, b in pairwise(widths))]

    def align(self, *, upwards: bool, both: bool) -> None:
        """Sweep once: move each vertex towards its neighbours, as far as its row allows.

        With the least distances taken off, ordered positions are a monotone regression on the wished ones.
        `both` uses the layer to come as well as the one before.
        """
        before, after = (self.below, self.above) if upwards else (self.above, self.below)

        def wish(vertex: int) -> float:
            if both and before[vertex] and after[vertex]:
                return (middle(before[vertex]) + middle(after[vertex])) / 2
            return middle(before[vertex] or after[vertex] or [vertex])

        def middle(vertices: Sequence[int]) -> float:
            return median(self.x[v] for v in vertices)

        for layer in self._sweep(upwards):
            row, offsets = self.rows[layer], np.array(self._offsets(layer))
            wished = np.array([wish(vertex) for vertex in row])
            weights = [1.0 if vertex < self.nodes else 4.0 for vertex in row]
            placed = scipy.optimize.isotonic_regression(wished - offsets, weights=weights).x + offsets
            for vertex, x in zip(row, placed.tolist(), strict=True):
                self.x[vertex] = x


def _placed(net: _Net) -> GraphLayout:
    """Round positions to pixels, and let each line begin and end at the edges of its boxes."""
    tops = [0, *accumulate(ROW_PITCH * rows for rows in net.staggered)]
    places: list[Point] = [(0, 0)] * len(net.layers)
    for layer, row in enumerate(net.rows):
        rows, index = net.staggered[layer], 0
        for vertex in row:
            passes = vertex >= net.nodes
            y = tops[layer] + ROW_PITCH * ((rows - 1) / 2 if passes else index % rows)
            index += not passes
            places[vertex] = (round(net.x[vertex]), round(y))
    lines, half = {}, NODE_HEIGHT // 2
    for edge, way in net.ways.items():
        (x, y), *between, (to_x, to_y) = (places[vertex] for vertex in way)
        lines[edge] = ((x, y + half), *between, (to_x, to_y - half))
    return GraphLayout(tuple(net.layers[: net.nodes]), tuple(places[: net.nodes]), lines)
