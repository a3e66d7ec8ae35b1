"""Small pieces of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def cell(text: object) -> str:
    """A text that fits into a cell of a table: on one line, its bars escaped."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers_from: int = 0) -> str:
    """A table.

    Args:
        head: One title for each column.
        rows: As many cells as titles each.
        numbers_from: First column that is aligned to the right; 0 for none.
    """
    lines = ["| " + " | ".join(cell(title) for title in head) + " |"]
    marks = ("---:" if numbers_from and index >= numbers_from else "---" for index in range(len(head)))
    lines.append("|" + "|".join(marks) + "|")
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"a row of {len(row)} cells under {len(head)} titles: {row}")
        lines.append("| " + " | ".join(cell(value) for value in row) + " |")
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """Inline code; longer fences where the text holds backticks."""
    fence = "`" * (1 + max((len(run) for run in _runs(text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _runs(text: str) -> list[str]:
    runs, current = [], ""
    for character in text:
        if character == "`":
            current += character
        else:
            runs, current = [*runs, current], ""
    return [run for run in [*runs, current] if run]
