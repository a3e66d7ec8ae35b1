"""Interactive charts: accuracy against latency, and calibration.

A chart is plotly's own JSON, drawn when it is scrolled into view. Markers differ in shape as well as in
colour; every candidate is a point, or is named beside the chart with the missing value.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import OutputEvaluation
from loka_onnx.core.intervals import Interval
from loka_onnx.report import numbers
from loka_onnx.report.data import CERTIFICATION, ReportData, confidence_text
from loka_onnx.report.document import can_be_drawn
from loka_onnx.report.engine_tables import delta_text, latency_text
from loka_onnx.report.slice_tables import Curve, certified_curves

# Mid tones that stand out on a white and on a black page; text and lines follow the page.
_MARKERS = {"within": ("circle", "#1a9a5c"), "undecided": ("diamond", "#c98a14"), "beyond": ("x", "#d64545")}
_EMITTED = "#3b82f6"
_FRONT = "#8a94a3"
_CURVES = (("square-open", "#8a94a3"), ("circle", "#3b82f6"), ("diamond", "#c98a14"), ("x", "#1a9a5c"))
"""Symbols and colours of calibration curves, the reference's first."""
_CORNERS = ("top right", "bottom right", "top left", "bottom left")
"""Positions of the names of neighbouring points."""
FEWEST = 2
"""Points below which there is nothing to compare, and no chart."""
_MOST_LABELLED = 14
"""With more points, names would overlap; they are shown under the pointer."""


@dataclass(frozen=True)
class Chart:
    """Data and layout for plotly, None below `FEWEST` points; `left_out` candidates with their reasons."""

    name: str
    caption: str
    figure: dict[str, Any] | None
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Point:
    """An engine; `x` in microseconds, `y` in percent."""

    engine: EngineArtifact
    x: float
    judged: Interval
    output: OutputEvaluation

    @property
    def y(self) -> float:
        return 100 * self.judged.value


def charts(data: ReportData) -> tuple[Chart, ...]:
    """Return charts by output: accuracy against latency on each target."""
    evaluations = (e for e in data.evaluations.evaluations if e.split == data.judged_split)
    names: dict[str, str] = {}
    for output in (output for evaluation in evaluations for output in evaluation.outputs):
        if output.difference is not None:
            names.setdefault(output.output, output.difference.judged_name)
    targets = tuple(dict.fromkeys(engine.target for engine in data.engines))
    is_only = len(targets) == 1
    return tuple(
        _chart(data, output, judged_name, target, is_only=is_only)
        for output, judged_name in names.items()
        for target in targets
    )


def calibration_charts(data: ReportData) -> tuple[Chart, ...]:
    """Return mean label over mean prediction by output: the reference, and what is emitted."""
    curves = [curve for curve in certified_curves(data) if curve[1].calibration]
    return tuple(
        _calibration(name, [curve for curve in curves if curve[1].output == name])
        for name in dict.fromkeys(output.output for _, output in curves)
    )


def _calibration(name: str, curves: Sequence[Curve]) -> Chart:
    ends = [end for _, o in curves for b in o.calibration for end in (b.predicted, b.observed)]
    corners = dict.fromkeys(("x0", "y0"), min(ends)) | dict.fromkeys(("x1", "y1"), max(ends))
    diagonal = {"type": "line", "line": {"color": _FRONT, "width": 1.5, "dash": "dash"}, **corners}
    traces = [
        {
            "x": [each.predicted for each in output.calibration],
            "y": [each.observed for each in output.calibration],
            "name": html.escape(engine),
            "mode": "lines+markers",
            # The last is drawn over the others: what lies below stays visible.
            "marker": {"symbol": symbol, "size": 9, "color": color},
            "line": {"color": color, "width": 1.5},
        }
        for (engine, output), (symbol, color) in zip(curves, cycle(_CURVES))
    ]
    axes = {"xaxis": "mean prediction", "yaxis": "mean label"}
    layout = {"shapes": [diagonal], **{axis: {"title": {"text": title}} for axis, title in axes.items()}}
    caption = f"Calibration of {name} on {CERTIFICATION}, in bins of equally many rows"
    return Chart(name, caption, {"data": traces, "layout": layout}, ())


