"""A difference of two things, and its renderers for a terminal and for a page.

Bundles, deployments and runs are compared each in its own way, and leave a document of their own (the JSON).
A view makes a `Difference` of each, which is all that the renderers know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from loka_onnx.report import numbers
from loka_onnx.report.document import (
    Cell,
    Document,
    Field,
    Section,
    Table,
    Tone,
    Verdict,
    number,
    prose,
    table_of,
    text,
)
from loka_onnx.report.provenance import Pointers, located

SCREEN_LINES = 40
SCREEN_COLUMNS = 110
_STYLES = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.BAD: "bold red", Tone.WARN: "yellow", Tone.MUTED: "dim"}


_NOTHING = Cell("")


@dataclass(frozen=True)
class Row:
    """One difference. A side is None where it has nothing to say.

    `mark` stands in front of the name on a terminal, `remark` is a sentence.
    """

    name: str
    before: str | None = None
    after: str | None = None
    judgement: Cell = _NOTHING
    remark: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Subject:
    """Rows about one thing.

    Attributes:
        title: Heading; caption of the table on a page.
        rows: The differences.
        section: Section of the page; subjects of one section stand one after another.
        heads: Headings of the columns: name, before, after, judgement.
        text: Sentences above the rows; on a page, of the section.
        numeric: Whether both sides are numbers, each with its source.
        width: Columns of the name on a terminal; 0 for a colon behind it.
    """

    title: str
    rows: tuple[Row, ...]
    section: str = ""
    heads: tuple[str, str, str, str] = ("Name", "Old", "New", "Change")
    text: tuple[str, ...] = ()
    numeric: bool = False
    width: int = 0


@dataclass(frozen=True)
class Difference:
    """The difference of two things.

    Attributes:
        title: Heading of a page.
        sides: Lines that describe the sides.
        subjects: What differs.
        notes: What a reader must know, each a sentence without its full stop.
        banner: A warning above everything of a page.
        verdicts: Where there are any, a terminal shows them in place of the rows.
    """

    title: str
    sides: tuple[str, ...]
    subjects: tuple[Subject, ...]
    notes: tuple[str, ...] = ()
    banner: str = ""
    verdicts: tuple[Verdict, ...] = ()


# Terminal -----------------------------------------------------------------------------------------


def print_difference(out: Console, found: Difference, *, screen: bool = False) -> None:
    """Print a difference, all of it or as many rows of each subject as fit on a screen."""
    # soft_wrap: a path or id that is cut at the margin cannot be copied.
    for line in screen_lines(found) if screen else lines(found):
        out.print(line, soft_wrap=True)


def screen_lines(found: Difference) -> Iterator[Text]:
    """Lines that fit on a screen, with a count of what is left out; of each subject one row at least."""
    most = 1
    while most < SCREEN_LINES and sum(1 for _ in lines(found, most + 1)) <= SCREEN_LINES:
        most += 1
    for place, line in enumerate(lines(found, most)):
        if place >= len(found.sides):
            # A path that is cut off cannot be copied; a value can be had in full.
            line.truncate(SCREEN_COLUMNS, overflow="ellipsis")
        yield line


def lines(found: Difference, most: int | None = None) -> Iterator[Text]:
    """Lines for a terminal, at most `most` rows of each subject."""
    yield from map(Text, found.sides)
    for verdict in found.verdicts:
        yield Text(verdict.headline, style=_STYLES[verdict.tone])
        yield from (Text(f"  {fact}") for fact in verdict.facts)
    for note in found.notes:
        yield Text.assemble(("! ", "yellow"), note)
    for subject in () if found.verdicts else found.subjects:
        yield Text(subject.title, style="bold")
        yield from (Text(f"  {sentence}") for sentence in subject.text)
        for row in subject.rows[:most]:
            yield _line(row, subject.width)
        if most is not None and len(subject.rows) > most:
            yield Text(f"  … and {len(subject.rows) - most} more (--all)")


def _line(row: Row, width: int) -> Text:
    sides = " → ".join(side for side in (row.before, row.after) if side is not None)
    name = f"{row.name:<{width}}" if width and sides else f"{row.name}: " if sides else row.name
    gap = "  " if row.judgement.text else ""
    line = Text.assemble(f"  {row.mark}{name}{sides}{gap}", (row.judgement.text, _STYLES[row.judgement.tone]))
    return line.append(f"; {row.remark}") if row.remark else line


# Page ---------------------------------------------------------------------------------------------


def page(found: Difference, facts: object) -> Document:
    """Arrange a difference as a report.

    Args:
        found: The difference.
        facts: The document whose numbers it shows: the page names the place of each.
    """
    sections = list[Section]()
    if found.notes:
        sections.append(Section("notes", "Notes", items=tuple(f"{note}." for note in found.notes)))
    for title, group in groupby(found.subjects, lambda subject: subject.section):
        subjects = tuple(group)
        paragraphs = tuple(sentence for subject in subjects for sentence in subject.text)
        tables = tuple(_table(subject) for subject in subjects if subject.title)
        sections.append(
            Section(title.partition(",")[0].lower().replace(" ", "-"), title, paragraphs, tables=tables)
        )
    return located(Document(found.title, found.banner, found.verdicts, tuple(sections)), Pointers(facts))


def _table(subject: Subject) -> Table:
    side = number if subject.numeric else text
    name, before, after, judgement = subject.heads
    fields: list[Field[Row]] = [
        text(name, lambda row: row.name),
        side(before, lambda row: numbers.NONE if row.before is None else row.before),
        side(after, lambda row: numbers.NONE if row.after is None else row.after),
    ]
    if any(row.judgement.text for row in subject.rows):
        fields.append(text(judgement, lambda row: row.judgement))
    if any(row.remark for row in subject.rows):
        fields.append(prose("Remark", lambda row: row.remark))
    return table_of(subject.title, fields, subject.rows)
