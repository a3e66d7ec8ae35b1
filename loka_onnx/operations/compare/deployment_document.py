"""The difference of two deployments as a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from loka_onnx.core.evaluation import BudgetStatus, Latency, OutputEvaluation
from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT


class DeploymentKind(StrEnum):
    """Kinds of deployment that a path names."""

    BUNDLE = "bundle"
    ARCHIVE = "bundle in a single file"
    MODEL = "ONNX model"


@dataclass(frozen=True)
class EngineUsed:
    """One engine that answered.

    Attributes:
        id: Its id in the bundle; the file name of an ONNX model.
        backend: Library that loaded it.
        version: Version of the library that built it; of a model, of the one that loaded it.
        plan: Empty for an ONNX model.
        target: Device that it was built for.
        device: Device that it ran on here, as the driver names it.
        simulated: Its FP8 is simulated, so that its latency is not meaningful.
        is_fallback: It is the FP32 model of the bundle, because no emitted engine runs here.
        digest: SHA-256 of the engine file; of a model, over its graph and its weights.
    """

    id: str
    backend: str
    version: str
    plan: str
    target: str
    architecture: str
    device: str
    simulated: bool
    is_fallback: bool
    digest: str


@dataclass(frozen=True)
class PassedOver:
    """An engine of the bundle that was preferred to those used, and does not run here."""

    engine: str
    reason: str


@dataclass(frozen=True)
class ServedTo:
    """Requests to so many rows go to this engine."""

    rows: int
    engine: str


@dataclass(frozen=True)
class Deployment:
    """One side of a comparison.

    Attributes:
        model_digest: Digest of the exported model; of a plain ONNX model, its own.
        engines: Engines that answered, the main one first.
        routes: Engines by the rows of a request, ascending; empty where one takes all.
        passed_over: Engines that do not run here.
        least_rows: Fewest rows of a request; `most_rows` likewise.
    """

    path: str
    kind: DeploymentKind
    model_digest: str
    engines: tuple[EngineUsed, ...]
    routes: tuple[ServedTo, ...]
    passed_over: tuple[PassedOver, ...]
    least_rows: int
    most_rows: int

    def engine_for(self, rows: int) -> str:
        """Id of the engine that answers a request of so many rows, as `runtime.Engine` picks it."""
        last = self.routes[-1].engine if self.routes else self.engines[0].id
        return next((route.engine for route in self.routes if rows <= route.rows), last)

    def engine(self, name: str) -> EngineUsed:
        """The engine of that id.

        Raises:
            KeyError: There is none.
        """
        for engine in self.engines:
            if engine.id == name:
                return engine
        raise KeyError(name)


@dataclass(frozen=True)
class ComparedRows:
    """The rows that both sides answered.

    Attributes:
        name: Name of the file with the rows of it; its `path` is as it was given.
        digest: SHA-256 over the content of the file and the rows of it.
        group: Column of rows that belong together; None for independent rows.
        slices: Columns whose values are judged apart.
        inputs: Columns that each input is made of.
        source: Where group, slices and inputs come from, in words.
    """

    path: str
    name: str
    digest: str
    rows: int
    group: str | None
    slices: tuple[str, ...]
    inputs: dict[str, tuple[str, ...]]
    source: str


@dataclass(frozen=True)
class Moved:
    """Distance that an output moved.

    Attributes:
        unit: ``logit``, or ``value`` of a regression or of an output of unknown kind.
        rmse: Root mean square of B less A, with the root of the 95 % interval of the mean square.
        max_abs: Largest magnitude of it.
        reason: Why it is not judged; empty where it is.
    """

    output: str
    unit: str
    rmse: Interval
    max_abs: float
    reason: str = ""


@dataclass(frozen=True)
class AccuracyDifference:
    """B from A on the same rows, for one pair of engines.

    Attributes:
        request_rows: Rows of a request; the last one may have fewer.
        least_rows: Fewest rows that these two answer; `most_rows` likewise.
        before: Quality of A.
        outputs: Quality of B and its paired difference from A: ``difference`` is relative to A's loss.
        moved: Every compared output, those that are not judged included.
    """

    engine_a: str
    engine_b: str
    request_rows: int
    least_rows: int
    most_rows: int
    before: tuple[OutputEvaluation, ...]
    outputs: tuple[OutputEvaluation, ...]
    moved: tuple[Moved, ...]


@dataclass(frozen=True)
class Ratio:
    """The time of B over that of A.

    Attributes:
        value: Ratio of the medians.
        interval: Where it lies with at least 95 %, over the loads; its rows are the loads. Of one load only,
            over the parts of the measurement. None where too few were timed to say how sure the ratio is.
    """

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class LatencyDifference:
    """Both sides at one batch size; `ratio` is B over A, None where they were not timed in turns."""

    batch: int
    engine_a: str
    engine_b: str
    a: Latency
    b: Latency
    ratio: Ratio | None


@dataclass(frozen=True)
class LatencyComparison:
    """Both sides, timed in turns.

    Attributes:
        batches: By batch size; those at which a side failed are left out.
        overall: B over A, over the mean time per row of all these batch sizes; None where there is none.
        threads: Threads of ONNX Runtime; 0 where it chose.
        loads: How many times both were loaded and timed.
        failures: By side, the error that ended its measurements.
        says_nothing: Why the ratios say nothing about a target; empty where they may.
    """

    batches: tuple[LatencyDifference, ...]
    overall: Ratio | None
    threads: int
    loads: int
    failures: dict[str, str] = field(default_factory=dict)
    says_nothing: tuple[str, ...] = ()


@dataclass(frozen=True)
class BeyondBudget:
    """An output that is not within the budget that was asked for.

    Attributes:
        judged: Interval with its upper end above the budget; None where the output was not judged.
        name: Name of what is judged.
        reason: Why the output was not judged, or remarks apart from the budget.
    """

    output: str
    engine_b: str
    judged: Interval | None
    name: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """The paired difference of deployment B from deployment A.

    Attributes:
        accuracy: One entry for each pair of engines that answers requests of some size.
        latency: None where it was not asked for.
        budget: Largest accepted ΔNE (KL without labels) that was asked for; None where none was.
        budget_source: Where the budgets of the outputs come from, in words.
        notes: What a reader must know, each a sentence without its full stop.
        unjudged: By output that a bundle records or that was asked for, why it could not be judged.
    """

    SCHEMA: ClassVar[str] = "comparison/2"
    __pydantic_config__ = STRICT

    a: Deployment
    b: Deployment
    rows: ComparedRows
    accuracy: tuple[AccuracyDifference, ...]
    latency: LatencyComparison | None
    budget: float | None
    budget_source: str
    notes: tuple[str, ...] = ()
    unjudged: dict[str, str] = field(default_factory=dict)

    def beyond_budget(self) -> Iterator[BeyondBudget]:
        """Outputs that are not within the budget that was asked for and the guards beside it."""
        for pair in self.accuracy if self.budget is not None else ():
            for output in pair.outputs:
                found = output.difference
                if found is None:
                    yield BeyondBudget(output.output, pair.engine_b, None, reason="it has no difference")
                elif output.budget_status != BudgetStatus.WITHIN:
                    why = "; ".join(output.remarks)
                    yield BeyondBudget(output.output, pair.engine_b, found.judged, found.judged_name, why)
            for name, reason in self.unjudged.items():
                yield BeyondBudget(name, pair.engine_b, None, reason=reason)
