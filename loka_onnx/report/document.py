"""A report as plain text in a structure; what Markdown and HTML are both written from.

Nothing here is escaped: each writer escapes for its own language. Any text may be `Told`, which knows where
the numbers in it are from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from loka_onnx.report.budget_bar import BudgetBar
from loka_onnx.report.figures import Told

Item = TypeVar("Item")


class Tone(StrEnum):
    """How a cell or a verdict is coloured; never the only carrier of a meaning."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    WARN = "warn"
    MUTED = "muted"


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: What stands in it.
        tone: Its colour.
    """

    text: str
    tone: Tone = Tone.PLAIN

    @property
    def value(self) -> float | None:
        """The first number of it, unrounded, to sort by; None where it has none."""
        figures = self.text.figures if isinstance(self.text, Told) else ()
        return figures[0].value if figures else None

    @property
    def source(self) -> str:
        """Where each number of it is from (`report.figures`); empty where it has none."""
        return source_of(self.text)


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: Heading.
        numeric: Whether it is aligned at the right.
        prose: Whether it holds sentences; Markdown lists these below the table, where they can be read in
            a terminal.
        is_choice: Whether the page offers its values as a choice of rows.
    """

    title: str
    numeric: bool = False
    prose: bool = False
    is_choice: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: What it shows.
        columns: Its columns.
        rows: As many cells each as there are columns.
        emphasized: Indices of rows that stand out (the emitted engines).
        keys: How many columns at the left name a row.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    emphasized: frozenset[int] = frozenset()
    keys: int = 1

    def sentences(self, row: tuple[Cell, ...]) -> tuple[Cell, ...]:
        """What a row has to say in its columns of prose."""
        found = zip(self.columns, row, strict=True)
        return tuple(cell for column, cell in found if column.prose and cell.text)


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        anchor: Its id in links.
        title: Heading.
        paragraphs: Text above the tables.
        items: A list above the tables.
        tables: Its tables.
        chart: Whether the chart stands here.
    """

    anchor: str
    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    chart: bool = False


@dataclass(frozen=True)
class Stat:
    """One number of a verdict.

    Attributes:
        label: What it is.
        shown: The number, or in words why there is none.
        note: Its interval, where it comes from, what it is held against.
    """

    label: str
    shown: Cell
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The answer for one target.

    Attributes:
        target: Its name.
        headline: Which engine, in one sentence.
        facts: What it costs, and why it was chosen; everything that `stats` say is among them.
        tone: Good for FP8 inside the budget, a warning otherwise.
        stats: The few numbers that decide, for the page.
        bars: What was judged against its budget, for the page.
    """

    target: str
    headline: str
    facts: tuple[str, ...]
    tone: Tone
    stats: tuple[Stat, ...] = ()
    bars: tuple[BudgetBar, ...] = ()


@dataclass(frozen=True)
class Document:
    """A whole report.

    Attributes:
        title: Heading.
        banner: A warning above everything; empty when there is none.
        verdicts: One per target.
        sections: Everything else.
    """

    title: str
    banner: str
    verdicts: tuple[Verdict, ...]
    sections: tuple[Section, ...]


def source_of(text: str) -> str:
    """Where each number of a text is from; empty where it has none, or is of no located document."""
    return text.source if isinstance(text, Told) else ""


def cell(text: str, tone: Tone = Tone.PLAIN) -> Cell:
    """A cell."""
    return Cell(text, tone)


@dataclass(frozen=True)
class Field(Generic[Item]):
    """A column, and what stands in it for one item.

    Attributes:
        column: The column.
        show: Text or cell of an item.
    """

    column: Column
    show: Callable[[Item], Cell | str]


def text(title: str, show: Callable[[Item], Cell | str]) -> Field[Item]:
    """A column of words."""
    return Field(Column(title), show)


def number(title: str, show: Callable[[Item], Cell | str]) -> Field[Item]:
    """A column of numbers, aligned at the right."""
    return Field(Column(title, numeric=True), show)


def prose(title: str, show: Callable[[Item], Cell | str]) -> Field[Item]:
    """A column of sentences."""
    return Field(Column(title, prose=True), show)


def table_of(
    caption: str,
    fields: Sequence[Field[Item]],
    items: Iterable[Item],
    emphasized: Collection[int] = (),
    keys: int = 1,
) -> Table:
    """A table with one row for each item; the other arguments are those of `Table`."""
    rows = tuple(tuple(_as_cell(field.show(item)) for field in fields) for item in items)
    return Table(caption, tuple(field.column for field in fields), rows, frozenset(emphasized), keys)


def _as_cell(shown: Cell | str) -> Cell:
    return shown if isinstance(shown, Cell) else Cell(shown)
