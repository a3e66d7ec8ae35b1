"""A difference of two bundles, deployments or runs: sections of rows, for a terminal, JSON and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text

from loka_onnx.core import serde
from loka_onnx.core.evaluation import Latency
from loka_onnx.report import document as report
from loka_onnx.report import numbers
from loka_onnx.report.document import Tone
from loka_onnx.report.figures import Place, Told, formed, told
from loka_onnx.report.markdown import to_markdown
from loka_onnx.report.webpage import Exhibits, to_html

SCREEN_LINES = 40
SCREEN_COLUMNS = 110
FILES = ("comparison.json", "comparison.md", "comparison.html")
_STYLES = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.BAD: "bold red", Tone.WARN: "yellow", Tone.MUTED: "dim"}


@dataclass(frozen=True)
class Value:
    """A value as text, with every number of the text, unrounded, in their order."""

    text: str
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class Row:
    """One difference; a side without the value has None, and so has `verdict` where the sides say all."""

    what: str
    before: Value | None = None
    after: Value | None = None
    verdict: Value | None = None
    tone: Tone = Tone.PLAIN
    note: str = ""


@dataclass(frozen=True)
class Section:
    """Rows about one subject; `text` stands above them."""

    name: str
    title: str
    rows: tuple[Row, ...]
    text: str = ""


@dataclass(frozen=True)
class Side:
    """One of both things (``A``, ``B``, ``old``, ``new``), with the SHA-256 of its exported model."""

    name: str
    path: str
    digest: str
    facts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """The difference of `b` from `a`.

    Attributes:
        basis: Data that both were compared on; empty where nothing was run.
        banner: A warning above everything.
        notes: Conditions of the comparison, each a sentence without its full stop.
        is_different: Bundles: any field. Deployments: any answer. Runs: which engine is emitted.
        beyond: Why the requested budget does not hold; empty where it does, or none was requested.
        failures: By side, the error that ended its measurements.
    """

    SCHEMA: ClassVar[str] = "difference/1"
    __pydantic_config__ = serde.STRICT

    title: str
    a: Side
    b: Side
    sections: tuple[Section, ...]
    is_different: bool
    basis: str = ""
    banner: str = ""
    notes: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)

    def rows(self, section: str) -> tuple[Row, ...]:
        """Rows of all sections of a name."""
        return tuple(row for each in self.sections if each.name == section for row in each.rows)


def row(what: str, *sides: str | None, verdict: str = "", tone: Tone = Tone.PLAIN, note: str = "") -> Row:
    """A row of texts, with at most two sides; the numbers of a `Told` text are kept."""
    before, after, *_ = (*map(_value, sides), None, None)
    return Row(what, before, after, _value(verdict or None), tone, note)


def number(form: Callable[[Any], str], value: float | None) -> Told:
    """A number as text; a dash for None."""
    return formed(form, Place(value))


def times(latency: Latency) -> Told:
    """Median and 99th percentile of a latency."""
    return told("p50 {}, p99 {}", *(number(numbers.latency, us) for us in (latency.p50_us, latency.p99_us)))


def _value(text: str | None) -> Value | None:
    if text is None:
        return None
    figures = text.figures if isinstance(text, Told) else ()
    return Value(str(text), tuple(float(figure.value) for figure in figures if figure.value is not None))


def screen_lines(difference: Difference) -> Iterator[Text]:
    """Lines that fit on a screen, with a count of omitted rows; of each section one row at least."""
    most = 1
    while most < SCREEN_LINES and sum(1 for _ in lines(difference, most + 1)) <= SCREEN_LINES:
        most += 1
    sides = sum(1 for _ in _side_lines(difference))
    for place, line in enumerate(lines(difference, most)):
        if place >= sides:
            # A path that is cut off cannot be copied; values are complete in the JSON.
            line.truncate(SCREEN_COLUMNS, overflow="ellipsis")
        yield line


def lines(difference: Difference, most: int | None = None) -> Iterator[Text]:
    """Lines for a terminal: all, or for a screen at most `most` rows of each section, without its text."""
    yield from map(Text, _side_lines(difference))
    for note in difference.notes:
        yield Text.assemble(("! ", "yellow"), note)
    for section in difference.sections:
        yield Text(section.title, style="bold")
        if section.text and most is None:
            yield Text(f"  {section.text}")
        yield from (_line(item, is_cut=most is not None) for item in section.rows[:most])
        if most is not None and len(section.rows) > most:
            yield Text(f"  … and {len(section.rows) - most} more")


def _side_lines(difference: Difference) -> Iterator[str]:
    for side in (difference.a, difference.b):
        yield f"{side.name}  {side.path}, exported model {numbers.digest(side.digest)}"
        yield from (f"   {fact}" for fact in side.facts)
    if difference.basis:
        yield difference.basis


def _line(item: Row, *, is_cut: bool) -> Text:
    values = [value.text for value in (item.before, item.after) if value is not None]
    mark = ""
    if values and item.verdict is None:
        mark = "+ " if item.before is None else "- " if item.after is None else "~ "
    sides, verdict = Text(" → ".join(values)), item.verdict.text if item.verdict else ""
    if is_cut:
        # The verdict is what a reader looks for.
        sides.truncate(max(30, SCREEN_COLUMNS - len(item.what) - len(verdict) - 8), overflow="ellipsis")
    line = Text.assemble(f"  {mark}{item.what}", ": " if sides or verdict else "", sides)
    line.append(("  " if sides and verdict else "") + verdict, _STYLES[item.tone])
    return line.append(f"; {item.note}") if item.note else line


def write_difference(difference: Difference, directory: Path) -> tuple[Path, ...]:
    """Write comparison.json, comparison.md and comparison.html, each atomically, and return their paths."""
    document = page(difference)
    texts = (serde.dumps(difference), to_markdown(document), to_html(document, Exhibits()))
    paths = tuple(directory / name for name in FILES)
    for path, text in zip(paths, texts, strict=True):
        serde.write_text(text, path)
    return paths


def page(difference: Difference) -> report.Document:
    """The difference as a report; every number names its place in the JSON."""
    sections = [report.Section("compared", "Compared", items=tuple(_side_lines(difference)))]
    if difference.notes:
        sections.append(report.Section("notes", "Notes", items=tuple(f"{n}." for n in difference.notes)))
    for name, group in groupby(enumerate(difference.sections), lambda item: item[1].name):
        members = list(group)
        texts = tuple(section.text for _, section in members if section.text)
        tables = tuple(_table(difference, index) for index, _ in members)
        sections.append(report.Section(name, name.capitalize().replace("-", " "), texts, tables=tables))
    return report.Document(difference.title, difference.banner, (), tuple(sections))


def _table(difference: Difference, index: int) -> report.Table:
    section = difference.sections[index]
    columns: list[report.Column[int]] = [report.text("Name", lambda at: section.rows[at].what)]
    for title, name in ((difference.a.name, "before"), (difference.b.name, "after"), ("Verdict", "verdict")):
        values = [value for item in section.rows if (value := getattr(item, name)) is not None]
        if values:
            kind = report.number if all(value.numbers for value in values) else report.text
            columns.append(kind(title, _cells(section, f"#/value/sections/{index}/rows", name)))
    if any(item.note for item in section.rows):
        columns.append(report.prose("Note", lambda at: section.rows[at].note))
    return report.table_of(section.title, columns, range(len(section.rows)))


def _cells(section: Section, pointer: str, name: str) -> Callable[[int], report.Cell]:
    def cell(at: int) -> report.Cell:
        value: Value | None = getattr(section.rows[at], name)
        if value is None:
            return report.Cell("" if name == "verdict" else numbers.NONE)
        sources = (f"{pointer}/{at}/{name}/numbers/{place}" for place in range(len(value.numbers)))
        figures = [Place(number) for number in value.numbers]
        tone = section.rows[at].tone if name == "verdict" else Tone.PLAIN
        return report.Cell(Told(value.text, figures, " ".join(sources)), tone)

    return cell
