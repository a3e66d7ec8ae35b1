"""The whole product on a device: models of the zoo, trained on MovieLens 1M, from a run file to a choice.

For each model the verbs of the command line, in this order: `transform`; `tune`, which times its products on
this device; `run --resume`, which plans with these times, builds, refines plans with engines in the loop,
certifies on what engines put out, chooses by batch size and measures throughput. Then what it chose is timed
in turns with what a user gets without it (`zoo_today`).

The parquet files of the splits and the checkpoints are made once where the data is, and travel::

    python -m benchmarks.engines.zoo prepare --data DIR --checkpoints DIR
    python -m benchmarks.engines.zoo run --data DIR --checkpoints DIR --models dcnv2 wukong --out DIR
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engines.timing import device_facts
from benchmarks.engines.torch_compiled import TorchCompiled
from benchmarks.engines.zoo_figures import Finished
from benchmarks.engines.zoo_today import Comparison
from benchmarks.pipeline.training import GROUP, TRAINING, arguments_of, checkpoint_path, trained
from benchmarks.recording import write_record
from loka_onnx.config import DataConfig
from loka_onnx.core.formats import Precision
from loka_onnx.data.parquet import write_parquet
from loka_onnx.export.checkpoint import load_checkpoint
from loka_zoo.builders import build
from loka_zoo.demo import BUILDER
from loka_zoo.movielens1m import CATEGORICAL, RULE, movielens_1m
from loka_zoo.movielens100k import LABEL, NUMERIC
from loka_zoo.prepared import Part, PreparedData

MODELS = tuple(sorted(TRAINING))
BEGAN = time.perf_counter()


def tell(what: str) -> None:
    """Print with the time since the start."""
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {what}", flush=True)


# Inputs ---------------------------------------------------------------------------------------------------


def prepare(options: argparse.Namespace) -> None:
    """Write the three splits that a run reads, and train what is not trained yet."""
    import pyarrow.parquet as pq

    data = movielens_1m()
    for directory in (options.data, options.checkpoints):
        directory.mkdir(parents=True, exist_ok=True)
    for split in DataConfig.SPLITS:
        part = data.splits[split]
        table = pq.read_table(part.path)
        if part.rows is not None:
            start = part.rows.start or 0
            table = table.slice(start, (part.rows.stop or table.num_rows) - start)
        write_parquet(table.slice(0, options.rows), options.data / f"{split}.parquet")
    for model in options.models:
        print(trained(model, data, options.checkpoints))


def prepared(directory: Path) -> PreparedData:
    """The splits that `prepare` wrote."""
    splits = {split: Part(directory / f"{split}.parquet") for split in DataConfig.SPLITS}
    return PreparedData("movielens-1m", directory, splits, CATEGORICAL, NUMERIC, LABEL, RULE)


def write_run_file(model: str, options: argparse.Namespace, directory: Path) -> Path:
    """The run file of one model."""
    data = prepared(options.data.absolute())
    values = {
        "name": model,
        "model": {
            "torch": BUILDER,
            "checkpoint": str(checkpoint_path(model, options.checkpoints.absolute())),
            "arguments": arguments_of(model, data),
        },
        "outputs": [{"name": "logit", "kind": "logit", "label": data.label, "budget": options.budget}],
        "data": {
            **{split: str(part.path) for split, part in data.splits.items()},
            "group": GROUP,
            "inputs": {b.input: list(b.columns) for b in data.bindings},
        },
        "batch": {"min": 1, "serve": list(options.serve), "max": max(options.serve)},
        "calibration": {
            "batch_size": 2048,
            "range_rows": options.range_rows,
            "sensitivity_rows": options.sensitivity_rows,
            "draws": 2,
        },
        "targets": [{"device": options.target, "backends": list(options.backends)}],
        **({"plan": {"formats": options.formats}} if options.formats else {}),
        "build": {
            "timeout_seconds": 300.0,
            "memory_gb": options.memory_gb,
            "parallel": options.parallel,
            "jobs": False,
            "cache": str(directory / "cache"),
        },
        "refine": {"rounds": options.rounds, "plans": options.plans, "seconds": 120.0},
        "serving": {
            "inputs": options.inputs,
            "p99_ms": options.p99_ms,
            "streams": options.streams,
            "trial_seconds": 0.5,
        },
        "threads": options.threads,
        "output": str(directory / "run"),
    }
    path = directory / "RUN.yaml"
    # Through JSON: YAML would write tuples in a way that only Python reads.
    path.write_text(yaml.safe_dump(json.loads(json.dumps(values)), sort_keys=False), encoding="utf-8")
    return path


# One model ------------------------------------------------------------------------------------------------


def verb(arguments: Sequence[str]) -> float:
    """Run a verb of the command line in this process; returns its wall seconds."""
    from loka_onnx.cli.main import app

    began = time.perf_counter()
    tell("loka-onnx " + " ".join(arguments[:1]))
    app(["--quiet", *arguments], standalone_mode=False)
    return time.perf_counter() - began


def module_of(model: str, data: PreparedData, options: argparse.Namespace, precision: str) -> TorchCompiled:
    """A trained model, as `torch.compile` runs it."""
    module, _ = build(**arguments_of(model, data))
    module.load_state_dict(load_checkpoint(checkpoint_path(model, options.checkpoints.absolute())))
    names = [binding.input for binding in data.bindings]
    return TorchCompiled(module.eval(), names, ["logit"], precision)


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the record holds of one model."""
    directory = (options.directory / model).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    run_file = write_run_file(model, options, directory)
    began = time.perf_counter()
    verbs = {
        "transform": verb(["transform", str(run_file)]),
        "tune": verb(["tune", str(run_file), "--rounds", "7"]),
        "run": verb(["run", str(run_file), "--resume"]),
    }
    finished = Finished(directory / "run")
    found = finished.figures()
    found["seconds"] = {"verbs": verbs, "stages": finished.stage_seconds}
    tell(f"{model}: chosen {found['choice']['engine']}")
    data = prepared(options.data)
    rows = next(data.open("selection").batches(2 * max(options.serve))).inputs
    module = partial(module_of, model, data, options)
    precisions = tuple(map(Precision, options.precisions))
    compared = Comparison(finished, rows, directory / "today", options, module, precisions, options.export)
    found["beside today"] = compared.figures()
    found["seconds"]["all"] = time.perf_counter() - began
    tell(f"{model}: {json.dumps(found['beside today']['batches'])}")
    return found


