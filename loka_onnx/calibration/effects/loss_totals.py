"""Sums over rows of the effect of units of sites on an output; memory does not grow with the rows.

Each batch is summed where it ran, in float64 (not by a BLAS, whose order of additions depends on its
threads). Where every row is a statistical unit (`core.intervals`), a batch leaves its sums and sums of
squares, which are added exactly (`core.exact_sum`): totals do not depend on the order of batches.

Where rows form groups, sums of squares need the sum of each group, and there may be as many groups as rows.
So groups are hashed into 4096 buckets. A bucket is a union of whole groups, so rows of different buckets are
independent and the variance between buckets is that of the estimate, with at most 4095 degrees of freedom.
The hash is the same in every process; its low bits decide, because splits by the same column take its high
ones. Batches are added in the order of the data, so totals do not depend on where batches ran.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.effects.loss_rows import LossRows, Rows
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import RatioMoments
from loka_onnx.core.profile import DeltaSums, WeightedMean
from loka_onnx.data.selection import stable_hash, without_id
from loka_onnx.errors import InternalError
from loka_onnx.numerics.column_sums import ColumnSums

BUCKETS = 4096

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class GroupSums:
    """Sums of one batch over the rows of each bucket that occurs: (buckets,), and `terms` (terms, units,
    buckets).
    """

    buckets: npt.NDArray[np.int64]
    denominator: Rows
    terms: Rows


@dataclass(frozen=True)
class BatchLoss:
    """Sums of one output over one batch.

    Attributes:
        rows: Rows of the batch.
        sums: (2 + 2·units,) of the weights, of the denominator, and of weighted δ and δ² for each unit.
        squares: (1 + 3·terms·units,) sums of B², then (3, terms, units) of A, A² and A·B; None for grouped
            rows.
        groups: Sums of each bucket; None where each row is a unit.
    """

    rows: int
    sums: Rows
    squares: Rows | None
    groups: GroupSums | None


def sum_batch(rows: LossRows, groups: Array | None) -> BatchLoss:
    """Sum the rows of one batch; `groups` (rows,) holds group ids, numbers or strings, None for independent
    rows.
    """
    a, b, w = rows.terms, rows.denominator, rows.weights
    changes = (w * rows.delta, w * rows.delta**2)
    sums = np.concatenate([[w.sum(), b.sum()], *(change.sum(axis=1) for change in changes)])
    if groups is not None:
        return BatchLoss(b.size, sums, None, _by_bucket(a, b, buckets_of(groups)))
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


def _by_bucket(a: Rows, b: Rows, buckets: npt.NDArray[np.int64]) -> GroupSums:
    order = np.argsort(buckets, kind="stable")
    present, starts = np.unique(buckets[order], return_index=True)
    return GroupSums(
        present, np.add.reduceat(b[order], starts), np.add.reduceat(a[:, :, order], starts, axis=2)
    )


class OutputTotals(ABC):
    """Totals of one output over batches; `rows` counts the rows."""

    def __init__(self) -> None:
        self.rows = 0
        self._sums = ColumnSums()

    def add(self, batch: BatchLoss) -> None:
        """Add a batch."""
        self.rows += batch.rows
        self._sums.add(batch.sums)

    @abstractmethod
    def moments(self, term: int, unit: int) -> RatioMoments:
        """Return one term of the loss change (0 for KL, 1 for the labelled term) under one unit, over the
        denominator.
        """

    @abstractmethod
    def relative(self) -> Rows:
        """Return (terms, units) of the loss change over the denominator."""

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


class RowTotals(OutputTotals):
    """Each row is a statistical unit."""

    def __init__(self) -> None:
        super().__init__()
        self._squares = ColumnSums()

    def add(self, batch: BatchLoss) -> None:
        """See `OutputTotals.add`; a batch summed by groups is an InternalError."""
        if batch.squares is None:
            raise InternalError("a batch that was summed by groups is added to some that were not")
        super().add(batch)
        self._squares.add(batch.squares)

    def moments(self, term: int, unit: int) -> RatioMoments:
        """See `OutputTotals.moments`."""
        bb, *products = self._squares.sums()
        each = len(products) // 3
        a, aa, ab = products[term * self.units + unit :: each]
        return RatioMoments(self.rows, self.rows, a, self.mean_denominator.total, aa, ab, bb)

    def relative(self) -> Rows:
        """See `OutputTotals.relative`."""
        _, *products = self._squares.sums()
        values = np.array([item.value for item in products[: len(products) // 3]])
        return np.asarray(values.reshape(-1, self.units) / self.mean_denominator.total.value)


class BucketTotals(OutputTotals):
    """Each bucket of groups is a statistical unit."""

    def __init__(self) -> None:
        super().__init__()
        self._denominator = np.zeros(BUCKETS)
        self._seen = np.zeros(BUCKETS, dtype=np.bool_)
        self._terms: Rows = np.zeros((0, 0, BUCKETS))

    def add(self, batch: BatchLoss) -> None:
        """See `OutputTotals.add`; a batch not summed by groups is an InternalError."""
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
        """See `OutputTotals.moments`."""
        a, b = self._terms[term, unit, self._seen], self._denominator[self._seen]
        sums = (ExactSum.of((values.sum(),)) for values in (a, b, a * a, a * b, b * b))
        return RatioMoments(self.rows, int(self._seen.sum()), *sums)

    def relative(self) -> Rows:
        """See `OutputTotals.relative`."""
        return np.asarray(self._terms.sum(axis=2) / self._denominator.sum())
