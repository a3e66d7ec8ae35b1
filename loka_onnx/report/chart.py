"""Interactive charts: accuracy against latency, and against the share of FP8.

A chart is plotly's own JSON, drawn when it is scrolled into view. Markers differ in shape as well as in
colour; every candidate is a point, or is named beside the chart with the missing value.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import Latency, OutputEvaluation
from loka_onnx.core.intervals import Interval
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData, confidence_text
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
    """An engine; `x` in units of the axis, `y` in percent."""

    engine: EngineArtifact
    x: float
    judged: Interval
    output: OutputEvaluation

    @property
    def y(self) -> float:
        return 100 * self.judged.value


@dataclass(frozen=True)
class _Axis:
    """Horizontal axis of a chart: its engines, and their positions by id.

    `batch` is the rows per request of an axis of latency; 0 where nothing was timed on its target.
    """

    kind: str
    name: str
    title: str
    against: str
    engines: Sequence[EngineArtifact]
    places: dict[str, float]
    batch: int = 0


def charts(data: ReportData) -> tuple[Chart, ...]:
    """Return charts by output: accuracy against latency on each target, then against the FP8 share."""
    outputs = dict.fromkeys(
        o.output
        for e in data.evaluations.evaluations
        for o in e.outputs
        if e.split == data.judged_split and o.difference is not None
    )
    targets = tuple(dict.fromkeys(engine.target for engine in data.engines))
    by_latency = [_latency_axis(data, target, is_only=len(targets) == 1) for target in targets]
    drawn = [_chart(data, output, axis) for output in outputs for axis in by_latency]
    return (*drawn, *(_chart(data, output, _share_axis(data)) for output in outputs))


def _latency_axis(data: ReportData, target: str, *, is_only: bool) -> _Axis:
    engines = [engine for engine in data.engines if engine.target == target]
    latencies = {
        engine.id: {
            latency.batch: latency.p50_us
            for latency in _latencies(data, engine)
            if latency.counts_for_choice and math.isfinite(latency.p50_us) and not engine.simulated
        }
        for engine in engines
    }
    batch = max((batch for by_batch in latencies.values() for batch in by_batch), default=0)
    times = {name: by_batch[batch] for name, by_batch in latencies.items() if batch in by_batch}
    unit, scale = ("ms", 1e-3) if max(times.values(), default=0) >= _LONG_US else ("µs", 1.0)
    at = f"batch {numbers.count(batch)}"
    against = f"median latency at {at}" if batch else "latency"
    return _Axis(
        "latency",
        "" if is_only else f" on {target}",
        f"latency p50 at {at}, {unit}",
        against if is_only else f"{against}, {target}",
        engines,
        {name: scale * time for name, time in times.items()},
        batch,
    )


def _share_axis(data: ReportData) -> _Axis:
    plans = {e.id: data.plan(e.plan) for e in data.engines}
    shares = {name: 100 * plan.fp8_share for name, plan in plans.items() if plan is not None}
    low = data.plans.quantized
    title, against = f"{low} share of FLOPs, %", f"the {low} share of the FP8-able FLOPs"
    return _Axis("share", "", title, against, data.engines, shares)


def _latencies(data: ReportData, engine: EngineArtifact) -> list[Latency]:
    return [t for e in data.evaluations.evaluations if e.engine == engine.id for t in e.latencies]


def _chart(data: ReportData, output: str, axis: _Axis) -> Chart:
    split, points, left_out = data.judged_split, [], []
    for engine in axis.engines:
        x, judged = axis.places.get(engine.id), _judged(data, engine.id, output)
        interval = judged.difference.judged if judged is not None and judged.difference is not None else None
        if x is not None and judged is not None and interval is not None and can_be_drawn(interval):
            points.append(_Point(engine, x, interval, judged))
        else:
            reasons = [_lacks_place(data, engine, axis)] if x is None else []
            is_judged = interval is not None and can_be_drawn(interval)
            reasons += [] if is_judged else ["accuracy not measured"]
            status = "" if engine.was_run else f" ({engine.status})"
            left_out.append(f"{engine.id}: {', '.join(reasons)}{status}")
    judged_name = next(
        o.difference.judged_name
        for e in data.evaluations.evaluations
        for o in e.outputs
        if (e.split, o.output) == (split, output) and o.difference is not None
    )
    level = confidence_text(data, split)
    caption = f"{judged_name} of {output} on {split} with its {level} interval against {axis.against}"
    has_front = axis.kind == "latency" and len(_front(points)) > 1
    caption += ". The line joins those that no other one beats in both" if has_front else ""
    figure = _figure(data, points, axis, judged_name, has_front) if points else None
    return Chart(axis.kind, f"{output}{axis.name}", caption, figure, tuple(left_out))


def _judged(data: ReportData, engine: str, output: str) -> OutputEvaluation | None:
    evaluation = data.evaluation(engine, data.judged_split)
    outputs = evaluation.outputs if evaluation is not None else ()
    return next((o for o in outputs if o.output == output), None)


def _lacks_place(data: ReportData, engine: EngineArtifact, axis: _Axis) -> str:
    """Return why an engine has no position on an axis."""
    latency = latency_text(data, engine)
    if not latency[0].isdigit():
        return f"latency {latency}"
    elsewhere = (
        timed.device
        for timed in _latencies(data, engine)
        if not timed.counts_for_choice and axis.batch in (timed.batch, 0)
    )
    device = next(elsewhere, None)
    return "not timed at this batch" if device is None else f"timed on {device}, not the target"


def _front(points: Sequence[_Point]) -> list[_Point]:
    """Return points that no other one beats in both directions, the fastest first."""
    best, front = float("inf"), []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if point.y < best:
            best = point.y
            front.append(point)
    return front


def _figure(
    data: ReportData, points: Sequence[_Point], axis: _Axis, judged_name: str, has_front: bool
) -> dict[str, Any]:
    budget = points[0].output.budget
    limits = [100 * budget] if math.isfinite(budget) else []
    heights = [0.0, *limits, *(100 * end for p in points for end in (p.judged.lower, p.judged.upper))]
    positions = _positions(points, max(heights) - min(heights) or 1.0)
    # Every engine without FP8 is at the left of the share axis.
    side, anchor = (1, "right") if axis.kind == "share" else (0, "left")
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1}
    name = {"xref": "paper", "x": side, "xanchor": anchor, "yanchor": "bottom", "showarrow": False}
    layout = {
        "xaxis": {"title": {"text": axis.title}, "range": _padded([p.x for p in points], room=0.3)},
        "yaxis": {"title": {"text": f"{judged_name}, %"}, "tickformat": "+.3~f", "range": _padded(heights)},
        "shapes": [
            line | {"y0": y, "y1": y, "line": {"dash": "dash", "width": 1.5, "color": _FRONT}} for y in limits
        ],
        "annotations": [name | {"y": y, "text": f"budget {numbers.budget_percent(budget)}"} for y in limits],
    }
    traces = []
    if has_front:
        line = {"color": _FRONT, "width": 1.5, "shape": "hv"}
        traces.append(_places(_front(points)) | {"mode": "lines", "name": "Pareto front", "line": line})
    for status, (symbol, color) in _MARKERS.items():
        members = [p for p in points if p.output.budget_status == status]
        marker = {"symbol": symbol, "color": color, "size": 11}
        if members:
            traces.append(_trace(members, judged_name, positions) | {"name": status, "marker": marker})
    if emitted := [p for p in points if data.chosen(p.engine.id) is not None]:
        ring = {"symbol": "circle-open", "color": _EMITTED, "size": 22}
        ring["line"] = {"width": 2.5, "color": _EMITTED}
        traces.append(_places(emitted) | {"mode": "markers", "name": "emitted", "marker": ring})
    return {"data": traces, "layout": layout}


def _places(points: Sequence[_Point]) -> dict[str, Any]:
    return {"x": [p.x for p in points], "y": [p.y for p in points], "hoverinfo": "skip"}


def _positions(points: Sequence[_Point], height: float) -> dict[str, str]:
    """Return the position of each point's name: names of close points take different corners."""
    if len(points) > _MOST_LABELLED:
        return {}
    width = max(p.x for p in points) - min(p.x for p in points) or 1.0
    positions = {}
    for index, point in enumerate(points):
        before = points[:index]
        near = [p for p in before if abs(p.x - point.x) < 0.1 * width and abs(p.y - point.y) < 0.08 * height]
        positions[point.engine.id] = _CORNERS[len(near) % len(_CORNERS)]
    return positions


