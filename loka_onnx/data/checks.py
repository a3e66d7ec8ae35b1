"""Rules for columns that a model reads, and errors for rows that break them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from loka_onnx.data.batch import Array
from loka_onnx.errors import DataError

Mask = npt.NDArray[np.bool_]

_NAMED_RANGES = 3


@dataclass(frozen=True)
class RawColumn:
    """Some rows of a column as stored, (rows,) or (rows, width), and the mask of nulls (rows,)."""

    values: Array
    nulls: Mask | None = None


@dataclass(frozen=True)
class ColumnRule:
    """Rule of a column, whose values become `dtype`; None keeps the stored type.

    `ids` are those allowed for each value in a row, or for all; None without a bound. If it is `nullable`,
    nulls and non-finite numbers are values, as in a slice. `if_null` is a remedy other than dropping or
    filling a null.
    """

    column: str
    dtype: str | None = None
    ids: tuple[range | None, ...] = (None,)
    nullable: bool = False
    if_null: str = ""


@dataclass(frozen=True)
class RowFault:
    """Rows that break a rule: `what` says how, of the column; `first_row` counts in the file."""

    rule: ColumnRule
    what: str
    count: int
    first_row: int
    value: str
    remedy: str

    def plus(self, other: RowFault | None) -> RowFault:
        """Return this fault plus the rows of a later one of the same rule and breach."""
        same = other is not None and other.rule == self.rule and other.what == self.what
        return replace(self, count=self.count + other.count) if other is not None and same else self

    def error(self, file: str, rows: int) -> DataError:
        """Return the exception that reports the fault."""
        return DataError(
            f"E0205 column '{self.rule.column}' of '{file}' {self.what}",
            evidence=f"{self.count} of {rows} rows, the first is row {self.first_row}: {self.value}",
            remedy=self.remedy,
        )


def find_fault(rule: ColumnRule, raw: RawColumn, file_rows: Array) -> RowFault | None:
    """Find the first breach (null, not finite, not whole, type, ids); `file_rows` (rows,) are of the file."""
    if rule.nullable:
        return None
    values, if_null = raw.values, rule.if_null or "drop the rows or fill the values"
    if values.dtype.kind == "U" and (empty := values == "").any():
        # A null string is read as an empty one; strings are ids of groups, and this is none.
        return _fault(rule, raw, empty, file_rows, "holds nulls or empty strings", if_null)
    if raw.nulls is not None and raw.nulls.any():
        return _fault(rule, raw, raw.nulls, file_rows, "holds nulls", if_null)
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        if not finite.all():
            bad = ~_whole_rows(finite)
            nan = bool(np.isnan(values[int(np.argmax(bad))]).any())
            remedy = rule.if_null or "drop or fill the rows; model inputs and labels must be finite"
            return _fault(rule, raw, bad, file_rows, f"holds {'NaN' if nan else 'infinity'}", remedy)
    if rule.dtype is None:
        return None
    return _conversion_fault(rule, raw, file_rows) or _id_fault(rule, raw, file_rows)


def _conversion_fault(rule: ColumnRule, raw: RawColumn, file_rows: Array) -> RowFault | None:
    target, values = np.dtype(rule.dtype), raw.values
    if target.kind in "iu":
        if values.dtype.kind == "f" and not (whole := values == np.trunc(values)).all():
            what = f"holds numbers that are not whole, where the model takes ids ({target})"
            remedy = "store ids as integers, or bind a float input to this column"
            return _fault(rule, raw, ~_whole_rows(whole), file_rows, what, remedy)
        limits = np.iinfo(target)
        inside = (values >= limits.min) & (values <= limits.max)
        # float64(2**63 - 1) rounds up to 2**63, which no int64 holds.
        if values.dtype.kind == "f" and target == np.int64:
            inside &= values < 2.0**63
    elif target.kind == "f" and values.dtype.kind == "f":
        inside = np.abs(values) <= float(np.finfo(target).max)
    else:
        return None
    if inside.all():
        return None
    remedy = "clip or rescale the values when the data are prepared"
    what = f"holds values outside the range of {target}"
    return _fault(rule, raw, ~_whole_rows(inside), file_rows, what, remedy)


def _id_fault(rule: ColumnRule, raw: RawColumn, file_rows: Array) -> RowFault | None:
    bounds = rule.ids
    known = list(dict.fromkeys(ids for ids in bounds if ids is not None))
    if not known:
        return None
    values = raw.values if raw.values.ndim == 2 else raw.values[:, np.newaxis]
    if len(bounds) not in {1, values.shape[1]}:
        what = f"holds {values.shape[1]} values a row, where the model takes {len(bounds)}"
        remedy = "export the model for rows of this length, or pad or cut them when the data are prepared"
        return _fault(rule, raw, np.ones(len(values), np.bool_), file_rows, what, remedy)
    least = np.array([0 if ids is None else ids.start for ids in bounds])
    end = np.array([0 if ids is None else ids.stop for ids in bounds])
    outside = ((values < least) | (values >= end)) & np.array([ids is not None for ids in bounds])
    if not outside.any():
        return None
    ranges = [_text(ids) for ids in known[:_NAMED_RANGES]]
    others = f", and {len(known) - len(ranges)} other ranges" if len(known) > len(ranges) else ""
    what = f"holds ids outside its embedding table, which takes {' or '.join(ranges)}{others}"
    remedy = "map unknown ids to a reserved row in the data, or export a model with a larger table"
    fault = _fault(rule, raw, outside.any(axis=1), file_rows, what, remedy)
    if raw.values.ndim == 1:
        return fault
    row, position = divmod(int(np.argmax(outside)), outside.shape[1])
    allowed = bounds[position if len(bounds) > 1 else 0]
    evidence = f"{values[row, position]} at position {position}, which takes {_text(allowed)}"
    return replace(fault, value=evidence)


def _text(ids: range | None) -> str:
    return "any" if ids is None else f"{ids.start} to {ids.stop - 1}"


def _whole_rows(mask: Mask) -> Mask:
    """Mask (rows,) of rows all of whose values are in a mask (rows,) or (rows, width)."""
    return mask if mask.ndim == 1 else np.asarray(mask.all(axis=1))


def _fault(rule: ColumnRule, raw: RawColumn, bad: Mask, file_rows: Array, what: str, remedy: str) -> RowFault:
    first = int(np.argmax(bad))
    null = raw.nulls is not None and bool(raw.nulls[first])
    value = "null" if null else str(raw.values[first].tolist())[:80]
    return RowFault(rule, what, int(bad.sum()), int(file_rows[first]), value, remedy)
