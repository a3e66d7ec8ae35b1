"""Measured accuracy and latency of built engines, and the choice among them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import ClassVar

from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT

DELTA_NE_NAME = "ΔNE"
KL_NAME = "KL over the mean entropy"
"""Name of the judged quantity without labels."""
FAILED = "failed"
"""Prefix of `Evaluation.status` where the engine failed."""


@dataclass(frozen=True)
class TaskMetrics:
    """Quality of one output of one engine; None for each part that needs missing labels.

    `loss` is the mean log loss (nats), `normalized_entropy` is it over the entropy of the base rate; for a
    regression the squared error, over the variance of the label. `prediction_ratio` is mean prediction over
    mean label.
    """

    loss: float | None
    normalized_entropy: float | None
    auc: float | None
    prediction_ratio: float | None


@dataclass(frozen=True)
class PairedDifference:
    """An engine against the FP32 reference, row by row.

    Changes of the loss are relative to the `denominator`: the mean FP32 `LOSS`, or without labels the mean
    `ENTROPY` of the FP32 model's predictions. `delta_ne` equals that of normalized entropy; `kl` is its
    label-free part, `labelled` its labelled first-order part. Parts that need labels are None without.
    `delta_rmse` and `delta_max` are of the logit (or regression output).
    """

    denominator: str
    delta_ne: Interval | None
    kl: Interval
    labelled: Interval | None
    delta_auc: Interval | None
    delta_prediction_ratio: Interval | None
    delta_rmse: float
    delta_max: float

    @property
    def judged(self) -> Interval:
        """Quantity of the budget: ΔNE, or KL where there are no labels."""
        return self.kl if self.delta_ne is None else self.delta_ne

    def guarded(self, guard: Because) -> Interval | None:
        """Return the quantity of a guard: KL, or the decrease of AUC; None where there is no AUC."""
        if guard is Because.MAX_KL:
            return self.kl
        drop = self.delta_auc
        if drop is None:
            return None
        return Interval(-drop.value, -drop.upper, -drop.lower, drop.confidence, drop.rows)

    @property
    def judged_name(self) -> str:
        """Name of `judged`, in words."""
        return KL_NAME if self.delta_ne is None else DELTA_NE_NAME


@dataclass(frozen=True)
class CalibrationBin:
    """Rows whose predictions are neighbours: mean prediction and mean label, with the weights of the rows."""

    rows: int
    predicted: float
    observed: float


LEAST_UNITS = 100
"""Groups, or rows, that an interval takes to be trusted: with 30 one of 95 % covers 91 to 94 %."""
MOST_TIMES = 100
"""Largest multiple of the present rows that is reported as deciding."""


class BudgetStatus:
    """Values of `OutputEvaluation.budget_status` and `SliceDifference.status`."""

    WITHIN = "within"
    BEYOND = "beyond"
    UNDECIDED = "undecided"
    NOT_JUDGED = "not judged"
    """Only for a slice: too few rows for a valid interval."""


def worst(statuses: Collection[str]) -> str:
    """Return the worst `BudgetStatus`: beyond outweighs undecided."""
    for status in (BudgetStatus.BEYOND, BudgetStatus.UNDECIDED):
        if status in statuses:
            return status
    return BudgetStatus.WITHIN


@dataclass(frozen=True)
class SliceDifference:
    """An engine against the FP32 reference on the rows where a column has one value (as text; None for null).

    Everything is relative to the FP32 loss (or entropy) of these rows. The judged intervals of all slices of
    an output hold together at 95 %: each has the confidence 1 − 0.05/m, with m the judged slices over all
    columns (Bonferroni). `units` are groups with weight, or rows without groups. `delta_ne`, `kl` and
    `labelled` are those of `PairedDifference`, None where the slice is not judged; `reason` says why, or
    which guard keeps it from ``within``.
    """

    column: str
    value: str | None
    rows: int
    units: int
    delta_ne: Interval | None
    kl: Interval | None
    labelled: Interval | None
    status: str
    reason: str = ""

    @property
    def judged(self) -> Interval | None:
        """ΔNE, or KL where there are no labels; None if not judged."""
        return self.kl if self.delta_ne is None else self.delta_ne


class Because(StrEnum):
    """Reason other than the budget for an output not being within."""

    MAX_KL = "max_kl"
    MAX_AUC_DROP = "max_auc_drop"
    FEW_UNITS = "few units"
    """Too few groups, or rows, for a valid interval."""


@dataclass(frozen=True)
class Guard:
    """The largest accepted KL, or decrease of AUC, beside the budget."""

    name: Because
    limit: float
    status: str


@dataclass(frozen=True)
class Basis:
    """Basis of an output's intervals.

    `units` are groups with weight, or rows without groups; `largest` is the name of the largest group,
    `largest_share` its share of the rows. `top_share` is the share of KL in the hundredth of the rows with
    the largest KL, `tail_index` Hill's over these rows (None where they are alike), `skewness` that of the
    influences of units on KL, over the root of their number. With `is_heavy` Student's t is invalid for KL:
    its interval is empirical Bernstein's.
    """

    units: int
    is_grouped: bool
    largest: str
    largest_share: float
    top_share: float
    tail_index: float | None
    skewness: float
    is_heavy: bool


@dataclass(frozen=True)
class OutputEvaluation:
    """One output of one engine on one split.

    Attributes:
        difference: Against the FP32 reference; None, as `basis`, for the reference itself.
        budget: Largest accepted relative loss increase.
        budget_status: ``within`` when the upper bound is inside the budget and every guard, ``beyond`` when
            the lower bound of one is outside; else, or where the intervals are invalid, ``undecided``.
        rows_to_decide: Rows that would settle an undecided verdict if the estimate stayed; None when decided,
            when the spread is unknown, or when even `MOST_TIMES` as many rows would not decide.
        slices: The difference on each slice, the surest harm first (falling lower end), then those that are
            not judged. They do not enter `budget_status`; `slices_left_out` counts omitted values by column.
        calibration: Bins of equally many rows by its own predictions, ascending; only of certification, and
            with labels. `drift` are quantiles there of the change of the score, ``99 %`` and so on.
        because: Reason other than the budget that keeps `budget_status` from ``within``.
        remarks: Why a guard or the basis does, and cautions on the intervals; sentences without full stop.
    """

    output: str
    kind: OutputKind
    metrics: TaskMetrics
    difference: PairedDifference | None
    budget: float
    budget_status: str
    rows_to_decide: int | None
    slices: tuple[SliceDifference, ...] = ()
    slices_left_out: dict[str, int] = field(default_factory=dict)
    calibration: tuple[CalibrationBin, ...] = ()
    drift: dict[str, float] = field(default_factory=dict)
    because: tuple[Because, ...] = ()
    guards: tuple[Guard, ...] = ()
    basis: Basis | None = None
    remarks: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The status with its cause beside the budget: ``beyond: max_kl``."""
        return f"{self.budget_status}: {', '.join(self.because)}" if self.because else self.budget_status

    @property
    def upper(self) -> float | None:
        """Largest upper end over its limit, guards included: at most 1 where all hold."""
        return max((interval.upper / limit for interval, limit in self._held() if limit > 0.0), default=None)

    def is_within(self, factor: float = 1.0) -> bool:
        """Return whether it is within, also with intervals `factor` times as wide."""
        within = self.budget_status == BudgetStatus.WITHIN
        return within and all(interval.widened(factor).upper <= limit for interval, limit in self._held())

    def _held(self) -> Iterator[tuple[Interval, float]]:
        if self.difference is None:
            return
        yield self.difference.judged, self.budget
        for guard in self.guards:
            measured = self.difference.guarded(guard.name)
            if measured is not None:
                yield measured, guard.limit

    def slices_of(self, status: str) -> tuple[SliceDifference, ...]:
        """Slices of a status, in their order."""
        return tuple(item for item in self.slices if item.status == status)


