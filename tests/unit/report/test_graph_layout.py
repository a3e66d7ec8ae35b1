"""The layout of model graphs: layered, without overlaps, the same every time."""

import random
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
    assert all(layout.layers[e.source] < layout.layers[e.target] for e in graph.edges)
    boxes = sorted((y, x, width_of(node)) for node, (x, y) in zip(graph.nodes, layout.places, strict=True))
    for (y, x, width), (other_y, other_x, other) in combinations(boxes, 2):
        if other_y - y < NODE_HEIGHT:
            assert abs(other_x - x) >= (width + other) / 2, "two boxes overlap"
    drawn = {(wire.source, target) for wire in layout.wires for target, _ in wire.branches}
    assert drawn == {(e.source, e.target) for e in graph.edges}
    for wire in layout.wires:
        assert all(0 <= passed <= len(wire.trunk) for _, passed in wire.branches)


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


def test_nothing_is_laid_out_as_nothing():
    assert lay_out(ModelGraph((), (), 0)) == GraphLayout((), (), (), 0)


def test_within_a_column_data_flows_downwards():
    graph = graph_of(6, {(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5)})
    layout = lay_out(graph)
    assert layout.columns == 1
    assert all(layout.places[e.source][1] < layout.places[e.target][1] for e in graph.edges)


def test_a_line_past_other_nodes_goes_around_them():
    """A residual sum: its second operand passes the branch, in a place of its own."""
    layout = lay_out(graph_of(4, {(0, 1), (1, 2), (2, 3), (0, 3)}))
    wire = layout.wires[0]
    (passed,) = (passed for target, passed in wire.branches if target == 3)
    assert passed == len(wire.trunk) > 0
    for x, y in wire.trunk:
        for node, (at, height) in zip((1, 2), layout.places[1:3], strict=True):
            assert (
                abs(y - height) > NODE_HEIGHT / 2
                or abs(x - at) > width_of(graph_of(4, set()).nodes[node]) / 2
            )


def test_an_input_stands_above_its_first_reader():
    """Of a chain of 20, the second input is read by the last but one: it is not drawn at the top."""
    edges = {(i, i + 1) for i in range(1, 20)} | {(0, 19)}
    layout = lay_out(graph_of(21, edges | {(19, 20)}))
    assert layout.layers[0] == layout.layers[19] - 1 == 17


def test_few_lines_cross():
    """Two chains that were mixed up in the model's order are taken apart."""
    edges = {(i, i + 2) for i in range(0, 40)}
    layout = lay_out(graph_of(42, edges))
    sides = [layout.places[i][0] < layout.places[i + 1][0] for i in range(0, 42, 2)]
    assert len(set(sides)) == 1


def test_a_deep_model_is_broken_into_columns_about_as_wide_as_a_screen():
    layout = lay_out(graph_of(600, chain(600)))
    xs, ys = zip(*layout.places, strict=True)
    assert layout.columns > 5
    assert 0.8 < (max(xs) - min(xs)) / (max(ys) - min(ys)) < 3.5
    check(graph_of(600, chain(600)), layout)


def test_a_wide_layer_is_staggered_over_rows():
    edges = {(0, i) for i in range(1, 401)} | {(i, 401) for i in range(1, 401)}
    graph = graph_of(402, edges)
    layout = lay_out(graph)
    check(graph, layout)
    assert set(layout.layers) == {0, 1, 2}
    assert len({y for _, y in layout.places}) > 10


def hard_graphs() -> dict[str, ModelGraph]:
    """What libraries do not end on: long skips from one tensor, everything reads everything, no order."""
    rng, count = random.Random(3), 5000
    near = {(rng.randint(max(0, i - 200), i - 1), i) for i in range(1, count) for _ in range(2)}
    skips = chain(count) | {(0, i) for i in range(10, count, 20)}
    dense = {(a, b) for a in range(300) for b in range(a + 1, 300)}
    return {
        "no order": graph_of(count, near),
        "one tensor in every layer": graph_of(count, skips),
        "dense": graph_of(300, dense),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", hard_graphs())
def test_5000_nodes_take_seconds(kind):
    """Measured 0.3 to 0.7 s on two idle cores; the limit leaves room for a machine that is shared."""
    graph = hard_graphs()[kind]
    begin = time.process_time()
    layout = lay_out(graph)
    assert time.process_time() - begin < 10
    assert all(layout.layers[e.source] < layout.layers[e.target] for e in graph.edges)
