"""Interactive charts: accuracy against latency, and against the share of FP8.

A chart is plotly's own JSON, drawn when it is scrolled into view. Markers differ in shape as well as in
colour; every candidate is a point, or is named beside the chart with the missing value.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import OutputEvaluation
from loka_onnx.report import numbers
from loka_onnx.report.data import SELECTION, ReportData, confidence_text
from loka_onnx.report.document import can_be_drawn
from loka_onnx.report.engine_tables import delta_text, latency_text

# Mid tones that stand out on a white and on a black page; text and lines follow the page.
_MARKERS = {
    "within": ("circle", "#1a9a5c"),
    "undecided": ("diamond", "#c98a14"),
    "beyond": ("x", "#d64545"),
}
_EMITTED = "#3b82f6"
_FRONT = "#8a94a3"
_LONG_US = 10_000
"""Axes are in milliseconds from here on."""
_CORNERS = ("top right", "bottom right", "top left", "bottom left")
_MOST_LABELLED = 14
"""With more points, names would overlap; they are shown under the pointer."""


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        kind: ``latency`` or ``share``: charts of one kind share a position, and one of them is shown.
        name: Distinguishes charts of one kind.
        figure: Data and layout for plotly; None without points.
        left_out: Candidates without a point, each with the reason.
    """

    kind: str
    name: str
    caption: str
    figure: dict[str, Any] | None
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Point:
    engine: EngineArtifact
    x: float
    output: OutputEvaluation
    is_emitted: bool

    @property
    def y(self) -> float:
        """The judged change, percent."""
        assert self.output.difference is not None
        return 100 * self.output.difference.judged.value


@dataclass(frozen=True)
class _Axis:
    """Horizontal axis of a chart.

    Attributes:
        against: Its name in the caption.
        places: Position of each engine, by its id.
        batch: Rows per request, of an axis of latency; 0 where nothing was timed on its target.
    """

    kind: str
    title: str
    against: str
    places: dict[str, float]
    batch: int = 0


_FRONT_NOTE = ". The line joins those that no other one beats in both"


def charts(data: ReportData) -> tuple[Chart, ...]:
    """Return charts by output: accuracy against latency on each target, then against the FP8 share."""
    split = SELECTION if SELECTION in data.splits else next(iter(data.splits), SELECTION)
    evaluations = [e for e in data.evaluations.evaluations if e.split == split]
    outputs = dict.fromkeys(o.output for e in evaluations for o in e.outputs if o.difference is not None)
    targets = dict.fromkeys(engine.target for engine in data.engines)
    by_latency = [
        _latency_chart(data, split, output, target if len(targets) > 1 else None)
        for output in outputs
        for target in targets
    ]
    return (*by_latency, *(_share_chart(data, split, output) for output in outputs))


def _latency_chart(data: ReportData, split: str, output: str, target: str | None) -> Chart:
    engines = [e for e in data.engines if target is None or e.target == target]
    batch = max((b for e in engines for b in _latencies(data, e)), default=0)
    times = {e.id: latency for e in engines if (latency := _latencies(data, e).get(batch)) is not None}
    unit, scale = ("ms", 1e-3) if max(times.values(), default=0) >= _LONG_US else ("µs", 1.0)
    at = f"batch {numbers.count(batch)}"
    against = f"median latency at {at}" if batch else "latency"
    axis = _Axis(
        "latency",
        f"latency p50 at {at}, {unit}",
        f"{against}, {target}" if target else against,
        {name: scale * time for name, time in times.items()},
        batch,
    )
    return _chart(data, (split, output), f"{output} on {target}" if target else output, engines, axis)


def _share_chart(data: ReportData, split: str, output: str) -> Chart:
    plans = {e.id: data.plan(e.plan) for e in data.engines}
    shares = {name: 100 * plan.fp8_share for name, plan in plans.items() if plan is not None}
    axis = _Axis("share", "FP8 share of FLOPs, %", "the FP8 share of the FP8-able FLOPs", shares)
    return _chart(data, (split, output), output, data.engines, axis)


