"""Scores of what is emitted, on certification: calibration, and how far scores moved."""

from __future__ import annotations

from functools import partial

from loka_onnx.core.evaluation import CalibrationBin, OutputEvaluation
from loka_onnx.report import numbers
from loka_onnx.report.data import CERTIFICATION, ReportData
from loka_onnx.report.document import Column, Section, number, table_of, text
from loka_onnx.report.figures import shown

Curve = tuple[str, OutputEvaluation]
"""Name of an engine or of the reference, and one of its outputs."""


def certified_curves(data: ReportData) -> list[Curve]:
    """Return outputs of the reference and of what is emitted, on certification."""
    ids = [*data.references, *(engine.id for engine in data.engines if data.chosen(engine.id))]
    return [(name, output) for name in ids for output in data.outputs(name, CERTIFICATION)]


def scores_sections(data: ReportData) -> tuple[Section, ...]:
    """Return the section; empty where nothing was certified."""
    curves = certified_curves(data)
    moved = [curve for curve in curves if any(curve[1].drift.values())]
    bins = [(*curve, each) for curve in curves for each in curve[1].calibration]
    tables = []
    if moved:
        levels = moved[0][1].drift
        columns: tuple[Column[Curve], ...] = (
            text("Engine", lambda row: row[0]),
            text("Output", lambda row: row[1].output),
            *(number(level, partial(_quantile, level)) for level in sorted(levels, key=_share)),
        )
        caption = "Change of the score (logit, or value of a regression) below which so many rows lie"
        tables.append(table_of(caption, columns, moved))
    if bins:
        tables.append(table_of("Prediction and label of rows in the order of predictions", _BINS, bins))
    return (Section("scores", "Scores", tables=tuple(tables)),) if tables else ()


def _quantile(level: str, curve: Curve) -> str:
    return shown(lambda value: f"{value:+.2g}" if value else "0", curve[1].drift, level)


def _share(level: str) -> float:
    return float(level.rstrip(" %"))


_BINS: tuple[Column[tuple[str, OutputEvaluation, CalibrationBin]], ...] = (
    text("Engine", lambda row: row[0]),
    text("Output", lambda row: row[1].output),
    number("Rows", lambda row: shown(numbers.count, row[2], "rows")),
    number("Mean prediction", lambda row: shown(numbers.metric, row[2], "predicted")),
    number("Mean label", lambda row: shown(numbers.metric, row[2], "observed")),
)
