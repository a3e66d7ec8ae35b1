"""Accuracy on the slices of the data: each value of each column in `data.slices`."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.evaluation import BudgetStatus, Evaluation, OutputEvaluation, SliceDifference
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData, confidence_text
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, cell
from loka_onnx.report.figures import (
    Figure,
    Place,
    Told,
    derive,
    formed,
    joined,
    percent_interval,
    shown,
    told,
)

SHOWN = 10
"""Most slices of one engine and output in texts; report.json has all."""
NULL = "(null)"

_TONES = {
    BudgetStatus.WITHIN: Tone.GOOD,
    BudgetStatus.BEYOND: Tone.BAD,
    BudgetStatus.UNDECIDED: Tone.WARN,
    BudgetStatus.NOT_JUDGED: Tone.MUTED,
}


def slices_sections(data: ReportData) -> tuple[Section, ...]:
    """Return the section; empty without columns under `data.slices`."""
    sliced = [(e, o) for e in data.evaluations.evaluations for o in e.outputs if o.slices]
    if not sliced:
        return ()
    splits = [split for split in data.splits if any(e.split == split for e, _ in sliced)]
    detailed = [pair for pair in sliced if data.chosen(pair[0].engine) or pair[1].slices_of("beyond")]
    return (
        Section(
            "slices",
            "Slices",
            paragraphs=(
                "Each slice is judged on its own rows, relative to its own FP32 loss (its own entropy where "
                "there are no labels). The intervals of all slices of an output hold together at "
                f"{' and '.join(dict.fromkeys(confidence_text(data, split) for split in splits))}. "
                "Slices do not enter the choice.",
                "Worst first, by the lower end: where harm is sure comes before where a few rows leave it "
                f"open. Shown are the first {SHOWN} slices of what is emitted and of what harms a slice; "
                "report.json has all of them.",
            ),
            items=tuple(dict.fromkeys(text for pair in sliced for text in _left_out(*pair))),
            tables=(
                *(_count_table(data, split, sliced) for split in splits),
                *(_worst_table(e, output, confidence_text(data, e.split)) for e, output in detailed),
            ),
        ),
    )


def slices_sentence(output: OutputEvaluation) -> Told:
    """Return the status of an output's slices, with the worst of those beyond the budget."""
    counts = [
        told("{} {}", formed(numbers.count, _counted(output, status)), status)
        for status in (BudgetStatus.WITHIN, BudgetStatus.UNDECIDED, BudgetStatus.NOT_JUDGED)
        if output.slices_of(status)
    ]
    beyond = output.slices_of(BudgetStatus.BEYOND)
    judged = derive("sum", *(_counted(output, s) for s in _ORDER if s != BudgetStatus.NOT_JUDGED))
    said = told(
        "{} of {} judged beyond the budget of {}",
        formed(numbers.count, _counted(output, BudgetStatus.BEYOND)) if beyond else "none",
        formed(numbers.count, judged),
        shown(numbers.budget_percent, output, "budget"),
    )
    worst = told("; worst {}: {}", slice_name(beyond[0]), _change(beyond[0], output)) if beyond else ""
    return told("{}{}{}{}", said, worst, "; " if counts else "", joined(", ", counts))


def slice_name(item: SliceDifference) -> str:
    """``country = BR``."""
    return f"{item.column} = {_value(item)}"


def _value(item: SliceDifference) -> str:
    if item.value is None:
        return NULL
    return item.value or "(empty text)"


def _counted(output: OutputEvaluation, status: str) -> Figure:
    return derive("count", Place(output, "slices"), status=status)


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


def _count_table(data: ReportData, split: str, sliced: list[tuple[Evaluation, OutputEvaluation]]) -> Table:
    columns = (
        Column("Engine"),
        Column("Output"),
        Column("Beyond", numeric=True),
        Column("Undecided", numeric=True),
        Column("Within", numeric=True),
        Column("Not judged", numeric=True),
        Column("Worst slice"),
        Column(f"Its change [simultaneous {confidence_text(data, split)} interval]", numeric=True),
    )
    here = [(e, o) for e, o in sliced if e.split == split]
    rows = tuple(
        (
            cell(evaluation.engine),
            cell(output.output),
            *(_count(output, status) for status in _ORDER),
            cell(slice_name(output.slices[0])),
            cell(_change(output.slices[0], output), _TONES[output.slices[0].status]),
        )
        for evaluation, output in here
    )
    emphasized = frozenset(i for i, (e, _) in enumerate(here) if data.chosen(e.engine) is not None)
    return Table(f"Slices on {split}", columns, rows, emphasized)


_ORDER = (BudgetStatus.BEYOND, BudgetStatus.UNDECIDED, BudgetStatus.WITHIN, BudgetStatus.NOT_JUDGED)


def _count(output: OutputEvaluation, status: str) -> Cell:
    count = _counted(output, status)
    return cell(formed(numbers.count, count), _TONES[status] if count.value else Tone.MUTED)


def _worst_table(evaluation: Evaluation, output: OutputEvaluation, level: str) -> Table:
    columns = (
        Column("Column"),
        Column("Value"),
        Column("Rows", numeric=True),
        Column(f"Change [simultaneous {level} interval]", numeric=True),
        Column("KL, label-free part", numeric=True),
        Column("Labelled part", numeric=True),
        Column("Status"),
        Column("Why", prose=True),
    )
    rows = tuple(
        (
            cell(item.column),
            cell(_value(item)),
            cell(shown(numbers.count, item, "rows")),
            cell(_change(item, output), _TONES[item.status]),
            cell(percent_interval(item.kl)),
            cell(percent_interval(item.labelled)),
            cell(item.status, _TONES[item.status]),
            cell(item.reason),
        )
        for item in output.slices[:SHOWN]
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
    return Table(caption, columns, rows, keys=2)