def _chart(
    data: ReportData, judged_on: tuple[str, str], name: str, engines: Sequence[EngineArtifact], axis: _Axis
) -> Chart:
    split, output = judged_on
    points, left_out = [], []
    for engine in engines:
        x, judged = axis.places.get(engine.id), _judged(data, engine, split, output)
        if x is not None and judged is not None:
            points.append(_Point(engine, x, judged, data.chosen(engine.id) is not None))
        else:
            parts = [_lacks_place(data, engine, axis)] if x is None else []
            parts += ["accuracy not measured"] if judged is None else []
            status = "" if engine.was_run else f" ({engine.status})"
            left_out.append(f"{engine.id}: {', '.join(parts)}{status}")
    judged_name = _judged_name(data, split, output)
    level = confidence_text(data, split)
    caption = f"{judged_name} of {output} on {split} with its {level} interval against {axis.against}"
    if axis.kind == "latency" and len(_front(points)) > 1:
        caption += _FRONT_NOTE
    figure = _figure(points, axis, judged_name) if points else None
    return Chart(axis.kind, name, caption, figure, tuple(left_out))


def _lacks_place(data: ReportData, engine: EngineArtifact, axis: _Axis) -> str:
    """Return why an engine has no position on an axis."""
    latency = latency_text(data, engine)
    if not latency[0].isdigit():
        return f"latency {latency}"
    elsewhere = (
        timed.device
        for evaluation in data.evaluations.evaluations
        if evaluation.engine == engine.id
        for timed in evaluation.latencies
        if not timed.counts_for_choice and axis.batch in (timed.batch, 0)
    )
    device = next(elsewhere, None)
    return "not timed at this batch" if device is None else f"timed on {device}, not the target"


def _judged(data: ReportData, engine: EngineArtifact, split: str, output: str) -> OutputEvaluation | None:
    evaluation = data.evaluation(engine.id, split)
    found = evaluation.outputs if evaluation is not None else ()
    return next(
        (
            o
            for o in found
            if o.output == output and o.difference is not None and can_be_drawn(o.difference.judged)
        ),
        None,
    )


def _judged_name(data: ReportData, split: str, output: str) -> str:
    """Return the judged quantity's name, the same for every engine of an output."""
    return next(
        o.difference.judged_name
        for e in data.evaluations.evaluations
        if e.split == split
        for o in e.outputs
        if o.output == output and o.difference is not None
    )


def _latencies(data: ReportData, engine: EngineArtifact) -> dict[int, float]:
    """Return median latencies that count, by batch size."""
    if engine.simulated:
        return {}
    return {
        latency.batch: latency.p50_us
        for evaluation in data.evaluations.evaluations
        if evaluation.engine == engine.id
        for latency in evaluation.latencies
        if latency.counts_for_choice and math.isfinite(latency.p50_us)
    }


def _front(points: Sequence[_Point]) -> list[_Point]:
    """Return points that no other one beats in both directions, the fastest first."""
    best, front = float("inf"), []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if point.y < best:
            best = point.y
            front.append(point)
    return front


def _figure(points: Sequence[_Point], axis: _Axis, judged_name: str) -> dict[str, Any]:
    budget = points[0].output.budget
    limits = [100 * budget] if math.isfinite(budget) else []
    layout = {
        "xaxis": {"title": {"text": axis.title}, "range": _padded([p.x for p in points], room=0.3)},
        "yaxis": {
            "title": {"text": f"{judged_name}, %"},
            "tickformat": "+.3~f",
            "range": _padded([0.0, *limits, *_ends(points)]),
        },
        "shapes": [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": limit,
                "y1": limit,
                "line": {"dash": "dash", "width": 1.5, "color": _FRONT},
            }
            for limit in limits
        ],
        "annotations": [
            {
                "xref": "paper",
                # Every engine without FP8 is at the left of the share axis.
                "x": 1 if axis.kind == "share" else 0,
                "y": limit,
                "xanchor": "right" if axis.kind == "share" else "left",
                "yanchor": "bottom",
                "showarrow": False,
                "text": f"budget {numbers.budget_percent(budget)}",
            }
            for limit in limits
        ],
    }
    return {"data": list(_traces(points, axis, judged_name)), "layout": layout}


