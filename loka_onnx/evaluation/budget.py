"""An interval held against a budget."""

from __future__ import annotations

import math

from scipy.special import ndtri

from loka_onnx.core.evaluation import MOST_TIMES, BudgetStatus
from loka_onnx.core.intervals import Interval
from loka_onnx.numerics.intervals import required_rows


def budget_status(change: Interval, budget: float) -> str:
    """A value of `BudgetStatus`: which side of the budget the whole interval lies on."""
    if change.upper <= budget:
        return BudgetStatus.WITHIN
    return BudgetStatus.BEYOND if change.lower > budget else BudgetStatus.UNDECIDED


def rows_to_decide(change: Interval, budget: float) -> int | None:
    """Rows that would settle an undecided verdict, if estimate and spread stayed.

    Args:
        change: Interval of the relative loss change; its half width carries the paired (and grouped) spread.
        budget: Largest accepted change.

    Returns:
        More rows than `change` has; None when decided, when no number of rows is known to be enough, or when
        it is more than `MOST_TIMES` as many. The half width falls with √rows, so the estimate is then nearer
        to the budget than a tenth of its half width. Were it the truth, another sample of as many rows would
        put it on the other side in 42 of 100 cases (at 95 % confidence): such a number says nothing.
    """
    if budget_status(change, budget) != BudgetStatus.UNDECIDED:
        return None
    quantile = float(ndtri(0.5 + change.confidence / 2.0))
    sd = (change.upper - change.lower) / 2.0 / quantile * math.sqrt(change.rows)
    needed = required_rows(change.value, sd, budget, change.confidence)
    if needed is None or needed > MOST_TIMES * change.rows:
        return None
    # An undecided interval is not settled by the rows it already has, whatever rounding says.
    return max(needed, change.rows + 1)
