"""What a finished run says of itself, for the record of `benchmarks.engines.zoo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy.typing as npt

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineArtifact, EngineSet
from loka_onnx.core.evaluation import Choice, Evaluation, EvaluationSet, TargetChoice
from loka_onnx.core.lineage import RunRecord
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.refinement import Refinement, read_refined
from loka_onnx.core.throughput import ThroughputSet
from loka_onnx.numerics.intervals import median_interval
from loka_onnx.planning.evidence import Evidence
from loka_onnx.sessions.onnx_session import OnnxSession

PERCENT = 100.0


def ratio_of(others: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """What others took over what ours took, round by round: the median, with its interval of 95 %."""
    ratios = [a / b for a, b in zip(others, ours, strict=True)]
    found = median_interval(ratios)
    ends = {} if found is None else {"lower": found.lower, "upper": found.upper}
    return {"ratio": median(ratios), **ends}


class Finished:
    """A finished run with one target.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        refined = read_refined(directory)
        plans = serde.read(PlanSet, directory / "plan.json")
        self.plan_set = PlanSet((*plans.plans, *refined.plans), plans.notes, plans.speeds)
        built = serde.read(EngineSet, directory / "engines.json").engines
        self.engines = {engine.id: engine for engine in (*built, *refined.engines)}
        self.evaluations = serde.read(EvaluationSet, directory / "evaluation.json")
        self.choice = serde.read(Choice, directory / "choice.json")
        self.evidence = Evidence(self.evaluations, self.plan_set)

    @property
    def target(self) -> TargetChoice:
        """What was chosen."""
        (target,) = self.choice.targets
        return target

    @cached_property
    def exported(self) -> ModelArtifact:
        """The model as it was exported, where the run directory has it."""
        model = serde.read(ModelArtifact, self.directory / "model" / "exported.json")
        return ModelArtifact(**{**vars(model), "path": self.directory / model.path})

    def exact(self, inputs: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The FP32 model's logits."""
        return OnnxSession(self.exported.path).run(inputs)["logit"]

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Wall time of each stage, as it ran."""
        record = serde.read(RunRecord, self.directory / "run.json")
        return {stage.stage: stage.seconds for stage in record.stages}

    def chosen_at(self, batch: int) -> EngineArtifact:
        """The engine that takes requests of a size."""
        return self.engines[self.target.route(batch)]

    def fastest(self, plan: str) -> EngineArtifact | None:
        """The fastest engine of a plan that was timed on the device; None without any."""
        timed = {
            e.id: speed
            for e in self.engines.values()
            if e.plan == plan and (speed := self.evidence.speed(e)) is not None
        }
        best = min(timed, key=lambda name: timed[name].per_row_us, default=None)
        return None if best is None else self.engines[best]

    def figures(self) -> dict[str, Any]:
        """What the record holds of the run."""
        return {
            "choice": {
                "engine": self.target.engine,
                "plan": self.target.plan,
                "reason": self.target.reason,
                "routes": [{"batch": r.batch, "engine": r.engine} for r in self.target.routes],
            },
            "engines": {name: self._engine(engine) for name, engine in self.engines.items()},
            "losers": {loser.engine: loser.reason for loser in self.target.losers},
            "notes": list(self.plan_set.notes),
            "sites": {
                "fp8_able": len({speed.site for speed in self.plan_set.speeds}),
                "with kernel times": len({s.site for s in self.plan_set.speeds if s.saved_us}),
            },
            "predictions": self._predictions(),
            "throughput": self._throughput(),
        }

    def _engine(self, engine: EngineArtifact) -> dict[str, Any]:
        plan = self.plan_set.plan(engine.plan)
        found: dict[str, Any] = {
            "status": str(engine.status),
            "build_seconds": engine.build_seconds,
            "fp8_sites": len(plan.fp8_sites),
            "fp8_share_percent": PERCENT * plan.fp8_share,
            "fallbacks": [site.site for site in engine.fallbacks],
        }
        if engine.detail:
            found["detail"] = engine.detail[-300:]
        for split, known in (
            ("selection", self.evidence.by_engine),
            ("certification", self.evidence.certified),
        ):
            if engine.id in known:
                found[split] = _judged(known[engine.id])
        if engine.id in self.evidence.by_engine:
            latencies = self.evidence.by_engine[engine.id].latencies
            found["latency_us"] = {str(latency.batch): latency.p50_us for latency in latencies}
        return found

    def _predictions(self) -> dict[str, Any]:
        document = self.directory / "refinement.json"
        found = serde.read(Refinement, document) if document.is_file() else Refinement()
        steps = [step for hardware in found.hardware for step in hardware.steps]
        return {
            "median_error_percent": _percent(found.median_prediction_error),
            "in the final timing, from BF16 alone, percent": _percent(self.choice.median_prediction_error),
            "ended": [hardware.ended for hardware in found.hardware],
            "plans": [
                {
                    "plan": step.plan,
                    "round": step.round,
                    "origin": str(step.origin),
                    "from": step.predicted_from,
                    "predicted_us": step.predicted_us,
                    "measured_us": step.latency_us,
                    "error_percent": {str(p.batch): PERCENT * p.error for p in step.predictions},
                    "upper over budget": step.upper,
                }
                for step in steps
            ],
        }

    def _throughput(self) -> list[dict[str, Any]]:
        document = self.directory / "throughput.json"
        if not document.is_file():
            return []
        measured = serde.read(ThroughputSet, document)
        gains = {(gain.engine, gain.batch): gain.ratio for gain in measured.gains}
        return [
            {
                "role": each.role,
                "plan": each.plan,
                "batch": each.batch,
                "streams": each.streams,
                "p99_limit_us": each.p99_limit_us,
                "requests_per_s": each.requests_per_s,
                "capacity_per_s": each.capacity_per_s,
                "p99_us": None if each.best is None else each.best.p99_us,
                "over the best without FP8": gains.get((each.engine, each.batch)),
                "failure": each.failure,
            }
            for each in measured.measurements
        ]


def _judged(evaluation: Evaluation) -> dict[str, Any]:
    """ΔNE with its interval, its parts, and the engine's own quality; percent."""
    found: dict[str, Any] = {"rows": evaluation.rows, "status": evaluation.status}
    for output in evaluation.outputs:
        found |= {"ne": output.metrics.normalized_entropy, "auc": output.metrics.auc}
        found["budget_status"] = output.budget_status
        if output.difference is not None:
            for name in ("delta_ne", "kl", "labelled"):
                interval = getattr(output.difference, name)
                if interval is not None:
                    ends = (interval.value, interval.lower, interval.upper)
                    found[f"{name}_percent"] = [PERCENT * end for end in ends]
    return found


def _percent(value: float | None) -> float | None:
    return None if value is None else PERCENT * value