def _traces(points: Sequence[_Point], axis: _Axis, judged_name: str) -> Iterator[dict[str, Any]]:
    front = _front(points)
    if axis.kind == "latency" and len(front) > 1:
        yield {
            "x": [p.x for p in front],
            "y": [p.y for p in front],
            "mode": "lines",
            "name": "Pareto front",
            "line": {"color": _FRONT, "width": 1.5, "shape": "hv"},
            "hoverinfo": "skip",
        }
    positions = _positions(points) if len(points) <= _MOST_LABELLED else {}
    for status, (symbol, color) in _MARKERS.items():
        members = [p for p in points if p.output.budget_status == status]
        if members:
            marker = {"symbol": symbol, "color": color, "size": 11}
            yield _trace(members, judged_name, positions) | {"name": status, "marker": marker}
    emitted = [p for p in points if p.is_emitted]
    if emitted:
        yield {
            "x": [p.x for p in emitted],
            "y": [p.y for p in emitted],
            "mode": "markers",
            "name": "emitted",
            "hoverinfo": "skip",
            "marker": {
                "symbol": "circle-open",
                "color": _EMITTED,
                "size": 22,
                "line": {"width": 2.5, "color": _EMITTED},
            },
        }


def _positions(points: Sequence[_Point]) -> dict[str, str]:
    """Return the position of each point's name: names of close points take different corners."""
    width = max(p.x for p in points) - min(p.x for p in points) or 1.0
    ends = list(_ends(points))
    height = max(*ends, 100 * points[0].output.budget) - min(0.0, *ends) or 1.0
    placed: list[_Point] = []
    positions = {}
    for point in points:
        near = [p for p in placed if abs(p.x - point.x) < 0.1 * width and abs(p.y - point.y) < 0.08 * height]
        positions[point.engine.id] = _CORNERS[len(near) % len(_CORNERS)]
        placed.append(point)
    return positions


def _trace(members: Sequence[_Point], judged_name: str, positions: dict[str, str]) -> dict[str, Any]:
    labelled = bool(positions)
    deltas = [p.output.difference.judged for p in members if p.output.difference is not None]
    # Plotly reads a subset of HTML in labels, links included.
    names = [html.escape(p.engine.id) for p in members]
    return {
        "x": [p.x for p in members],
        "y": [p.y for p in members],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [100 * (d.upper - d.value) for d in deltas],
            "arrayminus": [100 * (d.value - d.lower) for d in deltas],
            "thickness": 1.5,
        },
        "mode": "markers+text" if labelled else "markers",
        "text": [f"&nbsp;&nbsp;{html.escape(p.engine.plan)}&nbsp;&nbsp;" for p in members]
        if labelled
        else None,
        "textposition": [positions[p.engine.id] for p in members] if labelled else None,
        "hovertext": [
            f"{name}<br>{judged_name} {delta_text(p.output).removeprefix('KL ')}<br>x {p.x:.4g}"
            for name, p in zip(names, members, strict=True)
        ],
        "hoverinfo": "text",
    }


def _ends(points: Sequence[_Point]) -> Iterator[float]:
    for point in points:
        assert point.output.difference is not None
        judged = point.output.difference.judged
        yield from (100 * judged.lower, 100 * judged.upper)


def _padded(values: Sequence[float], room: float = 0.12) -> list[float]:
    """Return the ends of an axis: a share `room` of the values' extent stays free above them, for names."""
    low, high = min(values), max(values)
    extent = high - low or abs(high) or 1.0
    return [low - 0.12 * extent, high + room * extent]
