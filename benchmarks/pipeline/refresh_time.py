"""Wall time of a refresh on a retrained checkpoint over that of the full run that it refreshes.

A model of the zoo is trained, run through the whole pipeline, trained on, and refreshed. Rows are those of
MovieLens 1M where ``$LOKA_ONNX_DATA`` holds them and ``--rows`` is left out, else generated ones; all are
used. The run file names nothing but model, data, outputs and targets: plans, mods, rows and verdicts are the
defaults that every user gets. Run and refresh are each a process of its own without an engine cache.

`ratio` is taken from call to bundle, `process_ratio` with the start of the process and its imports (also of
torch), `cpu_ratio` from CPU time of the process and its children, which other work on the machine disturbs
less. The benchmark fails where the refresh falls back to a full run. On a machine without the device the FP8
plan is certified on its simulation, which is all that such a machine can do::

    python -m benchmarks.pipeline.refresh_time
    python -m benchmarks.pipeline.refresh_time --rows 60000 60000 60000 120000 --budget 0.01
    python -m benchmarks.pipeline.refresh_time --device nvidia-h100 --backends inductor onnxruntime
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.pipeline.movielens1m import file_of
from benchmarks.pipeline.training import GROUP, TRAINING
from benchmarks.processes import apart
from benchmarks.recording import write_record
from loka_onnx.config import build_run_config
from loka_onnx.core import serde
from loka_onnx.core.evaluation import Choice
from loka_onnx.core.lineage import RunRecord
from loka_onnx.errors import DataError
from loka_onnx.export.checkpoint import save_checkpoint
from loka_onnx.operations.refresh.refreshing import RefreshOptions, refresh
from loka_onnx.pipeline.run import run
from loka_zoo import MODEL_NAMES
from loka_zoo.builders import build
from loka_zoo.demo import BUILDER
from loka_zoo.movielens1m import movielens_1m
from loka_zoo.prepared import Part, PreparedData
from loka_zoo.synthetic import SyntheticOptions, prepare_synthetic
from loka_zoo.training import train

ROWS = (60_000, 60_000, 60_000, 120_000)
"""Of train, calibration, selection and certification, where they are generated."""
BUDGET = 0.0002
"""0.02 %, which the examples ask for."""


@dataclass(frozen=True)
class Timed:
    """One run.

    Attributes:
        seconds: Wall time.
        cpu_seconds: Time of processors, of the process and its children.
        stages: Wall time of each stage.
        engines: Engine that was chosen, by target.
        fallback: Why a refresh was a full run.
        process_seconds: Wall time of its process: the start and imports, that of torch among them, as well.
    """

    seconds: float
    cpu_seconds: float
    stages: dict[str, float]
    engines: dict[str, str]
    fallback: str = ""
    process_seconds: float = 0.0


def checkpoints(model: str, size: str, data: PreparedData, directory: Path) -> tuple[Path, Path]:
    """The model after some days, and after the next; for a process of its own."""
    module, _ = build(model, size, dict(data.categorical), data.numeric)
    found = []
    for day in range(2):
        train(module, data.open("train"), replace(TRAINING[model], epochs=1, seed=day))
        found.append(directory / f"day{day}.safetensors")
        save_checkpoint(found[-1], module.state_dict())
    return found[0], found[1]


def full_run(values: dict[str, Any], directory: Path) -> Timed:
    """The whole pipeline; for a process of its own."""
    config = build_run_config(values, directory)
    clock = _Clock()
    run(config)
    return clock.timed(config.output)


def refreshed(earlier: Path, checkpoint: Path, output: Path) -> Timed:
    """A refresh of it; for a process of its own."""
    clock = _Clock()
    result = refresh(earlier, checkpoint, RefreshOptions(output=output))
    return replace(clock.timed(output), fallback=result.refresh.fallback)


def _whole(work: Callable[..., Timed], *arguments: Any) -> Timed:
    """Work in a process of its own, which is timed too."""
    began = time.perf_counter()
    timed = apart(work, *arguments)
    return replace(timed, process_seconds=time.perf_counter() - began)


class _Clock:
    """Wall and CPU time since it was made."""

    def __init__(self) -> None:
        self._began, self._cpu = time.perf_counter(), _cpu_seconds()

    def timed(self, directory: Path) -> Timed:
        """The time until now, with what a run left."""
        seconds, cpu_seconds = time.perf_counter() - self._began, _cpu_seconds() - self._cpu
        stages = serde.read(RunRecord, directory / "run.json").stages
        choice = serde.read(Choice, directory / "choice.json")
        return Timed(
            seconds,
            cpu_seconds,
            {stage.stage: round(stage.seconds, 3) for stage in stages},
            {target.target: target.engine for target in choice.targets},
        )


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _data(directory: Path, rows: Sequence[int] | None) -> PreparedData:
    """MovieLens 1M, with a file for each split, or generated rows."""
    try:
        found = movielens_1m() if rows is None else None
    except DataError:
        found = None
    if found is None:
        train_rows, *others = rows or ROWS
        options = SyntheticOptions(rows=(train_rows, others[0], others[1], others[2]))
        return prepare_synthetic(directory / "data", options)
    files = {name: Part(file_of(found, name, directory, None)) for name in found.splits if name != "train"}
    return replace(found, splits={"train": found.splits["train"], **files})


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dcnv2", choices=MODEL_NAMES)
    parser.add_argument("--size", default="reference")
    parser.add_argument("--rows", type=int, nargs=4, help="generated, for each split")
    parser.add_argument("--budget", type=float, default=BUDGET)
    parser.add_argument("--device", default="nvidia-rtx-ada")
    parser.add_argument("--backends", nargs="+", default=["tensorrt_rtx"])
    parser.add_argument("--cpu-backends", nargs="+", default=["onnxruntime"])
    options = parser.parse_args()
    targets = [
        {"device": "cpu", "backends": options.cpu_backends},
        {"device": options.device, "backends": options.backends},
    ]
    with TemporaryDirectory() as place:
        directory = Path(place)
        data = _data(directory, options.rows)
        is_synthetic = data.name != "movielens-1m"
        rows = {name: data.open(name).rows for name in data.splits}
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
            "outputs": [{"name": "logit", "kind": "logit", "label": data.label, "budget": options.budget}],
            "data": {
                **{split: str(data.splits[split].path) for split in data.splits if split != "train"},
                "inputs": {b.input: list(b.columns) for b in data.bindings},
                "synthetic": is_synthetic,
                **({} if is_synthetic else {"group": GROUP}),
            },
            "targets": targets,
            "build": {"cache_gb": 0.0},
            "output": str(directory / "full"),
        }
        full = _whole(full_run, values, directory)
        again = _whole(refreshed, directory / "full", days[1], directory / "refreshed")
    if again.fallback:
        sys.exit(f"the refresh was a full run: {again.fallback}")
    figures = {
        "ratio": again.seconds / full.seconds,
        "process_ratio": again.process_seconds / full.process_seconds,
        "cpu_ratio": again.cpu_seconds / full.cpu_seconds,
        "full": vars(full),
        "refresh": vars(again),
    }
    print(json.dumps(figures, indent=1))
    settings = {
        "model": options.model,
        "size": options.size,
        "data": data.name,
        "rows": rows,
        "budget": options.budget,
        "targets": targets,
        "build": {"cache_gb": 0.0},
    }
    print(write_record("refresh_time", figures, settings))


if __name__ == "__main__":
    main()
