"""Write a document as Markdown that is readable in a terminal."""

from __future__ import annotations

import re
import textwrap
import unicodedata

from loka_onnx.report.document import Column, Document, Section, Table

_WIDTH = 100
_ENTITY = re.compile(r"&(?=#?\w+;)")
# A bracket matters only before a link; escaping all would spoil intervals.
_SPECIAL = re.compile(r"([\\`*|]|\](?=[(\[:])|~(?=~))")
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|(?:µs|ms|s|B|KiB|MiB|GiB)\b)")
# An underscore inside a word is literal, as in over_arch.fc2; at its edge it would open emphasis.
_EDGE_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
_LINE_START = re.compile(r"^(\s*)([#>+-]|\d+[.)])(?=\s|$|[#>+=-])")


def escape(text: str) -> str:
    """Return plain text as one line of Markdown without markup."""
    flat = " ".join(text.split())
    flat = _ENTITY.sub("&amp;", flat).replace("<", "&lt;").replace(">", "&gt;")
    return _EDGE_UNDERSCORE.sub(r"\\_", _SPECIAL.sub(r"\\\1", flat))


def to_markdown(document: Document) -> str:
    """Write a document, ending with a newline."""
    blocks = [f"# {escape(document.title)}"]
    if document.banner:
        blocks.append(f"> **{escape(document.banner)}**")
    for verdict in document.verdicts:
        blocks.append(f"## {escape(verdict.headline)}")
        blocks.append(_list(verdict.facts))
    for section in document.sections:
        blocks += _section(section)
    return "\n\n".join(blocks) + "\n"


def _section(section: Section) -> list[str]:
    blocks = [f"## {escape(section.title)}"]
    blocks += [_fill(text) for text in section.paragraphs]
    blocks += [_list(section.items)] if section.items else []
    for table in section.tables:
        blocks.append(f"### {escape(table.caption)}")
        blocks += _table(table) if table.rows else ["None."]
    return blocks


def _fill(text: str, first: str = "", other: str = "") -> str:
    line = _LINE_START.sub(r"\1\\\2", escape(text))
    # textwrap breaks at the ASCII space only, so that a number keeps its unit.
    filled = textwrap.fill(
        _BEFORE_UNIT.sub("\u00a0", line),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=other,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return filled.replace("\u00a0", " ")


def _list(items: tuple[str, ...]) -> str:
    return "\n".join(_fill(item, "- ", "  ") for item in items)


def _table(table: Table) -> list[str]:
    places = [i for i, column in enumerate(table.columns) if column.prose]
    sentences = tuple(
        f"{' · '.join(c.text for c in row[: table.keys])}: {row[i].text}"
        for row in table.rows
        for i in places
        if row[i].text
    )
    grid = [_grid(table)] if table.keys + len(places) < len(table.columns) else []
    return [*grid, _list(sentences)] if sentences else grid


def _grid(table: Table) -> str:
    shown = [i for i, column in enumerate(table.columns) if not column.prose]
    columns = [table.columns[i] for i in shown]
    rows = []
    for number, row in enumerate(table.rows):
        cells = [escape(row[i].text) for i in shown]
        if number in table.emphasized:
            cells[0] = f"**{cells[0]}**"
        rows.append(cells)
    heads = [escape(column.title) for column in columns]
    widths = [max(3, *(_width(line[i]) for line in (heads, *rows))) for i in range(len(columns))]
    rule = [f"{'-' * (w - 1)}:" if c.numeric else "-" * w for c, w in zip(columns, widths, strict=True)]
    lines = [_row(heads, columns, widths), f"| {' | '.join(rule)} |"]
    lines += [_row(cells, columns, widths) for cells in rows]
    return "\n".join(lines)


def _row(cells: list[str], columns: list[Column], widths: list[int]) -> str:
    padded = []
    for text, column, width in zip(cells, columns, widths, strict=True):
        space = " " * (width - _width(text))
        padded.append(space + text if column.numeric else text + space)
    return f"| {' | '.join(padded)} |"


def _width(text: str) -> int:
    return sum(
        2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text
    )
