"""Loss change of every row under every unit of sites, and its denominator.

Per row and exactly, ΔL = KL(p ‖ p′) + (p − y)·δ (`numerics.loss_change`). KL needs no label, so an unlabelled
model can be judged; only the denominator then differs.

**With labels** it is the FP32 model's loss L on the same rows: E[ΔL]/E[L] is the relative change of
normalized entropy, because the entropy of the base rate cancels.

**Without labels** it is the mean entropy of the predictions, h(p) = −p·log p − (1 − p)·log(1 − p). A row
whose label has probability q has the expected loss

    E_y[L] = −q·log p − (1 − q)·log(1 − p) = h(p) + (p − q)·z,     z = log(p/(1 − p)),

so E[h(p)] is the expected loss where q = p, as for a calibrated model on average over rows with the same p.
An overconfident model has less entropy than loss: its relative KL is too large, and the verdict errs on the
safe side. The labelled term vanishes in expectation where E[y | p, δ] = p, and is unknown otherwise.

A regression has a loss (the squared error) but no entropy: it needs labels (`OutputSpec`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.profile import ENTROPY, LOSS
from loka_onnx.errors import CalibrationError
from loka_onnx.numerics.loss_change import kl_rows, loss_change
from loka_onnx.numerics.task_metrics import (
    entropy_rows,
    log_loss_rows,
    logits_from_probabilities,
    squared_error_rows,
)

Rows = npt.NDArray[np.float64]
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class LossRows:
    """Effect of low precision on the rows of one output.

    Attributes:
        weights: (rows,).
        denominator: (rows,) weight times the loss of the exact model, or times the entropy of its prediction.
        delta: (units, rows) change of the logit, or of the regression output.
        terms: (terms, units, rows) weight times KL and, with labels, weight times the labelled term.
    """

    weights: Rows
    denominator: Rows
    delta: Rows
    terms: Rows


def denominator_of(spec: OutputSpec) -> str:
    """Return `LOSS`, or `ENTROPY` for an output without labels."""
    return ENTROPY if spec.label is None else LOSS


def as_scores(spec: OutputSpec, values: npt.NDArray[Any]) -> Rows:
    """Return (rows,) logits, or regression outputs, of a judged output."""
    flat = values.reshape(len(values)).astype(np.float64)
    return logits_from_probabilities(flat, spec.clip) if spec.kind is OutputKind.PROBABILITY else flat


def loss_rows(spec: OutputSpec, exact: Rows, changed: Sequence[Rows], columns: Arrays) -> LossRows:
    """Return the terms of the loss change from (rows,) scores: `exact`, and `changed` for each unit switched
    on.

    Raises CalibrationError if a score, a label or a weight is not finite.
    """
    scores = np.stack(changed) if changed else np.empty((0, exact.size))
    weights = np.ones(exact.shape)
    if spec.weight is not None:
        weights = columns[spec.weight].astype(np.float64)
    labels = None if spec.label is None else columns[spec.label].astype(np.float64)
    _check_finite(spec, exact, scores, weights, labels)
    if labels is None:
        denominator, terms = entropy_rows(exact), kl_rows(exact, scores)[np.newaxis]
    else:
        loss = squared_error_rows if spec.kind is OutputKind.REGRESSION else log_loss_rows
        change = loss_change(spec.kind, exact, scores, labels)
        denominator, terms = loss(exact, labels), np.stack([change.kl, change.labelled])
    return LossRows(weights, weights * denominator, scores - exact, weights * terms)


def _check_finite(spec: OutputSpec, exact: Rows, scores: Rows, weights: Rows, labels: Rows | None) -> None:
    for what, values, remedy in (
        (f"output '{spec.name}'", exact, "drop the rows that overflow, or correct the model"),
        (f"column '{spec.label}'", labels, "drop the rows or fill the values"),
        (f"column '{spec.weight}'", weights, "drop the rows or fill the values"),
        (
            f"with a site in low precision, output '{spec.name}'",
            scores,
            "leave sites out with `plan.keep`, or calibrate on rows without outliers",
        ),
    ):
        if values is not None and not np.isfinite(values).all():
            raise CalibrationError(
                f"E0502 {what} is not finite",
                evidence=f"{int((~np.isfinite(values)).sum())} of {values.size} values, in a batch of "
                f"{exact.size} rows",
                remedy=remedy,
            )
