"""Loss change of every row under every unit of sites, and its sums, which do not grow with the rows.

**A row.** Exactly, ΔL = KL(p ‖ p′) + (p − y)·δ (`numerics.loss_change`). KL needs no label, so an unlabelled
model can be judged; only the denominator then differs. With labels it is the FP32 model's loss L on the same
rows: E[ΔL]/E[L] is the relative change of normalized entropy, because the entropy of the base rate cancels.
Without labels it is the mean entropy of the predictions, h(p) = −p·log p − (1 − p)·log(1 − p). A row whose
label has probability q has the expected loss

    E_y[L] = −q·log p − (1 − q)·log(1 − p) = h(p) + (p − q)·z,     z = log(p/(1 − p)),

so E[h(p)] is the expected loss where q = p, as for a calibrated model on average over rows with the same p.
An overconfident model has less entropy than loss: its relative KL is too large, and the verdict errs on the
safe side. The labelled term vanishes in expectation where E[y | p, δ] = p, and is unknown otherwise. A
regression has a loss (the squared error) but no entropy: it needs labels (`OutputSpec`).

**Sums.** Each batch is summed where it ran, in float64 (not by a BLAS, whose order of additions depends on
its threads). Where every row is a statistical unit (`core.intervals`), a batch leaves its sums and sums
of squares, which are added exactly (`core.exact_sum`): totals do not depend on the order of batches. Where
rows form groups, sums of squares need the sum of each group, and there may be as many groups as rows. So
groups are hashed into 4096 buckets. A bucket is a union of whole groups, so rows of different buckets are
independent and the variance between buckets is that of the estimate, with at most 4095 degrees of freedom.
The hash is the same in every process; its low bits decide, because splits by the same column take its high
ones. Batches are added in the order of the data, so totals do not depend on where batches ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import RatioMoments
from loka_onnx.core.profile import ENTROPY, LOSS, DeltaSums, WeightedMean
from loka_onnx.data.selection import stable_hash, without_id
from loka_onnx.errors import CalibrationError, InternalError
from loka_onnx.numerics.column_sums import ColumnSums
from loka_onnx.numerics.loss_change import kl_rows, loss_change
from loka_onnx.numerics.task_metrics import (
    entropy_rows,
    log_loss_rows,
    logits_from_probabilities,
    squared_error_rows,
)

BUCKETS = 4096

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.float64]
Arrays = Mapping[str, Array]


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


def as_scores(spec: OutputSpec, values: Array) -> Rows:
    """Return (rows,) logits, or regression outputs, of a judged output."""
    flat = values.reshape(len(values)).astype(np.float64)
    return logits_from_probabilities(flat, spec.clip) if spec.kind is OutputKind.PROBABILITY else flat


def loss_terms(spec: OutputSpec, exact: Rows, changed: Sequence[Rows], columns: Arrays) -> LossRows:
    """Return the terms of the loss change from (rows,) scores: `exact`, and `changed` for each unit.

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


@dataclass(frozen=True)
class GroupSums:
    """Sums of a batch by bucket that occurs: (buckets,), `terms` (terms, units, buckets)."""

    buckets: npt.NDArray[np.int64]
    denominator: Rows
    terms: Rows


@dataclass(frozen=True)
class BatchLoss:
    """Sums of one output over one batch.

    Attributes:
        sums: (2 + 2·units,) of the weights, of the denominator, and of weighted δ and δ² for each unit.
        squares: (1 + 3·terms·units,) sums of B², then (3, terms, units) of A, A² and A·B; None if grouped.
        groups: Sums of each bucket; None if each row is a unit.
    """

    rows: int
    sums: Rows
    squares: Rows | None
    groups: GroupSums | None


def sum_batch(rows: LossRows, groups: Array | None) -> BatchLoss:
    """Sum a batch; `groups` (rows,) are group ids, numbers or strings, None for independent rows."""
    a, b, w = rows.terms, rows.denominator, rows.weights
    changes = (w * rows.delta, w * rows.delta**2)
    sums = np.concatenate([[w.sum(), b.sum()], *(change.sum(axis=1) for change in changes)])
    if groups is not None:
        buckets = buckets_of(groups)
        order = np.argsort(buckets, kind="stable")
        present, starts = np.unique(buckets[order], return_index=True)
        terms = np.add.reduceat(a[:, :, order], starts, axis=2)
        return BatchLoss(b.size, sums, None, GroupSums(present, np.add.reduceat(b[order], starts), terms))
    products = [product.sum(axis=2).ravel() for product in (a, a * a, a * b)]
    return BatchLoss(b.size, sums, np.concatenate([[(b * b).sum()], *products]), None)


