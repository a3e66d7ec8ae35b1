"""KL of sites on live rows: the part of the loss change that needs no label, in the unit of the loss.

It is measured, and not scaled up from the error of the sites, because that says little about it once the data
have moved: noise gathers in rows whose values lie far out, and those have a p near 0 or 1 that noise does not
change. With each of the eight numeric features of MovieLens 1M doubled in turn, KL was .57 to 1.26 times that
of the profile (DCNv2 and Wukong, 16,384 rows), where the growth of relative noise energy said 1.01 to 7.6
times: up to thirteen times too much (`benchmarks/records/drift_alarms.json`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.effects.loss_totals import as_scores
from loka_onnx.calibration.effects.switchable import SwitchableFile
from loka_onnx.calibration.passes.executors import BatchResult, BatchWork
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.data import Batch
from loka_onnx.errors import CalibrationError
from loka_onnx.numerics.loss_change import kl_rows, squared_change_rows

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LiveKl:
    """Mean KL of one output on live rows.

    Attributes:
        by_site: In nats (squared change for a regression).
        standard_error: Of the sum over the sites, from whole batches; infinite for fewer than two.
    """

    by_site: dict[str, float]
    standard_error: float


@dataclass(frozen=True)
class KlWork(BatchWork[Values]):
    """Runs a batch exact and with each counted site in FP8; labels are not read."""

    file: SwitchableFile
    outputs: tuple[OutputSpec, ...]

    def open(self) -> Callable[[Batch], Values]:
        """See `BatchWork.open`; each batch leaves (outputs, 1 + sites): mean weight, mean weighted KL."""
        model = self.file.open(threads=1)
        names = tuple(spec.name for spec in self.outputs)
        units = ((), *((site,) for site in self.file.sites))

        def run(batch: Batch) -> Values:
            scores = [model.run(batch.inputs, on, names) for on in units]
            return np.stack([_means(spec, scores, batch) for spec in self.outputs])

        return run


def _means(spec: OutputSpec, scores: Sequence[Mapping[str, npt.NDArray[Any]]], batch: Batch) -> Values:
    """Return (1 + sites,): mean weight and mean weighted KL of one output."""
    exact, *changed = (as_scores(spec, each[spec.name]) for each in scores)
    rows = squared_change_rows if spec.kind is OutputKind.REGRESSION else kl_rows
    weights = np.ones(batch.rows) if spec.weight is None else batch.columns[spec.weight].astype(np.float64)
    return np.array([weights.mean(), *((weights * rows(exact, each)).mean() for each in changed)])


def total_kl(work: KlWork, batches: Iterable[tuple[str, BatchResult[Values]]]) -> dict[str, LiveKl]:
    """KL of every output, from results of `work` with the names of their batches.

    Raises:
        CalibrationError: An output is not finite.
    """
    tables, rows = list[Values](), list[int]()
    for where, result in batches:
        if not np.isfinite(result.value).all():
            raise CalibrationError(
                f"E1623 an output is not finite in {where}",
                evidence=f"one of {', '.join(spec.name for spec in work.outputs)}, exact or with a site "
                "in FP8",
                remedy="drop the rows that overflow",
            )
        tables.append(result.value)
        rows.append(result.rows)
    table, counts = np.stack(tables), np.array(rows, dtype=np.float64)
    return {
        spec.name: _live_kl(table[:, at], counts, work.file.sites) for at, spec in enumerate(work.outputs)
    }


def _live_kl(table: Values, rows: Values, sites: Sequence[str]) -> LiveKl:
    """Ratio of weighted KL to weight over batches, with its standard error by the delta method.

    `table` is (batches, 1 + sites), mean weight and mean weighted KL; `rows` (batches,).
    """
    scaled = table * rows[:, None]
    weight, count = scaled[:, 0].sum(), len(rows)
    mean = scaled[:, 1:].sum(axis=0) / weight
    influence = (scaled[:, 1:].sum(axis=1) - mean.sum() * scaled[:, 0]) / weight
    error = math.sqrt(float(influence @ influence) * count / (count - 1)) if count > 1 else math.inf
    return LiveKl(dict(zip(sites, mean.tolist(), strict=True)), error)
