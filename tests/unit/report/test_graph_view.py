import json
import re
from dataclasses import replace

import pytest
from sample_run import SampleRun

from loka_onnx.core.model_graph import GraphEdge, GraphNode, ModelGraph, NodeKind
from loka_onnx.core.plan import PlanSet, Verdict
from loka_onnx.report import ReportData, render
from loka_onnx.report.graph_view import graph_view

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


def test_a_report_without_a_graph_draws_none(data):
    assert graph_view(replace(data, graph=None)) is None


def test_nodes_carry_the_verdict_precision_and_reason_of_the_plan(data):
    html = graph_view(data)
    nodes = {node["name"]: (node, mark) for node, mark in zip(payload(html), marks(html), strict=True)}
    for decision in data.plans.plan("fp8-safe").decisions:
        node, mark = nodes[decision.site]
        assert (node["sites"], mark) == ([decision.site], decision.verdict)
        assert f"{decision.verdict} · {decision.precision}" in node["lines"]
        assert decision.reason in node["lines"]
    # 3 products, 2 Relus, an input and an output; only products are sites.
    assert len(nodes) == 7
    assert marks(html).count("") == 4


def test_a_site_that_the_plan_does_not_name_is_not_judged(data):
    plans = PlanSet(tuple(replace(plan, decisions=plan.decisions[1:]) for plan in data.plans.plans))
    html = graph_view(replace(data, plans=plans))
    first = data.plans.plan("fp8-safe").decisions[0].site
    (place,) = (i for i, node in enumerate(payload(html)) if node["name"] == first)
    assert marks(html)[place] == "not judged"


@pytest.mark.parametrize(
    ("verdicts", "mark"),
    [(("safe", "safe"), "safe"), (("safe", "unsafe"), "several sites"), (("unsafe", "unsafe"), "unsafe")],
)
def test_a_folded_part_has_the_verdict_that_its_sites_agree_on(data, verdicts, mark):
    first, second, *_ = data.plans.plan("fp8-safe").decisions
    folded = GraphNode("arch", NodeKind.FOLDED, sites=(first.site, second.site), stands_for=9)
    graph = ModelGraph((folded,), (), 8, 9)
    decisions = tuple(replace(d, verdict=Verdict(v)) for d, v in zip((first, second), verdicts, strict=True))
    plans = PlanSet(tuple(replace(plan, decisions=decisions) for plan in data.plans.plans))
    html = graph_view(replace(data, graph=graph, plans=plans))
    assert marks(html) == [mark]
    assert "9 nodes are drawn as 1, by module" in html


def test_a_name_cannot_leave_its_place(data):
    site = data.modified.sites[0].name
    nodes = (GraphNode(NASTY, NodeKind.INPUT), GraphNode(site, NodeKind.OPERATOR, NASTY, NASTY, (site,)))
    decision = replace(data.plans.plan("fp8-safe").decisions[0], reason=NASTY)
    plans = PlanSet(tuple(replace(p, id=NASTY, decisions=(decision,)) for p in data.plans.plans))
    graph = ModelGraph(nodes, (GraphEdge(0, 1, NASTY),), 1)
    html = graph_view(replace(data, graph=graph, plans=plans))
    assert "alert(1)</script>" not in html
    assert "<!--" not in html
    drawn = payload(html)
    assert drawn[0]["name"] == drawn[1]["lines"][-1] == NASTY


def test_the_page_holds_the_graph(data, tmp_path):
    *_, page = render(data, tmp_path)
    assert len(payload(page.read_text(encoding="utf-8"))) == len(data.graph.nodes)
