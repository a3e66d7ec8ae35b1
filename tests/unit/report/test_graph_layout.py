"""The model graph of the page: its layout, without overlaps and the same every time, and its view."""

import json
import re
import time
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_run import SampleRun

from loka_onnx.core.model_graph import GraphEdge, GraphNode, ModelGraph, NodeKind
from loka_onnx.core.plan import Decision, PlanSet, Verdict
from loka_onnx.report import ReportData
from loka_onnx.report.graph_layout import NODE_HEIGHT, GraphLayout, box_width, lay_out
from loka_onnx.report.graph_view import graph_view


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
    boxes = sorted((y, x, box_width(node)) for node, (x, y) in zip(graph.nodes, layout.places, strict=True))
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
            assert abs(y - height) > NODE_HEIGHT / 2 or abs(x - at) > box_width(node) / 2


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


NASTY = "</script><script>alert(1)</script>&lt;<!--"


def payload(html: str) -> list[dict]:
    (text,) = re.findall(r'<script type="application/json" id="graph-data">(.*?)</script>', html, re.S)
    return json.loads(text)


def marks(html: str) -> list[str]:
    """The verdict that each node is drawn with; empty without a site."""
    groups = re.findall(r'<g class="node \S+ (\S+)"', html)
    return ["" if mark == "bare" else mark.replace("-", " ") for mark in groups]


@pytest.fixture(scope="module")
def data(sample: SampleRun) -> ReportData:
    return sample.report


def with_decisions(data: ReportData, *decisions: Decision, **changes: str) -> ReportData:
    """Every plan decides so."""
    plans = tuple(replace(plan, decisions=decisions, **changes) for plan in data.plans.plans)
    return replace(data, plans=PlanSet(plans))


def test_nodes_carry_the_verdict_precision_and_reason_of_the_plan(data):
    first, *rest = data.plans.plan("fp8-safe").decisions
    html = graph_view(data)
    nodes = {node["name"]: (node, mark) for node, mark in zip(payload(html), marks(html), strict=True)}
    for decision in (first, *rest):
        node, mark = nodes[decision.site]
        assert (node["sites"], mark) == ([decision.site], decision.verdict)
        assert f"{decision.verdict} · {decision.precision}" in node["lines"]
        assert decision.reason in node["lines"]
    # 3 products, 2 Relus, an input and an output; only products are sites.
    assert len(nodes) == 7
    assert marks(html).count("") == 4
    # A site that the plan does not name is not judged.
    html = graph_view(with_decisions(data, *rest))
    (place,) = (i for i, node in enumerate(payload(html)) if node["name"] == first.site)
    assert marks(html)[place] == "not judged"
    assert graph_view(replace(data, graph=None)) is None


@pytest.mark.parametrize(
    ("verdicts", "mark"),
    [(("safe", "safe"), "safe"), (("safe", "unsafe"), "several sites"), (("unsafe", "unsafe"), "unsafe")],
)
def test_a_folded_part_has_the_verdict_that_its_sites_agree_on(data, verdicts, mark):
    first, second, *_ = data.plans.plan("fp8-safe").decisions
    folded = GraphNode("arch", NodeKind.FOLDED, sites=(first.site, second.site), stands_for=9)
    graph = ModelGraph((folded,), (), 8, 9)
    decisions = tuple(replace(d, verdict=Verdict(v)) for d, v in zip((first, second), verdicts, strict=True))
    html = graph_view(replace(with_decisions(data, *decisions), graph=graph))
    assert marks(html) == [mark]
    assert "9 nodes are drawn as 1, by module" in html


def test_a_name_cannot_leave_its_place(data):
    site = data.modified.sites[0].name
    nodes = (GraphNode(NASTY, NodeKind.INPUT), GraphNode(site, NodeKind.OPERATOR, NASTY, NASTY, (site,)))
    decision = replace(data.plans.plan("fp8-safe").decisions[0], reason=NASTY)
    graph = ModelGraph(nodes, (GraphEdge(0, 1, NASTY),), 1)
    html = graph_view(replace(with_decisions(data, decision, id=NASTY), graph=graph))
    assert "alert(1)</script>" not in html
    assert "<!--" not in html
    drawn = payload(html)
    assert drawn[0]["name"] == drawn[1]["lines"][-1] == NASTY
