"""Effect of each site, alone in low precision, on the model's outputs; sites that share a tensor also
together.

The loss change of a row is exactly KL(p ‖ p′) + (p − y)·δ (`effects.loss_totals`). A site is judged on the
first term, which needs no label; the second is reported beside it.

Batches of rows in random order run through one switchable model, once exact, and for every unit of sites once
through the parts that it reaches (`effects.reached`), and leave their sums (`effects.loss_totals`). At each
interim analysis the caller names the undecided sites; with none left the pass ends. Before that, the first
rows run under slightly moved scales (`observers.arithmetic`).

**Stopping.** The first analysis is after 4096 rows, each next one after half as many rows more, so a verdict
takes at most half again the rows it needs. The intervals hold at every number of rows at once
(`RatioMoments.anytime_interval`). They are tightest at 16384 rows; this is fixed because it must depend
neither on the data nor on the number of rows. Fewer rows than the first analysis needs, or a pass that nobody
stops, have one analysis at a fixed number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np

from loka_onnx.calibration.effects.loss_totals import (
    BatchLoss,
    BucketTotals,
    OutputTotals,
    Rows,
    RowTotals,
    as_scores,
    denominator_of,
    loss_terms,
    sum_batch,
)
from loka_onnx.calibration.effects.reached import Parts, write_parts
from loka_onnx.calibration.effects.switchable import Switch, Unit, units_of, write_switchable
from loka_onnx.calibration.observers.arithmetic import DRAW_ROWS, draw_factors
from loka_onnx.calibration.passes.executors import (
    BatchExecutor,
    BatchWork,
    Span,
    first_rows,
    scattered_spans,
    span_rows,
)
from loka_onnx.calibration.passes.probe import PassOptions
from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.profile import (
    LOSS,
    Draws,
    Sampling,
    Sensitivity,
    SensitivityName,
    SiteGroup,
    WeightedMean,
)
from loka_onnx.core.progress import UNTIL, Progress, silent
from loka_onnx.core.recipe import Scales
from loka_onnx.data import Batch, Dataset
from loka_onnx.errors import CalibrationError, InternalError
from loka_onnx.graph.model import GraphModel

KL, LABELLED = 0, 1
"""Terms of the loss change (`LossRows.terms`)."""
FIRST_LOOK_ROWS = 4096
GROWTH = 1.5
TIGHTEST_AT_ROWS = 16384


@dataclass(frozen=True)
class Sensitivities:
    """The result of the pass.

    `baseline_loss` is the mean loss of the exact model per output; without labels, mean entropy.
    """

    by_site: dict[str, tuple[Sensitivity, ...]]
    groups: tuple[SiteGroup, ...]
    baseline_loss: dict[str, WeightedMean]
    sampling: Sampling


OpenSites = Callable[[Sensitivities], tuple[str, ...]]
"""Names the sites whose verdict is still open."""


MovedScales = tuple[tuple[Rows, ...], ...]
"""Loss changes of the first rows under moved scales: for each noise seed and output, (terms, units) over the
denominator, of the units that have scales."""


@dataclass(frozen=True)
class SwitchedModel:
    """The exact model, the sites and recipes to switch, and activation scales."""

    model: Path
    switches: tuple[Switch, ...]
    scales: Scales
    outputs: tuple[OutputSpec, ...]


@dataclass(frozen=True)
class SensitivityWork(BatchWork[tuple[BatchLoss, ...]]):
    """Runs a batch exact and under every unit of sites, and sums the loss changes of each output."""

    parts: Parts
    units: tuple[Unit, ...]
    outputs: tuple[OutputSpec, ...]
    group: str | None

    def open(self) -> Callable[[Batch], tuple[BatchLoss, ...]]:
        """See `BatchWork.open`."""
        run_each, names = self.parts.open(), tuple(spec.name for spec in self.outputs)

        def run(batch: Batch) -> tuple[BatchLoss, ...]:
            exact, *changed = run_each(batch.inputs, [unit.switches for unit in self.units], names)
            groups = batch.columns[self.group] if self.group is not None else None
            losses: list[BatchLoss] = []
            for spec in self.outputs:
                scores = [as_scores(spec, each[spec.name]) for each in (exact, *changed)]
                losses.append(sum_batch(loss_terms(spec, scores[0], scores[1:], batch.columns), groups))
            return tuple(losses)

        return run


class StoppingSchedule:
    """Numbers of rows at which an interim analysis is due: at `limit`, and before if it `may_stop`."""

    def __init__(self, limit: int, may_stop: bool) -> None:
        self.limit, self.taken = limit, 0
        self.may_stop_early = may_stop and limit > FIRST_LOOK_ROWS
        self._next = FIRST_LOOK_ROWS if self.may_stop_early else limit

    def is_due(self, done: int) -> bool:
        """True if an analysis is due after `done` rows."""
        return done >= min(self._next, self.limit)

    def take(self, done: int) -> None:
        """Record an analysis at `done` rows."""
        self.taken += 1
        while self._next <= done:
            self._next = max(int(self._next * GROWTH), self._next + 1)


class SensitivityPass:
    """The pass over the calibration split; ConfigError if the number of noise seeds is out of range."""

    def __init__(
        self,
        subject: SwitchedModel,
        data: Dataset,
        options: PassOptions,
        executor: BatchExecutor,
        progress: Progress = silent,
    ) -> None:
        self.subject, self.data, self.options = subject, data, options
        self.executor, self.progress = executor, progress
        self.units = units_of(GraphModel.load(subject.model), subject.switches)
        rows, most = options.rows_used(data.rows), options.sensitivity_rows
        order = scattered_spans(rows, options.batch_size, options.seed)
        self._spans = first_rows(order, rows if most is None else most)
        self._drawn_spans = first_rows(self._spans, DRAW_ROWS, options.batch_size)
        self._factors = draw_factors(options.draws)
        self._denominators = [denominator_of(spec) for spec in subject.outputs]
        self._moved = [position for position, unit in enumerate(self.units) if unit.has_scales]

    def draws(self, scratch: Path) -> MovedScales:
        """Run the first rows under moved scales, those of weights included; `scratch` is for graphs."""
        units = [self.units[position] for position in self._moved]
        by_factor: list[tuple[Rows, ...]] = []
        rows = span_rows(self._drawn_spans)
        for number, factor in enumerate(self._factors[1:] if units else (), 1):
            work = self._work(scratch / f"switchable-{number}.onnx", units, factor)
            totals, done = self._new_totals(), (number - 1) * rows
            for added in self._add_batches(work, self._drawn_spans, totals):
                done += added
                self.progress("moved scales", done, rows * (len(self._factors) - 1))
            self._check_denominators(totals)
            by_factor.append(tuple(total.relative() for total in totals))
        return tuple(by_factor)

    def measure(
        self, scratch: Path, drawn: MovedScales, open_sites: OpenSites | None = None
    ) -> Sensitivities:
        """Run every unit of sites over the same rows until `open_sites` returns no undecided site.

        Without `open_sites` there is one analysis at the end. `drawn` is the result of `draws`.
        """
        task = "sensitivity" if open_sites is None else f"sensitivity{UNTIL}decided"
        limit, drawn_rows = span_rows(self._spans), span_rows(self._drawn_spans)
        schedule = StoppingSchedule(limit, may_stop=open_sites is not None)
        totals, draws = self._new_totals(), dict[tuple[int, int], Draws]()
        done = 0
        sensitivities: Sensitivities | None = None
        work = self._work(scratch / "switchable.onnx", self.units)
        with closing(self._add_batches(work, self._spans, totals)) as batches:
            for added in batches:
                done += added
                self.progress(task, done, limit)
                if done == drawn_rows:
                    draws = self._draws_of(totals, drawn)
                if not schedule.is_due(done):
                    continue
                schedule.take(done)
                sampling = Sampling(done, schedule.taken, TIGHTEST_AT_ROWS, (), schedule.may_stop_early)
                sensitivities = self._sensitivities(totals, draws, sampling)
                if open_sites is None:
                    continue
                undecided = open_sites(sensitivities)
                sensitivities = replace(sensitivities, sampling=replace(sampling, undecided=undecided))
                if not undecided:
                    self.progress(task, done, done)
                    break
        if sensitivities is None:
            raise InternalError("the sensitivity pass saw no rows", evidence=f"{limit} were to be seen")
        return sensitivities

    def _work(self, path: Path, units: Sequence[Unit], factor: float = 1.0) -> SensitivityWork:
        subject = self.subject
        file = write_switchable(
            GraphModel.load(subject.model), subject.switches, subject.scales, path, factor
        )
        return SensitivityWork(path, write_parts(file), tuple(units), subject.outputs, self.options.group)

    def _add_batches(
        self, work: SensitivityWork, spans: Iterable[Span], totals: Sequence[OutputTotals]
    ) -> Generator[int]:
        """Add every batch to the totals of the outputs; yield its number of rows."""
        with closing(self.executor.run(work, self.data, spans, self.options.batch_size)) as results:
            for result in results:
                for total, loss in zip(totals, result.value, strict=True):
                    total.add(loss)
                yield result.rows

    def _new_totals(self) -> list[OutputTotals]:
        kind = RowTotals if self.options.group is None else BucketTotals
        return [kind() for _ in self.subject.outputs]

    def _sensitivities(
        self, totals: Sequence[OutputTotals], draws: Mapping[tuple[int, int], Draws], sampling: Sampling
    ) -> Sensitivities:
        self._check_denominators(totals)
        by_unit = [
            tuple(
                Sensitivity.of(
                    SensitivityName(unit.recipe, spec.name, self._denominators[output]),
                    totals[output].delta(position),
                    totals[output].moments(KL, position),
                    totals[output].moments(LABELLED, position) if spec.label is not None else None,
                    draws.get((output, position)),
                )
                for output, spec in enumerate(self.subject.outputs)
            )
            for position, unit in enumerate(self.units)
        ]
        measured = list(zip(self.units, by_unit, strict=True))
        by_site: dict[str, tuple[Sensitivity, ...]] = {}
        for unit, items in measured:
            if unit.tensor is None:
                by_site[unit.sites[0]] = (*by_site.get(unit.sites[0], ()), *items)
        return Sensitivities(
            by_site,
            tuple(SiteGroup(u.tensor, u.sites, items) for u, items in measured if u.tensor is not None),
            {s.name: t.mean_denominator for s, t in zip(self.subject.outputs, totals, strict=True)},
            sampling,
        )

    def _draws_of(self, totals: Sequence[OutputTotals], drawn: MovedScales) -> dict[tuple[int, int], Draws]:
        """Return the spread by output and unit; `totals` hold the very rows that ran under moved scales."""
        if not drawn:
            return {}
        self._check_denominators(totals)
        spreads: dict[tuple[int, int], Draws] = {}
        for output, total in enumerate(totals):
            own = total.relative()[:, self._moved]
            terms = np.stack([own, *(draw[output] for draw in drawn)])
            for column, position in enumerate(self._moved):
                spreads[output, position] = spread_of_draws(terms[:, :, column])
        return spreads

    def _check_denominators(self, totals: Sequence[OutputTotals]) -> None:
        for spec, name, total in zip(self.subject.outputs, self._denominators, totals, strict=True):
            mean = total.mean_denominator
            if mean.total.value <= 0.0:
                what = "the FP32 model's loss" if name == LOSS else "the entropy of the predictions"
                raise CalibrationError(
                    f"E0504 {what} on output '{spec.name}' is {mean.total.value:g}: "
                    "nothing can be relative to it",
                    evidence=f"over {total.rows} rows of '{self.data.name}', of weight {mean.weight.value:g}",
                    remedy=f"check the columns '{spec.label}' (labels) and '{spec.weight}' (weights)",
                )


def spread_of_draws(terms: Rows) -> Draws:
    """Return the spread over noise seeds of (seeds, terms) loss changes; the first has the own scales."""
    kl = terms[:, KL]
    low, high, own = float(kl.min()), float(kl.max()), float(kl[0])
    growth = high / own if own > 0.0 else (inf if high > 0.0 else 1.0)
    if terms.shape[1] == 1:
        return Draws(len(terms), low, high, growth)
    labelled = terms[:, LABELLED]
    return Draws(len(terms), low, high, growth, float(labelled.min()), float(labelled.max()))
