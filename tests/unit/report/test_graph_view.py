import json
import re
from dataclasses import replace

import pytest
from sample_run import SampleRun

from loka_onnx.core import serde
from loka_onnx.core.model_graph import GraphEdge, GraphNode, ModelGraph, NodeKind
from loka_onnx.core.plan import Decision, PlanSet, Verdict
from loka_onnx.report import HTML_NAME, ReportData, render
from loka_onnx.report.graph_view import graph_view

NASTY = "</script><script>alert(1)</script>&lt;<!--"
VERDICTS = ["safe", "unsafe", "undecided", "not judged", "several sites"]


def payload(html: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="graph-data">(.*?)</script>', html, re.S)
    return json.loads(text)


@pytest.fixture(scope="module")
def data(sample: SampleRun) -> ReportData:
    return sample.report


def test_a_report_without_a_graph_draws_none(sample):
    assert graph_view(replace(sample.report, graph=None)) is None


def test_nodes_carry_the_verdict_precision_and_reason_of_the_plan(data):
    drawn = payload(graph_view(data).html)
    assert drawn["verdicts"] == VERDICTS
    plan = data.plans.plan("fp8-safe")
    assert [site[0] for site in drawn["sites"]] == [d.site for d in plan.decisions]
    for (_, verdict, precision, reason), decision in zip(drawn["sites"], plan.decisions, strict=True):
        assert (VERDICTS[verdict], precision, reason) == (
            decision.verdict,
            decision.precision,
            decision.reason,
        )
    marks = {node[0]: node[7] for node in drawn["nodes"]}
    for decision in plan.decisions:
        assert VERDICTS[marks[decision.site]] == decision.verdict
    # 3 products, 2 Relus, an input and an output; only products are sites.
    assert len(drawn["nodes"]) == 7
    assert sorted(marks.values()).count(-1) == 4


def test_a_site_that_the_plan_does_not_name_is_not_judged(data):
    plans = PlanSet(tuple(replace(plan, decisions=plan.decisions[1:]) for plan in data.plans.plans))
    drawn = payload(graph_view(replace(data, plans=plans)).html)
    assert VERDICTS[drawn["sites"][0][1]] == "not judged"


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
    html = graph_view(replace(data, graph=graph, plans=plans)).html
    assert VERDICTS[payload(html)["nodes"][0][7]] == mark
    assert "9 nodes are drawn as 1, by module" in html


def test_a_name_cannot_leave_its_place(data):
    site = data.modified.sites[0].name
    nodes = (
        GraphNode(NASTY, NodeKind.INPUT),
        GraphNode(site, NodeKind.OPERATOR, NASTY, NASTY, (site,)),
    )
    decision = data.plans.plan("fp8-safe").decisions[0]
    plans = PlanSet(
        tuple(replace(p, id=NASTY, decisions=(_with_reason(decision),)) for p in data.plans.plans)
    )
    graph = ModelGraph(nodes, (GraphEdge(0, 1, NASTY),), 1)
    html = graph_view(replace(data, graph=graph, plans=plans)).html
    assert "alert(1)</script>" not in html
    assert "<!--" not in html
    drawn = payload(html)
    assert drawn["nodes"][0][0] == drawn["nodes"][1][2] == drawn["sites"][0][3] == NASTY


def _with_reason(decision: Decision) -> Decision:
    return replace(decision, reason=NASTY)


def test_the_report_holds_the_graph_and_reads_it_back(data, tmp_path):
    json_path, _, html_path = render(data, tmp_path)
    assert serde.read(ReportData, json_path).graph == data.graph
    assert html_path.name == HTML_NAME
    html = html_path.read_text(encoding="utf-8")
    assert len(payload(html)["nodes"]) == len(data.graph.nodes)
    # The first rendering is not remembered by anything: equal facts give equal bytes.
    render(data, tmp_path / "again")
    assert (tmp_path / "again" / HTML_NAME).read_text(encoding="utf-8") == html
