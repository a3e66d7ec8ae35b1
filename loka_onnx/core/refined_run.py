"""Plans and engines that refining added to a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from loka_onnx.core import serde
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import EvaluationSet
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.rewrite import RewriteLogs
from loka_onnx.core.serde import STRICT

REFINED_NAME = "refined.json"
"""Name of the document in a run directory."""


def _nothing_judged() -> EvaluationSet:
    return EvaluationSet(())


def _nothing_rewritten() -> RewriteLogs:
    return RewriteLogs({})


@dataclass(frozen=True)
class RefinedRun:
    """Plans that were added to those of the run file (`refined.json`).

    Attributes:
        engines: Failures included.
        corrections: Constants fitted to them.
        rewrites: Changes in their models.
        evaluations: Every judged engine, those of the run file too: on selection, with the latencies of the
            round.
    """

    SCHEMA: ClassVar[str] = "refined-run/1"
    __pydantic_config__ = STRICT

    plans: tuple[PrecisionPlan, ...] = ()
    engines: tuple[EngineArtifact, ...] = ()
    corrections: CorrectionSet = field(default_factory=CorrectionSet)
    rewrites: RewriteLogs = field(default_factory=_nothing_rewritten)
    evaluations: EvaluationSet = field(default_factory=_nothing_judged)


def read_refined(directory: Path) -> RefinedRun:
    """Return the refinement of a run directory; empty where nothing was refined.

    Raises:
        UserError: The document was written by another version of this package.
    """
    document = directory / REFINED_NAME
    return serde.read(RefinedRun, document) if document.is_file() else RefinedRun()
