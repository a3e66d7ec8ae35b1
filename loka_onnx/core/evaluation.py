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
"""What an output is judged on, with labels and without."""
FAILED = "failed"
"""How `Evaluation.status` begins where the engine failed."""


@dataclass(frozen=True)
class TaskMetrics:
    """Quality of one output of one engine; every part of it needs labels and is None without them.

    Attributes:
        loss: Mean log loss (nats), or mean squared error for a regression.
        normalized_entropy: Loss over the entropy of the base rate; for a regression, over the variance
            of the label.
        auc: Area under the ROC curve; None also for a regression or a single-class label.
        prediction_ratio: Mean prediction over mean label.
    """

    loss: float | None
    normalized_entropy: float | None
    auc: float | None
    prediction_ratio: float | None


@dataclass(frozen=True)
class PairedDifference:
    """An engine against the FP32 reference, row by row.

    Attributes:
        denominator: What changes of the loss are relative to: `LOSS`, the mean FP32 loss, or where there
            are no labels `ENTROPY`, the mean entropy of the FP32 model's predictions.
        delta_ne: Relative change of the loss (equal to the relative change of normalized entropy); None
            without labels.
        kl: Its label-free part.
        labelled: Its labelled first-order part; None without labels.
        delta_auc: Change of AUC; None where there is no AUC.
        delta_prediction_ratio: Change of the prediction ratio; None without labels.
        delta_rmse: Root mean square change of the logit (or regression output).
        delta_max: Largest change of it.
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
        """What is held against the budget: ΔNE, or KL where there are no labels."""
        return self.kl if self.delta_ne is None else self.delta_ne

    def guarded(self, guard: Because) -> Interval | None:
        """What a guard is held against: KL, or the decrease of AUC; None where there is no AUC."""
        if guard is Because.MAX_KL:
            return self.kl
        drop = self.delta_auc
        if drop is None:
            return None
        return Interval(-drop.value, -drop.upper, -drop.lower, drop.confidence, drop.rows)

    @property
    def judged_name(self) -> str:
        """What `judged` is, in words."""
        return KL_NAME if self.delta_ne is None else DELTA_NE_NAME


MOST_TIMES = 100
"""Times the rows at hand beyond which no number of rows is told that would decide."""


class BudgetStatus:
    """Values of `OutputEvaluation.budget_status` and `SliceDifference.status`."""

    WITHIN = "within"
    BEYOND = "beyond"
    UNDECIDED = "undecided"
    NOT_JUDGED = "not judged"
    """Only of a slice: too few rows for an interval that could be trusted."""


def worst(statuses: Collection[str]) -> str:
    """Of values of `BudgetStatus`: beyond on one outweighs undecided on another."""
    for status in (BudgetStatus.BEYOND, BudgetStatus.UNDECIDED):
        if status in statuses:
            return status
    return BudgetStatus.WITHIN


@dataclass(frozen=True)
class SliceDifference:
    """An engine against the FP32 reference on the rows where a column has one value.

    Everything is relative to the FP32 loss (or entropy) of these rows. The judged intervals of all slices of
    an output hold together at 95 %: each has the confidence 1 − 0.05/m, with m the judged slices over all
    columns (Bonferroni).

    Attributes:
        column: Name of the column.
        value: The value as text; None for null.
        rows: Rows that have it.
        units: Independent units among them that carry weight: groups, or rows where nothing groups them.
        delta_ne: As in `PairedDifference`; None without labels, and where the slice is not judged.
        kl: Its label-free part; None where the slice is not judged.
        labelled: Its labelled part; None without labels, and where the slice is not judged.
        status: A value of `BudgetStatus`.
        reason: Why it is not judged, or which guard keeps it from ``within``; else empty.
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
        """What is held against the budget: ΔNE, or KL where there are no labels; None if nothing is."""
        return self.kl if self.delta_ne is None else self.delta_ne


class Because(StrEnum):
    """What apart from the budget keeps an output from being within."""

    MAX_KL = "max_kl"
    MAX_AUC_DROP = "max_auc_drop"
    FEW_UNITS = "few units"
    """Too few groups, or rows, for an interval that could be trusted."""


@dataclass(frozen=True)
class Guard:
    """A limit that an output is held against beside its budget.

    Attributes:
        name: `Because.MAX_KL` or `Because.MAX_AUC_DROP`.
        limit: Largest accepted KL, or decrease of AUC.
        status: A value of `BudgetStatus`.
    """

    name: Because
    limit: float
    status: str


