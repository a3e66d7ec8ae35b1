"""Accuracy on the slices of the data: each value of each column in `data.slices`."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.evaluation import BudgetStatus, Evaluation, OutputEvaluation, SliceDifference
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData, confidence_text
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, cell

SHOWN = 10
"""Slices of one engine and output that the texts show; report.json has all of them."""
NULL = "(null)"

_TONES = {
    BudgetStatus.WITHIN: Tone.GOOD,
    BudgetStatus.BEYOND: Tone.BAD,
    BudgetStatus.UNDECIDED: Tone.WARN,
    BudgetStatus.NOT_JUDGED: Tone.MUTED,
}


def slices_sections(data: ReportData) -> tuple[Section, ...]:
    """The section, where any column was named under `data.slices`; else nothing."""
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


def slices_sentence(output: OutputEvaluation) -> str:
    """How the slices of an output stand to its budget, with the worst of those that are beyond it."""
    counts = [
        f"{numbers.count(len(found))} {status}"
        for status in (BudgetStatus.WITHIN, BudgetStatus.UNDECIDED, BudgetStatus.NOT_JUDGED)
        if (found := output.slices_of(status))
    ]
    beyond, judged = output.slices_of(BudgetStatus.BEYOND), _judged(output)
    said = (
        f"{numbers.count(len(beyond)) if beyond else 'none'} of {numbers.count(judged)} judged beyond the "
        f"budget of {numbers.budget_percent(output.budget)}"
    )
    worst = f"; worst {slice_name(beyond[0])}: {_change(beyond[0], output)}" if beyond else ""
    return f"{said}{worst}{'; ' if counts else ''}{', '.join(counts)}"


def slice_name(item: SliceDifference) -> str:
    """``country = BR``."""
    return f"{item.column} = {_value(item)}"


def _value(item: SliceDifference) -> str:
    if item.value is None:
        return NULL
    return item.value or "(empty text)"


def _judged(output: OutputEvaluation) -> int:
    return len(output.slices) - len(output.slices_of(BudgetStatus.NOT_JUDGED))


def _change(item: SliceDifference, output: OutputEvaluation) -> str:
    if item.judged is None:
        return f"{BudgetStatus.NOT_JUDGED} ({numbers.count(item.rows)} rows)"
    text = numbers.percent_interval(item.judged, output.budget)
    return f"KL {text}" if item.delta_ne is None else text


def _left_out(evaluation: Evaluation, output: OutputEvaluation) -> Iterator[str]:
    for column, count in output.slices_left_out.items():
        yield (
            f"Column '{column}' has many values: the most frequent on {evaluation.split} are looked at, "
            f"{numbers.count(count)} are left out."
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
    count = len(output.slices_of(status))
    return cell(numbers.count(count), _TONES[status] if count else Tone.MUTED)


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
    shown = output.slices[:SHOWN]
    rows = tuple(
        (
            cell(item.column),
            cell(_value(item)),
            cell(numbers.count(item.rows)),
            cell(_change(item, output), _TONES[item.status]),
            cell(numbers.NONE if item.kl is None else numbers.percent_interval(item.kl)),
            cell(numbers.NONE if item.labelled is None else numbers.percent_interval(item.labelled)),
            cell(item.status, _TONES[item.status]),
            cell(item.reason),
        )
        for item in shown
    )
    rest = len(output.slices) - len(shown)
    more = f"; {numbers.count(rest)} more in report.json" if rest else ""
    caption = (
        f"Worst slices of {evaluation.engine}, {output.output}, on {evaluation.split}, budget "
        f"{numbers.budget_percent(output.budget)}{more}"
    )
    return Table(caption, columns, rows, keys=2)
