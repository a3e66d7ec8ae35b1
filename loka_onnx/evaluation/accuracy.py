"""Accuracy of a built engine: its outputs against the FP32 reference's on the same rows, paired.

Every figure is a difference row by row: the noise of the task metric itself is a hundred times the budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.evaluation import (
    Basis,
    BudgetStatus,
    CalibrationBin,
    OutputEvaluation,
    PairedDifference,
    TaskMetrics,
)
from loka_onnx.core.intervals import Interval
from loka_onnx.errors import EvaluationError
from loka_onnx.evaluation.budget import budget_verdict
from loka_onnx.evaluation.columns import Groups, Scores, Truth, read_scores, read_truth, refuse_no_rows
from loka_onnx.evaluation.paired import PairedRows, loss_rows, paired_rows
from loka_onnx.evaluation.slices import SliceColumn, read_slices, slice_differences
from loka_onnx.numerics.intervals import CONFIDENCE, ratio_interval
from loka_onnx.numerics.task_metrics import (
    auc,
    auc_difference,
    normalized_entropy,
    normalized_squared_error,
    prediction_ratio,
    weighted_mean,
)

Array = npt.NDArray[Any]
BINS = 10
"""Bins of a calibration curve."""
DRIFT_LEVELS = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
"""Shares of the rows below the quantiles of the change of the score."""


@dataclass(frozen=True)
class Units:
    """Groups of rows that belong together, and slices that are judged apart, of the rows of a split.

    With `curves`, calibration and drift are included; without `metrics`, only the change and a guarded AUC.
    """

    grouping: Groups | None = None
    slices: tuple[SliceColumn, ...] = ()
    curves: bool = False
    metrics: bool = True

    @property
    def groups(self) -> npt.NDArray[np.intp] | None:
        """(rows,) numbers of the groups; None for independent rows."""
        return None if self.grouping is None else self.grouping.ids

    @classmethod
    def of(
        cls, columns: Mapping[str, Array], group: str | None, slices: Sequence[str] = (), curves: bool = False
    ) -> Units:
        """Read groups and slices from the columns of a split; DataError if a slice column is missing."""
        grouping = Groups.of(group, columns[group]) if group else None
        return cls(grouping, read_slices(columns, slices), curves)

    def basis(self, paired: PairedRows) -> Basis:
        """Return the basis of intervals over the paired changes of all rows."""
        weight, tail = np.ones(paired.base.size) if paired.weights is None else paired.weights, paired.tail
        if self.grouping is not None:
            weight = np.bincount(self.grouping.ids, weights=weight).astype(np.float64)
        largest = int(np.argmax(weight))
        return Basis(
            units=int(np.count_nonzero(weight)),
            is_grouped=self.grouping is not None,
            largest="" if self.grouping is None else self.grouping.name(largest),
            largest_share=float(weight[largest] / weight.sum()),
            top_share=tail.top_share,
            tail_index=tail.index if math.isfinite(tail.index) else None,
            skewness=tail.skewness,
            is_heavy=tail.is_heavy,
        )


def evaluate_reference(
    reference: Mapping[str, Array],
    columns: Mapping[str, Array],
    specs: tuple[OutputSpec, ...],
    curves: bool = False,
) -> tuple[OutputEvaluation, ...]:
    """Return the quality of the FP32 reference itself, per spec; with its calibration where `curves` is set.

    Other arguments are as of `evaluate_outputs`.
    """
    evaluations = []
    for spec in specs:
        truth = read_truth(columns, spec, None)
        scores = _reference_scores(spec, reference, truth)
        known = (spec.name, spec.kind, _metrics(spec, scores, truth), None, spec.budget, BudgetStatus.WITHIN)
        curve = _calibration(scores, truth) if curves else ()
        evaluations.append(OutputEvaluation(*known, None, calibration=curve))
    return tuple(evaluations)


def evaluate_outputs(
    reference: Mapping[str, Array],
    candidate: Mapping[str, Array],
    columns: Mapping[str, Array],
    specs: tuple[OutputSpec, ...],
    units: Units | None = None,
    confidence: float = CONFIDENCE,
) -> tuple[OutputEvaluation, ...]:
    """Return the quality of an engine per spec, and its paired difference from the FP32 reference.

    Outputs are (rows,) or (rows, 1) arrays by name, of the same rows in the same order; columns are (rows,)
    labels and weights. `confidence` is that of the two-sided intervals that decide, and jointly of the slices
    of an output; other intervals have 95 %. Raises as `read_truth` and `read_scores` do, and EvaluationError
    where the reference's loss (without labels, its entropy) is 0.
    """
    units, evaluations = units or Units(), []
    for spec in specs:
        truth = read_truth(columns, spec, units.groups)
        before = _reference_scores(spec, reference, truth)
        after = read_scores(candidate, spec, before.raw.size, is_reference=False)
        paired = paired_rows(spec, before, after, truth)
        if weighted_mean(paired.base, paired.weights) == 0.0:
            raise _nothing_to_relate_to(spec, paired)
        truth = truth if units.metrics or spec.max_auc_drop is not None else replace(truth, labels=None)
        difference = _difference(spec, before, after, truth, paired, confidence)
        slices, left_out = slice_differences(paired, units.slices, spec, confidence)
        basis = units.basis(paired)
        evaluations.append(
            OutputEvaluation(
                output=spec.name,
                kind=spec.kind,
                metrics=_metrics(spec, after, truth),
                difference=difference,
                budget=spec.budget,
                slices=slices,
                slices_left_out=left_out,
                calibration=_calibration(after, truth) if units.curves else (),
                drift=_drift(before, after) if units.curves else {},
                basis=basis,
                **vars(budget_verdict(spec, difference, basis)),
            )
        )
    return tuple(evaluations)


def _calibration(scores: Scores, truth: Truth) -> tuple[CalibrationBin, ...]:
    """Return mean prediction and mean label of bins of equally many rows; none without labels."""
    if truth.labels is None:
        return ()
    counted = np.arange(truth.labels.size) if truth.weights is None else np.flatnonzero(truth.weights)
    order = counted[np.argsort(scores.predictions[counted], kind="stable")]
    bins = []
    for rows in np.array_split(order, min(BINS, order.size)):
        weights = None if truth.weights is None else truth.weights[rows]
        predicted, observed = (weighted_mean(v[rows], weights) for v in (scores.predictions, truth.labels))
        bins.append(CalibrationBin(rows.size, predicted, observed))
    return tuple(bins)


def _drift(before: Scores, after: Scores) -> dict[str, float]:
    """Return quantiles of the change of the logit (or regression output), each by its level in words."""
    values = np.quantile(after.scores - before.scores, DRIFT_LEVELS).tolist()
    return {f"{100 * level:g} %": value for level, value in zip(DRIFT_LEVELS, values, strict=True)}


def _reference_scores(spec: OutputSpec, reference: Mapping[str, Array], truth: Truth) -> Scores:
    scores = read_scores(reference, spec, truth.rows, is_reference=True)
    refuse_no_rows(scores.raw.size, spec)
    return scores


def _nothing_to_relate_to(spec: OutputSpec, paired: PairedRows) -> EvaluationError:
    rows, what = paired.base.size, "loss"
    evidence = f"{rows} rows fit their labels exactly"
    remedy = "check that the label is not an input of the model"
    if paired.labelled is None:
        what, evidence = "entropy", f"it predicts 0 or 1 for certain on {rows} rows"
        remedy = "check the kind of the output, or give labels"
    return EvaluationError(
        f"E1001 the {what} of the FP32 reference on output '{spec.name}' is 0, so no change "
        "is relative to it",
        evidence=evidence,
        remedy=remedy,
    )


def _metrics(spec: OutputSpec, scores: Scores, truth: Truth) -> TaskMetrics:
    labels, weights = truth.labels, truth.weights
    if labels is None:
        return TaskMetrics(loss=None, normalized_entropy=None, auc=None, prediction_ratio=None)
    is_regression = spec.kind is OutputKind.REGRESSION
    normalized = normalized_squared_error if is_regression else normalized_entropy
    return TaskMetrics(
        loss=weighted_mean(loss_rows(spec, scores, labels), weights),
        normalized_entropy=normalized(scores.scores, labels, weights),
        auc=None if is_regression else auc(scores.raw, labels, weights),
        prediction_ratio=prediction_ratio(scores.predictions, labels, weights),
    )


def _difference(
    spec: OutputSpec, before: Scores, after: Scores, truth: Truth, paired: PairedRows, confidence: float
) -> PairedDifference:
    change = paired.relative(confidence)
    delta = after.scores - before.scores
    area = moved = None
    if truth.labels is not None:
        shift = after.predictions - before.predictions
        moved = (
            ratio_interval(shift, truth.labels, paired.weights, paired.groups)
            if weighted_mean(truth.labels, paired.weights) != 0.0
            else Interval(math.nan, -math.inf, math.inf, CONFIDENCE, truth.labels.size)
        )
        if spec.kind is not OutputKind.REGRESSION:
            area = auc_difference(before.raw, after.raw, truth.labels, truth.weights, truth.groups)
    return PairedDifference(
        denominator=paired.denominator,
        **vars(change),
        delta_auc=area,
        delta_prediction_ratio=moved,
        delta_rmse=math.sqrt(weighted_mean(np.square(delta), truth.weights)),
        delta_max=float(np.abs(delta).max()),
    )
