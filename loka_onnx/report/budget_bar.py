"""An interval and its budget on one bar."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loka_onnx.core.intervals import Interval

_MARGIN = 0.08
"""Share of the bar that stays free at each end."""


@dataclass(frozen=True)
class BudgetBar:
    """One judged change and its budget on one axis, 0 included.

    Positions are percentages of the bar's length, from the left.

    Attributes:
        status: A value of `BudgetStatus`.
        interval: The change as a fraction, finite.
        budget: Largest accepted change as a fraction.
    """

    label: str
    text: str
    status: str
    interval: Interval
    budget: float
    budget_text: str

    @property
    def zero(self) -> float:
        """Position of no change."""
        return self._place(0.0)

    @property
    def limit(self) -> float:
        """Position of the budget."""
        return self._place(self.budget)

    @property
    def lower(self) -> float:
        """Position of the interval's lower end."""
        return self._place(self.interval.lower)

    @property
    def value(self) -> float:
        """Position of the change itself."""
        return self._place(self.interval.value)

    @property
    def upper(self) -> float:
        """Position of the interval's upper end, which the budget limits."""
        return self._place(self.interval.upper)

    def _place(self, value: float) -> float:
        low = min(0.0, self.interval.lower)
        high = max(self.budget, self.interval.upper)
        width = (high - low) or 1.0
        return round(100 * (_MARGIN + (1 - 2 * _MARGIN) * (value - low) / width), 2)


def can_be_drawn(interval: Interval) -> bool:
    """Return whether every end of an interval is finite."""
    return all(math.isfinite(end) for end in (interval.lower, interval.value, interval.upper))
