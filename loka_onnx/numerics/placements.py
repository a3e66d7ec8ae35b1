"""Placement values: the row-by-row view of the area under the ROC curve.

With a_i = w_i·y_i and b_i = w_i·(1 − y_i), the weights of row i as a positive and as a negative, A = Σa,
B = Σb and ψ(s, t) = 1 if s > t, ½ if s = t, else 0:

    above_i = Σ_j b_j ψ(s_i, s_j) / B       share of the negatives below row i
    below_i = Σ_j a_j ψ(s_j, s_i) / A       share of the positives above row i
    AUC     = Σ_i a_i above_i / A = Σ_i b_i below_i / B

Source: DeLong, DeLong and Clarke-Pearson (Biometrics 1988), V10 and V01 of section 2, computed from one
sort as in Sun and Xu, "Fast Implementation of DeLong's Algorithm" (IEEE SPL 2014); cumulative weights
take the place of their midranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AucPlacements:
    """Placement values of every row.

    Attributes:
        auc: Area under the ROC curve.
        positive: (rows,) weight of each row as a positive, over their sum.
        negative: (rows,) weight of each row as a negative, over their sum.
        above: (rows,) share of the negatives that score below the row, ties half.
        below: (rows,) share of the positives that score above the row, ties half.
    """

    auc: float
    positive: Rows
    negative: Rows
    above: Rows
    below: Rows


def auc_placements(scores: Array, labels: Array, weights: Array | None = None) -> AucPlacements | None:
    """Placement values, O(rows · log rows).

    Args:
        scores: (rows,), finite.
        labels: (rows,), in [0, 1].
        weights: (rows,) nonnegative; None for equal weights.

    Returns:
        The placements; None where one class has no weight.
    """
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
    """Mass below each row's level plus half of the mass on it."""
    on_level = np.bincount(level, weights=mass)
    return np.asarray((np.cumsum(on_level) - 0.5 * on_level)[level], dtype=np.float64)
