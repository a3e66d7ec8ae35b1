"""Accuracy on slices, each value of each column in `data.slices`, and scores of what is emitted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from loka_onnx.core.evaluation import (
    BudgetStatus,
    CalibrationBin,
    Evaluation,
    OutputEvaluation,
    SliceDifference,
)
from loka_onnx.report import numbers
from loka_onnx.report.data import CERTIFICATION, ReportData, confidence_text
from loka_onnx.report.document import (
    BUDGET_TONES,
    Cell,
    Column,
    Section,
    Table,
    fact,
    number,
    prose,
    table_of,
    text,
)
from loka_onnx.report.figures import (
    Place,
    Told,
    counted,
    derive,
    formed,
    joined,
    percent_interval,
    shown,
    told,
)

SHOWN = 10
"""Most slices of one engine and output in texts; report.json has all."""
_JUDGED = (BudgetStatus.BEYOND, BudgetStatus.UNDECIDED, BudgetStatus.WITHIN)


def slices_sections(data: ReportData) -> tuple[Section, ...]:
    """Return the section; empty without columns under `data.slices`."""
    sliced = [(e, o) for e in data.evaluations.evaluations for o in e.outputs if o.slices]
    if not sliced:
        return ()
    splits = [split for split in data.splits if any(e.split == split for e, _ in sliced)]
    detailed = [pair for pair in sliced if data.chosen(pair[0].engine) or pair[1].slices_of("beyond")]
    paragraphs = (
        "Each slice is judged on its own rows, relative to its own FP32 loss (its own entropy where "
        "there are no labels). The intervals of all slices of an output hold together at "
        f"{' and '.join(dict.fromkeys(confidence_text(data, split) for split in splits))}. "
        "Slices do not enter the choice.",
        "Worst first, by the lower end: where harm is sure comes before where a few rows leave it "
        f"open. Shown are the first {SHOWN} slices of what is emitted and of what harms a slice; "
        "report.json has all of them.",
    )
    tables = tuple(_worst_table(e, output, confidence_text(data, e.split)) for e, output in detailed)
    items = tuple(dict.fromkeys(text for pair in sliced for text in _left_out(*pair)))
    return (Section("slices", "Slices", paragraphs, items, tables),)


def slices_sentence(output: OutputEvaluation) -> Told:
    """Return the status of an output's slices, with the worst of those beyond the budget."""
    counts = [
        told("{} {}", counted(output, "slices", status=status), status)
        for status in (BudgetStatus.WITHIN, BudgetStatus.UNDECIDED, BudgetStatus.NOT_JUDGED)
        if output.slices_of(status)
    ]
    beyond = output.slices_of(BudgetStatus.BEYOND)
    judged = derive("sum", *(derive("count", Place(output, "slices"), status=s) for s in _JUDGED))
    summary = told(
        "{} of {} judged beyond the budget of {}",
        counted(output, "slices", status=BudgetStatus.BEYOND) if beyond else "none",
        formed(numbers.count, judged),
        shown(numbers.budget_percent, output, "budget"),
    )
    worst = told("; worst {}: {}", slice_name(beyond[0]), _change(beyond[0], output)) if beyond else ""
    return told("{}{}{}{}", summary, worst, "; " if counts else "", joined(", ", counts))


def slice_name(item: SliceDifference) -> str:
    """``country = BR``."""
    return f"{item.column} = {_value(item)}"


def _value(item: SliceDifference) -> str:
    return "(null)" if item.value is None else item.value or "(empty text)"


def _change(item: SliceDifference, output: OutputEvaluation) -> Told:
    if item.judged is None:
        return told("{} ({} rows)", BudgetStatus.NOT_JUDGED, shown(numbers.count, item, "rows"))
    text = percent_interval(item.judged, output.budget)
    return told("KL {}", text) if item.delta_ne is None else text


def _left_out(evaluation: Evaluation, output: OutputEvaluation) -> Iterator[str]:
    for column in output.slices_left_out:
        yield told(
            "Column '{}' has many values: the most frequent on {} are looked at, {} are left out.",
            column,
            evaluation.split,
            shown(numbers.count, output.slices_left_out, column),
        )


def _worst_table(evaluation: Evaluation, output: OutputEvaluation, level: str) -> Table:
    def change(item: SliceDifference) -> Cell:
        return Cell(_change(item, output), BUDGET_TONES[item.status])

    columns: tuple[Column[SliceDifference], ...] = (
        text("Column", "column"),
        text("Value", _value),
        fact("Rows", "rows", numbers.count),
        number(f"Change [simultaneous {level} interval]", change),
        number("KL, label-free part", lambda item: percent_interval(item.kl)),
        number("Labelled part", lambda item: percent_interval(item.labelled)),
        text("Status", lambda item: Cell(item.status, BUDGET_TONES[item.status])),
        prose("Why", "reason"),
    )
    rest = derive("entries", *map(Place, output.slices[SHOWN:]))
    caption = told(
        "Worst slices of {}, {}, on {}, budget {}{}",
        evaluation.engine,
        output.output,
        evaluation.split,
        shown(numbers.budget_percent, output, "budget"),
        told("; {} more in report.json", formed(numbers.count, rest)) if rest.value else "",
    )
    return table_of(caption, columns, output.slices[:SHOWN])


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
        levels = sorted(moved[0][1].drift, key=lambda level: float(level[:-2]))
        columns: tuple[Column[Curve], ...] = (
            text("Engine", lambda row: row[0]),
            text("Output", lambda row: row[1].output),
            *(number(level, partial(_quantile, level)) for level in levels),
        )
        caption = "Change of the score (logit, or value of a regression) below which so many rows lie"
        tables.append(table_of(caption, columns, moved))
    if bins:
        tables.append(table_of("Prediction and label of rows in the order of predictions", _BINS, bins))
    return (Section("scores", "Scores", tables=tuple(tables)),) if tables else ()


def _quantile(level: str, curve: Curve) -> str:
    return shown(lambda value: f"{value:+.2g}" if value else "0", curve[1].drift, level)


_BINS: tuple[Column[tuple[str, OutputEvaluation, CalibrationBin]], ...] = (
    text("Engine", lambda row: row[0]),
    text("Output", lambda row: row[1].output),
    number("Rows", lambda row: shown(numbers.count, row[2], "rows")),
    number("Mean prediction", lambda row: shown(numbers.metric, row[2], "predicted")),
    number("Mean label", lambda row: shown(numbers.metric, row[2], "observed")),
)
