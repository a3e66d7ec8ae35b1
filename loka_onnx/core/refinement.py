"""What was tried on a device to make its plans better, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from loka_onnx.core.evaluation import PredictedTime
from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT


class Origin(StrEnum):
    """Where a plan comes from."""

    RUN_FILE = "run file"
    SEARCH = "search"
    """Sites toggled against the plan that should be the fastest, by kernel times."""
    GIVEN_BACK = "sites given back"
    """Sites of a plan beyond the budget returned to the base precision."""


@dataclass(frozen=True)
class Returned:
    """Sites that were given back together.

    Attributes:
        sites: Their names: one, or several that share a quantized tensor.
        kl: What they cost: KL over what is allowed for it, on the output where that is most.
        saved_us: Time a row that they were expected to save, microseconds; None where it was weighed by
            operations.
    """

    sites: tuple[str, ...]
    kl: float
    saved_us: float | None


@dataclass(frozen=True)
class Step:
    """One plan that was tried.

    Attributes:
        round: 0 for the plans of the run file.
        plan: Id of the plan.
        engine: Id of its engine.
        origin: Where the plan comes from.
        parent: Plan that it was made from; empty for those of the run file.
        returned: What was given back of the parent.
        fp8_sites: Sites that it has in FP8.
        fp8_share: Their share of the FP8-able FLOPs.
        status: How far the engine came.
        detail: Failure with its evidence, or why it was declined or not judged; empty where it was judged and
            timed.
        build_seconds: Wall time of the build.
        latency_us: Median latency by batch size (as text); empty where it was not timed.
        predicted_us: The same as it was expected before anything of this engine was measured, at the pace of
            its round, which the anchor tells; empty where nothing was known to start from.
        predicted_from: Engine whose measured time the prediction starts from; empty where there is none.
        not_predicted: Why kernel times do not tell what the engine takes; empty where they do, or where
            nothing was known to start from.
        times: Latency over that of the anchor, which was timed in turns with it; None where it was not timed.
        upper: Upper bound of what is judged on selection over the budget, of the worst output; None where it
            was not judged.
        is_within: Whether every output is inside its budget on selection.
        is_on_front: Whether no engine of the same hardware is as fast and as accurate.
    """

    round: int
    plan: str
    engine: str
    origin: Origin
    parent: str
    returned: tuple[Returned, ...]
    fp8_sites: int
    fp8_share: float
    status: str
    detail: str
    build_seconds: float
    latency_us: dict[str, float]
    predicted_us: dict[str, float]
    predicted_from: str
    times: Interval | None
    upper: float | None
    is_within: bool
    is_on_front: bool
    not_predicted: str = ""

    @property
    def predictions(self) -> tuple[PredictedTime, ...]:
        """Predicted and measured, at each batch size that has both."""
        return tuple(
            PredictedTime(self.engine, self.plan, int(batch), us, self.latency_us[batch])
            for batch, us in self.predicted_us.items()
            if batch in self.latency_us
        )


@dataclass(frozen=True)
class HardwareRefinement:
    """The rounds on one piece of hardware.

    Attributes:
        target: Name of the target.
        architecture: Of the engines that were added; empty where none was.
        backend: Backend of the engines that were added; empty where none was.
        anchor: Engine without FP8 that all are compared with, the fastest of these; empty where none was
            timed.
        steps: Every plan that was tried, in order.
        best: Plan of the fastest engine inside the budget on selection; empty where there is none.
        ended: Why no further round was made.
        seconds: Wall time of the rounds, the one of the run file's plans left out.
    """

    target: str
    architecture: str
    backend: str
    anchor: str
    steps: tuple[Step, ...]
    best: str
    ended: str
    seconds: float


@dataclass(frozen=True)
class Refinement:
    """The rounds of a run (`refinement.json`).

    Attributes:
        hardware: One entry per piece of hardware that an engine runs on here.
        predictions: Those of all steps.
        median_prediction_error: Median magnitude of their relative errors; None where there is none.
    """

    SCHEMA: ClassVar[str] = "refinement/2"
    __pydantic_config__ = STRICT

    hardware: tuple[HardwareRefinement, ...] = ()
    predictions: tuple[PredictedTime, ...] = ()
    median_prediction_error: float | None = None
