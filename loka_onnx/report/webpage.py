"""A document as one HTML file that needs nothing from anywhere."""

from __future__ import annotations

from functools import cache

import jinja2

from loka_onnx.report.chart import Chart, plotly_script
from loka_onnx.report.document import Document


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("loka_onnx.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def to_html(document: Document, charts: tuple[Chart, ...]) -> str:
    """Writes a document; plotly.js is put on the page when there is a chart to show."""
    template = _environment().get_template("report.html.j2")
    script = plotly_script() if charts else ""
    return template.render(document=document, charts=charts, plotly_script=script)
