"""Task metrics of a ranker, from rows, in float64.

A label y may be soft, in [0, 1]: the row then counts as a positive of weight y and as a negative of weight 1
− y. Arrays are (rows,) throughout; logits are finite; weights are nonnegative, not all zero, None for equal
ones.

**AUC** and its paired change come from placement values. With a_i = w_i·y_i and b_i = w_i·(1 − y_i), A = Σa,
B = Σb and ψ(s, t) = 1 if s > t, ½ if s = t, else 0:

    above_i = Σ_j b_j ψ(s_i, s_j) / B       share of the negatives below row i
    below_i = Σ_j a_j ψ(s_j, s_i) / A       share of the positives above row i
    AUC     = Σ_i a_i above_i / A = Σ_i b_i below_i / B

Both areas of a difference are U-statistics of one sample, so it has the influence (candidate primed)

    ψ_i = a_i/A · [(above′_i − above_i) − ΔAUC] + b_i/B · [(below′_i − below_i) − ΔAUC].

Independent rows: the two sums are scaled to ddof = 1 within each class, which for binary labels and equal
weights is DeLong's variance of the difference exactly. Grouped rows: ψ is summed within a group first.

Sources: normalized entropy: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook" (ADKDD
2014), section 2; DeLong, DeLong and Clarke-Pearson (Biometrics 1988), section 2, V10 and V01, from one sort
as in Sun and Xu, "Fast Implementation of DeLong's Algorithm" (IEEE SPL 2014), with cumulative weights for
midranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import entr, expit

from loka_onnx.core.intervals import Interval
from loka_onnx.errors import InternalError
from loka_onnx.numerics.intervals import CONFIDENCE, Spread, interval_around, spread_of

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AucPlacements:
    """AUC, and of every row a_i/A (`positive`), b_i/B (`negative`), above_i and below_i, as defined above."""

    auc: float
    positive: Rows
    negative: Rows
    above: Rows
    below: Rows


def auc_placements(scores: Array, labels: Array, weights: Array | None = None) -> AucPlacements | None:
    """Return placement values of finite scores with labels in [0, 1]; None where one class has no weight."""
    y = labels.astype(np.float64)
    w = np.ones_like(y) if weights is None else weights.astype(np.float64)
    positive, negative = w * y, w * (1.0 - y)
    total_positive, total_negative = float(positive.sum()), float(negative.sum())
    if total_positive == 0.0 or total_negative == 0.0:
        return None
    _, level = np.unique(scores, return_inverse=True)
    above = _midshare(level, negative) / total_negative
    below = 1.0 - _midshare(level, positive) / total_positive
    positive, negative = positive / total_positive, negative / total_negative
    return AucPlacements(float(positive @ above), positive, negative, above, below)


def _midshare(level: npt.NDArray[np.intp], mass: Rows) -> Rows:
    """Return the mass below each row's level plus half of the mass on it."""
    on_level = np.bincount(level, weights=mass)
    return np.asarray((np.cumsum(on_level) - 0.5 * on_level)[level], dtype=np.float64)


def auc_difference(
    reference: Array,
    candidate: Array,
    labels: Array,
    weights: Array | None = None,
    groups: Array | None = None,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Return the AUC of the candidate minus that of the reference, with its paired interval. `groups` are ids
    of rows that belong together. None where one class has no weight; infinite where a class has one row.
    """
    before, after = auc_placements(reference, labels, weights), auc_placements(candidate, labels, weights)
    if before is None or after is None:
        return None
    change = after.auc - before.auc
    positive = before.positive * (after.above - before.above - change)
    negative = before.negative * (after.below - before.below - change)
    if groups is not None:
        spread = spread_of(positive + negative, groups)
    else:
        counts = int(np.count_nonzero(before.positive)), int(np.count_nonzero(before.negative))
        influence = _unbiased(positive, counts[0]) + _unbiased(negative, counts[1])
        spread = Spread(float(np.linalg.norm(influence)) if min(counts) > 1 else math.inf, min(counts))
    return interval_around(change, spread, int(labels.size), confidence)


def _unbiased(influence: Rows, count: int) -> Rows:
    return influence * math.sqrt(count / (count - 1)) if count > 1 else influence


def softplus(z: Array) -> Rows:
    """Return log(1 + eᶻ), elementwise, without overflow."""
    return np.logaddexp(0.0, z.astype(np.float64))


def log_loss_rows(logits: Array, labels: Array) -> Rows:
    """Return the log loss of each row in nats, from its logit. L = y·softplus(−z) + (1 − y)·softplus(z): both
    terms are positive, so a confident and right one keeps its small loss, which softplus(z) − y·z would
    cancel.
    """
    y = labels.astype(np.float64)
    return y * softplus(-logits) + (1.0 - y) * softplus(logits)


def entropy_rows(logits: Array) -> Rows:
    """Return the entropy in nats of σ(z) for each logit z: a calibrated model's expected log loss. With q =
    σ(−|z|) it is softplus(−|z|) + q·|z|, in which nothing cancels.
    """
    distance = np.abs(logits.astype(np.float64))
    return np.asarray(np.log1p(np.exp(-distance)) + distance * expit(-distance), dtype=np.float64)


def squared_error_rows(predictions: Array, labels: Array) -> Rows:
    """Return the squared error of each row."""
    return np.square(predictions.astype(np.float64) - labels.astype(np.float64))


def logits_from_probabilities(probabilities: Array, clip: float) -> Rows:
    """Return finite logits of probabilities in [clip, 1 − clip]; InternalError for a clip outside (0, ½)."""
    if not 0.0 < clip < 0.5:
        raise InternalError("a probability clip lies between 0 and one half", evidence=f"clip is {clip:g}")
    p = np.clip(probabilities.astype(np.float64), clip, 1.0 - clip)
    return np.asarray(np.log(p) - np.log1p(-p), dtype=np.float64)


def probabilities_from_logits(logits: Array) -> Rows:
    """Return 1 / (1 + e⁻ᶻ), elementwise."""
    return np.asarray(expit(logits.astype(np.float64)), dtype=np.float64)


def weighted_mean(values: Array, weights: Array | None = None) -> float:
    """Return Σwx / Σw, the plain mean for weights None; ZeroDivisionError if they sum to 0."""
    return float(np.average(values.astype(np.float64), weights=weights))


def base_rate_entropy(labels: Array, weights: Array | None = None) -> float:
    """Return the entropy of the mean label in nats: the loss of the best constant prediction."""
    rate = weighted_mean(labels, weights)
    return float(entr(rate) + entr(1.0 - rate))


def normalized_entropy(logits: Array, labels: Array, weights: Array | None = None) -> float:
    """Return mean log loss over the entropy of the base rate; NaN where every label is of one class."""
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
    """Return P(score of a positive > score of a negative) + ½ P(equal); None if one class has no weight."""
    placements = auc_placements(scores, labels, weights)
    return None if placements is None else placements.auc


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator != 0.0 else float("nan")
