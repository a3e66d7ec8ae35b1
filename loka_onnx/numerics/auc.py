"""Area under the ROC curve from placement values, and its paired change between two models.

With a_i = w_i·y_i and b_i = w_i·(1 − y_i), the weights of row i as a positive and as a negative, A = Σa, B =
Σb and ψ(s, t) = 1 if s > t, ½ if s = t, else 0:

    above_i = Σ_j b_j ψ(s_i, s_j) / B       share of the negatives below row i
    below_i = Σ_j a_j ψ(s_j, s_i) / A       share of the positives above row i
    AUC     = Σ_i a_i above_i / A = Σ_i b_i below_i / B

Both areas of a difference are U-statistics of one sample, so it has the influence (candidate primed)

    ψ_i = a_i/A · [(above′_i − above_i) − ΔAUC] + b_i/B · [(below′_i − below_i) − ΔAUC].

Independent rows: the two sums are scaled to ddof = 1 within each class, which for binary labels and equal
weights is DeLong's variance of the difference exactly. Grouped rows: ψ is summed within a group first, see
`intervals`.

Source: DeLong, DeLong and Clarke-Pearson (Biometrics 1988), section 2, V10 and V01; computed from one sort in
O(rows · log rows) as in Sun and Xu, "Fast Implementation of DeLong's Algorithm" (IEEE SPL 2014), with
cumulative weights in place of their midranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.intervals import Interval
from loka_onnx.numerics.intervals import CONFIDENCE, Spread, interval_around, spread_of

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AucPlacements:
    """AUC; of every row, its weights as positive and negative over their sums, the share of negatives below
    it (`above`) and of positives above it (`below`), ties half.
    """

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
    """Return the AUC of the candidate minus that of the reference, with its paired interval.

    Arrays are (rows,), of the same rows; labels are in [0, 1], `groups` ids of rows that belong together.
    None where one class has no weight. Infinite where a class has one row.
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
