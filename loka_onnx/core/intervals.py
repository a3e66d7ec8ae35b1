"""An estimate and how sure we are of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A point estimate with a two-sided confidence interval.

    Attributes:
        value: Point estimate.
        lower: Lower end.
        upper: Upper end; budgets are held against it.
        confidence: Coverage, 0.95 unless said otherwise.
        rows: Rows behind it.
    """

    value: float
    lower: float
    upper: float
    confidence: float
    rows: int

    def scaled(self, factor: float) -> Interval:
        """The interval of `factor` times the quantity (factor > 0)."""
        return Interval(
            self.value * factor, self.lower * factor, self.upper * factor, self.confidence, self.rows
        )

    def widened(self, factor: float) -> Interval:
        """With ends that are so many times as far from the estimate (factor ≥ 1)."""
        lower, upper = ((end - self.value) * factor + self.value for end in (self.lower, self.upper))
        return Interval(self.value, lower, upper, self.confidence, self.rows)
