"""Reads the numbers of a report, and what they claim to be, without the package that wrote them.

The grammar of a source is that of `loka_onnx.report.figures`; formulas are written here a second time, over
plain JSON. Tests of the page in a browser use it too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote

from pydantic import TypeAdapter

from loka_onnx.core.intervals import RatioMoments
from loka_onnx.core.profile import Sampling

NUMBER = re.compile(r"(?<![\w.\-])(?!\d{4}-\d\d-\d\d)[+-]?(?:\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?|inf|nan)(?!\w)")
UNITS = {"%": 1e-2, "B": 1.0, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}
MICROSECONDS = {"µs": 1.0, "ms": 1e3, "ns": 1e-3}
SECONDS = {"s": 1.0, "ms": 1e-3}
VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}


def resolve(document: Any, pointer: str) -> Any:
    """RFC 6901, from the URI fragment form."""
    assert pointer.startswith("#/"), pointer
    for token in pointer[2:].split("/"):
        name = unquote(token).replace("~1", "/").replace("~0", "~")
        document = document[int(name)] if isinstance(document, list) else document[name]
    return document


def evaluate(document: Any, term: str) -> Any:
    """The number of a term, or what stands at its pointer."""
    if term.startswith("#"):
        return resolve(document, term)
    name, _, rest = term.partition("(")
    assert rest.endswith(")"), term
    arguments = list(_split(rest[:-1]))
    where = dict(a.split("=", 1) for a in arguments if not a.startswith("#") and "(" not in a)
    values = [evaluate(document, a) for a in arguments if a.startswith("#") or "(" in a]
    return _FORMULAS[name](*values, **{key: unquote(value) for key, value in where.items()})


def _split(text: str) -> Iterator[str]:
    depth, part = 0, ""
    for letter in text:
        if letter == "," and depth == 0:
            yield part
            part = ""
            continue
        depth += (letter == "(") - (letter == ")")
        part += letter
    if part:
        yield part


def _parts(value: dict[str, Any]) -> float:
    return float(value["parts"][0]) if value["parts"] else 0.0


def _flops(site: dict[str, Any]) -> int:
    return int(2 * site["rows"] * site["n"] * site["k"])


def _able(sites: list[dict[str, Any]]) -> int:
    return sum(_flops(s) for s in sites if s["kind"] == "linear" and s["k"] >= 16 and s["n"] >= 16)


def _products(sites: list[dict[str, Any]], others: list[dict[str, Any]]) -> int:
    return sum(_flops(s) for s in sites if s["kind"] != "norm") + sum(
        o["flops_per_example"] or 0 for o in others
    )


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _count(entries: Any, **where: str) -> int:
    if not where:
        return len(entries)
    return len([e for e in entries if all(_plain(e[key]) == wanted for key, wanted in where.items())])


def _interval(end: str) -> Callable[[Any, Any], float]:
    def of(moments: Any, sampling: Any) -> float:
        plan = TypeAdapter(Sampling).validate_python(sampling)
        sums = TypeAdapter(RatioMoments).validate_python(moments)
        assert plan.may_stop_early or plan.looks > 1
        return float(getattr(sums.anytime_interval(plan.tightest_at, 0.95), end))

    return of


_FORMULAS: dict[str, Callable[..., Any]] = {
    "ratio": lambda a, b: a / b,
    "product": lambda a, b: a * b,
    "sum": lambda *terms: sum(terms),
    "max": lambda *terms: max(terms),
    "next": lambda a: a + 1,
    "entries": lambda *places: len(places),
    "count": _count,
    "half_width": lambda i: max(i["upper"] - i["value"], i["value"] - i["lower"]),
    "flops": _flops,
    "fp8_able_flops": _able,
    "product_flops": _products,
    "relative_error": lambda e: math.sqrt(_parts(e["noise"]) / _parts(e["signal"])),
    "interval_value": _interval("value"),
    "interval_lower": _interval("lower"),
    "interval_upper": _interval("upper"),
}


def check_numbers(document: Any, text: str, source: str, value: str | float | None) -> int:
    """Holds every number of a text against its term, within its printed digits; how many there are.

    Args:
        document: report.json.
        text: What is shown.
        source: Its terms.
        value: The raw number that is given beside it; None where none is.
    """
    terms = source.split()
    found = list(NUMBER.finditer(text))
    assert len(found) == len(terms), f"{len(found)} numbers and {len(terms)} sources: '{text}' of {terms}"
    for place, (number, term) in enumerate(zip(found, terms, strict=True)):
        exact = float(evaluate(document, term))
        if place == 0 and value is not None:
            assert float(value) == exact or (math.isnan(exact) and math.isnan(float(value))), (text, term)
        _check(number, text, exact, term)
    return len(found)


def _check(number: re.Match[str], text: str, exact: float, term: str) -> None:
    shown = number.group().replace(",", "")
    unit = re.match(r" ?(%|µs|ms|ns|s|B|KiB|MiB|GiB)(?!\w)", text[number.end() :])
    scale = _scale(unit.group(1), term) if unit else 1.0
    if not math.isfinite(exact):
        assert shown.lstrip("+") in {str(exact), str(exact * 100)}, (text, term)
        return
    mantissa, _, exponent = shown.partition("e")
    digits = len(mantissa.partition(".")[2])
    half = 0.5 * 10.0 ** (int(exponent or 0) - digits) * scale
    assert abs(float(shown) * scale - exact) <= half * (1 + 1e-6), (text, term, exact)


def _scale(unit: str, term: str) -> float:
    if unit in UNITS:
        return UNITS[unit]
    # Times of a comparison, whose numbers have no names, are all latencies.
    is_latency = unit == "µs" or "/numbers/" in term or re.search(r"_us(/[^/]*)?(\)|,|$)", term)
    return MICROSECONDS[unit] if is_latency else SECONDS[unit]


@dataclass
class Element:
    """One element of a page that carries a value or a source, or is a cell of a table."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    numeric: bool = False


@dataclass
class Tables(HTMLParser):
    """Cells of tables, and everything with a source, of a page."""

    cells: list[Element] = field(default_factory=list)
    sourced: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[tuple[str, Element | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens an element."""
        if tag in VOID:
            return
        attributes = {name: value or "" for name, value in attrs}
        element = None
        is_body = tag == "td" or (tag == "th" and attributes.get("scope") == "row")
        if is_body or "data-source" in attributes:
            classes = attributes.get("class", "").split()
            element = Element(tag, attributes, numeric="numeric" in classes)
            if is_body:
                self.cells.append(element)
            if attributes.get("data-source"):
                self.sourced.append(element)
        self._open.append((tag, element))

    def handle_endtag(self, tag: str) -> None:
        """Closes an element."""
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Text belongs to every open element."""
        if any(tag in {"script", "style"} for tag, _ in self._open):
            return
        for _, element in self._open:
            if element is not None:
                element.text += data


def tables_of(page: str) -> Tables:
    """Reads a page."""
    parser = Tables()
    parser.feed(page)
    parser.close()
    return parser
