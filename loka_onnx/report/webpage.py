"""A document as one self-contained HTML file."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from loka_onnx.report.chart import Chart
from loka_onnx.report.document import Document


@dataclass(frozen=True)
class Exhibits:
    """The drawn parts of a page: charts by section, `histograms.histogram_data`, the model graph."""

    charts: Mapping[str, tuple[Chart, ...]] = field(default_factory=dict)
    histograms: dict[str, Any] = field(default_factory=dict)
    graph: Markup | None = None

    @property
    def sites(self) -> frozenset[str]:
        """Names of the sites that the page can show."""
        return frozenset(site["name"] for site in self.histograms.get("sites", ()))


def to_html(document: Document, exhibits: Exhibits | None = None) -> str:
    """Write a document with its drawn parts."""
    exhibits = exhibits or Exhibits()
    template = environment().get_template("report.html.j2")
    has_chart = any(chart.figure for each in exhibits.charts.values() for chart in each)
    plotly = _packed_plotly() if has_chart or exhibits.histograms.get("tensors") else ""
    return template.render(document=document, exhibits=exhibits, graph=exhibits.graph, plotly=plotly)


@cache
def environment() -> jinja2.Environment:
    """Return the templates of the page, with autoescaping."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("loka_onnx.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["json"] = _json
    return templates


def _json(value: Any) -> Markup:
    """Return data for a script: nothing in it can end its element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e"))


@cache
def _packed_plotly() -> str:
    """Return the source of plotly.js, compressed; a browser unpacks it for the first chart."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
