"""Find the JSON position of every number of a document in the facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any
from urllib.parse import quote

from loka_onnx.errors import InternalError
from loka_onnx.report.figures import Derived, Figure, Told

_ROOT = "#/value"
"""Position of a document's value, as written by `core.serde`."""


class Pointers:
    """JSON positions of all dataclasses and mappings of a document of facts.

    A repeated value has one of its positions: they are equal.
    """

    def __init__(self, facts: object) -> None:
        """Walk the facts once: a document of dataclasses, mappings, tuples and plain values."""
        # Kept alive, so that ids stay unique.
        self._facts = facts
        self._parents: dict[int, tuple[int, str]] = {}
        self._pointers: dict[int, str] = {id(facts): _ROOT}
        pending = [facts]
        while pending:
            value = pending.pop()
            for name, part in _parts(value):
                if id(part) not in self._parents and _is_container(part):
                    self._parents[id(part)] = id(value), name
                    pending.append(part)

    def source(self, figures: Sequence[Figure]) -> str:
        """Return the terms of figures; InternalError for one whose object is not in the facts."""
        return " ".join(map(self._term, figures))

    def _term(self, origin: Figure) -> str:
        if isinstance(origin, Derived):
            where = (f"{name}={_literal(value)}" for name, value in origin.where.items())
            return f"{origin.formula}({','.join((*map(self._term, origin.of), *where))})"
        owner = id(origin.owner)
        if owner not in self._parents and owner not in self._pointers:
            raise InternalError(
                "a report shows a number that is not in its facts",
                where=f"{type(origin.owner).__name__}.{origin.name}",
                evidence=f"{origin.value!r} stands at no place of the {type(self._facts).__name__}",
                remedy="take it from the facts themselves, or by a formula of `report.figures`",
            )
        pointer = self._pointer(owner)
        return pointer if origin.name is None else f"{pointer}/{_token(origin.name)}"

    def _pointer(self, owner: int) -> str:
        if owner not in self._pointers:
            parent, name = self._parents[owner]
            self._pointers[owner] = f"{self._pointer(parent)}/{_token(name)}"
        return self._pointers[owner]


def located(value: Any, pointers: Pointers) -> Any:
    """Return a document of dataclasses, tuples and texts with the source of every number (`Told`) in it.

    Raises InternalError where a number's object is not in the facts of `pointers`.
    """
    if isinstance(value, Told):
        return Told(value, value.figures, pointers.source(value.figures))
    if isinstance(value, tuple):
        return tuple(located(part, pointers) for part in value)
    names = _names(type(value))
    changes = {
        name: new for name in names if (new := located(old := getattr(value, name), pointers)) is not old
    }
    return replace(value, **changes) if changes else value


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in value.items())
    elif isinstance(value, tuple | list):
        # Of one type throughout: a histogram of numbers need not be searched.
        if value and _is_container(value[0]):
            yield from ((str(place), part) for place, part in enumerate(value))
    else:
        yield from ((name, getattr(value, name)) for name in _names(type(value)))


def _is_container(value: object) -> bool:
    return isinstance(value, Mapping | tuple | list) or bool(_names(type(value)))


_NAMES: dict[type[Any], tuple[str, ...]] = {}
"""Field names of dataclasses; a report asks a million times."""


def _names(kind: type[Any]) -> tuple[str, ...]:
    """Return the field names of a dataclass; none for another type."""
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
    return _NAMES[kind]


def _token(name: str) -> str:
    """Return a reference token: escaped by RFC 6901, then percent-encoded (RFC 3986)."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~")


def _literal(value: str | bool) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else quote(value, safe="")
