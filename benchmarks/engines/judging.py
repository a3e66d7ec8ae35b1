"""Accuracy of timed engines, by their own outputs, and the choice among them.

Chosen is the fastest engine whose ΔNE is inside the budget by its upper end on selection; certification
decides nothing and says whether that held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.engines.plans import TODAY, Engine
from benchmarks.engines.timing import Built
from benchmarks.pipeline.training import GROUP
from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.evaluation import Evaluation, OutputEvaluation
from loka_onnx.core.intervals import Interval
from loka_onnx.engines.registry import get_backend
from loka_onnx.evaluation.engines import Reference, Split, judge_engine, judge_reference, predict_reference
from loka_onnx.evaluation.predictions import Run
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.sessions.runner import SplitRunner
from loka_zoo.prepared import PreparedData

BF16, BLANKET = "BF16", "blanket FP8"
"""Names of the engines that the chosen one is compared with, beside those that begin with `TODAY`."""


class Judge:
    """Holds engines against the FP32 model on selection and certification.

    Args:
        data: The splits.
        spec: The judged output.
        run: Runs the FP32 model.
        batch: Rows of a request.
    """

    def __init__(self, data: PreparedData, spec: OutputSpec, run: Run, batch: int) -> None:
        self.specs = (spec,)
        columns = (data.label, GROUP)
        self._splits = [
            Split(name, data.open(name, columns), columns, GROUP, batch_size=batch)
            for name in ("selection", "certification")
        ]
        self._references: list[Reference] = [
            predict_reference(split, run, self.specs) for split in self._splits
        ]

    def reference(self) -> dict[str, Any]:
        """Quality of the FP32 model, by split."""
        found = {}
        for split, known in zip(self._splits, self._references, strict=True):
            metrics = judge_reference(split, known, self.specs).outputs[0].metrics
            found[split.name] = asdict(metrics) | {"rows": known.predictions.rows}
        return found

    def judge(self, engine: Engine, made: Built) -> dict[str, Evaluation]:
        """One engine by its own outputs, by split."""
        if not made.artifact.was_run or made.artifact.path is None:
            return {}
        backend = get_backend(engine.backend)
        runner = backend.open(made.artifact, made.directory / made.artifact.path)
        with SplitRunner(OnnxSession(engine.variant.lookup), runner) as whole:
            return {
                split.name: judge_engine(made.artifact, split, known, self.specs, lambda: whole.run)
                for split, known in zip(self._splits, self._references, strict=True)
            }


def accuracy(evaluation: Evaluation) -> dict[str, Any]:
    """Of one engine on one split, for the record."""
    if not evaluation.outputs:
        return {"status": evaluation.status}
    output: OutputEvaluation = evaluation.outputs[0]
    found: dict[str, Any] = {
        "rows": evaluation.rows,
        "ne": output.metrics.normalized_entropy,
        "auc": output.metrics.auc,
        "budget": str(output.budget_status),
    }
    if output.difference is not None:
        for name in ("delta_ne", "kl", "labelled", "delta_auc"):
            interval: Interval | None = getattr(output.difference, name)
            if interval is not None:
                found[f"{name}_percent"] = [
                    100 * end for end in (interval.value, interval.lower, interval.upper)
                ]
        found["logit_rmse"] = output.difference.delta_rmse
    return found


def is_inside(judged: Mapping[str, Any], split: str, budget: float) -> bool:
    """Whether the upper end of an engine's ΔNE is inside the budget; not where it was not measured."""
    interval = judged.get(split, {}).get("delta_ne_percent")
    return interval is not None and interval[2] <= 100 * budget


def choose(
    medians: Mapping[str, float], judged: Mapping[str, Mapping[str, Any]], budget: float
) -> str | None:
    """The fastest engine of ours that is inside the budget on selection; None where none is.

    Args:
        medians: Microseconds by engine.
        judged: Accuracy by engine and split.
        budget: Largest accepted relative loss.
    """
    ours = [name for name in medians if not name.startswith(TODAY)]
    able = [name for name in ours if is_inside(judged.get(name, {}), "selection", budget)]
    return min(able, key=lambda name: medians[name], default=None)


def ratios(medians: Mapping[str, float], chosen: str) -> dict[str, float]:
    """Times of others over that of the chosen engine; of several of today, the fastest."""
    found = {}
    today = [us for name, us in medians.items() if name.startswith(TODAY)]
    if today:
        found["chosen over today"] = min(today) / medians[chosen]
    for words, name in (("our BF16", BF16), ("blanket FP8", BLANKET)):
        if name in medians:
            found[f"chosen over {words}"] = medians[name] / medians[chosen]
    return found
