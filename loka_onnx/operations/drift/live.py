"""Live rows through the instrumented model, under the scales of a profile.

Three passes, each through an executor: the range of every activation with the number of batches that went
beyond the profile's, the FP8 error of every product in the recipe that its sensitivity was measured in, and
the KL of the counted sites, one at a time: the part of the loss change that needs no label.

KL is measured, and not scaled up from the error of the sites: noise gathers in rows whose values lie far out,
and those have a p near 0 or 1 that noise does not change. With each of the eight numeric features of
MovieLens 1M doubled in turn, KL was .57 to 1.26 times that of the profile, where the growth of relative noise
energy said 1.01 to 7.6 times (DCNv2 and Wukong, 16,384 rows; `benchmarks/records/drift_alarms.json`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.effects.loss_totals import as_scores
from loka_onnx.calibration.effects.reached import Parts, write_parts
from loka_onnx.calibration.effects.switchable import Switch, write_switchable
from loka_onnx.calibration.observers.sampling import sampling_stride
from loka_onnx.calibration.observers.site_observers import (
    ErrorObserver,
    ErrorObserverBuilder,
    RangeObserver,
    observe_ranges,
)
from loka_onnx.calibration.passes.executors import (
    BatchResult,
    BatchWork,
    LocalExecutor,
    ReductionWork,
    Span,
    first_rows,
    scattered_spans,
    spans_in_order,
)
from loka_onnx.calibration.passes.totals import ErrorTotals, RangeBatch, RangeTotals, RangeWork
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.profile import Profile
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import SiteKind
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.data import Batch, Dataset
from loka_onnx.errors import CalibrationError, UserError
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.loss_change import kl_rows, squared_change_rows
from loka_onnx.operations.drift.report import DriftOptions

R = TypeVar("R")
Values = npt.NDArray[np.float64]
DEFAULT_BATCH_ROWS = 512
"""Batch size where the profile holds no full batch; nothing is judged then."""


@dataclass(frozen=True)
class Baseline:
    """Model and profile that live data are compared with; labels of `outputs` are not read.

    `counted` are the sites in FP8, which ΔNE is predicted for, and `basis` is their origin, for the reader;
    None for the linear sites that could run in FP8. `columns` names the columns of an activation, "" for one
    without.
    """

    model: ModelArtifact
    profile: Profile
    outputs: tuple[OutputSpec, ...] = ()
    counted: frozenset[str] | None = None
    basis: str = "every FP8-able linear site"
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.profile.model_digest != self.model.digest:
            raise UserError(
                f"E1619 the profile is not that of '{self.model.path.name}'",
                evidence=f"it was measured on a model with digest {self.profile.model_digest[:12]}…, and "
                f"this one has {self.model.digest[:12]}…",
                remedy="give the profile of this model, or calibrate the model again",
            )

    @property
    def batch_rows(self) -> int:
        """Rows of a batch of the profile; 0 where it holds no full one."""
        return max((stats.spread.rows for stats in self.ranges.values()), default=0)

    @cached_property
    def ranges(self) -> dict[str, RangeStats]:
        """Range of every activation in the profile, by tensor name."""
        weights, operands = set(self.profile.weights), (s.operands.items() for s in self.profile.sites)
        return {tensor: stats for tensor, stats in chain.from_iterable(operands) if tensor not in weights}

    @property
    def switches(self) -> tuple[Switch, ...]:
        """Every product that was profiled, in the recipe that its sensitivity was measured in."""
        known = {entry.site: entry for entry in self.profile.sites}
        return tuple(
            Switch(site, Recipe.of_id(known[site.name].sensitivities[0].recipe))
            for site in self.model.sites
            if site.kind is not SiteKind.NORM and site.name in known and known[site.name].sensitivities
        )

    @property
    def counted_switches(self) -> tuple[Switch, ...]:
        """Switches of the sites that ΔNE is predicted for."""
        if self.counted is None:
            return tuple(switch for switch in self.switches if switch.site.is_fp8_able)
        return tuple(switch for switch in self.switches if switch.site.name in self.counted)


@dataclass(frozen=True)
class LiveKl:
    """Mean KL of one output on live rows, by site in nats (squared change for a regression).

    `standard_error` is of the sum over sites, from whole batches; infinite for fewer than two.
    """

    by_site: dict[str, float]
    standard_error: float


@dataclass(frozen=True)
class Live:
    """Measurements on live rows: ranges by activation, errors by site, KL by output (none without sites).

    `beyond` counts full batches beyond the profile's range, by tensor.
    """

    digest: str
    rows: int
    ranges: dict[str, RangeStats]
    beyond: dict[str, int]
    errors: dict[str, ErrorStats] = field(default_factory=dict)
    kl: dict[str, LiveKl] = field(default_factory=dict)

    def merge(self, other: Live) -> Live:
        """Both sets of rows together, of the same tensors and sites; KL is not kept."""
        return Live(
            self.digest,
            self.rows + other.rows,
            {name: stats.merge(other.ranges[name]) for name, stats in self.ranges.items()},
            {name: count + other.beyond[name] for name, count in self.beyond.items()},
            {site: stats.merge(other.errors[site]) for site, stats in self.errors.items()},
        )


class RangeWatch:
    """Adds up ranges of batches and counts full batches beyond the ranges of a profile, in place."""

    def __init__(
        self, observers: Sequence[RangeObserver], profile: Mapping[str, RangeStats], batch_rows: int
    ) -> None:
        self.totals = RangeTotals(observers, batch_rows)
        self._batch_rows = batch_rows
        self._known = {o.tensor: profile[o.tensor].amax for o in observers if o.tensor in profile}
        self._beyond = dict.fromkeys(self._known, 0)
        self._rows = 0

    def add(self, result: BatchResult[RangeBatch], where: str) -> None:
        """Add one batch; CalibrationError where an activation is not finite."""
        self.totals.add(result, where)
        self._rows += result.rows
        if result.rows != self._batch_rows:
            return
        for observer in self.totals.observers:
            reduced, slots = result.value.reduced, observer.slots
            amax = max(-slots.minimum.read(reduced), slots.maximum.read(reduced))
            if observer.tensor in self._known and amax > self._known[observer.tensor]:
                self._beyond[observer.tensor] += 1

    def read(self, digest: str) -> Live:
        """The totals, without errors and KL."""
        totals = self.totals.read()
        return Live(digest, self._rows, {name: totals[name] for name in self._known}, dict(self._beyond))


def measure_live(
    baseline: Baseline, data: Dataset, scratch: Path, options: DriftOptions, progress: Progress = silent
) -> Live:
    """Run all passes, in `scratch` on the model's file system; CalibrationError if a value is not finite."""
    size = baseline.batch_rows or DEFAULT_BATCH_ROWS
    rows = data.rows if options.rows is None else min(options.rows, data.rows)
    executor = LocalExecutor(options.threads)

    def run(
        work: BatchWork[R], task: str, spans: Sequence[Span] | None = None
    ) -> Generator[tuple[str, BatchResult[R]]]:
        """Yield the name of each batch and its result."""
        chosen = spans_in_order(rows, size) if spans is None else spans
        total, done = sum(span.stop - span.start for span in chosen), 0
        numbers = (start // size + 1 for s in chosen for start in range(s.start, s.stop, size))
        with closing(executor.run(work, data, chosen, size)) as results:
            for result, number in zip(results, numbers, strict=True):
                yield f"batch {number} of {-(-rows // size)} of '{data.name}'", result
                done += result.rows
                progress(task, done, total)

    path, model = scratch / "live-ranges.onnx", GraphModel.load(baseline.model.path)
    watch = RangeWatch(observe_activations(model, baseline, size), baseline.ranges, size)
    model.save(path)
    for where, ranges in run(RangeWork(path, watch.totals.samples), "ranges"):
        watch.add(ranges, where)
    live = watch.read(data.digest)

    path, model = scratch / "live-errors.onnx", GraphModel.load(baseline.model.path)
    totals = ErrorTotals(observe_products(model, baseline, live.ranges))
    model.save(path)
    for where, errors in run(ReductionWork(path), "fp8 error"):
        totals.add(errors, where)
    live = replace(live, errors={site: errors[0] for site, errors in totals.read().items()})

    switches = baseline.counted_switches
    if not baseline.outputs or not switches:
        return live
    path, model = scratch / "live-switchable.onnx", GraphModel.load(baseline.model.path)
    file = write_switchable(model, switches, baseline.profile.scales, path)
    work = KlWork(file.path, write_parts(file), baseline.outputs)
    # From all over the data: a file may be sorted.
    spans = first_rows(scattered_spans(rows, size, options.seed), options.kl_rows, size)
    return replace(live, kl=total_kl(work, run(work, "kl", spans)))


def observe_activations(model: GraphModel, baseline: Baseline, batch_rows: int) -> tuple[RangeObserver, ...]:
    """Add the range of every activation that a profiled site reads to a graph, as its only outputs."""
    profiled = {entry.site for entry in baseline.profile.sites}
    sites = [site for site in baseline.model.sites if site.name in profiled]
    return observe_ranges(model, sites, sampling_stride(batch_rows))


def observe_products(
    model: GraphModel, baseline: Baseline, ranges: Mapping[str, RangeStats]
) -> tuple[ErrorObserver, ...]:
    """Add the output error of every product in its recipe to a graph; `ranges` are of activations."""
    builder = ErrorObserverBuilder(model, baseline.profile.scales, ranges)
    for switch in baseline.switches:
        builder.add_product(switch.site, switch.recipe)
    builder.reductions.finish()
    return tuple(builder.observers)


@dataclass(frozen=True)
class KlWork(BatchWork[Values]):
    """Runs a batch exact and with each counted site in FP8; labels are not read."""

    parts: Parts
    outputs: tuple[OutputSpec, ...]

    def open(self) -> Callable[[Batch], Values]:
        """See `BatchWork.open`; each batch leaves (outputs, 1 + sites): mean weight, mean weighted KL."""
        run_each, names = self.parts.open(), tuple(spec.name for spec in self.outputs)
        units = [(position,) for position in range(len(self.parts.whole.sites))]

        def run(batch: Batch) -> Values:
            scores = [*run_each(batch.inputs, units, names)]
            return np.stack([_means(spec, scores, batch) for spec in self.outputs])

        return run


def _means(spec: OutputSpec, scores: Sequence[Mapping[str, npt.NDArray[Any]]], batch: Batch) -> Values:
    """Return (1 + sites,): mean weight and mean weighted KL of one output."""
    exact, *changed = (as_scores(spec, each[spec.name]) for each in scores)
    rows = squared_change_rows if spec.kind is OutputKind.REGRESSION else kl_rows
    weights = np.ones(batch.rows) if spec.weight is None else batch.columns[spec.weight].astype(np.float64)
    return np.array([weights.mean(), *((weights * rows(exact, each)).mean() for each in changed)])


def total_kl(work: KlWork, batches: Iterable[tuple[str, BatchResult[Values]]]) -> dict[str, LiveKl]:
    """KL of every output, from results of `work` with the names of their batches; all must be finite."""
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
        spec.name: _live_kl(table[:, at], counts, work.parts.whole.sites)
        for at, spec in enumerate(work.outputs)
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