@dataclass(frozen=True)
class Basis:
    """What the intervals of an output rest on.

    Attributes:
        units: Independent units with weight: groups, or rows where nothing groups them.
        is_grouped: Whether units are groups.
        largest: Name of the largest group; empty where nothing groups the rows.
        largest_share: Its share of the rows, by weight; of one row where nothing groups them.
        top_share: Share of KL that the hundredth of the rows with the largest KL holds.
        tail_index: Hill's tail index of KL over these rows; None where they are alike.
        skewness: Of the influences of units on KL, over the root of their number.
        is_heavy: Whether Student's t cannot be trusted for KL: its interval is then empirical Bernstein's.
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
        output: Name of the output.
        kind: How it is read.
        metrics: Quality of the engine.
        difference: Against the FP32 reference; None for the reference itself.
        budget: Largest accepted relative loss increase.
        budget_status: ``within`` when the upper bound is inside the budget and inside of every guard,
            ``beyond`` when the lower bound of one is outside, else ``undecided``; ``undecided`` as well where
            the intervals cannot be trusted.
        rows_to_decide: Rows that would settle an undecided verdict if the estimate stayed; None when
            decided, when nothing is known of the spread, or when the estimate lies on the budget: not even
            `MOST_TIMES` as many rows would tell on which side.
        slices: The difference on each slice, the surest harm first (falling lower end), then those that are
            not judged. They do not enter `budget_status`.
        slices_left_out: For each column with more values than are looked at, how many were left out.
        because: What apart from the budget keeps `budget_status` from ``within``.
        guards: Limits beside the budget.
        basis: What the intervals rest on; None for the reference itself.
        remarks: Why a guard or the basis keeps it from ``within``, and what a reader of the intervals must
            know, each a sentence without its full stop.
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
    because: tuple[Because, ...] = ()
    guards: tuple[Guard, ...] = ()
    basis: Basis | None = None
    remarks: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The status, with what apart from the budget it is due to: ``beyond: max_kl``."""
        return f"{self.budget_status}: {', '.join(self.because)}" if self.because else self.budget_status

    @property
    def upper(self) -> float | None:
        """The worst upper end over its limit, guards included: at most 1 where all hold."""
        return max((found.upper / limit for found, limit in self._held() if limit > 0.0), default=None)

    def is_within(self, factor: float = 1.0) -> bool:
        """Whether it is within, also with intervals that are so many times as wide."""
        within = self.budget_status == BudgetStatus.WITHIN
        return within and all(found.widened(factor).upper <= limit for found, limit in self._held())

    def _held(self) -> Iterator[tuple[Interval, float]]:
        """Each interval with what it is held against."""
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
    """Where the inputs of a request lie when an engine is asked."""

    HOST = "host"
    """In memory of the process, as a loaded bundle takes them: a request is the engine with its copies."""
    DEVICE = "device"
    """Where the engine computes: a request is the engine alone."""


@dataclass(frozen=True)
class Latency:
    """Latency of one engine at one batch size, microseconds.

    Attributes:
        batch: Rows per request.
        p50_us: Median.
        p90_us: 90th percentile.
        p99_us: 99th percentile.
        repeats: Measured requests.
        device: Where it was measured: the device as its driver names it, ``cpu`` for the processor.
        counts_for_choice: False where the speed says nothing about the target: of a simulation, or on another
            device of the architecture.
        lookup_p50_us: Median of the lookup in ONNX Runtime on the CPU, which the other figures leave out;
            None for an engine that takes ids.
        loads_us: Median of each load of the engine, in order; the i-th loads of engines that were timed in
            turns were timed together. Empty where they were not kept.
        inputs: Where the inputs of the requests lay.
        job: Build job that it was timed in, by its candidate; empty where the run itself timed it, in turns
            with all engines of its target that it could run.
    """

    batch: int
    p50_us: float
    p90_us: float
    p99_us: float
    repeats: int
    device: str
    counts_for_choice: bool
    lookup_p50_us: float | None = None
    loads_us: tuple[float, ...] = ()
    inputs: InputPlace = InputPlace.HOST
    job: str = ""


