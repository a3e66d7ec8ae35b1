"""Numbers with their origin: those of report.json, and results of named formulas over these.

`Told` is text with the `Figure` behind each of its numbers, in order. `report.provenance` finds the position
of each in report.json when the whole document is known: a source has one term for each number, a JSON pointer
in its URI fragment form (RFC 6901, section 6), ``#/value/engines/0/bytes``, or a formula of `FORMULAS` over
terms, ``ratio(#/value/a,#/value/b)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any
from urllib.parse import quote

from loka_onnx.core.intervals import Interval
from loka_onnx.core.site import product_flops
from loka_onnx.errors import InternalError
from loka_onnx.report import numbers


@dataclass(frozen=True, eq=False)
class Place:
    """A field or key of a dataclass or mapping of the facts (itself, not a copy); without name the owner."""

    owner: object
    name: str | None = None

    @property
    def value(self) -> Any:
        """Value of the field."""
        if self.name is None:
            return self.owner
        return self.owner[self.name] if isinstance(self.owner, Mapping) else getattr(self.owner, self.name)


@dataclass(frozen=True, eq=False)
class Derived:
    """Result of a formula of `FORMULAS` over figures; `where` restricts by field name, for `count`."""

    formula: str
    of: tuple[Figure, ...]
    where: dict[str, str | bool]
    value: float | None


Figure = Place | Derived
"""One number with its origin; its `value` is unrounded, None for none."""


class Told(str):
    """Text with the figures of its numbers, in order, and their source once the document is located.

    Slices and formatted results are bare text again; `told` and `joined` lose nothing.
    """

    figures: tuple[Figure, ...]
    source: str

    def __new__(cls, text: str, figures: Sequence[Figure] = (), source: str = "") -> Told:
        """Return text with its figures."""
        self = super().__new__(cls, text)
        self.figures, self.source = tuple(figures), source
        return self


def derive(formula: str, *of: Figure, **where: str | bool) -> Derived:
    """Return the result of a formula of `FORMULAS`; None where an argument is."""
    values = [item.value for item in of]
    value = None if any(v is None for v in values) else FORMULAS[formula](*values, **where)
    return Derived(formula, of, where, value)


def counted(owner: object, name: str, **where: str | bool) -> Told:
    """Return how many entries a list or mapping of the facts has, with all of these values."""
    return formed(numbers.count, derive("count", Place(owner, name), **where))


def shown(form: Callable[[Any], str], owner: object, name: str) -> Told:
    """Return the number of a field as text; a dash for None."""
    return formed(form, Place(owner, name))


def formed(form: Callable[[Any], str], figure: Figure, missing: str = numbers.NONE) -> Told:
    """Return a figure as text; `missing` for None."""
    return Told(missing) if figure.value is None else Told(form(figure.value), (figure,))


def ends(interval: Interval) -> tuple[Figure, Figure, Figure]:
    """Return estimate, lower and upper end, in printing order."""
    return Place(interval, "value"), Place(interval, "lower"), Place(interval, "upper")


def percent_interval(interval: Interval | None, budget: float | None = None) -> Told:
    """Return `numbers.percent_interval` of an interval of the facts; a dash for none."""
    if interval is None:
        return Told(numbers.NONE)
    return Told(numbers.percent_interval(interval, budget), ends(interval))


def plus_minus(interval: Interval | None, budget: float | None = None) -> Told:
    """Return `numbers.plus_minus` of an interval of the facts, both ends where it is not symmetric."""
    if interval is None or not numbers.is_symmetric(interval):
        return percent_interval(interval, budget)
    text = numbers.plus_minus(interval, budget)
    figures = Place(interval, "value"), derive("half_width", Place(interval))
    return Told(text, figures[: text.count("%")])


def metric_interval(interval: Interval | None) -> Told:
    """Return `numbers.metric_interval` of an interval of the facts; a dash for none."""
    if interval is None or not math.isfinite(interval.value):
        return Told(numbers.NONE)
    return Told(numbers.metric_interval(interval), ends(interval))


def told(template: str, *parts: object) -> Told:
    """Return `template` with each ``{}`` replaced by a part, keeping the parts' figures."""
    figures = (figure for part in parts if isinstance(part, Told) for figure in part.figures)
    return Told(template.format(*parts), tuple(figures))


def joined(separator: str, parts: Sequence[object]) -> Told:
    """`separator.join` that keeps the figures."""
    return told(separator.join(["{}"] * len(parts)), *parts)


def _count(entries: Sequence[object] | Mapping[str, object], **where: str | bool) -> int:
    if not where:
        return len(entries)
    return sum(all(getattr(entry, name) == wanted for name, wanted in where.items()) for entry in entries)


FORMULAS: dict[str, Callable[..., float]] = {
    "ratio": lambda a, b: a / b,
    "product": lambda a, b: a * b,
    "sum": lambda *terms: sum(terms),
    "max": lambda *terms: max(terms),
    "next": lambda a: a + 1,
    "entries": lambda *places: len(places),
    "count": _count,
    "half_width": numbers.half_width,
    "flops": lambda site: int(site.flops_per_example),
    "fp8_able_flops": lambda sites: sum(site.flops_per_example for site in sites if site.is_fp8_able),
    "product_flops": product_flops,
    "relative_error": lambda error: float(error.relative_error),
    "interval_value": lambda moments, sampling: float(sampling.interval_of(moments).value),
    "interval_lower": lambda moments, sampling: float(sampling.interval_of(moments).lower),
    "interval_upper": lambda moments, sampling: float(sampling.interval_of(moments).upper),
}
"""Every formula of a report; `docs/reference/report-json.md` tells readers what each is."""


_ROOT = "#/value"
"""Position of a document's value, as written by `core.serde`."""


class Pointers:
    """JSON positions of all dataclasses and mappings of a document of facts; equal values may share one."""

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
    """Return a document with the source of every `Told` in it; InternalError for one outside of the facts."""
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
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
    return _NAMES[kind]


def _token(name: str) -> str:
    """Return a reference token: escaped by RFC 6901, then percent-encoded (RFC 3986)."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~")


def _literal(value: str | bool) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else quote(value, safe="")