def buckets_of(groups: Array) -> npt.NDArray[np.int64]:
    """Return (rows,) the bucket of each row's group, the same in every process.

    A row whose group is null is a group of its own: its bucket follows from its position in the batch.
    """
    missing = without_id(groups)
    known = groups[~missing]
    if known.dtype.kind == "O":
        known = np.array(known.tolist())
    if known.dtype.kind == "f":
        # Adding 0 turns −0 into 0, which is the same group.
        known = (known.astype(np.float64) + 0.0).view(np.int64)
    elif known.dtype.kind in "mM":
        known = known.view(np.int64)
    buckets = np.arange(groups.size, dtype=np.int64) % BUCKETS
    if known.size:
        buckets[~missing] = stable_hash(known) % np.uint64(BUCKETS)
    return buckets


class _Totals:
    """Totals of one output over batches; `rows` counts the rows."""

    def __init__(self) -> None:
        self.rows = 0
        self._sums = ColumnSums()

    def add(self, batch: BatchLoss) -> None:
        """Add a batch."""
        self.rows += batch.rows
        self._sums.add(batch.sums)

    @property
    def units(self) -> int:
        """Number of units of sites."""
        return len(self._sums.sums()) // 2 - 1

    def delta(self, unit: int) -> DeltaSums:
        """Return the change of the logit under one unit of sites."""
        weight, _, *changes = self._sums.sums()
        return DeltaSums(weight, changes[unit], changes[self.units + unit])

    @property
    def mean_denominator(self) -> WeightedMean:
        """Mean loss of the exact model, or mean entropy of its predictions."""
        weight, total, *_ = self._sums.sums()
        return WeightedMean(total, weight)


class RowTotals(_Totals):
    """Each row is a statistical unit."""

    def __init__(self) -> None:
        super().__init__()
        self._squares = ColumnSums()

    def add(self, batch: BatchLoss) -> None:
        """Add a batch; one summed by groups is an InternalError."""
        if batch.squares is None:
            raise InternalError("a batch that was summed by groups is added to some that were not")
        super().add(batch)
        self._squares.add(batch.squares)

    def moments(self, term: int, unit: int) -> RatioMoments:
        """Return a term of the loss change (0: KL, 1: labelled) under one unit, over the denominator."""
        bb, *products = self._squares.sums()
        each = len(products) // 3
        a, aa, ab = products[term * self.units + unit :: each]
        return RatioMoments(self.rows, self.rows, a, self.mean_denominator.total, aa, ab, bb)

    def relative(self) -> Rows:
        """Return (terms, units) of the loss change over the denominator."""
        _, *products = self._squares.sums()
        values = np.array([item.value for item in products[: len(products) // 3]])
        return np.asarray(values.reshape(-1, self.units) / self.mean_denominator.total.value)


class BucketTotals(_Totals):
    """Each bucket of groups is a statistical unit."""

    def __init__(self) -> None:
        super().__init__()
        self._denominator = np.zeros(BUCKETS)
        self._seen = np.zeros(BUCKETS, dtype=np.bool_)
        self._terms: Rows = np.zeros((0, 0, BUCKETS))

    def add(self, batch: BatchLoss) -> None:
        """Add a batch; one not summed by groups is an InternalError."""
        groups = batch.groups
        if groups is None:
            raise InternalError("a batch that was not summed by groups is added to some that were")
        super().add(batch)
        if not self._terms.size:
            self._terms = np.zeros((*groups.terms.shape[:2], BUCKETS))
        self._seen[groups.buckets] = True
        self._denominator[groups.buckets] += groups.denominator
        self._terms[:, :, groups.buckets] += groups.terms

    def moments(self, term: int, unit: int) -> RatioMoments:
        """Return a term of the loss change (0: KL, 1: labelled) under one unit, over the denominator."""
        a, b = self._terms[term, unit, self._seen], self._denominator[self._seen]
        sums = (ExactSum.of((values.sum(),)) for values in (a, b, a * a, a * b, b * b))
        return RatioMoments(self.rows, int(self._seen.sum()), *sums)

    def relative(self) -> Rows:
        """Return (terms, units) of the loss change over the denominator."""
        return np.asarray(self._terms.sum(axis=2) / self._denominator.sum())


OutputTotals = RowTotals | BucketTotals
