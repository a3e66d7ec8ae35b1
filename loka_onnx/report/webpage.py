"""A document as one self-contained HTML file."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from loka_onnx.report.document import Document
from loka_onnx.report.exhibits import Exhibits


def to_html(document: Document, exhibits: Exhibits, graph: Markup | None = None) -> str:
    """Write a document with its drawn parts, and the markup of the model graph, if any."""
    template = environment().get_template("report.html.j2")
    plotly = _packed_plotly() if exhibits.has_drawings else ""
    return template.render(document=document, exhibits=exhibits, graph=graph, plotly=plotly)


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
