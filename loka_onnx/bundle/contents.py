"""Contents of a bundle, as the caller passes them."""

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
from loka_onnx.core.rewrite import Halves

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
    """Answers of an engine on the sample, and the largest absolute difference that a self-test accepts per
    output.
    """

    outputs: ArrayMap
    tolerance: Mapping[str, float]


@dataclass(frozen=True)
class BundleEngine:
    """An engine to ship, with a path relative to `BundleContents.root`.

    `expectation` is its own answer; where this host cannot run it, the fallback's, with a tolerance that
    covers the plan's error.
    """

    artifact: EngineArtifact
    expectation: Expectation
    evaluation: Evaluation | None = None


@dataclass(frozen=True)
class BundleLookup:
    """The lookup half of a model that was cut at its embeddings; `looked_up` has one array per cut tensor."""

    halves: Halves
    looked_up: ArrayMap


@dataclass(frozen=True)
class BundleContents:
    """Everything a bundle is made of; paths of artifacts are relative to `root`, the run directory.

    Attributes:
        model: The exported FP32 model; becomes the fallback.
        engines: Emitted engines, the preferred one of each target first.
        fallback: The FP32 model's outputs on the sample.
        sample: One array per graph input. These rows are shipped: pass only rows that may be given away.
        plans: Plans of the run; those of the engines are shipped.
        report: Report files to ship, absolute or relative to the working directory.
        versions: Version of every library that took part.
        lookup: None where every engine is of the whole.
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
