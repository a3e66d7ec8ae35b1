"""Task metrics of a ranker, from rows, in float64.

A label y may be soft, in [0, 1]: the row then counts as a positive of weight y and as a negative of weight
1 − y.

Sources: normalized entropy is defined in section 2 of He et al., "Practical Lessons from Predicting Clicks
on Ads at Facebook" (ADKDD 2014); the area under the ROC curve is the Mann-Whitney statistic with ties counted
half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import entr, expit

from loka_onnx.errors import InternalError
from loka_onnx.numerics.placements import auc_placements

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.float64]


def softplus(z: Array) -> Rows:
    """log(1 + eᶻ), elementwise, without overflow."""
    return np.logaddexp(0.0, z.astype(np.float64))


def log_loss_rows(logits: Array, labels: Array) -> Rows:
    """Log loss of each row from its logit.

    L = y·softplus(−z) + (1 − y)·softplus(z): both terms are positive, so a confident and right prediction
    keeps its small loss, which softplus(z) − y·z would cancel away.

    Args:
        logits: (rows,), finite.
        labels: (rows,), in [0, 1].

    Returns:
        (rows,) losses in nats.
    """
    y = labels.astype(np.float64)
    return y * softplus(-logits) + (1.0 - y) * softplus(logits)


def entropy_rows(logits: Array) -> Rows:
    """Entropy of each predicted probability: the loss that a calibrated model expects, without a label.

    With q = σ(−|z|) it is softplus(−|z|) + q·|z|, in which nothing cancels.

    Args:
        logits: (rows,), finite.

    Returns:
        (rows,) entropies in nats, between 0 and log 2.
    """
    distance = np.abs(logits.astype(np.float64))
    return np.asarray(np.log1p(np.exp(-distance)) + distance * expit(-distance), dtype=np.float64)


def squared_error_rows(predictions: Array, labels: Array) -> Rows:
    """Squared error of each row.

    Args:
        predictions: (rows,).
        labels: (rows,).

    Returns:
        (rows,) squared differences.
    """
    return np.square(predictions.astype(np.float64) - labels.astype(np.float64))


def logits_from_probabilities(probabilities: Array, clip: float) -> Rows:
    """Logits of probabilities, clipped first.

    Args:
        probabilities: (rows,), in [0, 1].
        clip: Probabilities are moved into [clip, 1 − clip]; above 0 and below one half.

    Returns:
        (rows,) finite logits.

    Raises:
        InternalError: The clip is outside (0, ½).
    """
    if not 0.0 < clip < 0.5:
        raise InternalError("a probability clip lies between 0 and one half", evidence=f"clip is {clip:g}")
    p = np.clip(probabilities.astype(np.float64), clip, 1.0 - clip)
    return np.asarray(np.log(p) - np.log1p(-p), dtype=np.float64)


def probabilities_from_logits(logits: Array) -> Rows:
    """1 / (1 + e⁻ᶻ), elementwise."""
    return np.asarray(expit(logits.astype(np.float64)), dtype=np.float64)


def weighted_mean(values: Array, weights: Array | None = None) -> float:
    """Mean over rows.

    Args:
        values: (rows,).
        weights: (rows,) nonnegative, not all zero; None for equal weights.

    Returns:
        Σwx / Σw.
    """
    return float(np.average(values.astype(np.float64), weights=weights))


def base_rate_entropy(labels: Array, weights: Array | None = None) -> float:
    """Entropy of the mean label, nats.

    Args:
        labels: (rows,), in [0, 1].
        weights: As for `weighted_mean`.

    Returns:
        The loss of the best constant prediction; 0 for a single-class label.
    """
    rate = weighted_mean(labels, weights)
    return float(entr(rate) + entr(1.0 - rate))


def normalized_entropy(logits: Array, labels: Array, weights: Array | None = None) -> float:
    """Mean log loss over the entropy of the base rate.

    Args:
        logits: (rows,), finite.
        labels: (rows,), in [0, 1].
        weights: As for `weighted_mean`.

    Returns:
        1 for a model that knows the base rate only, less for a better one; NaN where every label is of
        one class, which leaves nothing to normalize by.
    """
    loss = weighted_mean(log_loss_rows(logits, labels), weights)
    return _ratio(loss, base_rate_entropy(labels, weights))


def normalized_squared_error(predictions: Array, labels: Array, weights: Array | None = None) -> float:
    """Mean squared error over the variance of the label.

    Args:
        predictions: (rows,).
        labels: (rows,).
        weights: As for `weighted_mean`.

    Returns:
        1 − R²; NaN for a constant label.
    """
    centred = labels.astype(np.float64) - weighted_mean(labels, weights)
    error = weighted_mean(squared_error_rows(predictions, labels), weights)
    return _ratio(error, weighted_mean(np.square(centred), weights))


def prediction_ratio(predictions: Array, labels: Array, weights: Array | None = None) -> float:
    """Mean prediction over mean label, which is 1 for a calibrated model.

    Args:
        predictions: (rows,) probabilities, or regression outputs.
        labels: (rows,).
        weights: As for `weighted_mean`.

    Returns:
        The ratio; NaN where the mean label is 0.
    """
    return _ratio(weighted_mean(predictions, weights), weighted_mean(labels, weights))


def auc(scores: Array, labels: Array, weights: Array | None = None) -> float | None:
    """Area under the ROC curve, exact with ties, O(rows · log rows).

    Args:
        scores: (rows,) logits or probabilities.
        labels: (rows,), in [0, 1].
        weights: (rows,) nonnegative; None for equal weights.

    Returns:
        P(score of a positive > score of a negative) + ½ P(equal); None where one class has no weight.
    """
    placements = auc_placements(scores, labels, weights)
    return None if placements is None else placements.auc


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator != 0.0 else float("nan")
