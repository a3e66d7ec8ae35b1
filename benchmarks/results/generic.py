"""Any record: nested figures as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.results.formats import NOTHING, number, spread, table
from benchmarks.results.records import Record

MOST_ROWS = 40
LEAST_FILLED = 0.6
"""Share of the cells of a table that must hold something."""
SPREAD = {"min", "median", "max"}
MEANS = {"min", "mean", "max"}


def render(record: Record) -> str:
    """Every figure, as tables as wide as they are alike."""
    return nested(record.figures)


def nested(value: Any, path: tuple[str, ...] = ()) -> str:
    """Figures below one place.

    Args:
        value: Figures.
        path: Keys that lead there.
    """
    title = f"**{', '.join(path)}**\n\n" if path else ""
    if isinstance(value, Mapping):
        scalars = {str(key): held for key, held in value.items() if is_scalar(held)}
        rest = {str(key): held for key, held in value.items() if not is_scalar(held)}
        parts = []
        if scalars:
            rows = [(readable(key), scalar(held)) for key, held in scalars.items()]
            parts.append(title + table(("figure", "value"), rows))
        if rest and _are_alike(rest):
            parts.append(title + _rows_of(list(rest.items())))
        else:
            parts += [nested(held, (*path, readable(key))) for key, held in rest.items()]
        return "\n".join(parts)
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return title + _rows_of([("", each) for each in value])
    return f"{title}{scalar(value)}\n"


def is_scalar(value: Any) -> bool:
    """Whether it fits into one cell."""
    if isinstance(value, Mapping):
        return set(value) in (SPREAD, MEANS) or not value
    if isinstance(value, list):
        return all(not isinstance(each, (Mapping, list)) for each in value)
    return True


def scalar(value: Any) -> str:
    """A value in one cell."""
    if isinstance(value, Mapping):
        if not value:
            return NOTHING
        return spread({"median": value.get("median", value.get("mean")), **value})
    if isinstance(value, list):
        return ", ".join(number(each) for each in value) or NOTHING
    return number(value)


def readable(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def _are_alike(value: Mapping[str, Any]) -> bool:
    """Whether these are rows of one table: mappings of much the same keys to single values."""
    if not all(isinstance(held, Mapping) for held in value.values()):
        return False
    every = {key for held in value.values() for key in held}
    filled = sum(len(held) for held in value.values())
    is_full = filled >= LEAST_FILLED * len(every) * len(value)
    return is_full and all(is_scalar(each) for held in value.values() for each in held.values())


def _rows_of(named: list[tuple[str, Mapping[str, Any]]]) -> str:
    keys = list(dict.fromkeys(key for _, row in named for key, held in row.items() if is_scalar(held)))
    has_names = any(name for name, _ in named)
    head = ([""] if has_names else []) + [readable(key) for key in keys]
    rows = [
        ([readable(name)] if has_names else []) + [scalar(held.get(key)) for key in keys]
        for name, held in named[:MOST_ROWS]
    ]
    more = f"\n{len(named) - MOST_ROWS} more rows are in the record.\n" if len(named) > MOST_ROWS else ""
    return table(head, rows) + more
