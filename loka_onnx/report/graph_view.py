"""The model graph for the page: an inline SVG, which `graph.js` moves, searches and explains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from loka_onnx.core.model_graph import GraphNode, NodeKind
from loka_onnx.core.plan import Decision, Verdict
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.graph_layout import NODE_HEIGHT, GraphLayout, Point, box_width, lay_out
from loka_onnx.report.site_tables import shown_plan
from loka_onnx.report.webpage import environment

_MIXED = "several sites"
"""Verdict of a folded part whose sites have several."""
_MARGIN = 24
_LETTER = 6.4
"""Mean width of a letter in a label, px."""


@dataclass(frozen=True)
class _Box:
    """One node with its place, labels and words; `verdict` is empty without a site."""

    node: GraphNode
    place: Point
    width: int
    verdict: str
    labels: tuple[str, ...]
    lines: tuple[str, ...]


def graph_view(data: ReportData) -> Markup | None:
    """Draw the graph of a run; None where the run has none."""
    graph = data.graph
    if graph is None or not graph.nodes:
        return None
    plan, layout = shown_plan(data), lay_out(graph)
    decisions = {} if plan is None else {decision.site: decision for decision in plan.decisions}
    boxes = [_box(node, place, decisions) for node, place in zip(graph.nodes, layout.places, strict=True)]
    present = {box.verdict for box in boxes}
    return Markup(
        environment()
        .get_template("graph.html.j2")
        .render(
            graph=graph,
            plan=plan,
            boxes=boxes,
            height=NODE_HEIGHT,
            lines=[(*edge, _curve(line)) for edge, line in layout.lines.items()],
            view=_view(boxes, layout),
            verdicts=[verdict for verdict in (*Verdict, _MIXED) if verdict in present],
            operators=numbers.count(graph.operators),
            sites=numbers.count(len(data.modified.sites)),
            payload=[_words(box, decisions) for box in boxes],
        )
    )


def _box(node: GraphNode, place: Point, decisions: Mapping[str, Decision]) -> _Box:
    counts = Counter(_verdict(decisions, site) for site in node.sites)
    verdict = "" if not counts else _MIXED if len(counts) > 1 else next(iter(counts))
    is_operator = node.kind is NodeKind.OPERATOR
    amount = f"{node.stands_for} nodes" if node.kind is NodeKind.FOLDED else ""
    module = f"in {node.module}" if node.module else ""
    lines = [" · ".join(filter(None, (node.op if is_operator else node.kind, amount, module)))]
    decision = decisions.get(node.sites[0]) if len(node.sites) == 1 else None
    if len(node.sites) == 1:
        lines += [f"site {node.sites[0]}"] if node.sites[0] != node.name else []
        lines.append(f"{verdict} · {decision.precision}" if decision is not None else verdict)
        lines += [decision.reason] if decision is not None and decision.reason else []
    elif node.sites:
        each = ", ".join(f"{count} {name}" for name, count in counts.items())
        lines.append(f"{len(node.sites)} sites: {each}")
    first, second = node.name, amount or str(node.kind)
    if is_operator:
        precision = f" · {decision.precision}" if decision is not None else ""
        first, second = (node.name, f"{node.op}{precision}") if verdict else (node.op, "")
    width = box_width(node)
    room = int((width - 10 - (NODE_HEIGHT * 0.8 if verdict else 0)) / _LETTER)
    # The end of a name tells more than its beginning.
    labels = tuple(x if len(x) <= room else f"…{x[1 - room :]}" for x in (first, second) if x)
    return _Box(node, place, width, verdict, labels, tuple(lines))


def _view(boxes: Sequence[_Box], layout: GraphLayout) -> tuple[int, int, int, int]:
    """Return left, top, width and height of the drawing with a margin."""
    points = [point for line in layout.lines.values() for point in line]
    for box in boxes:
        (x, y), half = box.place, box.width // 2
        points += [(x - half, y - NODE_HEIGHT // 2), (x + half, y + NODE_HEIGHT // 2)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    width, height = max(xs) - min(xs) + 2 * _MARGIN, max(ys) - min(ys) + 2 * _MARGIN
    return min(xs) - _MARGIN, min(ys) - _MARGIN, width, height


def _verdict(decisions: Mapping[str, Decision], site: str) -> Verdict:
    return decisions[site].verdict if site in decisions else Verdict.NOT_JUDGED


def _curve(line: tuple[Point, ...]) -> str:
    """Return SVG path data: curves that leave and arrive vertically."""
    (x, y), *_ = line
    path = [f"M{x} {y}"]
    for (x, y), (to_x, to_y) in pairwise(line):
        middle = (y + to_y) // 2
        path.append(f"L{to_x} {to_y}" if x == to_x else f"C{x} {middle} {to_x} {middle} {to_x} {to_y}")
    return "".join(path)


def _words(box: _Box, decisions: Mapping[str, Decision]) -> dict[str, object]:
    """Return the words of a node and what it is found by; `words` count from their first letter on."""
    node = box.node
    judged = [decisions[site] for site in node.sites if site in decisions]
    words = {box.verdict, *(_verdict(decisions, s) for s in node.sites), *(d.precision for d in judged)}
    return {
        "name": node.name,
        "lines": box.lines,
        "sites": node.sites,
        "text": "\n".join([node.name, node.op, node.module, *node.sites]).lower(),
        "words": sorted(words - {""}),
    }