def _chart(data: ReportData, output: str, judged_name: str, target: str, *, is_only: bool) -> Chart:
    engines = [engine for engine in data.engines if engine.target == target]
    latencies = {
        engine.id: {x.batch: x.p50_us for x in data.target_latencies(engine) if math.isfinite(x.p50_us)}
        for engine in engines
    }
    batch = max((batch for by_batch in latencies.values() for batch in by_batch), default=0)
    points, left_out = [], []
    for engine in engines:
        x, outputs = latencies[engine.id].get(batch), data.outputs(engine.id, data.judged_split)
        judged = next((each for each in outputs if each.output == output), None)
        interval = judged.difference.judged if judged is not None and judged.difference is not None else None
        if x is not None and judged is not None and can_be_drawn(interval):
            points.append(_Point(engine, x, interval, judged))
        else:
            reasons = [f"latency {latency_text(data, engine)}"] if x is None else []
            reasons += [] if can_be_drawn(interval) else ["accuracy not measured"]
            status = "" if engine.was_run else f" ({engine.status})"
            left_out.append(f"{engine.id}: {', '.join(reasons)}{status}")
    points.sort(key=lambda point: (point.x, point.y))
    at = f"median latency at batch {numbers.count(batch)}" if batch else "latency"
    level = confidence_text(data, data.judged_split)
    caption = f"{judged_name} of {output} on {data.judged_split} with its {level} interval against {at}"
    caption += "" if is_only else f", {target}"
    if len(_front(points)) > 1:
        caption += ". The line joins those that no other one beats in both"
    if len(points) < FEWEST:
        left_out += [f"{point.engine.id}: nothing to compare it with" for point in points]
    figure = _figure(data, points, batch, judged_name) if len(points) >= FEWEST else None
    return Chart(output if is_only else f"{output} on {target}", caption, figure, tuple(left_out))


def _front(points: Sequence[_Point]) -> list[_Point]:
    """Return points that no other one beats in both directions; `points` are sorted, the fastest first."""
    front: list[_Point] = []
    for point in points:
        if not front or point.y < front[-1].y:
            front.append(point)
    return front


def _figure(data: ReportData, points: Sequence[_Point], batch: int, judged_name: str) -> dict[str, Any]:
    budget, front = points[0].output.budget, _front(points)
    limits = [100 * budget] if math.isfinite(budget) else []
    heights = [0.0, *limits, *(100 * end for p in points for end in (p.judged.lower, p.judged.upper))]
    line = {"dash": "dash", "width": 1.5, "color": _FRONT}
    dashed = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": line}
    name = {"xref": "paper", "x": 0, "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    x_title = f"latency p50 at batch {numbers.count(batch)}, µs"
    layout = {
        "xaxis": {"title": {"text": x_title}, "range": _padded([p.x for p in points], room=0.3)},
        "yaxis": {"title": {"text": f"{judged_name}, %"}, "tickformat": "+.3~f", "range": _padded(heights)},
        "shapes": [dashed | {"y0": y, "y1": y} for y in limits],
        "annotations": [name | {"y": y, "text": f"budget {numbers.budget_percent(budget)}"} for y in limits],
    }
    traces = []
    if len(front) > 1:
        steps = {"color": _FRONT, "width": 1.5, "shape": "hv"}
        traces.append(_places(front) | {"mode": "lines", "name": "Pareto front", "line": steps})
    corners = {point.engine.id: _CORNERS[i % len(_CORNERS)] for i, point in enumerate(points)}
    for status, (symbol, color) in _MARKERS.items():
        if members := [p for p in points if p.output.budget_status == status]:
            marker = {"symbol": symbol, "color": color, "size": 11}
            labels = corners if len(points) <= _MOST_LABELLED else {}
            traces.append(_trace(members, judged_name, labels) | {"name": status, "marker": marker})
    if emitted := [p for p in points if data.chosen(p.engine.id) is not None]:
        ring = {"symbol": "circle-open", "color": _EMITTED, "size": 22}
        ring["line"] = {"width": 2.5, "color": _EMITTED}
        traces.append(_places(emitted) | {"mode": "markers", "name": "emitted", "marker": ring})
    return {"data": traces, "layout": layout}


def _places(points: Sequence[_Point]) -> dict[str, Any]:
    return {"x": [p.x for p in points], "y": [p.y for p in points], "hoverinfo": "skip"}


def _trace(members: Sequence[_Point], judged_name: str, corners: dict[str, str]) -> dict[str, Any]:
    def hover(point: _Point) -> str:
        judged = delta_text(point.output).removeprefix("KL ")
        # Plotly reads a subset of HTML in labels, links included.
        return f"{html.escape(point.engine.id)}<br>{judged_name} {judged}<br>x {point.x:.4g}"

    labels = {
        "text": [f"&nbsp;&nbsp;{html.escape(p.engine.plan)}&nbsp;&nbsp;" for p in members],
        "textposition": [corners.get(p.engine.id) for p in members],
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
        "mode": "markers+text" if corners else "markers",
        "hovertext": [hover(p) for p in members],
        "hoverinfo": "text",
        **(labels if corners else {}),
    }


def _padded(values: Sequence[float], room: float = 0.12) -> list[float]:
    """Return the ends of an axis: a share `room` of the values' extent stays free above them, for names."""
    low, high = min(values), max(values)
    extent = high - low or abs(high) or 1.0
    return [low - 0.12 * extent, high + room * extent]
