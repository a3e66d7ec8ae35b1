"""A report as structured plain text, the source of Markdown and HTML.

Nothing here is escaped: each writer escapes for its own language. Any text may be `Told`, which carries the
origin of its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, Generic, TypeGuard, TypeVar

from loka_onnx.core.evaluation import BudgetStatus
from loka_onnx.core.intervals import Interval
from loka_onnx.report.figures import Told, shown

Item = TypeVar("Item")
_MARGIN = 0.08
"""Share of a budget bar that stays free at each end."""


class Tone(StrEnum):
    """Colour of a cell or verdict; never the only carrier of a meaning."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    WARN = "warn"
    MUTED = "muted"


BUDGET_TONES = {
    BudgetStatus.WITHIN: Tone.GOOD,
    BudgetStatus.BEYOND: Tone.BAD,
    BudgetStatus.UNDECIDED: Tone.WARN,
    BudgetStatus.NOT_JUDGED: Tone.MUTED,
}


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
        return getattr(self.text, "source", "")


Show = Callable[[Item], Cell | str]


@dataclass(frozen=True)
class Column(Generic[Item]):
    """One column: of numbers, of sentences (below the row of a wide table), or of values to filter by.

    `show` gives the content for one item; `bar` draws each number behind it, on the scale of the largest.
    """

    title: str
    show: Show[Item] = field(compare=False)
    numeric: bool = False
    prose: bool = False
    is_choice: bool = False
    bar: bool = False


@dataclass(frozen=True)
class Table:
    """A table; `emphasized` are the indices of highlighted rows (the selected engines)."""

    caption: str
    columns: tuple[Column[Any], ...]
    rows: tuple[tuple[Cell, ...], ...]
    emphasized: frozenset[int] = frozenset()

    def bar(self, place: int, cell: Cell) -> float | None:
        """Return a number of a column of bars in percent of the column's largest; None for no bar."""
        if not self.columns[place].bar or cell.value is None or not cell.value > 0:
            return None
        values = [value for row in self.rows if (value := row[place].value) and math.isfinite(value)]
        return round(100 * min(cell.value / max(values), 1.0), 1) if values else None

    def sentences(self, row: tuple[Cell, ...]) -> tuple[Cell, ...]:
        """Return the nonempty prose cells of a row."""
        pairs = zip(self.columns, row, strict=True)
        return tuple(cell for column, cell in pairs if column.prose and cell.text)


@dataclass(frozen=True)
class Section:
    """A part of the report; `anchor` is its id in links, paragraphs and items stand above the tables.

    So many of the tables are `unfolded`; None for the first and the short ones.
    """

    anchor: str
    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    unfolded: int | None = None


@dataclass(frozen=True)
class Stat:
    """One number of a verdict, or in words why there is none; the note says interval, origin, limit."""

    label: str
    shown: Cell
    note: str = ""


@dataclass(frozen=True)
class BudgetBar:
    """One judged change (fractions, all ends finite) and its budget on one axis, 0 included."""

    label: str
    text: str
    status: str
    interval: Interval
    budget: float
    budget_text: str

    @property
    def places(self) -> dict[str, float]:
        """Positions of the marks in percent of the bar's length, from the left."""
        lower, value, upper = self.interval.lower, self.interval.value, self.interval.upper
        low = min(0.0, lower)
        width = (max(self.budget, upper) - low) or 1.0
        marks = {"zero": 0.0, "limit": self.budget, "lower": lower, "value": value, "upper": upper}
        return {
            name: round(100 * (_MARGIN + (1 - 2 * _MARGIN) * (mark - low) / width), 2)
            for name, mark in marks.items()
        }


def can_be_drawn(interval: Interval | None) -> TypeGuard[Interval]:
    """Return whether every end of an interval is finite."""
    return interval is not None and all(map(math.isfinite, (interval.lower, interval.value, interval.upper)))


@dataclass(frozen=True)
class TargetVerdict:
    """The answer for one target; `stats` and `bars` are for the page, `facts` include all that they say."""

    target: str
    headline: str
    facts: tuple[str, ...]
    tone: Tone
    stats: tuple[Stat, ...] = ()
    bars: tuple[BudgetBar, ...] = ()


@dataclass(frozen=True)
class Document:
    """A report; the banner warns or is empty, `about` is day, model and rows, `overview` all targets."""

    title: str
    banner: str
    verdicts: tuple[TargetVerdict, ...]
    sections: tuple[Section, ...]
    overview: Table | None = None
    about: str = ""


def text(title: str, show: Show[Item] | str, *, is_choice: bool = False) -> Column[Item]:
    """A column of words: a function of the item, or the name of its attribute."""
    return Column(title, attrgetter(show) if isinstance(show, str) else show, is_choice=is_choice)


def number(title: str, show: Show[Item], *, bar: bool = False) -> Column[Item]:
    """A column of numbers, aligned at the right; with a bar behind each where that is asked for."""
    return Column(title, show, numeric=True, bar=bar)


def fact(title: str, name: str, form: Callable[[Any], str]) -> Column[Any]:
    """A column of numbers, each a field of the item."""
    return number(title, lambda item: shown(form, item, name))


def prose(title: str, show: Show[Item] | str) -> Column[Item]:
    """A column of sentences."""
    return Column(title, attrgetter(show) if isinstance(show, str) else show, prose=True)


def table_of(
    caption: str,
    columns: Sequence[Column[Item]],
    items: Iterable[Item],
    emphasized: Callable[[Item], bool] = lambda _: False,
) -> Table:
    """Return a table with one row for each item."""
    listed = list(items)
    contents = ([column.show(item) for column in columns] for item in listed)
    rows = tuple(tuple(c if isinstance(c, Cell) else Cell(c) for c in row) for row in contents)
    marked = frozenset(index for index, item in enumerate(listed) if emphasized(item))
    return Table(caption, tuple(columns), rows, marked)