class InputPlace(StrEnum):
    """Memory of a request's inputs."""

    HOST = "host"
    """Process memory, as a loaded bundle takes them: latency includes the copies."""
    DEVICE = "device"
    """Memory of the device: latency of the engine alone."""


@dataclass(frozen=True)
class Latency:
    """Latency of one engine at one batch size (rows per request), microseconds, over `repeats` requests.

    Attributes:
        device: Device as its driver names it, ``cpu`` for the processor.
        counts_for_choice: False for a simulation, or another device of the architecture.
        lookup_p50_us: Median of the lookup in ONNX Runtime on the CPU, not in other figures; None for ids.
        host_load: Largest load average of the measuring host's last minute over its cores; None if unknown.
        loads_us: Median of each load; the i-th loads of engines timed in turns were timed together.
        least_us: Least time of a request in each load, by which engines are compared (`planning.speed`).
        job: Build job that timed it; empty where the run did, in turns with all engines of the target.
    """

    batch: int
    p50_us: float
    p90_us: float
    p99_us: float
    repeats: int
    device: str
    counts_for_choice: bool
    lookup_p50_us: float | None = None
    host_load: float | None = None
    loads_us: tuple[float, ...] = ()
    inputs: InputPlace = InputPlace.HOST
    job: str = ""
    least_us: tuple[float, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """One engine on one split, ``selection`` or ``certification``; without outputs if it could not run here.

    `status` is ``measured``, or why not; `latency_failure` is an error that ended timing, else empty.
    """

    engine: str
    backend: str
    plan: str
    target: str
    split: str
    rows: int
    outputs: tuple[OutputEvaluation, ...]
    latencies: tuple[Latency, ...]
    status: str
    latency_failure: str = ""

    @property
    def has_failed(self) -> bool:
        """True if the engine failed while it was judged."""
        return self.status.startswith(FAILED)

    @property
    def is_within_budget(self) -> bool:
        """True if every output was measured and is within: see `OutputEvaluation.budget_status`."""
        return bool(self.outputs) and self.worst_status == BudgetStatus.WITHIN

    @property
    def worst_status(self) -> str:
        """Worst budget status of its outputs."""
        return worst([output.budget_status for output in self.outputs])

    @property
    def upper(self) -> float | None:
        """Worst `OutputEvaluation.upper` of its outputs; None where nothing was measured."""
        bounds = [output.upper for output in self.outputs if output.upper is not None]
        return max(bounds, default=None)


@dataclass(frozen=True)
class EvaluationSet:
    """Every evaluation of a run, and the day of the first of them (UTC, ``2026-11-27``)."""

    SCHEMA: ClassVar[str] = "evaluations/6"
    __pydantic_config__ = STRICT

    evaluations: tuple[Evaluation, ...]
    date: str = ""

    def of(self, engine: str, split: str) -> Evaluation:
        """Return the evaluation of an engine on a split."""
        for item in self.evaluations:
            if (item.engine, item.split) == (engine, split):
                return item
        raise KeyError((engine, split))


class Why(StrEnum):
    """Reason why a candidate was rejected."""

    SLOWER = "slower"
    WITHIN_NOISE = "not surely faster"
    """Within noise of the chosen engine, which is more exact, or as exact and of the smaller median."""
    BEYOND = "beyond the budget"
    UNDECIDED = "undecided against the budget"
    NOT_CERTIFIED = "not inside the budget on certification"
    NOT_SELECTED = "not selected"
    """Inside the budget, but the selected engine missed on certification, which does not choose again."""
    NO_SPEED = "speed not measured"
    SIMULATED = "simulated"
    NOT_MEASURED = "not measured"
    NOT_RUN = "not run"
    OTHER_DEVICE = "run on another device"
    """Of the same architecture: its accuracy counts, its latency does not."""
    DECLINED = "declined"
    FAILED = "failed"


@dataclass(frozen=True)
class Rejection:
    """A candidate that was not chosen, with the reason in words.

    `times` is its latency over the chosen engine's, None where they were not timed in turns on the target;
    `upper` is the worst output's upper bound of the judged quantity over the budget.
    """

    engine: str
    why: Why
    reason: str
    times: Interval | None = None
    upper: float | None = None


@dataclass(frozen=True)
class Route:
    """Engine for requests of at most `batch` rows; the largest takes larger requests too.

    `times` is the latency of the target's main engine over this engine's; None for the main engine.
    """

    batch: int
    engine: str
    plan: str
    times: Interval | None = None


@dataclass(frozen=True)
class TargetChoice:
    """The engine selected for one target (`engine`, an id): the best over all sizes, or several by `routes`.

    Attributes:
        basis: Basis of the choice, in words: measured on the target, or provisional.
        losers: Every other candidate.
        routes: Engine for each request size, ascending; empty where one takes all. A request between two
            sizes goes to the engine of the larger.
        missed: Ids of engines that missed on certification before, in order, each with fewer sites in FP8
            than the one before: with the selected one, the attempts that share the error.
    """

    target: str
    engine: str
    plan: str
    reason: str
    basis: str
    losers: tuple[Rejection, ...]
    routes: tuple[Route, ...] = ()
    missed: tuple[str, ...] = ()

    @property
    def engines(self) -> tuple[str, ...]:
        """Ids of all selected engines, the main one first."""
        return tuple(dict.fromkeys((self.engine, *(route.engine for route in self.routes))))

    @property
    def plans(self) -> tuple[str, ...]:
        """Plans of all selected engines, the main one's first."""
        return tuple(dict.fromkeys((self.plan, *(route.plan for route in self.routes))))

    def route(self, rows: int) -> str:
        """Return the id of the engine for a request of so many rows."""
        return next(
            (route.engine for route in self.routes if rows <= route.batch),
            self.routes[-1].engine if self.routes else self.engine,
        )


@dataclass(frozen=True)
class PredictedTime:
    """Predicted and measured time (median latency on the target) of a plan for `batch` rows."""

    engine: str
    plan: str
    batch: int
    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_us / self.measured_us - 1.0


def median_error(predictions: Iterable[PredictedTime]) -> float | None:
    """Return the median magnitude of the relative errors; None without predictions."""
    errors = [abs(prediction.error) for prediction in predictions]
    return median(errors) if errors else None


@dataclass(frozen=True)
class Choice:
    """The decision of a run, by target; `not_predicted` has reasons by engine."""

    SCHEMA: ClassVar[str] = "choice/3"
    __pydantic_config__ = STRICT

    targets: tuple[TargetChoice, ...]
    predictions: tuple[PredictedTime, ...] = ()
    median_prediction_error: float | None = None
    not_predicted: dict[str, str] = field(default_factory=dict)
