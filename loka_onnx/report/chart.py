"""Interactive charts: what accuracy costs against what FP8 brings.

Markers differ in shape as well as in colour, and every point is a row of the engines table.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from loka_onnx.core.evaluation import Evaluation, OutputEvaluation
from loka_onnx.report import numbers
from loka_onnx.report.data import SELECTION, ReportData, confidence_text
from loka_onnx.report.engine_tables import delta_text

# Mid tones that stand out on a white and on a black page; text and lines follow the page by CSS.
_MARKERS = {
    "within": ("circle", "#1a9a5c"),
    "undecided": ("diamond", "#c98a14"),
    "beyond": ("x", "#d64545"),
}
_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        caption: What it shows.
        html: Its element and script; needs `plotly_script` before it.
    """

    caption: str
    html: str


@dataclass(frozen=True)
class _Point:
    engine: str
    x: float
    output: OutputEvaluation


def charts(data: ReportData) -> tuple[Chart, ...]:
    """What is judged against the FP8 share and against measured latency, each where it has two points."""
    split = SELECTION if SELECTION in data.splits else next(iter(data.splits), SELECTION)
    found = [
        e for e in data.evaluations.evaluations if e.split == split and data.engine(e.engine) is not None
    ]
    outputs = dict.fromkeys(o.output for e in found for o in e.outputs)
    made = []
    for number, output in enumerate(outputs):
        shares = _points(output, [(e, _share(data, e)) for e in found])
        speeds = _points(output, [(e, _latency_us(data, e)) for e in found])
        level = confidence_text(data, split)
        caption = f"{_judged_name(shares)} of {output} on {split} with its {level} interval"
        made += [
            Chart(f"{caption} against {against}", _figure(points, title, f"chart-{number}-{kind}"))
            for points, against, title, kind in (
                (shares, "the FP8 share of the FP8-able FLOPs", "FP8 share of FLOPs, %", "share"),
                (speeds, "median latency at the largest batch", "latency p50, µs", "latency"),
            )
            if len(points) > 1
        ]
    return tuple(made)


def plotly_script() -> str:
    """The source of plotly.js, to be put on the page itself."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _points(output: str, places: list[tuple[Evaluation, float | None]]) -> list[_Point]:
    return [
        _Point(evaluation.engine, x, item)
        for evaluation, x in places
        for item in evaluation.outputs
        if x is not None and item.output == output and item.difference is not None
    ]


def _judged_name(points: list[_Point]) -> str:
    """The same at every point of an output: it has labels or has none."""
    return next((p.output.difference.judged_name for p in points if p.output.difference is not None), "ΔNE")


def _share(data: ReportData, evaluation: Evaluation) -> float | None:
    plan = data.plan(evaluation.plan)
    return None if plan is None else 100 * plan.fp8_share


def _latency_us(data: ReportData, evaluation: Evaluation) -> float | None:
    engine = data.engine(evaluation.engine)
    counted = [latency for latency in evaluation.latencies if latency.counts_for_choice]
    if not counted or (engine is not None and engine.simulated):
        return None
    return max(counted, key=lambda latency: latency.batch).p50_us


def _figure(points: list[_Point], title: str, identifier: str) -> str:
    # Not plotly.express, which would need pandas; not at the top, because it takes a second to import.
    import plotly.graph_objects as go
    import plotly.io

    figure = go.Figure()
    for status, (symbol, color) in _MARKERS.items():
        members = [p for p in points if p.output.budget_status == status]
        if members:
            figure.add_trace(_trace(go, members, status, {"symbol": symbol, "color": color, "size": 11}))
    budget = 100 * points[0].output.budget
    figure.add_hline(
        y=budget,
        line={"dash": "dash", "width": 1.5, "color": "#888"},
        annotation_text=f"budget {numbers.budget_percent(points[0].output.budget)}",
        annotation_position="top left",
    )
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 70, "r": 20, "t": 30, "b": 90},
        height=380,
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "y": -0.22},
        xaxis={"title": {"text": title}},
        yaxis={"title": {"text": f"{_judged_name(points)}, %"}, "tickformat": "+.3~f"},
        showlegend=True,
    )
    return str(
        plotly.io.to_html(figure, config=_CONFIG, full_html=False, include_plotlyjs=False, div_id=identifier)
    )


def _trace(go: Any, members: list[_Point], status: str, marker: dict[str, object]) -> Any:
    deltas = [p.output.difference.judged for p in members if p.output.difference is not None]
    # Plotly reads a subset of HTML in labels, links included.
    names = [html.escape(p.engine) for p in members]
    return go.Scatter(
        x=[p.x for p in members],
        y=[100 * d.value for d in deltas],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [100 * (d.upper - d.value) for d in deltas],
            "arrayminus": [100 * (d.value - d.lower) for d in deltas],
            "thickness": 1.5,
        },
        mode="markers",
        name=status,
        marker=marker,
        text=[
            f"{n}<br>{_judged_name([p])} {delta_text(p.output).removeprefix('KL ')}"
            for n, p in zip(names, members, strict=True)
        ],
        hoverinfo="text",
    )
