"""Change of the area under the ROC curve between two models on the same rows.

Both areas are U-statistics of one sample, so their difference has the influence (terms as in `placements`,
primed for the candidate)

    ψ_i = a_i/A · [(above′_i − above_i) − ΔAUC] + b_i/B · [(below′_i − below_i) − ΔAUC].

Independent rows: the two sums are scaled to ddof = 1 within each class, which for binary labels and equal
weights is DeLong's variance of the difference exactly. Grouped rows: ψ is summed within a group first, see
`intervals`.

Source: DeLong, DeLong and Clarke-Pearson (Biometrics 1988), section 2; Sun and Xu (IEEE SPL 2014)
for the order of growth, O(rows · log rows).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.intervals import Interval
from loka_onnx.numerics.intervals import CONFIDENCE, Spread, interval_around, spread_of
from loka_onnx.numerics.placements import auc_placements

Array = npt.NDArray[Any]


def auc_difference(
    reference: Array,
    candidate: Array,
    labels: Array,
    weights: Array | None = None,
    groups: Array | None = None,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """AUC of the candidate minus AUC of the reference.

    Args:
        reference: (rows,) scores, finite.
        candidate: (rows,) scores of the same rows, finite.
        labels: (rows,), in [0, 1].
        weights: (rows,) nonnegative; None for equal weights.
        groups: (rows,) ids of rows that belong together; None for independent rows.
        confidence: Coverage.

    Returns:
        The paired interval; None where one class has no weight. Infinite where a class has one row.
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


def _unbiased(influence: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    return influence * math.sqrt(count / (count - 1)) if count > 1 else influence
