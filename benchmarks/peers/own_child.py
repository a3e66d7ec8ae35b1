"""This project as the other tools are run: one job in a process of its own, timed and watched like theirs.

``pipeline``: what `loka-onnx run` does up to its planned graphs (`RunOptions.until`), over the exported ONNX
file. ``blanket``: ranges, and Q/DQ at every linear site. ``precision``: no FP8, everything in one type.
``mods``: what a run makes of its plan ``bf16``, all mods and no FP8.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.engines.plans import float8_plan, high_precision_plans, wide_plan
from benchmarks.peers.children.answering import answer
from benchmarks.pipeline.training import GROUP
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.config import build_run_config
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.backends import Fusions
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet, PrecisionPlan, Wide
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.protected import logit_ends
from loka_onnx.pipeline.context import CHECK_ROWS
from loka_onnx.pipeline.run import RunOptions, Stage, run
from loka_onnx.sessions.backends import fusions_of
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_onnx.transforms.sequence import apply_mods
from loka_zoo.movielens1m import movielens_1m

PLAN = "fp8-safe"
ON_A_GPU = "inductor"
"""The backend whose form of a plan the files for a device have."""
PROBING = frozenset({"calibrate", "recalibrate"})
"""Stages of a run that look at calibration rows."""


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job."""
    kinds = {"pipeline": pipeline, "blanket": blanket, "precision": precision, "mods": mods}
    return kinds[job["kind"]](job)


def pipeline(job: dict[str, Any]) -> dict[str, Any]:
    """Calibrate, mods, plan, correct; the planned graph in FP32 and in BF16."""
    artifact = serde.read(ModelArtifact, Path(job["artifact"]))
    data, output = movielens_1m(), Path(job["output"])
    directory = Path(job["directory"])
    config = build_run_config(
        {
            "name": output.parent.parent.name,
            "model": {"onnx": artifact.path},
            "outputs": [{"name": "logit", "kind": "logit", "label": data.label, "budget": job["budget"]}],
            "data": {
                **job["files"],
                "group": GROUP,
                "inputs": {b.input: list(b.columns) for b in data.bindings},
            },
            "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
            "plan": {"plans": ["fp32", PLAN]},
            **job.get("sections", {}),
            "build": {"cache": directory / "cache"},
            "output": directory / "run",
        },
        directory,
    )
    seconds: dict[str, float] = {}

    def on_stage(stage: str, outcome: Any) -> None:
        if outcome is not None:
            seconds[stage] = outcome.seconds

    began = time.perf_counter()
    found = run(config, RunOptions(force=True, until=Stage.BUILD, on_stage=on_stage)).directory
    total = time.perf_counter() - began
    plan = serde.read(PlanSet, found / "plan.json").plan(PLAN)
    modified = serde.read(ModelArtifact, found / "model" / "modified.json")
    modified = _placed(modified, found)
    corrections = serde.read(CorrectionSet, found / "corrections.json").accepted(PLAN)
    planned = found / "planned" / f"{PLAN}-fp32" / "model.onnx"
    if planned.is_file():
        _copy(planned, output)
    else:
        # No site is safe: what is left of the plan is the model after mods.
        apply_plan(modified, plan, PlanForm(Precision.FP32), output)
    fusions = fusions_of(ON_A_GPU) if plan.fp8_sites else Fusions()
    narrow = Path(job["narrow"])
    narrow.parent.mkdir(parents=True, exist_ok=True)
    apply_plan(modified, plan, PlanForm(Precision.BF16, fusions, corrections), narrow)
    return {
        "seconds": total,
        "stage_seconds": seconds,
        "calibration_seconds": sum(seconds.get(stage, 0.0) for stage in PROBING),
        "origins": {site.name: list(site.merged_from or (site.name,)) for site in modified.linear_sites},
        "plan": described(plan),
    }


def blanket(job: dict[str, Any]) -> dict[str, Any]:
    """Every linear site in FP8, under the ranges of the calibration rows; interactions stay exact."""
    artifact = serde.read(ModelArtifact, Path(job["artifact"]))
    data = movielens_1m().open("calibration")
    began = time.perf_counter()
    with TemporaryDirectory() as scratch:
        options = PassOptions(recipes=(PER_TENSOR,), batch_size=job["batch"], rows=job["rows"])
        probe = Probe(artifact, artifact.sites, data, options)
        (scales,) = scales_of(probe.ranges(Path(scratch)), options.recipes).values()
    calibrated = time.perf_counter() - began
    plan = float8_plan("fp8-all", GraphModel.load(artifact.path), artifact, scales, ())
    apply_plan(artifact, plan, PlanForm(Precision.FP32), Path(job["output"]))
    total = time.perf_counter() - began
    narrow = Path(job["narrow"])
    narrow.parent.mkdir(parents=True, exist_ok=True)
    apply_plan(artifact, plan, PlanForm(Precision.BF16, fusions_of(ON_A_GPU)), narrow)
    return {"seconds": total, "calibration_seconds": calibrated, "plan": described(plan)}


def precision(job: dict[str, Any]) -> dict[str, Any]:
    """No quantizing: the exported model, or everything in one type below."""
    artifact = serde.read(ModelArtifact, Path(job["artifact"]))
    (plan,) = high_precision_plans(artifact, [job["precision"]]).plans
    began = time.perf_counter()
    apply_plan(artifact, plan, PlanForm(Precision(job["precision"])), Path(job["output"]))
    return {"seconds": time.perf_counter() - began, "calibration_seconds": 0.0, "plan": described(plan)}


def mods(job: dict[str, Any]) -> dict[str, Any]:
    """The default mods, and BF16 everywhere but at the ends that a plan of ours keeps exact."""
    artifact, output = serde.read(ModelArtifact, Path(job["artifact"])), Path(job["output"])
    with np.load(job["data"], allow_pickle=False) as arrays:
        rows = {name: arrays[name][:CHECK_ROWS] for name in arrays.files}
    began = time.perf_counter()
    with TemporaryDirectory() as scratch:
        modified = apply_mods(artifact, [rows], Path(scratch) / "modified.onnx").model
        sites = {site.name for site in modified.sites}
        ends = logit_ends(GraphModel.load(modified.path))
        wide = tuple(Wide(end.node, end.reason) for end in ends if end.node not in sites)
        plan = replace(wide_plan(modified, Precision.BF16), wide=wide)
        apply_plan(modified, plan, PlanForm(Precision.BF16), output)
    origins = {site.name: list(site.merged_from or (site.name,)) for site in modified.linear_sites}
    return {
        "seconds": time.perf_counter() - began,
        "calibration_seconds": 0.0,
        "origins": origins,
        "plan": described(plan),
    }


def described(plan: PrecisionPlan) -> dict[str, Any]:
    """What the record holds of a plan."""
    reasons = {d.site: f"{d.verdict}: {d.reason}" for d in plan.decisions}
    return {
        "id": plan.id,
        "fp8_sites": sorted(plan.fp8_sites),
        "fp8_share_of_flops": plan.fp8_share,
        "reasons": reasons if plan.id == PLAN else {},
    }


def _placed(artifact: ModelArtifact, directory: Path) -> ModelArtifact:
    return replace(artifact, path=directory / artifact.path)


def _copy(source: Path, target: Path) -> None:
    """A model file, and its external data where it has any."""
    for path in source.parent.iterdir():
        shutil.copyfile(path, target if path == source else target.parent / path.name)


if __name__ == "__main__":
    answer(("onnxruntime", "onnx", "numpy", "torch"), work)
