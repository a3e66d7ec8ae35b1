"""Columns and scores of one output, checked and in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.data.selection import without_id
from loka_onnx.errors import ConfigError, DataError, EvaluationError, InternalError
from loka_onnx.numerics.task_metrics import logits_from_probabilities, probabilities_from_logits

PROBABILITY_SLACK = 1e-6
"""Largest distance of a probability from [0, 1]: a few FP32 ulps of 1, for approximated sigmoids."""

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Truth:
    """Labels, weights and group ids of the rows for one output, (rows,) each; None where there are none."""

    labels: Rows | None
    weights: Rows | None
    groups: npt.NDArray[np.intp] | None

    @property
    def rows(self) -> int | None:
        """Number of rows; None without any column."""
        return next((a.size for a in (self.labels, self.weights, self.groups) if a is not None), None)


@dataclass(frozen=True)
class Scores:
    """One output of one engine, (rows,) each: as returned (ranking), as logit (loss), as prediction."""

    raw: Rows
    scores: Rows
    predictions: Rows


@dataclass(frozen=True)
class Groups:
    """Rows that belong together, by number, so that statistics need not sort strings.

    `ids` (rows,) number each row's group; a row whose group is null is a group of its own. `values` are the
    distinct groups; single rows without an id come last.
    """

    column: str
    ids: npt.NDArray[np.intp]
    values: Array

    @classmethod
    def of(cls, column: str, stored: Array) -> Groups:
        """Number the groups of a stored column."""
        stored = stored.reshape(-1)
        missing = without_id(stored)
        known = stored[~missing]
        if known.dtype.kind == "O":
            known = np.array(known.tolist())
        values, inverse = np.unique(known, return_inverse=True)
        ids = np.empty(stored.size, dtype=np.intp)
        ids[~missing] = inverse.reshape(-1)
        ids[missing] = np.arange(values.size, values.size + int(missing.sum()))
        return cls(column, ids, values)

    def name(self, group: int) -> str:
        """Return ``user_id 17``."""
        value = str(self.values[group]) if group < self.values.size else "null"
        return f"{self.column} {value}"


def read_truth(columns: Mapping[str, Array], spec: OutputSpec, groups: npt.NDArray[np.intp] | None) -> Truth:
    """Return labels and weights of one output as float64, None where `spec` names no column, and `groups`.

    Raises DataError for a column that is missing, empty, not numeric or not finite, for labels outside of 0
    to 1 (but of a regression), and for weights that are negative or all 0.
    """
    labels = weights = None
    if spec.label is not None:
        labels = _column(columns, spec.label, f"the label of output '{spec.name}'")
        refuse_no_rows(labels.size, spec)
        if spec.kind is not OutputKind.REGRESSION:
            _refuse(
                (labels < 0) | (labels > 1),
                spec.label,
                labels,
                f"holds labels outside [0, 1], but output '{spec.name}' is a {spec.kind}",
                "map the labels to [0, 1], or declare `kind: regression` for this output",
            )
    if spec.weight is not None:
        weights = _column(columns, spec.weight, f"the weight of output '{spec.name}'")
        refuse_no_rows(weights.size, spec)
        remedy = "a row weight says how often the row counts; fix it, or drop `weight` from the output"
        _refuse(weights < 0, spec.weight, weights, "holds negative row weights", remedy)
        if not weights.any():
            raise DataError(
                f"E1002 column '{spec.weight}' is 0 on every row",
                evidence=f"{weights.size} rows",
                remedy=remedy,
            )
    lengths = {a.size for a in (labels, weights, groups) if a is not None}
    if len(lengths) > 1:
        raise InternalError(
            f"columns of output '{spec.name}' differ in length", evidence=str(sorted(lengths))
        )
    return Truth(labels, weights, groups)


def refuse_no_rows(rows: int, spec: OutputSpec) -> None:
    """Raise DataError where there are no rows."""
    if rows == 0:
        raise DataError(
            f"E1003 output '{spec.name}' cannot be judged: the split holds no rows",
            remedy="check the files and filters of the split",
        )


def read_scores(
    outputs: Mapping[str, Array], spec: OutputSpec, rows: int | None, *, is_reference: bool
) -> Scores:
    """Return one output of an engine as scores in float64.

    `outputs` are (rows,) or (rows, 1) arrays by name; `rows` those of the labels, or else of the reference.
    The user declared the kind of the reference's outputs, so a wrong one is a configuration error; elsewhere
    the engine is wrong.
    """
    whose = "the FP32 reference" if is_reference else "the candidate"
    if spec.name not in outputs:
        raise EvaluationError(
            f"E1004 {whose} gave no output '{spec.name}'",
            evidence=f"it gave: {', '.join(sorted(outputs)) or 'none'}",
        )
    array = outputs[spec.name]
    if array.ndim > 1 and array.size != array.shape[0]:
        raise ConfigError(
            f"E1005 output '{spec.name}' holds several values per row and cannot be judged against one label",
            evidence=f"its shape is {array.shape}",
            remedy="give each task an output of its own, (rows,) or (rows, 1)",
        )
    raw = array.reshape(-1).astype(np.float64)
    if rows is not None and raw.size != rows:
        against = "the reference's" if spec.label is None else "its label"
        raise EvaluationError(
            f"E1006 output '{spec.name}' of {whose} has another number of rows than {against}",
            evidence=f"{raw.size} and {rows}",
        )
    finite = np.isfinite(raw)
    if not finite.all():
        first = int(np.argmin(finite))
        raise EvaluationError(
            f"E1007 output '{spec.name}' of {whose} is not finite",
            evidence=f"{int((~finite).sum())} of {raw.size} rows, the first is row {first}: {raw[first]}",
            remedy="check the inputs and weights of the model for NaN and overflow"
            if is_reference
            else "the engine overflows or is broken; it counts as failed, another plan or backend may not",
        )
    if spec.kind is OutputKind.LOGIT:
        return Scores(raw, raw, probabilities_from_logits(raw))
    if spec.kind is OutputKind.REGRESSION:
        return Scores(raw, raw, raw)
    _refuse_probabilities(raw, spec, whose, is_reference=is_reference)
    return Scores(raw, logits_from_probabilities(raw, spec.clip), raw)


def _refuse_probabilities(raw: Rows, spec: OutputSpec, whose: str, *, is_reference: bool) -> None:
    outside = (raw < -PROBABILITY_SLACK) | (raw > 1.0 + PROBABILITY_SLACK)
    if not outside.any():
        return
    first = int(np.argmax(outside))
    what = f"output '{spec.name}' of {whose} is declared a probability but holds values like {raw[first]:.4g}"
    evidence = f"{int(outside.sum())} of {raw.size} rows lie outside [0, 1], the first is row {first}"
    if is_reference:
        raise ConfigError(f"E1018 {what}", evidence=evidence, remedy="declare `kind: logit` for this output")
    remedy = "the reference stays inside: the engine is wrong and counts as failed"
    raise EvaluationError(f"E1019 {what}", evidence=evidence, remedy=remedy)


def _column(columns: Mapping[str, Array], name: str, role: str) -> Rows:
    if name not in columns:
        raise DataError(
            f"E1008 there is no column '{name}', {role}",
            evidence=f"the columns are: {', '.join(sorted(columns)) or 'none'}",
            remedy="add the column to every split, or name the right one under `outputs`",
        )
    stored = columns[name]
    if stored.dtype.kind not in "buif":
        raise DataError(
            f"E1009 column '{name}', {role}, is not numeric",
            evidence=f"its type is {stored.dtype}",
            remedy="store numbers; a boolean column is read as 0 and 1",
        )
    values = stored.reshape(-1).astype(np.float64)
    _refuse(
        ~np.isfinite(values),
        name,
        values,
        f"holds NaN or an infinity, and is {role}",
        "drop the rows without a label or weight",
    )
    return values


def _refuse(wrong: npt.NDArray[np.bool_], column: str, values: Rows, what: str, remedy: str) -> None:
    if wrong.any():
        first = int(np.argmax(wrong))
        raise DataError(
            f"E1010 column '{column}' {what}",
            evidence=f"{int(wrong.sum())} of {values.size} rows, the first is row {first}: {values[first]:g}",
            remedy=remedy,
        )
