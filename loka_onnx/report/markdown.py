"""Write a document as Markdown."""

from __future__ import annotations

import re

from loka_onnx.report.document import Document, Section, Table

_ENTITY = re.compile(r"&(?=#?\w+;)")
# A bracket matters only before a link; escaping all would spoil intervals.
_SPECIAL = re.compile(r"([\\`*|]|\](?=[(\[:])|~(?=~))")
# An underscore inside a word is literal, as in over_arch.fc2; at its edge it would open emphasis.
_EDGE_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
_LINE_START = re.compile(r"^(\s*)([#>+-]|\d+[.)])(?=\s|$|[#>+=-])")


def escape(text: str) -> str:
    """Return plain text as one line of Markdown without markup."""
    flat = " ".join(text.split())
    flat = _ENTITY.sub("&amp;", flat).replace("<", "&lt;").replace(">", "&gt;")
    return _EDGE_UNDERSCORE.sub(r"\\_", _SPECIAL.sub(r"\\\1", flat))


def to_markdown(document: Document) -> str:
    """Return a document as Markdown, ending with a newline."""
    blocks = [f"# {escape(document.title)}"]
    if document.banner:
        blocks.append(f"> **{escape(document.banner)}**")
    blocks += [_line(document.about)] if document.about else []
    blocks += [_table(document.overview)] if document.overview else []
    for verdict in document.verdicts:
        blocks.append(f"## {escape(verdict.headline)}")
        blocks.append(_list(verdict.facts))
    for section in document.sections:
        blocks += _section(section)
    return "\n\n".join(blocks) + "\n"


def _section(section: Section) -> list[str]:
    blocks = [f"## {escape(section.title)}"]
    blocks += [_line(text) for text in section.paragraphs]
    blocks += [_list(section.items)] if section.items else []
    for table in section.tables:
        blocks.append(f"### {escape(table.caption)}")
        blocks.append(_table(table) if table.rows else "None.")
    return blocks


def _line(text: str) -> str:
    return _LINE_START.sub(r"\1\\\2", escape(text))


def _list(items: tuple[str, ...]) -> str:
    return "\n".join(f"- {_line(item)}" for item in items)


def _table(table: Table) -> str:
    rows = [[escape(cell.text) for cell in row] for row in table.rows]
    for number in table.emphasized:
        rows[number][0] = f"**{rows[number][0]}**"
    rule = ["--:" if column.numeric else "---" for column in table.columns]
    heads = [escape(column.title) for column in table.columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))
