"""Differences of two values of dicts, lists and scalars; lists by the names of their elements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loka_onnx.operations.compare.bundle_document import Change, Kind, Section

_NAMES = ("id", "name", "path", "site", "stage", "output", "batch", "node", "target", "engine")
"""Fields that tell the elements of a list apart, the first one that does."""
_NAMED_BY_SECTION = frozenset({"engines", "files", "versions", "plans", "lineage", "choice"})
"""Lists and parts whose name says nothing where the section and the name of the element do."""


def kind_of(a: object, b: object) -> Kind:
    """How two sides differ, of which None says nothing."""
    if a is None:
        return Kind.ADDED
    return Kind.REMOVED if b is None else Kind.CHANGED


def leaves(a: Any, b: Any, path: tuple[str, ...], section: Section) -> Iterator[Change]:
    """Every difference of two values of dicts, lists and scalars.

    Args:
        a: The one.
        b: The other.
        path: Where they lie.
        section: What they are about.

    Yields:
        One change for each scalar that differs, and for each element that one side lacks.
    """
    if are_same(a, b):
        return
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            if key in a and key in b:
                yield from leaves(a[key], b[key], (*path, key), section)
            else:
                value = a[key] if key in a else b[key]
                yield _one_sided(value, (*path, key), section, is_ours=key in a)
        return
    if isinstance(a, list) and isinstance(b, list):
        field = _naming_field(a, b)
        if field is not None:
            ours, theirs = ({str(item[field]): item for item in items} for items in (a, b))
            yield from leaves(ours, theirs, path, section)
            common = [[name for name in side if name in ours and name in theirs] for side in (ours, theirs)]
            if common[0] != common[1]:
                texts = map(", ".join, common)
                yield Change(section, _joined((*path, "order")), Kind.CHANGED, *texts)
            return
    yield Change(section, _joined(path), Kind.CHANGED, _text(a), _text(b))


def _one_sided(value: Any, path: tuple[str, ...], section: Section, *, is_ours: bool) -> Change:
    if is_ours:
        return Change(section, _joined(path), Kind.REMOVED, _text(value), "")
    return Change(section, _joined(path), Kind.ADDED, "", _text(value))


def are_same(a: Any, b: Any) -> bool:
    """Equality in which NaN equals NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(are_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(are_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _naming_field(a: Sequence[Any], b: Sequence[Any]) -> str | None:
    """The field that tells the elements of two lists apart; None where there is none."""
    items = [*a, *b]
    if not items or not all(isinstance(item, Mapping) for item in items):
        return None
    for name in _NAMES:
        if all(name in item and isinstance(item[name], (str, int)) for item in items) and all(
            max(Counter(str(item[name]) for item in side).values(), default=0) <= 1 for side in (a, b)
        ):
            return name
    return None


def _joined(path: tuple[str, ...]) -> str:
    # The name of the list says nothing where its elements do.
    shown = path[1:] if len(path) > 1 and path[0] in _NAMED_BY_SECTION else path
    return " / ".join(shown)


def _text(value: Any) -> str:
    """A value in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items() if item not in ({}, [], ""))
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return "none" if value is None else str(value)
