"""Renders the results of a run as JSON, Markdown, HTML and a terminal table; computes nothing."""

from __future__ import annotations

from pathlib import Path

from loka_onnx.core import serde
from loka_onnx.report.chart import calibration_charts, charts
from loka_onnx.report.data import DataDescription, ReportData, SplitDescription
from loka_onnx.report.graph_view import graph_view
from loka_onnx.report.histograms import histogram_data
from loka_onnx.report.markdown import to_markdown
from loka_onnx.report.sections import build_document
from loka_onnx.report.site_tables import shown_plan
from loka_onnx.report.summary import summary_table
from loka_onnx.report.webpage import Exhibits, to_html

__all__ = [
    "HTML_NAME",
    "JSON_NAME",
    "MARKDOWN_NAME",
    "DataDescription",
    "ReportData",
    "SplitDescription",
    "render",
    "summary_table",
]

JSON_NAME, MARKDOWN_NAME, HTML_NAME = "report.json", "report.md", "report.html"


def render(data: ReportData, directory: Path) -> tuple[Path, ...]:
    """Write report.json, report.md and report.html, each atomically, and return them; OutputError if not.

    Equal data gives equal bytes.
    """
    document = build_document(data)
    drawn = {"engines": charts(data), "scores": calibration_charts(data)}
    exhibits = Exhibits(drawn, histogram_data(data, shown_plan(data)), graph_view(data))
    texts = {
        JSON_NAME: serde.dumps(data),
        MARKDOWN_NAME: to_markdown(document),
        HTML_NAME: to_html(document, exhibits),
    }
    for name, text in texts.items():
        serde.write_text(text, directory / name)
    return tuple(directory / name for name in texts)
