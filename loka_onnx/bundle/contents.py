"""What goes into a bundle, as the caller hands it over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import Choice, Evaluation
from loka_onnx.core.lineage import StageRecord
from loka_onnx.core.manifest import BatchRange
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.split import Halves

ArrayMap = Mapping[str, npt.NDArray[Any]]

DEFAULT_TOLERANCE = 1e-4
"""For engines without FP8, absolute, on a logit.

Sums in another order move a logit by a few ulp of its terms: input moved by 3e-7 moved the logits of
16-32-16-1 and 256-512-256-1 MLPs by 4.5e-6 at most in 4000 rows. The rest is room for other hosts.
"""

FP8_TOLERANCE = 0.05
"""For engines with FP8, absolute, on a logit.

An activation on a rounding boundary may fall to the other side on another host, and moves by an eighth of
itself: the same experiment with FP8 in two layers moved one row in 4000 by 0.018, and a batch of one row
differed from the whole by 0.0025. This is about the error of FP8 itself, so the self-test finds a broken
engine and not one that runs another precision; `EngineArtifact.sites` is what says the precision.
"""


@dataclass(frozen=True)
class Expectation:
    """Answers of an engine on the sample.

    Attributes:
        outputs: One array per graph output.
        tolerance: Largest absolute difference that a loader's self-test accepts, per output.
    """

    outputs: ArrayMap
    tolerance: Mapping[str, float]


@dataclass(frozen=True)
class BundleEngine:
    """One engine to ship.

    Attributes:
        artifact: The engine; its path is relative to `BundleContents.root`.
        expectation: Its own outputs on the sample; where this host cannot run it, the fallback's outputs
            with a tolerance that covers the plan's error.
        evaluation: Measured accuracy and latency; None when it was not measured.
    """

    artifact: EngineArtifact
    expectation: Expectation
    evaluation: Evaluation | None = None


@dataclass(frozen=True)
class BundleLookup:
    """The lookup half of a model that was cut at its embeddings.

    Attributes:
        halves: The halves; their paths are relative to `BundleContents.root`.
        looked_up: One array per cut tensor, for the rows of the sample.
    """

    halves: Halves
    looked_up: ArrayMap


@dataclass(frozen=True)
class BundleContents:
    """Everything a bundle is made of.

    Attributes:
        root: Directory that the artifacts' paths are relative to (the run directory).
        model: The exported FP32 model; becomes the fallback.
        judged: Judged outputs with their budgets.
        batch: Rows per request that the engines were built for.
        engines: Emitted engines, the preferred one of each target first.
        fallback: The FP32 model's outputs on the sample.
        sample: One array per graph input, the batch on axis 0. These rows are shipped: pass only rows that
            may be given away.
        plans: Plans of the run; those of the engines are shipped.
        choice: Why these engines.
        report: Report files to ship, absolute or relative to the working directory.
        lineage: Finished stages.
        versions: Version of every library that took part.
        lookup: What looks ids up for engines of the dense half; None where every engine is of the whole.
    """

    root: Path
    model: ModelArtifact
    judged: tuple[OutputSpec, ...]
    batch: BatchRange
    engines: tuple[BundleEngine, ...]
    fallback: Expectation
    sample: ArrayMap
    plans: PlanSet
    choice: Choice
    report: tuple[Path, ...]
    lineage: tuple[StageRecord, ...]
    versions: dict[str, str]
    lookup: BundleLookup | None = None
