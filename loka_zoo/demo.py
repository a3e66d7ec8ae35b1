"""The demo: a ranker trained on MovieLens 100K, and the whole pipeline over it.

It prepares an ordinary run: Parquet files, a checkpoint, and a run file that names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from loka_onnx.config import DataConfig, load_run_file
from loka_onnx.core import serde
from loka_onnx.core.progress import Progress
from loka_onnx.export.torch_module import import_torch
from loka_onnx.pipeline.directory import RUN_FILE, RunDirectory
from loka_onnx.pipeline.run import RunOptions, RunResult, expected_stages, run
from loka_onnx.pipeline.versions import library_versions
from loka_zoo.builders import build
from loka_zoo.movielens100k import prepare_movielens_100k
from loka_zoo.prepared import PreparedData

BUILDER = "loka_zoo.builders:build"
SEED = 0
RUN_FILE_HEAD = "# What `loka-onnx demo` runs. Relative paths start at this file.\n"


def run_demo(output: Path, options: RunOptions | None = None) -> RunResult:
    """Prepare data, train, and run every stage; finished work is taken over unless `options.force` is set."""
    options = options or RunOptions()
    with RunDirectory.create(
        output, {"preset": "demo"}, library_versions(), force=options.force, resume=not options.force
    ) as directory:
        directory.on_stage = options.on_stage
        options.on_stages(("prepare data", "train", *expected_stages(None)))
        with directory.undone_on_error():
            import_torch()
            with directory.watched("prepare data"):
                prepared = prepare_movielens_100k(directory.path / "data")
        checkpoint = _train(directory, prepared, options.progress)
        run_file = _write_run_file(directory, prepared, checkpoint)
    # The run takes the lock again; a demo that slips in between does the same work.
    config = load_run_file(run_file)
    return run(config, replace(options, force=False, resume=True, label_rule=prepared.rule))


def _write_run_file(directory: RunDirectory, prepared: PreparedData, checkpoint: Path) -> Path:
    settings = resources.files("loka_zoo").joinpath("demo.yaml").read_text(encoding="utf-8")
    values = {
        **yaml.safe_load(settings),
        "model": {
            "torch": BUILDER,
            "checkpoint": checkpoint.relative_to(directory.path).as_posix(),
            "arguments": _arguments(prepared),
        },
        "data": {
            **{split: f"data/{prepared.splits[split].path.name}" for split in DataConfig.SPLITS},
            "inputs": {b.input: list(b.columns) for b in prepared.bindings},
        },
        "output": ".",
    }
    run_file = directory.path / RUN_FILE
    serde.write_text(RUN_FILE_HEAD + yaml.safe_dump(values, sort_keys=False, width=100), run_file)
    return run_file


def _train(directory: RunDirectory, data: PreparedData, progress: Progress) -> Path:
    """Train the model, once → `train/ranker.safetensors`."""
    checkpoint = directory.path / "train" / "ranker.safetensors"
    rows = data.open("train")
    arguments = _arguments(data)

    def produce() -> Sequence[Path]:
        from loka_onnx.export.checkpoint import save_checkpoint
        from loka_zoo.training import TrainOptions, train

        module, _ = build(**arguments)
        train(
            module,
            rows,
            TrainOptions(seed=SEED),
            lambda step, steps, loss: progress(f"train (loss {loss:.3f})", step, steps),
        )
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(checkpoint, module.state_dict())
        return [checkpoint]

    key = {"data": rows.digest, **{name: arguments[name] for name in ("architecture", "size")}, "seed": SEED}
    return directory.stage("train", key, produce, lambda: checkpoint)


def _arguments(prepared: PreparedData) -> dict[str, Any]:
    """Arguments of the builder, as a run file holds them."""
    return {
        "architecture": "wukong",
        "size": "reference",
        "categorical": dict(prepared.categorical),
        "numeric": list(prepared.numeric),
    }
