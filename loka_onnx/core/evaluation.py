"""Measured accuracy and latency of built engines, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable
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
        reason: Why it is not judged; empty where it is.
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


@dataclass(frozen=True)
class OutputEvaluation:
    """One output of one engine on one split.

    Attributes:
        output: Name of the output.
        kind: How it is read.
        metrics: Quality of the engine.
        difference: Against the FP32 reference; None for the reference itself.
        budget: Largest accepted relative loss increase.
        budget_status: ``within`` when the upper bound is inside the budget, ``beyond`` when the lower
            bound is outside, else ``undecided``.
        rows_to_decide: Rows that would settle an undecided verdict if the estimate stayed; None when
            decided, when nothing is known of the spread, or when the estimate lies on the budget: not even
            `MOST_TIMES` as many rows would tell on which side.
        slices: The difference on each slice, the surest harm first (falling lower end), then those that are
            not judged. They do not enter `budget_status`.
        slices_left_out: For each column with more values than are looked at, how many were left out.
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
        parts_us: Medians of consecutive parts of the requests, in order; the i-th parts of engines that were
            timed in turns were timed together. Empty where they were not kept.
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
    parts_us: tuple[float, ...] = ()
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
        """Whether every output was measured and its upper bound is inside its budget."""
        return bool(self.outputs) and all(o.budget_status == BudgetStatus.WITHIN for o in self.outputs)


@dataclass(frozen=True)
class EvaluationSet:
    """Every evaluation of a run."""

    SCHEMA: ClassVar[str] = "evaluations/4"
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
class Loser:
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
    """

    target: str
    engine: str
    plan: str
    reason: str
    basis: str
    losers: tuple[Loser, ...]
    routes: tuple[Route, ...] = ()

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

    SCHEMA: ClassVar[str] = "choice/2"
    __pydantic_config__ = STRICT

    targets: tuple[TargetChoice, ...]
    predictions: tuple[PredictedTime, ...] = ()
    median_prediction_error: float | None = None
    not_predicted: dict[str, str] = field(default_factory=dict)
