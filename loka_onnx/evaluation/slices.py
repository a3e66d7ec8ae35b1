"""Accuracy of rows with one value of a column: country, device, a segment of users.

A budget may hold on average but fail for a few. Each slice is judged like the whole, on its own rows and
relative to its own FP32 loss. With m slices judged, over all columns, each interval has the confidence
1 − 0.05/m; by Bonferroni's inequality all m hold together at 95 % or more, under any dependence.

**Order.** By the lower end, falling: it asks where harm is sure, so a small slice with a wild estimate does
not precede a large one with a certain loss. The status ``undecided`` says where harm cannot be excluded.

**Which are judged.** The `LARGEST` most frequent values of a column. Among them, those with 100 independent
units (groups, or rows) and, for a log loss, `LEAST_EVENTS` rows of the rarer class expected under the FP32
model. Below, Student's t is overconfident: on simulated logits with FP8-like noise, at 2 % clicks, m = 50 and
300 rows (6 clicks) a tail was missed 16 times as often as stated; at 3000 rows (60 clicks) at most 2.5 times.
Neither number depends on the labels, so the selection of slices is independent of their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.evaluation import BudgetStatus, SliceDifference, worst
from loka_onnx.errors import DataError
from loka_onnx.evaluation.budget import budget_status, too_few
from loka_onnx.evaluation.paired import PairedRows
from loka_onnx.numerics.intervals import CONFIDENCE

LARGEST = 50
"""Values of one column judged at most, so that a column of ids has no more slices."""
LEAST_EVENTS = 50

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SliceColumn:
    """A column that the rows are divided by: index of each row's value, and the values as text or None."""

    name: str
    codes: npt.NDArray[np.intp]
    values: tuple[str | None, ...]


@dataclass(frozen=True)
class _Slice:
    """One value of a column: indices of its rows, and their changes without rows of weight 0."""

    column: str
    value: str | None
    rows: npt.NDArray[np.intp]
    paired: PairedRows

    @property
    def units(self) -> int:
        groups = self.paired.groups
        return int(self.paired.base.size if groups is None else np.unique(groups).size)

    @property
    def known(self) -> tuple[str, str | None, int, int]:
        """Column, value, rows and units."""
        return (self.column, self.value, self.rows.size, self.units)

    @property
    def why_not_judged(self) -> str:
        """Reason why no interval could be trusted; empty if one can."""
        size = self.paired.base.size
        if few := too_few(size, self.units, is_grouped=self.paired.groups is not None):
            return few
        if self.paired.probabilities is not None:
            expected = float(self.paired.probabilities.sum())
            events = min(expected, size - expected)
            if events < LEAST_EVENTS:
                return (
                    f"about {events:.0f} of {size} rows are expected in the rarer class, an interval needs "
                    f"{LEAST_EVENTS}"
                )
        if not self.paired.base.any():
            return f"the {self.paired.denominator} of the FP32 model is 0 on its {size} rows"
        return ""


def read_slices(columns: Mapping[str, Array], names: Sequence[str]) -> tuple[SliceColumn, ...]:
    """Number the values of each slice column; None, NaN and NaT are null. DataError without a column."""
    for name in names:
        if name not in columns:
            raise DataError(
                f"E1017 there is no column '{name}' to divide the rows by",
                evidence=f"the columns are: {', '.join(sorted(columns)) or 'none'}",
                remedy="add it to the selection and certification rows, or remove it from `data.slices`",
            )
    return tuple(_numbered(name, columns[name]) for name in names)


def slice_differences(
    paired: PairedRows, columns: Sequence[SliceColumn], spec: OutputSpec, together: float = CONFIDENCE
) -> tuple[tuple[SliceDifference, ...], dict[str, int]]:
    """Return the difference on every slice, with intervals of that confidence together.

    Judged slices by falling lower end, then the others by falling rows; and the number of values left out, by
    column.
    """
    candidates = [item for column in columns for item in _largest(paired, column)]
    reasons = [item.why_not_judged for item in candidates]
    judged = [item for item, reason in zip(candidates, reasons, strict=True) if not reason]
    confidence = 1.0 - (1.0 - together) / max(len(judged), 1)
    differences = [_difference(item, confidence, spec) for item in judged]
    others = [
        SliceDifference(*item.known, None, None, None, BudgetStatus.NOT_JUDGED, reason)
        for item, reason in zip(candidates, reasons, strict=True)
        if reason
    ]
    left_out = {c.name: len(c.values) - LARGEST for c in columns if len(c.values) > LARGEST}
    # Sorting keeps the order of ties: that of the columns, then of falling number of rows.
    differences.sort(key=lambda item: -item.judged.lower if item.judged is not None else 0.0)
    return (*differences, *sorted(others, key=lambda item: -item.rows)), left_out


def _numbered(name: str, stored: Array) -> SliceColumn:
    column = stored.reshape(-1)
    known = np.arange(column.size)
    if column.dtype.kind == "O":
        known = np.flatnonzero([value is not None for value in column])
        column = np.array(column[known].tolist())
    if column.dtype.kind in "fmM":
        has_value = ~np.isnan(column)
        known, column = known[has_value], column[has_value]
    distinct, inverse = np.unique(column, return_inverse=True)
    codes = np.full(stored.size, distinct.size, dtype=np.intp)
    codes[known] = inverse.reshape(-1)
    null: list[str | None] = [None] if known.size < stored.size else []
    return SliceColumn(name, codes, (*(str(value) for value in distinct), *null))


def _largest(paired: PairedRows, column: SliceColumn) -> list[_Slice]:
    """Return the most frequent values, by falling number of rows."""
    counts = np.bincount(column.codes, minlength=len(column.values))
    chosen = np.argsort(-counts, kind="stable")[:LARGEST]
    order = np.argsort(column.codes, kind="stable")
    ends = np.cumsum(counts)
    slices = []
    for code in chosen:
        rows = order[ends[code] - counts[code] : ends[code]]
        counted = rows if paired.weights is None else rows[paired.weights[rows] > 0]
        slices.append(_Slice(column.name, column.values[code], rows, paired.take(counted)))
    return slices


def _difference(item: _Slice, confidence: float, spec: OutputSpec) -> SliceDifference:
    change, limit = item.paired.relative(confidence), spec.kl_limit
    judged = change.kl if change.delta_ne is None else change.delta_ne
    guard = BudgetStatus.WITHIN if limit is None else budget_status(change.kl, limit)
    status = worst([budget_status(judged, spec.budget), guard])
    reason = "" if guard == BudgetStatus.WITHIN else f"KL is at most {change.kl.upper:.3%}: {guard} `max_kl`"
    return SliceDifference(*item.known, change.delta_ne, change.kl, change.labelled, status, reason)
