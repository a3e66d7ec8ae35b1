"""Run files over empty files, plans and engines, for tests of what is read of them."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from loka_onnx.config import RunConfig, load_run_file
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.formats import INT8, Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_TENSOR, Recipe


def config_of(folder: Path, **sections: Any) -> RunConfig:
    """A run file in a folder, with sections replaced."""
    for name in ("ranker.onnx", "rows.parquet"):
        (folder / name).touch()
    splits = dict.fromkeys(("calibration", "selection", "certification"), "rows.parquet")
    document = {
        "model": {"onnx": "ranker.onnx"},
        "outputs": [{"name": "ctr", "kind": "logit", "label": "clicked"}],
        "data": {**splits, "inputs": {"dense": ["age"]}},
        "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump({**document, **sections}))
    return load_run_file(folder / "run.yaml")


def plan_of(
    name: str,
    fp8: Collection[str] = (),
    sites: Collection[str] = ("fc",),
    base: Precision = Precision.BF16,
    int8: Collection[str] = (),
    **changes: Any,
) -> PrecisionPlan:
    """A plan with some of its sites in FP8, those of `int8` in INT8 instead."""
    decisions = tuple(
        Decision(site, recipe.precision, recipe, Verdict.SAFE, "", 1.0, (1.0,))
        if site in fp8 and (recipe := Recipe.of(INT8) if site in int8 else PER_TENSOR)
        else Decision(site, base, None, Verdict.NOT_JUDGED, "")
        for site in sites
    )
    return replace(PrecisionPlan(name, "digest", base, decisions, {}, len(fp8) / len(sites)), **changes)


def engine_of(plan: str, target: str = "gpu", architecture: str = "sm90", **changes: Any) -> EngineArtifact:
    """An engine that runs here."""
    ready = (BuildStatus.READY, False, None, 0, plan, "", (), 1.0)
    return replace(EngineArtifact("maker", plan, target, architecture, *ready), **changes)
