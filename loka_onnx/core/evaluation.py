"""Measured accuracy and latency of built engines, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT


@dataclass(frozen=True)
class TaskMetrics:
    """Quality of one output of one engine.

    Attributes:
        loss: Mean log loss (nats), or mean squared error for a regression.
        normalized_entropy: Loss over the entropy of the base rate; for a regression, over the variance
            of the label.
        auc: Area under the ROC curve; None for a regression or a single-class label.
        prediction_ratio: Mean prediction over mean label.
    """

    loss: float
    normalized_entropy: float
    auc: float | None
    prediction_ratio: float


@dataclass(frozen=True)
class PairedDifference:
    """An engine against the FP32 reference, row by row.

    Attributes:
        delta_ne: Relative change of the loss (equal to the relative change of normalized entropy).
        kl: Its label-free part.
        labelled: Its labelled first-order part.
        delta_auc: Change of AUC; None where there is no AUC.
        delta_prediction_ratio: Change of the prediction ratio.
        delta_rmse: Root mean square change of the logit (or regression output).
        delta_max: Largest change of it.
    """

    delta_ne: Interval
    kl: Interval
    labelled: Interval
    delta_auc: Interval | None
    delta_prediction_ratio: Interval
    delta_rmse: float
    delta_max: float


class BudgetStatus:
    """Values of `OutputEvaluation.budget_status`."""

    WITHIN = "within"
    BEYOND = "beyond"
    UNDECIDED = "undecided"


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
            decided, or when no number of rows would.
    """

    output: str
    kind: OutputKind
    metrics: TaskMetrics
    difference: PairedDifference | None
    budget: float
    budget_status: str
    rows_to_decide: int | None


@dataclass(frozen=True)
class Latency:
    """Latency of one engine at one batch size, microseconds.

    Attributes:
        batch: Rows per request.
        p50_us: Median.
        p90_us: 90th percentile.
        p99_us: 99th percentile.
        repeats: Measured requests.
        device: Where it was measured.
        counts_for_choice: False where the speed says nothing about the target (a simulation).
    """

    batch: int
    p50_us: float
    p90_us: float
    p99_us: float
    repeats: int
    device: str
    counts_for_choice: bool


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

    @property
    def is_within_budget(self) -> bool:
        """Whether every output was measured and its upper bound is inside its budget."""
        return bool(self.outputs) and all(o.budget_status == BudgetStatus.WITHIN for o in self.outputs)


@dataclass(frozen=True)
class EvaluationSet:
    """Every evaluation of a run."""

    SCHEMA: ClassVar[str] = "evaluations/1"
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


@dataclass(frozen=True)
class Loser:
    """A candidate that was not chosen.

    Attributes:
        engine: Its id.
        reason: Why not.
    """

    engine: str
    reason: str


@dataclass(frozen=True)
class TargetChoice:
    """The engine emitted for one target.

    Attributes:
        target: Name of the target.
        engine: Id of the engine emitted.
        plan: Its plan.
        reason: Why it was chosen.
        basis: ``measured on the target`` or ``not measured``: what the choice of speed rests on.
        losers: Every other candidate.
    """

    target: str
    engine: str
    plan: str
    reason: str
    basis: str
    losers: tuple[Loser, ...]


@dataclass(frozen=True)
class Choice:
    """The decision of a run, one entry per target."""

    SCHEMA: ClassVar[str] = "choice/1"
    __pydantic_config__ = STRICT

    targets: tuple[TargetChoice, ...]
