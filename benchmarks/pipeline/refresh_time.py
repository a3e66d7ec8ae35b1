"""Wall time of a refresh on a retrained checkpoint over that of the full run that it refreshes.

A model of the zoo is trained on generated rows, run through the whole pipeline, trained on, and refreshed.
Run and refresh are each a process of its own without an engine cache, and are timed from their call to their
bundle. The benchmark fails where the refresh falls back to a full run. On a machine without the device the
FP8 plan is certified on its simulation, which is all that such a machine can do::

    python -m benchmarks.pipeline.refresh_time
    python -m benchmarks.pipeline.refresh_time --device nvidia-h100 --backends inductor onnxruntime
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.processes import apart
from benchmarks.recording import write_record
from loka_onnx.config import build_run_config
from loka_onnx.core import serde
from loka_onnx.core.evaluation import Choice
from loka_onnx.core.lineage import RunRecord
from loka_onnx.data.prepared import PreparedData
from loka_onnx.data.synthetic import SyntheticOptions, prepare_synthetic
from loka_onnx.pipeline.demo import BUILDER
from loka_onnx.pipeline.refresh import RefreshOptions, refresh
from loka_onnx.pipeline.run import run
from loka_onnx.zoo import MODEL_NAMES
from loka_onnx.zoo.builders import build
from loka_onnx.zoo.checkpoint import save_checkpoint
from loka_onnx.zoo.training import TrainOptions, train

ROWS = (60_000, 60_000, 60_000, 120_000)
"""Of train, calibration, selection and certification."""
BUDGET = 0.01
"""Generous: what is timed is the way through an accepted FP8 plan."""
TRAINING = TrainOptions(epochs=1, batch_size=2048)


@dataclass(frozen=True)
class Timed:
    """One run.

    Attributes:
        seconds: Wall time.
        stages: Of each stage.
        plans: Plan that was chosen, by target.
        fallback: Why a refresh was a full run.
    """

    seconds: float
    stages: dict[str, float]
    plans: dict[str, str]
    fallback: str = ""


def checkpoints(model: str, size: str, data: PreparedData, directory: Path) -> tuple[Path, Path]:
    """The model after one day, and after the next; for a process of its own."""
    module, _ = build(model, size, dict(data.categorical), data.numeric)
    found = []
    for day in range(2):
        train(module, data.open("train"), replace(TRAINING, seed=day))
        found.append(directory / f"day{day}.safetensors")
        save_checkpoint(found[-1], module.state_dict())
    return found[0], found[1]


def full_run(values: dict[str, Any], directory: Path) -> Timed:
    """The whole pipeline; for a process of its own."""
    config = build_run_config(values, directory)
    began = time.perf_counter()
    run(config)
    return _timed(time.perf_counter() - began, config.output)


def refreshed(earlier: Path, checkpoint: Path, output: Path) -> Timed:
    """A refresh of it; for a process of its own."""
    began = time.perf_counter()
    result = refresh(earlier, checkpoint, RefreshOptions(output=output))
    return replace(_timed(time.perf_counter() - began, output), fallback=result.refresh.fallback)


def _timed(seconds: float, directory: Path) -> Timed:
    stages = serde.read(RunRecord, directory / "run.json").stages
    choice = serde.read(Choice, directory / "choice.json")
    return Timed(
        seconds,
        {stage.stage: round(stage.seconds, 3) for stage in stages},
        {target.target: target.plan for target in choice.targets},
    )


def _targets(device: str, backends: Sequence[str]) -> list[dict[str, Any]]:
    simulation = {"device": "cpu", "backends": ["onnxruntime"]}
    return [simulation, {"device": device, "backends": list(backends)}]


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dcnv2", choices=MODEL_NAMES)
    parser.add_argument("--size", default="reference")
    parser.add_argument("--rows", type=int, nargs=4, default=ROWS)
    parser.add_argument("--device", default="nvidia-rtx-ada")
    parser.add_argument("--backends", nargs="+", default=["tensorrt_rtx"])
    options = parser.parse_args()
    with TemporaryDirectory() as place:
        directory = Path(place)
        data = prepare_synthetic(directory / "data", SyntheticOptions(rows=tuple(options.rows)))
        days = apart(checkpoints, options.model, options.size, data, directory)
        values = {
            "name": options.model,
            "model": {
                "torch": BUILDER,
                "checkpoint": str(days[0]),
                "arguments": {
                    "architecture": options.model,
                    "size": options.size,
                    "categorical": dict(data.categorical),
                    "numeric": list(data.numeric),
                },
            },
            "outputs": [{"name": "logit", "kind": "logit", "label": data.label, "budget": BUDGET}],
            "data": {
                **{split: str(data.splits[split].path) for split in data.splits if split != "train"},
                "inputs": {b.input: list(b.columns) for b in data.bindings},
                "synthetic": True,
            },
            "targets": _targets(options.device, options.backends),
            "build": {"cache_gb": 0.0},
            "output": str(directory / "full"),
        }
        full = apart(full_run, values, directory)
        again = apart(refreshed, directory / "full", days[1], directory / "refreshed")
    if again.fallback:
        sys.exit(f"the refresh was a full run: {again.fallback}")
    figures = {
        "ratio": again.seconds / full.seconds,
        "full": {"seconds": full.seconds, "stages": full.stages, "plans": full.plans},
        "refresh": {"seconds": again.seconds, "stages": again.stages, "plans": again.plans},
    }
    print(json.dumps(figures, indent=1))
    settings = {
        "model": options.model,
        "size": options.size,
        "rows": list(options.rows),
        "budget": BUDGET,
        "targets": _targets(options.device, options.backends),
    }
    print(write_record("refresh_time", figures, settings))


if __name__ == "__main__":
    main()
