"""Renders the results of a run as JSON, Markdown, HTML and a terminal table; computes nothing."""

from loka_onnx.report.data import DataDescription, ReportData, SplitDescription
from loka_onnx.report.render import HTML_NAME, JSON_NAME, MARKDOWN_NAME, render
from loka_onnx.report.summary import summary_table

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
