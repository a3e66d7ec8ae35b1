"""Values as tables of rows: short in an interpreter, and HTML in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

Rows = list[dict[str, Any]]
"""Rows of plain values, all of the same keys: what `pandas.DataFrame` and `polars.DataFrame` take."""
SHOWN = 60
"""Most rows of a table in a notebook."""


class Tabular:
    """A value with rows, shown in place of all that it holds."""

    @property
    def title(self) -> str:
        """Text of one line or a few."""
        raise NotImplementedError

    def records(self) -> Rows:
        """Return its rows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.title

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.title).replace(chr(10), '<br>')}</p>{html_table(self.records())}"


def html_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the first `SHOWN` rows; everything in it is text."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    lines = (
        "".join(f"<td>{html.escape(_text(value))}</td>" for value in row.values()) for row in rows[:SHOWN]
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    more = f"<p>and {len(rows) - SHOWN} more</p>" if len(rows) > SHOWN else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return "" if value is None else str(value)