@dataclass(frozen=True)
class Evaluation:
    """One engine on one split.

    Attributes:
        engine: Id of the engine.
        backend: Its backend.
        plan: Its plan.
        target: Its target.
        split: ``selection`` or ``certification``.
        rows: Rows of the split.
        outputs: One entry per judged output; empty when the engine could not run here.
        latencies: One entry per batch size; empty when not measured.
        status: ``measured``, or why not.
        latency_failure: What ended the engine while it was timed; empty where nothing did.
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
        """Whether the engine failed while it was judged."""
        return self.status.startswith(FAILED)

    @property
    def is_within_budget(self) -> bool:
        """Whether every output was measured and is within: see `OutputEvaluation.budget_status`."""
        return bool(self.outputs) and self.worst_status == BudgetStatus.WITHIN

    @property
    def worst_status(self) -> str:
        """How the engine stands to the budget: the worst of its outputs."""
        return worst([output.budget_status for output in self.outputs])

    @property
    def upper(self) -> float | None:
        """The worst of its outputs: see `OutputEvaluation.upper`; None where nothing was measured."""
        found = [output.upper for output in self.outputs if output.upper is not None]
        return max(found, default=None)


@dataclass(frozen=True)
class EvaluationSet:
    """Every evaluation of a run."""

    SCHEMA: ClassVar[str] = "evaluations/5"
    __pydantic_config__ = STRICT

    evaluations: tuple[Evaluation, ...]

    def of(self, engine: str, split: str) -> Evaluation:
        """The evaluation of an engine on a split.

        Raises:
            KeyError: There is none.
        """
        for item in self.evaluations:
            if (item.engine, item.split) == (engine, split):
                return item
        raise KeyError((engine, split))


class Why(StrEnum):
    """What kept a candidate from being chosen."""

    SLOWER = "slower"
    WITHIN_NOISE = "as fast, in lower precision"
    """No faster than noise allows to tell, and in lower precision than the engine that was taken."""
    BEYOND = "beyond the budget"
    UNDECIDED = "undecided against the budget"
    NOT_CERTIFIED = "not inside the budget on certification"
    NOT_SELECTED = "not selected"
    """Inside the budget, but what was selected missed on certification, which does not choose again."""
    NO_SPEED = "speed not measured"
    SIMULATED = "simulated"
    NOT_MEASURED = "not measured"
    NOT_RUN = "not run"
    OTHER_DEVICE = "run on another device"
    """Of the same architecture: its accuracy counts, what it took there does not."""
    DECLINED = "declined"
    FAILED = "failed"


@dataclass(frozen=True)
class Rejection:
    """A candidate that was not chosen.

    Attributes:
        engine: Its id.
        why: What kept it from being chosen.
        reason: The same in words, with the evidence.
        times: Its latency over that of the chosen engine, with the interval that the spread of both leaves;
            None where one of the two was not measured on the target, or they were not timed in turns.
        upper: The worst of its outputs: upper bound of what is judged, over the budget; None where it was not
            measured.
    """

    engine: str
    why: Why
    reason: str
    times: Interval | None = None
    upper: float | None = None


@dataclass(frozen=True)
class Route:
    """Which engine takes requests of some sizes.

    Attributes:
        batch: Largest number of rows that it takes; the route with the largest takes larger requests too.
        engine: Id of the engine.
        plan: Its plan.
        times: Latency at this size of the target's main engine over this engine's; None for the main engine.
    """

    batch: int
    engine: str
    plan: str
    times: Interval | None = None


@dataclass(frozen=True)
class TargetChoice:
    """The engine emitted for one target, or the engines where that pays.

    Attributes:
        target: Name of the target.
        engine: Id of the engine emitted; of several, the one that is best over all batch sizes.
        plan: Its plan.
        reason: Why it was chosen.
        basis: What the choice rests on, in words: measured on the target, or provisional.
        losers: Every other candidate.
        routes: Which engine takes requests of which size, by ascending size; empty where one takes all. A
            request between two sizes goes to the engine of the larger.
        missed: Ids of the engines that were held against certification before and missed, in order: each has
            fewer sites in FP8 than the one before it. With the emitted one they are the attempts that share
            certification's error.
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
        """Ids of all engines that are emitted, the main one first."""
        return tuple(dict.fromkeys((self.engine, *(route.engine for route in self.routes))))

    @property
    def plans(self) -> tuple[str, ...]:
        """Plans of all engines that are emitted, the main one's first."""
        return tuple(dict.fromkeys((self.plan, *(route.plan for route in self.routes))))

    def route(self, rows: int) -> str:
        """Id of the engine that takes a request of so many rows."""
        return next(
            (route.engine for route in self.routes if rows <= route.batch),
            self.routes[-1].engine if self.routes else self.engine,
        )


@dataclass(frozen=True)
class PredictedTime:
    """What a plan was predicted to take, and what its engine takes.

    Attributes:
        engine: Id of the engine.
        plan: Its plan.
        batch: Rows per request.
        predicted_us: Predicted from kernel timings.
        measured_us: Median latency on the target.
    """

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
    """Median of the magnitude of the relative errors; None where nothing was predicted."""
    errors = [abs(prediction.error) for prediction in predictions]
    return median(errors) if errors else None


@dataclass(frozen=True)
class Choice:
    """The decision of a run.

    Attributes:
        targets: One entry per piece of hardware.
        predictions: Times of plans that a time was predicted for.
        median_prediction_error: Median magnitude of their relative errors; None where there is none.
        not_predicted: Why kernel times do not tell what an engine takes, by its id.
    """

    SCHEMA: ClassVar[str] = "choice/3"
    __pydantic_config__ = STRICT

    targets: tuple[TargetChoice, ...]
    predictions: tuple[PredictedTime, ...] = ()
    median_prediction_error: float | None = None
    not_predicted: dict[str, str] = field(default_factory=dict)