def _trace(members: Sequence[_Point], judged_name: str, positions: dict[str, str]) -> dict[str, Any]:
    def hover(point: _Point) -> str:
        judged = delta_text(point.output).removeprefix("KL ")
        # Plotly reads a subset of HTML in labels, links included.
        return f"{html.escape(point.engine.id)}<br>{judged_name} {judged}<br>x {point.x:.4g}"

    labels = {
        "text": [f"&nbsp;&nbsp;{html.escape(p.engine.plan)}&nbsp;&nbsp;" for p in members],
        "textposition": [positions.get(p.engine.id) for p in members],
    }
    return {
        **_places(members),
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [100 * (p.judged.upper - p.judged.value) for p in members],
            "arrayminus": [100 * (p.judged.value - p.judged.lower) for p in members],
            "thickness": 1.5,
        },
        "mode": "markers+text" if positions else "markers",
        "hovertext": [hover(p) for p in members],
        "hoverinfo": "text",
        **(labels if positions else {}),
    }


def _padded(values: Sequence[float], room: float = 0.12) -> list[float]:
    """Return the ends of an axis: a share `room` of the values' extent stays free above them, for names."""
    low, high = min(values), max(values)
    extent = high - low or abs(high) or 1.0
    return [low - 0.12 * extent, high + room * extent]
