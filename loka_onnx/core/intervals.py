"""An estimate with its confidence interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A point estimate with a two-sided confidence interval; its upper end is compared with budgets."""

    value: float
    lower: float
    upper: float
    confidence: float
    rows: int

    def scaled(self, factor: float) -> Interval:
        """Return the interval of `factor` times the quantity (factor > 0)."""
        return Interval(
            self.value * factor, self.lower * factor, self.upper * factor, self.confidence, self.rows
        )

    def widened(self, factor: float) -> Interval:
        """Return the interval with ends `factor` times as far from the estimate (factor ≥ 1)."""
        lower, upper = ((end - self.value) * factor + self.value for end in (self.lower, self.upper))
        return Interval(self.value, lower, upper, self.confidence, self.rows)
