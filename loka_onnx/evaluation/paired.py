"""Loss changes of an engine row by row, relative to the FP32 model.

With labels, ΔNE is E[ΔL] / E[L_fp32] by the exact identity of `numerics.loss_change`, with the delta method
for the estimated denominator; KL and labelled part have the same denominator, so they add up.

Without labels only KL is known. Its denominator is the mean entropy of the FP32 model's predictions, E[−p·log
p − (1−p)·log(1−p)], which is its expected loss if it is calibrated (E[y | p] = p). An overconfident model has
less entropy than loss, which makes the ratio too large: the verdict then errs on the safe side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.intervals import Interval
from loka_onnx.core.profile import ENTROPY, LOSS
from loka_onnx.evaluation.columns import Scores, Truth
from loka_onnx.numerics.intervals import CONFIDENCE, Ends, Tail, ratio_interval, tail_of
from loka_onnx.numerics.loss_change import kl_rows, loss_change
from loka_onnx.numerics.task_metrics import entropy_rows, log_loss_rows, squared_error_rows

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RelativeChange:
    """Changes over the FP32 model's loss (or entropy): whole, label-free and labelled part."""

    delta_ne: Interval | None
    kl: Interval
    labelled: Interval | None


@dataclass(frozen=True)
class PairedRows:
    """Effect of a change of one output on the loss of each row, (rows,) each.

    `base` is the FP32 model's loss, or without labels the entropy of its predictions; `probabilities` are
    these, None for a regression. `kl` is the label-free part of the change, `labelled` the rest, None without
    labels. `groups` are ids of rows that belong together; None if rows are independent.
    """

    base: Rows
    kl: Rows
    labelled: Rows | None
    weights: Rows | None
    groups: npt.NDArray[np.intp] | None
    probabilities: Rows | None

    @property
    def denominator(self) -> str:
        """`LOSS`, or `ENTROPY` without labels."""
        return ENTROPY if self.labelled is None else LOSS

    def take(self, rows: npt.NDArray[Any]) -> PairedRows:
        """Return some of the rows, by index or mask."""
        optional = (self.labelled, self.weights, self.groups, self.probabilities)
        return PairedRows(
            self.base[rows], self.kl[rows], *(None if part is None else part[rows] for part in optional)
        )

    @cached_property
    def tail(self) -> Tail:
        """Tail of KL; needs a base that does not sum to 0."""
        weight = 1.0 if self.weights is None else self.weights
        return tail_of(weight * self.kl, weight * self.base, self.groups)

    def relative(self, confidence: float = CONFIDENCE) -> RelativeChange:
        """Return the changes with two-sided intervals; needs a base that does not sum to 0."""
        # The labelled part has both signs and most of the spread: other rows than KL's may carry the change.
        ends = Ends.BY_SKEWNESS
        of_kl = Ends.BERNSTEIN if self.tail.is_heavy else Ends.ONE_MORE

        def over_base(rows: Rows, ends: Ends) -> Interval:
            return ratio_interval(rows, self.base, self.weights, self.groups, confidence, ends)

        if self.labelled is None:
            return RelativeChange(None, over_base(self.kl, of_kl), None)
        whole = over_base(self.kl + self.labelled, ends)
        return RelativeChange(whole, over_base(self.kl, of_kl), over_base(self.labelled, ends))


def paired_rows(spec: OutputSpec, before: Scores, after: Scores, truth: Truth) -> PairedRows:
    """Return the changes of one output on every row, from the reference's and the engine's scores."""
    probabilities = None if spec.kind is OutputKind.REGRESSION else before.predictions
    rest = (truth.weights, truth.groups, probabilities)
    if truth.labels is None:
        return PairedRows(entropy_rows(before.scores), kl_rows(before.scores, after.scores), None, *rest)
    change = loss_change(spec.kind, before.scores, after.scores, truth.labels)
    return PairedRows(loss_rows(spec, before, truth.labels), change.kl, change.labelled, *rest)


def loss_rows(spec: OutputSpec, scores: Scores, labels: Rows) -> Rows:
    """Return (rows,) log loss, or squared error for a regression."""
    rule = squared_error_rows if spec.kind is OutputKind.REGRESSION else log_loss_rows
    return rule(scores.scores, labels)
