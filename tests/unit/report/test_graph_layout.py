"""The layout of model graphs: layered, without overlaps, the same every time."""

import time
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.core.model_graph import GraphEdge, GraphNode, ModelGraph, NodeKind
from loka_onnx.report.graph_layout import NODE_HEIGHT, GraphLayout, lay_out, width_of


def graph_of(count: int, edges: set[tuple[int, int]]) -> ModelGraph:
    nodes = tuple(
        GraphNode(f"n{i}", NodeKind.OPERATOR, "MatMul", "m", (f"n{i}",) if i % 3 == 0 else ())
        for i in range(count)
    )
    return ModelGraph(nodes, tuple(GraphEdge(s, t, f"t{s}") for s, t in sorted(edges)), count)


def chain(count: int) -> set[tuple[int, int]]:
    return {(i, i + 1) for i in range(count - 1)}


def check(graph: ModelGraph, layout: GraphLayout) -> None:
    assert len(layout.places) == len(layout.layers) == len(graph.nodes)
    for edge in graph.edges:
        assert layout.layers[edge.source] < layout.layers[edge.target]
        assert layout.places[edge.source][1] < layout.places[edge.target][1], "data flows downwards"
    boxes = sorted((y, x, width_of(node)) for node, (x, y) in zip(graph.nodes, layout.places, strict=True))
    for (y, x, width), (other_y, other_x, other) in combinations(boxes, 2):
        if other_y - y < NODE_HEIGHT:
            assert abs(other_x - x) >= (width + other) / 2, "two boxes overlap"
    assert set(layout.lines) == {(e.source, e.target) for e in graph.edges}
    for (source, target), line in layout.lines.items():
        (x, y), (to_x, to_y) = layout.places[source], layout.places[target]
        half = NODE_HEIGHT // 2
        assert (line[0], line[-1]) == ((x, y + half), (to_x, to_y - half))


@st.composite
def graphs(draw) -> ModelGraph:
    count = draw(st.integers(1, 40))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    edges = {(min(p), max(p)) for p in draw(st.sets(pairs, max_size=80)) if p[0] != p[1]}
    return graph_of(count, edges)


@given(graphs())
def test_every_edge_goes_forward_is_drawn_once_and_no_boxes_overlap(graph):
    layout = lay_out(graph)
    check(graph, layout)
    assert lay_out(graph) == layout


def test_a_line_past_other_nodes_goes_around_them():
    """A residual sum: its second operand passes the branch, in a place of its own."""
    graph = graph_of(4, {(0, 1), (1, 2), (2, 3), (0, 3)})
    layout = lay_out(graph)
    passed = layout.lines[0, 3][1:-1]
    assert passed
    for x, y in passed:
        for node, (at, height) in zip(graph.nodes[1:3], layout.places[1:3], strict=True):
            assert abs(y - height) > NODE_HEIGHT / 2 or abs(x - at) > width_of(node) / 2


def test_an_input_stands_above_its_first_reader():
    """Of a chain of 20, the second input is read by the last but one: it is not drawn at the top."""
    edges = {(i, i + 1) for i in range(1, 20)} | {(0, 19)}
    layout = lay_out(graph_of(21, edges | {(19, 20)}))
    assert layout.layers[0] == layout.layers[19] - 1 == 17


def test_few_lines_cross():
    """Two chains that were mixed up in the model's order are taken apart."""
    layout = lay_out(graph_of(42, {(i, i + 2) for i in range(0, 40)}))
    sides = [layout.places[i][0] < layout.places[i + 1][0] for i in range(0, 42, 2)]
    assert len(set(sides)) == 1


def test_a_wide_layer_is_staggered_over_rows():
    graph = graph_of(402, {(0, i) for i in range(1, 401)} | {(i, 401) for i in range(1, 401)})
    layout = lay_out(graph)
    check(graph, layout)
    assert set(layout.layers) == {0, 1, 2}
    assert len({y for _, y in layout.places}) > 10


@pytest.mark.parametrize("count", [2, 600])
def test_a_tensor_that_every_layer_reads_is_laid_out_in_seconds(count):
    graph = graph_of(count, chain(count) | {(0, i) for i in range(1, count, 3)})
    begin = time.process_time()
    check(graph, lay_out(graph))
    assert time.process_time() - begin < 10
