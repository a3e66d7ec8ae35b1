"""An interval held against a budget."""

from __future__ import annotations

import math

from scipy.special import ndtri

from loka_onnx.core.evaluation import BudgetStatus
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
        More rows than `change` has; None when decided, or when no number of rows is known to be enough.
    """
    if budget_status(change, budget) != BudgetStatus.UNDECIDED:
        return None
    quantile = float(ndtri(0.5 + change.confidence / 2.0))
    sd = (change.upper - change.lower) / 2.0 / quantile * math.sqrt(change.rows)
    needed = required_rows(change.value, sd, budget, change.confidence)
    # An undecided interval is not settled by the rows it already has, whatever rounding says.
    return None if needed is None else max(needed, change.rows + 1)
