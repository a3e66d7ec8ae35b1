"""Compare intervals with the budget and its guards; the only module that decides what is within.

ΔNE has a labelled part of either sign, which may hide large changes on these rows. So two guards stand beside
the budget: KL, which has no such part, and, where requested, the decrease of AUC. The worse end of each
interval counts. A verdict on too few units is undecided, whatever the interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scipy.special import ndtri

from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.evaluation import (
    LEAST_UNITS,
    MOST_TIMES,
    Basis,
    Because,
    BudgetStatus,
    Guard,
    PairedDifference,
    worst,
)
from loka_onnx.core.intervals import Interval
from loka_onnx.numerics.intervals import required_rows

ENOUGH_UNITS = 1000
"""Groups, or rows, below which a verdict carries a warning."""
LARGE_SHARE = 0.1
"""Share of the rows beyond which one group makes the interval unreliable: at one half it covers 89 %."""
AUC_WARNING = 1e-4
"""Decrease of AUC (.01 points) that is warned of if the whole interval lies beyond it."""

SMALL_KL = 0.01
"""Share of the budget below which the tail of KL is ignored: it may be rounding noise of FP32."""


@dataclass(frozen=True)
class BudgetVerdict:
    """The verdict on one output; the fields are those of `OutputEvaluation`."""

    budget_status: str
    because: tuple[Because, ...]
    guards: tuple[Guard, ...]
    rows_to_decide: int | None
    remarks: tuple[str, ...]


def budget_verdict(spec: OutputSpec, difference: PairedDifference, basis: Basis) -> BudgetVerdict:
    """Compare the measured difference of one output, on its statistical basis, with its budget and guards."""
    guards = []
    for name, limit in ((Because.MAX_KL, spec.kl_limit), (Because.MAX_AUC_DROP, spec.max_auc_drop)):
        if limit is not None:
            measured = difference.guarded(name)
            held = BudgetStatus.UNDECIDED if measured is None else budget_status(measured, limit)
            guards.append(Guard(name, limit, held))
    is_small = difference.kl.upper < SMALL_KL * spec.budget
    basis_remarks = _basis_remarks(difference.judged.rows, basis, is_small=is_small)
    remarks = (*_guard_remarks(guards, difference), *basis_remarks)
    because = tuple(guard.name for guard in guards if guard.status != BudgetStatus.WITHIN)
    status = worst([budget_status(difference.judged, spec.budget), *(guard.status for guard in guards)])
    rows = _rows_to_decide(spec, difference, guards) if status == BudgetStatus.UNDECIDED else None
    if basis.units < LEAST_UNITS:
        status, because, rows = BudgetStatus.UNDECIDED, (Because.FEW_UNITS, *because), None
    return BudgetVerdict(status, because, tuple(guards), rows, remarks)


def too_few(rows: int, units: int, *, is_grouped: bool) -> str:
    """Return why an interval over these rows cannot be trusted; empty where it can."""
    if units >= LEAST_UNITS:
        return ""
    named = f"{rows} rows in {units} groups" if is_grouped else f"{rows} rows"
    return f"{named}, an interval needs {LEAST_UNITS} {'groups' if is_grouped else 'rows'}"


def _guard_remarks(guards: Sequence[Guard], difference: PairedDifference) -> Iterator[str]:
    for guard in guards:
        measured = difference.guarded(guard.name)
        if guard.status == BudgetStatus.WITHIN:
            continue
        if measured is None:
            yield f"there is no AUC to hold against `{guard.name}`: one class has no row"
        elif guard.name is Because.MAX_KL:
            yield f"KL is at most {measured.upper:.3%}, and `{guard.name}` accepts {guard.limit:.3%}"
        else:
            yield (
                f"AUC falls by at most {100 * measured.upper:.3f} points, and `{guard.name}` accepts "
                f"{100 * guard.limit:.3f}"
            )
    drop = difference.guarded(Because.MAX_AUC_DROP)
    if drop is not None and drop.lower > AUC_WARNING:
        yield f"AUC falls by {100 * drop.value:.3f} points [{100 * drop.lower:.3f}, {100 * drop.upper:.3f}]"


def _basis_remarks(rows: int, basis: Basis, *, is_small: bool) -> Iterator[str]:
    unit = "groups" if basis.is_grouped else "rows"
    if few := too_few(rows, basis.units, is_grouped=basis.is_grouped):
        yield few
    elif basis.units < ENOUGH_UNITS:
        yield f"the intervals rest on {basis.units} {unit}: below {ENOUGH_UNITS} they may be too narrow"
    if basis.is_grouped and basis.largest_share > LARGE_SHARE:
        yield (
            f"{basis.largest} has {100 * basis.largest_share:.0f} % of the rows: intervals over groups are "
            f"unreliable where one has more than {100 * LARGE_SHARE:.0f} %"
        )
    if basis.is_heavy and not is_small:
        index = "" if basis.tail_index is None else f"tail index {basis.tail_index:.1f}, "
        yield (
            f"1 % of the rows hold {100 * basis.top_share:.0f} % of KL ({index}skewness "
            f"{basis.skewness:.2f}): its interval is that for heavy tails"
        )


def _rows_to_decide(spec: OutputSpec, difference: PairedDifference, guards: Sequence[Guard]) -> int | None:
    """Return rows that settle every undecided verdict; None where unknown for some of them."""
    held = [
        (difference.judged, spec.budget),
        *((difference.guarded(guard.name), guard.limit) for guard in guards),
    ]
    needed = [
        None if measured is None else rows_to_decide(measured, limit)
        for measured, limit in held
        if measured is None or budget_status(measured, limit) == BudgetStatus.UNDECIDED
    ]
    known = [rows for rows in needed if rows is not None]
    return max(known) if known and len(known) == len(needed) else None


def budget_status(change: Interval, budget: float) -> str:
    """Return the `BudgetStatus`: the side of the budget that the whole interval lies on."""
    if change.upper <= budget:
        return BudgetStatus.WITHIN
    return BudgetStatus.BEYOND if change.lower > budget else BudgetStatus.UNDECIDED


def rows_to_decide(change: Interval, budget: float) -> int | None:
    """Return the rows that would settle an undecided verdict, if estimate and spread stayed; else None.

    They are more than `change` has and at most `MOST_TIMES` as many: beyond, the estimate is nearer to the
    budget than a tenth of its half width. Were it the truth, another sample of as many rows would put it on
    the other side in 42 of 100 cases (at 95 % confidence).
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
