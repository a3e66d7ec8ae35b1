"""Sums of floating-point numbers without rounding, so that merging is associative to the last bit.

A sum is a list of numbers: the nearest float64, then the nearest float64 of the rest, and so on. Equal sums
have equal lists, of one or two numbers as a rule.

Source: Shewchuk, "Adaptive Precision Floating-Point Arithmetic and Fast Robust Geometric Predicates" (1997),
whose expansions `math.fsum` keeps inside; it rounds correctly, which is all that is needed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import fsum, isfinite
from typing import Self

from loka_onnx.errors import InternalError


@dataclass(frozen=True)
class ExactSum:
    """A sum that merges exactly.

    Attributes:
        parts: Numbers that add up to the sum, each the nearest float64 of the rest.
    """

    parts: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Iterable[float]) -> ExactSum:
        """Return the sum of finite numbers.

        Raises InternalError if a number is not finite, or the sum is beyond float64.
        """
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


class Sums:
    """A dataclass of counts and exact sums; merges exactly, associative and commutative."""

    def merge(self, other: Self) -> Self:
        """Return both together: counts add, sums merge."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return type(self)(*(a.merge(b) if isinstance(a, (ExactSum, Sums)) else a + b for a, b in pairs))
