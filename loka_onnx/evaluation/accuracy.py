"""Accuracy of a built engine: its own outputs against the FP32 reference's on the same rows, paired.

Every figure is a difference row by row, because the noise of the task metric itself is a hundred times what a
budget allows. ΔNE is E[ΔL] / E[L_fp32] by the exact identity of `numerics.loss_change`, with the delta method
for the estimated denominator; KL and labelled part are relative to the same denominator, so that they add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.evaluation import BudgetStatus, OutputEvaluation, PairedDifference, TaskMetrics
from loka_onnx.core.intervals import Interval
from loka_onnx.errors import EvaluationError
from loka_onnx.evaluation.columns import Scores, Truth, group_ids, read_scores, read_truth
from loka_onnx.numerics.auc_difference import auc_difference
from loka_onnx.numerics.intervals import CONFIDENCE, ratio_interval, required_rows
from loka_onnx.numerics.loss_change import loss_change
from loka_onnx.numerics.task_metrics import (
    auc,
    log_loss_rows,
    normalized_entropy,
    normalized_squared_error,
    prediction_ratio,
    squared_error_rows,
    weighted_mean,
)

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.float64]


def evaluate_reference(
    reference: Mapping[str, Array], columns: Mapping[str, Array], specs: tuple[OutputSpec, ...]
) -> tuple[OutputEvaluation, ...]:
    """Quality of the FP32 reference itself.

    Args:
        reference: (rows,) or (rows, 1) arrays by output name.
        columns: (rows,) labels and weights by column name.
        specs: The judged outputs.

    Returns:
        One entry per spec, without a difference and within its budget by definition.

    Raises:
        DataError: A label or weight is missing, not finite, or out of range; there are no rows.
        ConfigError: An output does not hold what its kind declares.
        EvaluationError: An output is missing or not finite.
    """
    return tuple(_evaluate(spec, reference, None, read_truth(columns, spec, None)) for spec in specs)


def evaluate_outputs(
    reference: Mapping[str, Array],
    candidate: Mapping[str, Array],
    columns: Mapping[str, Array],
    specs: tuple[OutputSpec, ...],
    groups: Array | None = None,
) -> tuple[OutputEvaluation, ...]:
    """Quality of an engine, and its paired difference from the FP32 reference.

    Args:
        reference: (rows,) or (rows, 1) arrays by output name, of the FP32 reference.
        candidate: The same of the engine, on the same rows in the same order.
        columns: (rows,) labels and weights by column name.
        specs: The judged outputs.
        groups: (rows,) ids of rows that belong together; None for independent rows.

    Returns:
        One entry per spec, with two-sided 95 % intervals.

    Raises:
        DataError: A label or weight is missing, not finite, or out of range; there are no rows.
        ConfigError: A reference output does not hold what its kind declares.
        EvaluationError: An output is missing or not finite, or the reference's loss is 0.
    """
    ids = group_ids(groups)
    return tuple(_evaluate(spec, reference, candidate, read_truth(columns, spec, ids)) for spec in specs)


def budget_status(delta: Interval, budget: float) -> str:
    """A value of `BudgetStatus`: which side of the budget the whole interval lies on."""
    if delta.upper <= budget:
        return BudgetStatus.WITHIN
    return BudgetStatus.BEYOND if delta.lower > budget else BudgetStatus.UNDECIDED


def rows_to_decide(delta: Interval, budget: float) -> int | None:
    """Rows that would settle an undecided verdict, if estimate and spread stayed.

    Args:
        delta: Interval of the relative loss change; its half width carries the paired (and grouped) spread.
        budget: Largest accepted change.

    Returns:
        More rows than `delta` has; None when decided, or when no number of rows is known to be enough.
    """
    if budget_status(delta, budget) != BudgetStatus.UNDECIDED:
        return None
    quantile = float(ndtri(0.5 + delta.confidence / 2.0))
    sd = (delta.upper - delta.lower) / 2.0 / quantile * math.sqrt(delta.rows)
    needed = required_rows(delta.value, sd, budget, delta.confidence)
    # An undecided interval is not settled by the rows it already has, whatever rounding says.
    return None if needed is None else max(needed, delta.rows + 1)


def _evaluate(
    spec: OutputSpec, reference: Mapping[str, Array], candidate: Mapping[str, Array] | None, truth: Truth
) -> OutputEvaluation:
    rows = truth.labels.size
    before = read_scores(reference, spec, rows, is_reference=True)
    if candidate is None:
        metrics = _metrics(spec, before, truth)
        return OutputEvaluation(
            spec.name, spec.kind, metrics, None, spec.budget, BudgetStatus.WITHIN, rows_to_decide=None
        )
    after = read_scores(candidate, spec, rows, is_reference=False)
    difference = _difference(spec, before, after, truth)
    return OutputEvaluation(
        output=spec.name,
        kind=spec.kind,
        metrics=_metrics(spec, after, truth),
        difference=difference,
        budget=spec.budget,
        budget_status=budget_status(difference.delta_ne, spec.budget),
        rows_to_decide=rows_to_decide(difference.delta_ne, spec.budget),
    )


def _loss_rows(spec: OutputSpec, scores: Scores, truth: Truth) -> Rows:
    rule = squared_error_rows if spec.kind is OutputKind.REGRESSION else log_loss_rows
    return rule(scores.scores, truth.labels)


def _metrics(spec: OutputSpec, scores: Scores, truth: Truth) -> TaskMetrics:
    is_regression = spec.kind is OutputKind.REGRESSION
    normalized = normalized_squared_error if is_regression else normalized_entropy
    return TaskMetrics(
        loss=weighted_mean(_loss_rows(spec, scores, truth), truth.weights),
        normalized_entropy=normalized(scores.scores, truth.labels, truth.weights),
        auc=None if is_regression else auc(scores.raw, truth.labels, truth.weights),
        prediction_ratio=prediction_ratio(scores.predictions, truth.labels, truth.weights),
    )


def _difference(spec: OutputSpec, before: Scores, after: Scores, truth: Truth) -> PairedDifference:
    losses = _loss_rows(spec, before, truth)
    if weighted_mean(losses, truth.weights) == 0.0:
        raise EvaluationError(
            f"the loss of the FP32 reference on output '{spec.name}' is 0, so no change is relative to it",
            evidence=f"{losses.size} rows fit their labels exactly",
            remedy="check that the label is not an input of the model",
        )
    change = loss_change(spec.kind, before.scores, after.scores, truth.labels)

    def relative(rows: Rows) -> Interval:
        return ratio_interval(rows, losses, truth.weights, truth.groups)

    delta = after.scores - before.scores
    area = None
    if spec.kind is not OutputKind.REGRESSION:
        area = auc_difference(before.raw, after.raw, truth.labels, truth.weights, truth.groups)
    return PairedDifference(
        delta_ne=relative(change.total),
        kl=relative(change.kl),
        labelled=relative(change.labelled),
        delta_auc=area,
        delta_prediction_ratio=_prediction_ratio_change(before, after, truth),
        delta_rmse=math.sqrt(weighted_mean(np.square(delta), truth.weights)),
        delta_max=float(np.abs(delta).max()),
    )


def _prediction_ratio_change(before: Scores, after: Scores, truth: Truth) -> Interval:
    if weighted_mean(truth.labels, truth.weights) == 0.0:
        return Interval(math.nan, -math.inf, math.inf, CONFIDENCE, truth.labels.size)
    moved = after.predictions - before.predictions
    return ratio_interval(moved, truth.labels, truth.weights, truth.groups)
