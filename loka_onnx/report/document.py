"""A report as structured plain text, the source of Markdown and HTML.

Nothing here is escaped: each writer escapes for its own language. Any text may be `Told`, which carries the
origin of its numbers.
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
    """Colour of a cell or verdict; never the only carrier of a meaning."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    WARN = "warn"
    MUTED = "muted"


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    tone: Tone = Tone.PLAIN

    @property
    def value(self) -> float | None:
        """Its first number, unrounded, as a sort key; None without one."""
        figures = self.text.figures if isinstance(self.text, Told) else ()
        return figures[0].value if figures else None

    @property
    def source(self) -> str:
        """Origin of each number of it (`report.figures`); empty without one."""
        return source_of(self.text)


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: Heading.
        numeric: Whether it is right-aligned.
        prose: Whether it holds sentences; Markdown lists these below the table, for terminals.
        is_choice: Whether the page offers its values as a filter.
    """

    title: str
    numeric: bool = False
    prose: bool = False
    is_choice: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        rows: As many cells each as there are columns.
        emphasized: Indices of highlighted rows (the selected engines).
        keys: Number of columns at the left that name a row.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    emphasized: frozenset[int] = frozenset()
    keys: int = 1

    def sentences(self, row: tuple[Cell, ...]) -> tuple[Cell, ...]:
        """Return the nonempty prose cells of a row."""
        found = zip(self.columns, row, strict=True)
        return tuple(cell for column, cell in found if column.prose and cell.text)


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        anchor: Its id in links.
        paragraphs: Text above the tables.
        items: A list above the tables.
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
        shown: The number, or in words why there is none.
        note: Interval, origin, limit.
    """

    label: str
    shown: Cell
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The answer for one target.

    Attributes:
        headline: Selected engine, in one sentence.
        facts: Costs and reasons; they include everything in `stats`.
        tone: Good for FP8 inside the budget, a warning otherwise.
        stats: The few deciding numbers, for the page.
        bars: Judged quantities and budgets, for the page.
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
    """Return the origin of each number of a text; empty without numbers, or without a located document."""
    return text.source if isinstance(text, Told) else ""


def cell(text: str, tone: Tone = Tone.PLAIN) -> Cell:
    """A cell."""
    return Cell(text, tone)


@dataclass(frozen=True)
class Field(Generic[Item]):
    """A column with its content for one item."""

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
    """Return a table with one row for each item; further arguments as in `Table`."""
    rows = tuple(tuple(_as_cell(field.show(item)) for field in fields) for item in items)
    return Table(caption, tuple(field.column for field in fields), rows, frozenset(emphasized), keys)


def _as_cell(shown: Cell | str) -> Cell:
    return shown if isinstance(shown, Cell) else Cell(shown)
