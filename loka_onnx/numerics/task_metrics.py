"""Task metrics of a ranker, from rows, in float64.

A label y may be soft, in [0, 1]: the row then counts as a positive of weight y and as a negative of weight 1
− y. Arrays are (rows,) throughout; logits are finite; weights are nonnegative, not all zero, and None for
equal ones.

Sources: normalized entropy is defined in section 2 of He et al., "Practical Lessons from Predicting Clicks on
Ads at Facebook" (ADKDD 2014); the area under the ROC curve is the Mann-Whitney statistic with ties counted
half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import entr, expit

from loka_onnx.errors import InternalError
from loka_onnx.numerics.auc import auc_placements

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.float64]


def softplus(z: Array) -> Rows:
    """Return log(1 + eᶻ), elementwise, without overflow."""
    return np.logaddexp(0.0, z.astype(np.float64))


def log_loss_rows(logits: Array, labels: Array) -> Rows:
    """Return the log loss of each row in nats, from its logit.

    L = y·softplus(−z) + (1 − y)·softplus(z): both terms are positive, so a confident and right prediction
    keeps its small loss, which softplus(z) − y·z would cancel.
    """
    y = labels.astype(np.float64)
    return y * softplus(-logits) + (1.0 - y) * softplus(logits)


def entropy_rows(logits: Array) -> Rows:
    """Return the entropy in nats of each predicted probability: a calibrated model's expected loss, without
    label.

    With q = σ(−|z|) it is softplus(−|z|) + q·|z|, in which nothing cancels.
    """
    distance = np.abs(logits.astype(np.float64))
    return np.asarray(np.log1p(np.exp(-distance)) + distance * expit(-distance), dtype=np.float64)


def squared_error_rows(predictions: Array, labels: Array) -> Rows:
    """Return the squared error of each row."""
    return np.square(predictions.astype(np.float64) - labels.astype(np.float64))


def logits_from_probabilities(probabilities: Array, clip: float) -> Rows:
    """Return finite logits of probabilities, clipped to [clip, 1 − clip].

    Raises InternalError if the clip is outside (0, ½).
    """
    if not 0.0 < clip < 0.5:
        raise InternalError("a probability clip lies between 0 and one half", evidence=f"clip is {clip:g}")
    p = np.clip(probabilities.astype(np.float64), clip, 1.0 - clip)
    return np.asarray(np.log(p) - np.log1p(-p), dtype=np.float64)


def probabilities_from_logits(logits: Array) -> Rows:
    """Return 1 / (1 + e⁻ᶻ), elementwise."""
    return np.asarray(expit(logits.astype(np.float64)), dtype=np.float64)


def weighted_mean(values: Array, weights: Array | None = None) -> float:
    """Return Σwx / Σw."""
    return float(np.average(values.astype(np.float64), weights=weights))


def base_rate_entropy(labels: Array, weights: Array | None = None) -> float:
    """Return the entropy of the mean label in nats: the loss of the best constant prediction."""
    rate = weighted_mean(labels, weights)
    return float(entr(rate) + entr(1.0 - rate))


def normalized_entropy(logits: Array, labels: Array, weights: Array | None = None) -> float:
    """Return the mean log loss over the entropy of the base rate.

    1 for a model that knows only the base rate, less for a better one; NaN where every label is of one class.
    """
    loss = weighted_mean(log_loss_rows(logits, labels), weights)
    return _ratio(loss, base_rate_entropy(labels, weights))


def normalized_squared_error(predictions: Array, labels: Array, weights: Array | None = None) -> float:
    """Return the mean squared error over the variance of the label, 1 − R²; NaN for a constant label."""
    centred = labels.astype(np.float64) - weighted_mean(labels, weights)
    error = weighted_mean(squared_error_rows(predictions, labels), weights)
    return _ratio(error, weighted_mean(np.square(centred), weights))


def prediction_ratio(predictions: Array, labels: Array, weights: Array | None = None) -> float:
    """Return mean prediction over mean label, 1 for a calibrated model; NaN where the mean label is 0."""
    return _ratio(weighted_mean(predictions, weights), weighted_mean(labels, weights))


def auc(scores: Array, labels: Array, weights: Array | None = None) -> float | None:
    """Return P(score of a positive > score of a negative) + ½ P(equal); None where
    one class has no weight.
    """
    placements = auc_placements(scores, labels, weights)
    return None if placements is None else placements.auc


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator != 0.0 else float("nan")
