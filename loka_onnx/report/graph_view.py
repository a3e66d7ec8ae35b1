"""The model graph for the page: markup, and the data of `graph.js`.

A canvas of our own instead of a graph library: of 5,000 nodes, cytoscape.js 3.34 needs 1.3 to 1.7 s for the
first first picture, during which the page is blocked, and one frame in twenty takes 52 ms or more close by
and 123 ms or more from afar; bare canvas calls draw the same nodes with 21 ms for one frame in twenty
(Chromium 150 on two cores that compute the pixels too). It also has no lines with branches, nor marks that
tell verdicts apart where no label can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from loka_onnx.core.model_graph import GraphNode, ModelGraph
from loka_onnx.core.plan import Decision, Verdict
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.graph_layout import NODE_HEIGHT, GraphLayout, lay_out, width_of
from loka_onnx.report.site_tables import shown_plan
from loka_onnx.report.webpage import environment

_VERDICTS = tuple(Verdict)
_MIXED = "several sites"
"""Verdict of a folded part whose sites have several."""


@dataclass(frozen=True)
class GraphView:
    """The drawing of a model graph.

    Attributes:
        html: Element with style, data and script, safe on a page.
    """

    html: Markup


def graph_view(data: ReportData) -> GraphView | None:
    """Draws the graph of a run; None where the run has none."""
    if data.graph is None or not data.graph.nodes:
        return None
    plan = shown_plan(data)
    decisions = {} if plan is None else {decision.site: decision for decision in plan.decisions}
    found = {_verdict(decisions, site) for node in data.graph.nodes for site in node.sites}
    return GraphView(
        Markup(
            environment()
            .get_template("graph.html.j2")
            .render(
                graph=data.graph,
                plan=plan,
                verdicts=[verdict for verdict in _VERDICTS if verdict in found],
                operators=numbers.count(data.graph.operators),
                sites=numbers.count(len(data.modified.sites)),
                payload=_payload(data.graph, lay_out(data.graph), decisions),
            )
        )
    )


def _payload(graph: ModelGraph, layout: GraphLayout, decisions: Mapping[str, Decision]) -> dict[str, Any]:
    """Return the drawing data; lists instead of objects where there are thousands."""
    names = dict.fromkeys(site for node in graph.nodes for site in node.sites)
    numbers = {name: index for index, name in enumerate(names)}
    return {
        "height": NODE_HEIGHT,
        "verdicts": [*_VERDICTS, _MIXED],
        "nodes": [
            [
                node.name,
                node.kind,
                node.op,
                node.module,
                *place,
                width_of(node),
                _mark(node, decisions),
                node.stands_for,
                [numbers[site] for site in node.sites],
            ]
            for node, place in zip(graph.nodes, layout.places, strict=True)
        ],
        "wires": [
            [
                wire.source,
                [coordinate for point in wire.trunk for coordinate in point],
                [number for branch in wire.branches for number in branch],
            ]
            for wire in layout.wires
        ],
        "sites": [_site(decisions, name) for name in names],
    }


def _mark(node: GraphNode, decisions: Mapping[str, Decision]) -> int:
    """Return the index of a node's verdict; −1 without a site."""
    found = {_verdict(decisions, site) for site in node.sites}
    if len(found) > 1:
        return len(_VERDICTS)
    return _VERDICTS.index(found.pop()) if found else -1


def _verdict(decisions: Mapping[str, Decision], site: str) -> Verdict:
    return decisions[site].verdict if site in decisions else Verdict.NOT_JUDGED


def _site(decisions: Mapping[str, Decision], name: str) -> list[Any]:
    decision = decisions.get(name)
    verdict = _VERDICTS.index(_verdict(decisions, name))
    return [name, verdict, *(("", "") if decision is None else (decision.precision, decision.reason))]
