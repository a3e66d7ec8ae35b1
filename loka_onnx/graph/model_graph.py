"""The graph of a model, folded until it is small enough to draw.

Beyond `MOST_NODES` the nodes of a module are folded into one, deepest modules first and of equally deep ones
the largest, until the rest fits. Folding must not make a cycle: data may leave a module and come back. A node
therefore has a rank: the largest over its inputs of the producer's rank, plus one where the two are in
different modules. Nodes of one module and one rank are folded together, and between two such parts every
tensor goes to a higher rank. Where not even the outermost modules fit, or names give no module, runs of
consecutive nodes are folded, which makes no cycle either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import onnx

from loka_onnx.core.model_graph import GraphEdge, GraphNode, ModelGraph, NodeKind
from loka_onnx.graph.storage import parse_proto
from loka_onnx.sessions.model_files import reads_of

MOST_NODES = 600
"""Nodes that a reader can still follow, and a browser moves smoothly."""


def read_model_graph(path: Path, sites: Collection[str]) -> ModelGraph:
    """Describe the graph of a canonical model file; no external data is read. ModelError as `parse_proto`."""
    return describe_graph(parse_proto(path).graph, sites)


def describe_graph(graph: onnx.GraphProto, sites: Collection[str], most: int = MOST_NODES) -> ModelGraph:
    """Return the graph of a parsed, sorted model, folded to at most `most` nodes; `sites` are node names."""
    nodes, edges = _whole(graph, frozenset(sites))
    operators = sum(node.kind is NodeKind.OPERATOR for node in nodes)
    whole = _Drawing(tuple(nodes), edges)
    drawn = whole if len(nodes) <= most else _fold(whole, most)
    folded = sum(node.stands_for for node in drawn.nodes if node.kind is NodeKind.FOLDED)
    return ModelGraph(
        drawn.nodes,
        tuple(GraphEdge(source, target, name) for (source, target), name in sorted(drawn.edges.items())),
        operators,
        folded,
        drawn.in_runs,
    )


@dataclass(frozen=True)
class _Drawing:
    nodes: tuple[GraphNode, ...]
    edges: Mapping[tuple[int, int], str]
    in_runs: bool = False


def _whole(
    graph: onnx.GraphProto, sites: Collection[str]
) -> tuple[list[GraphNode], Mapping[tuple[int, int], str]]:
    weights = {tensor.name for tensor in graph.initializer}
    nodes: list[GraphNode] = []
    edges: dict[tuple[int, int], str] = {}
    maker: dict[str, int] = {}
    for value in graph.input:
        if value.name not in weights:
            maker[value.name] = len(nodes)
            nodes.append(GraphNode(value.name, NodeKind.INPUT))
    for position, node in enumerate(graph.node):
        if node.op_type == "Constant":
            continue
        index = len(nodes)
        nodes.append(_operator(node, position, sites))
        for tensor in reads_of([node]):
            if tensor in maker:
                edges.setdefault((maker[tensor], index), tensor)
        maker.update(dict.fromkeys(filter(None, node.output), index))
    for value in graph.output:
        if value.name in maker:
            edges[maker[value.name], len(nodes)] = value.name
        nodes.append(GraphNode(value.name, NodeKind.OUTPUT))
    return nodes, edges


def _operator(node: onnx.NodeProto, position: int, sites: Collection[str]) -> GraphNode:
    name = node.name or f"{node.op_type.lower()} {position}"
    if node.name in sites:
        return GraphNode(name, NodeKind.OPERATOR, node.op_type, _module(name, "."), (node.name,))
    return GraphNode(name, NodeKind.OPERATOR, node.op_type, _module(name, "/"))


def _module(name: str, separator: str) -> str:
    """Return the module path in a node's name; of several merged ones, the first's."""
    one, merged, _ = name.partition("+")
    return one.rpartition("." if merged else separator)[0].replace("/", ".")


def _fold(whole: _Drawing, most: int) -> _Drawing:
    paths = [tuple(node.module.split(".")) if node.module else () for node in whole.nodes]
    done: set[tuple[str, ...]] = set()
    for depth in range(max(map(len, paths)), 0, -1):
        sizes = Counter(path[:depth] for path in paths if len(path) >= depth)
        modules = sorted(sizes, key=lambda path: (-sizes[path], path))
        counts = range(len(modules) + 1)
        parts = partial(_parts, whole, paths)
        few = bisect_left(counts, True, key=lambda n: len({*parts(done.union(modules[:n]))}) <= most)
        done.update(modules[:few])
        if few < len(counts):
            return _joined(whole, parts(done))
    length = -(-len(whole.nodes) // most)
    return replace(_joined(whole, [index // length for index in range(len(whole.nodes))]), in_runs=True)


def _parts(
    whole: _Drawing, paths: Sequence[tuple[str, ...]], modules: Collection[tuple[str, ...]]
) -> list[int]:
    """Return the part number of each node; parts are numbered by their first node."""
    keys: list[tuple[str, ...] | int] = []
    for index, path in enumerate(paths):
        outermost = (path[:depth] for depth in range(1, len(path) + 1) if path[:depth] in modules)
        keys.append(next(outermost, index))
    sources: list[list[int]] = [[] for _ in keys]
    for source, target in whole.edges:
        sources[target].append(source)
    ranks: list[int] = []
    for index, key in enumerate(keys):
        ranks.append(max((ranks[s] + (keys[s] != key) for s in sources[index]), default=0))
    numbers: dict[tuple[tuple[str, ...] | int, int], int] = {}
    return [numbers.setdefault(part, len(numbers)) for part in zip(keys, ranks, strict=True)]


def _joined(whole: _Drawing, parts: Sequence[int]) -> _Drawing:
    members: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        members.setdefault(part, []).append(index)
    between: dict[tuple[int, int], str] = {}
    for (source, target), tensor in sorted(whole.edges.items()):
        if parts[source] != parts[target]:
            between.setdefault((parts[source], parts[target]), tensor)
    order = {part: index for index, part in enumerate(_sorted(list(members), between))}
    nodes = tuple(_one([whole.nodes[index] for index in members[part]]) for part in order)
    return _Drawing(nodes, {(order[s], order[t]): tensor for (s, t), tensor in between.items()})


def _one(nodes: Sequence[GraphNode]) -> GraphNode:
    if len(nodes) == 1:
        return nodes[0]
    paths = [node.module.split(".") if node.module else [] for node in nodes]
    shared = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    module = ".".join(level[0] for level in shared)
    sites = tuple(site for node in nodes for site in node.sites)
    return GraphNode(
        module or f"{nodes[0].name} and {len(nodes) - 1} more",
        NodeKind.FOLDED,
        module=module.rpartition(".")[0],
        sites=sites,
        stands_for=len(nodes),
    )


def _sorted(parts: Sequence[int], edges: Collection[tuple[int, int]]) -> list[int]:
    """Return the parts, producers before consumers, else by their first node."""
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(parts)
    graph.add_edges_from(edges)
    return list(networkx.lexicographical_topological_sort(graph))