# All of them ----------------------------------------------------------------------------------------------


def child(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model in a process of its own, so that several may run at once, and one may fail."""
    out, log = options.directory / f"{model}.json", options.directory / f"{model}.log"
    # Of an option that is given twice the last one counts.
    given = [*sys.argv[1:], "--models", model, "--figures", str(out)]
    with log.open("w", encoding="utf-8") as stream:
        command = [sys.executable, "-m", "benchmarks.engines.zoo", *given]
        code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    tell(f"{model}: exit {code}\n{text[-3000:]}")
    if code:
        return {"failed": text[-3000:]}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def arguments() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["prepare", "run"])
    parser.add_argument("--data", type=Path, required=True, help="parquet files of the three splits")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", type=int, help="prepare: most rows of a split")
    parser.add_argument("--directory", type=Path, default=Path("runs/bench-zoo"))
    parser.add_argument("--target", default="nvidia-h100")
    parser.add_argument("--backends", nargs="+", default=["inductor"])
    parser.add_argument("--serve", nargs="+", type=int, default=[256, 2048])
    parser.add_argument("--formats", nargs="+", help="of the plans: fp8, int8 or both; default the device's")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp16"], help="of today's engines")
    parser.add_argument(
        "--export", action=argparse.BooleanOptionalAction, default=True, help="compile it too"
    )
    parser.add_argument("--budget", type=float, default=0.0002)
    parser.add_argument("--range-rows", type=int)
    parser.add_argument("--sensitivity-rows", type=int, default=32768)
    parser.add_argument("--memory-gb", type=float, default=14.0)
    parser.add_argument("--parallel", type=int, help="most builds at once of one model")
    parser.add_argument("--rounds", type=int, default=2, help="of refining")
    parser.add_argument("--plans", type=int, default=2, help="of a round of refining")
    parser.add_argument(
        "--inputs", default="device", choices=["host", "device"], help="where they lie when engines are timed"
    )
    parser.add_argument("--p99-ms", type=float, default=2.0)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--at-once", type=int, default=1, help="models that run side by side")
    parser.add_argument("--figures", type=Path, help="write the figures of one model here, and no record")
    parser.add_argument("--out", type=Path, help="directory of the record")
    return parser


def main() -> None:
    """Prepare, or run and record."""
    options = arguments().parse_args()
    if options.what == "prepare":
        prepare(options)
        return
    options.directory = options.directory.absolute()
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.figures is not None:
        (model,) = options.models
        found = measure(model, options)
        options.figures.write_text(json.dumps(found), encoding="utf-8")
        return
    paths = ("what", "data", "checkpoints", "directory", "figures", "out", "rows")
    settings = {name: value for name, value in vars(options).items() if name not in paths}
    settings["device"] = device_facts()
    figures: dict[str, Any] = {}
    with ThreadPoolExecutor(options.at_once) as pool:
        running = {pool.submit(child, model, options): model for model in options.models}
        for done in as_completed(running):
            figures[running[done]] = done.result()
            # After each: what follows may run into a limit of time.
            print(write_record("zoo-engines", figures, settings, options.out))
    if any("failed" in found for found in figures.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
