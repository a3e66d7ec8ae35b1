"""A document as one self-contained HTML file."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from typing import Any, Protocol

import jinja2
from markupsafe import Markup

from loka_onnx.report.chart import plotly_script
from loka_onnx.report.document import Document
from loka_onnx.report.exhibits import Exhibits


class Graph(Protocol):
    """The model graph, ready for the page."""

    @property
    def html(self) -> Markup:
        """Its markup with its style and script, escaped."""


def to_html(document: Document, exhibits: Exhibits, graph: Graph | None = None) -> str:
    """Write a document.

    Args:
        exhibits: Drawn parts; plotly.js is included when there are any.
        graph: The model graph; None leaves its section out.
    """
    template = environment().get_template("report.html.j2")
    return template.render(
        document=document,
        exhibits=exhibits,
        graph=graph,
        plotly=_packed_plotly() if exhibits.has_drawings else "",
    )


@cache
def environment() -> jinja2.Environment:
    """Return the templates of the page, with autoescaping."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("loka_onnx.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["json"] = _json
    return found


def _json(value: Any) -> Markup:
    """Return data for a script: nothing in it can end its element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e"))


@cache
def _packed_plotly() -> str:
    """Return the source of plotly.js, compressed; a browser unpacks it for the first chart."""
    return base64.b64encode(gzip.compress(plotly_script().encode(), 9, mtime=0)).decode()
