"""Sums of floating-point numbers without rounding, so that merging is associative to the last bit.

A sum is a list of numbers: the nearest float64, then the nearest float64 of the rest, and so on; equal sums
have equal lists. Source: Shewchuk, "Adaptive Precision Floating-Point Arithmetic and Fast Robust Geometric
Predicates" (1997), whose expansions `math.fsum` keeps inside and rounds correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from math import fsum, isfinite
from typing import Any, ClassVar, Self

from loka_onnx.errors import InternalError


@dataclass(frozen=True)
class ExactSum:
    """A sum that merges exactly: numbers that add up to it, each the nearest float64 of the rest."""

    parts: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Iterable[float]) -> ExactSum:
        """Return the sum of finite numbers; InternalError if one is not, or the sum is beyond float64."""
        rest = [float(value) for value in values]
        if not all(map(isfinite, rest)):
            raise InternalError("an exact sum takes finite numbers", evidence=f"{rest[:8]}")
        parts: list[float] = []
        try:
            while part := fsum(rest):
                parts.append(part)
                rest.append(-part)
        except OverflowError as error:
            raise InternalError("a sum is beyond float64", evidence=str(error)) from error
        return cls(tuple(parts))

    def merge(self, other: ExactSum) -> ExactSum:
        """Return both sums together; associative and commutative."""
        return ExactSum.of((*self.parts, *other.parts))

    @property
    def value(self) -> float:
        """The float64 nearest to the sum."""
        return self.parts[0] if self.parts else 0.0


NOTHING_ADDED = ExactSum()
Rules = Mapping[str, Callable[[Any, Any], Any]]


class Sums:
    """A dataclass that merges field by field, exactly, associative and commutative.

    Counts add and sums merge, unless `RULES` has another function for a field, such as `max`. `KEYS` are
    fields that only merge if they are equal.
    """

    KEYS: ClassVar[tuple[str, ...]] = ()
    RULES: ClassVar[Rules] = {}

    def merge(self, other: Self) -> Self:
        """Return both together; ValueError if they differ in one of `KEYS`."""
        if any(getattr(self, key) != getattr(other, key) for key in self.KEYS):
            raise ValueError(f"{type(self).__name__} of different {' or '.join(self.KEYS)} do not merge")
        merged = {key: getattr(self, key) for key in self.KEYS}
        for name in (f.name for f in fields(self) if f.name not in self.KEYS):  # type: ignore[arg-type]
            merged[name] = self.RULES.get(name, _added)(getattr(self, name), getattr(other, name))
        return type(self)(**merged)


def _added(one: Any, other: Any) -> Any:
    return one.merge(other) if hasattr(one, "merge") else one + other


def least(one: float | None, other: float | None) -> float | None:
    """Return the smaller number; None is not known."""
    return min((number for number in (one, other) if number is not None), default=None)


def largest(one: float | None, other: float | None) -> float | None:
    """Return the larger number; None is not known."""
    return max((number for number in (one, other) if number is not None), default=None)
