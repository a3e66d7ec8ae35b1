"""Metrics as Prometheus reads them.

Source: "Exposition formats", text-based format 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats):
a family is its HELP and TYPE line and its samples; a backslash and a line feed are escaped in help texts, and
in label values the double quote as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """Type of a metric."""

    COUNTER = "counter"
    """Never falls while the process lives; its name ends in ``_total``."""
    GAUGE = "gauge"


@dataclass
class Family:
    """One metric, with a sample for each set of labels.

    Attributes:
        name: Its name.
        kind: Its type.
        help: What it says, for a reader.
        samples: Labels and value of each sample.
    """

    name: str
    kind: Kind
    help: str
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float, **labels: str) -> None:
        """Add a sample."""
        self.samples.append((labels, value))


def exposition(families: Iterable[Family]) -> str:
    """The text of all families; those without samples are left out."""
    return "".join(f"{line}\n" for family in families if family.samples for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.help)}"
    yield f"# TYPE {family.name} {family.kind}"
    for labels, value in family.samples:
        inside = ",".join(f'{name}="{_escaped(text, quote=True)}"' for name, text in labels.items())
        yield f"{family.name}{{{inside}}} {_number(value)}" if inside else f"{family.name} {_number(value)}"


def _escaped(text: str, *, quote: bool = False) -> str:
    found = text.replace("\\", "\\\\").replace("\n", "\\n")
    return found.replace('"', '\\"') if quote else found


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
