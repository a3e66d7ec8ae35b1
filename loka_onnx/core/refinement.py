"""Trials on a device that improve plans, step by step, and the plans and engines that they added to a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from loka_onnx.core import serde
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import EvaluationSet, PredictedTime
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.rewrite import RewriteLogs
from loka_onnx.core.serde import STRICT


class Origin(StrEnum):
    """Origin of a plan."""

    RUN_FILE = "run file"
    SEARCH = "search"
    """Sites toggled against the plan predicted fastest by kernel times."""
    GIVEN_BACK = "sites given back"
    """Sites of a plan beyond the budget reverted to the base precision."""


@dataclass(frozen=True)
class Returned:
    """Sites reverted together: one, or several that share a quantized tensor.

    `kl` is KL over the allowed KL, on the output where that is most; `saved_us` the expected saving per row,
    microseconds, None where weighed by operations.
    """

    sites: tuple[str, ...]
    kl: float
    saved_us: float | None


@dataclass(frozen=True)
class Step:
    """One tried plan, in a round: 0 for those of the run file, which have no `parent`.

    Attributes:
        returned: Sites reverted from the parent.
        fp8_sites: Number of sites in FP8 or INT8; `fp8_share` is their share of the FP8-able FLOPs.
        detail: Failure with its evidence, or why it was declined or not judged; empty where judged and timed.
        latency_us: Median latency by batch size (as text), microseconds; empty where not timed.
        predicted_us: Prediction before anything of this engine was measured, at the pace of its round (given
            by the anchor), from the engine `predicted_from`; else `not_predicted` says why there is none.
        times: Latency over the anchor's, timed in turns; None where not timed.
        upper: Upper bound of the judged quantity on selection over the budget, of the worst output; None
            where not judged. `is_within` says it of every output.
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
        """Predicted and measured times, at each batch size with both."""
        return tuple(
            PredictedTime(self.engine, self.plan, int(batch), us, self.latency_us[batch])
            for batch, us in self.predicted_us.items()
            if batch in self.latency_us
        )


@dataclass(frozen=True)
class HardwareRefinement:
    """The rounds on one piece of hardware, in `seconds` of wall time without the run file's plans.

    `architecture` and `backend` are of the added engines; `anchor` is the fastest engine without FP8, `best`
    the plan of the fastest inside the budget on selection. Each is empty where there is none. `ended` says
    why no further round was made.
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
    """The rounds of a run (`refinement.json`) on each piece of hardware, with all steps' predictions."""

    SCHEMA: ClassVar[str] = "refinement/2"
    __pydantic_config__ = STRICT

    hardware: tuple[HardwareRefinement, ...] = ()
    predictions: tuple[PredictedTime, ...] = ()
    median_prediction_error: float | None = None


REFINED_NAME = "refined.json"


@dataclass(frozen=True)
class RefinedRun:
    """Plans that were added to those of the run file (`refined.json`), with their engines, failures included.

    `corrections` are fitted to them, `rewrites` the changes in their models. `evaluations` are of every
    judged engine, those of the run file too: on selection, with the latencies of the round.
    """

    SCHEMA: ClassVar[str] = "refined-run/1"
    __pydantic_config__ = STRICT

    plans: tuple[PrecisionPlan, ...] = ()
    engines: tuple[EngineArtifact, ...] = ()
    corrections: CorrectionSet = field(default_factory=CorrectionSet)
    rewrites: RewriteLogs = field(default_factory=lambda: RewriteLogs({}))
    evaluations: EvaluationSet = field(default_factory=lambda: EvaluationSet(()))


def read_refined(directory: Path) -> RefinedRun:
    """Return the refinement of a run directory, empty where there is none; `UserError` on another schema."""
    document = directory / REFINED_NAME
    return serde.read(RefinedRun, document) if document.is_file() else RefinedRun()
