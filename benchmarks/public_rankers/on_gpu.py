"""Public rankers on a GPU, through `tune` and `run`, beside the strongest that a user has without us.

`prepare` writes, for rankers that `benchmarks.public_rankers.prepare` exported, what travels: the model, the
module as a program of PyTorch's operators, and fewer rows. `run` needs none of the libraries: every ranker is
tuned and run, several at once; then each chosen engine is timed in turns with `engines.zoo_today`'s::

    python -m benchmarks.public_rankers.on_gpu prepare --cache DIR --libraries DIR --to DIR
    python -m benchmarks.public_rankers.on_gpu run --to DIR --work DIR --target nvidia-h200 --out DIR

`plans` records the times of all plans of finished runs, by which formats are compared (`gpu_formats.json`)::

    python -m benchmarks.public_rankers.on_gpu run --formats fp8 int8 --rankers fuxictr-dcnv2 …
    python -m benchmarks.public_rankers.on_gpu plans --to DIR --work DIR --rankers fuxictr-dcnv2 --out DIR
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml

from benchmarks.engines.timing import device_facts
from benchmarks.engines.torch_compiled import TYPES, TorchCompiled
from benchmarks.engines.zoo_figures import Finished
from benchmarks.engines.zoo_today import Comparison
from benchmarks.public_rankers.prepare import PROGRAM, names_of
from benchmarks.recording import write_record
from loka_onnx.config import OutputConfig, load_run_file
from loka_onnx.core import serde
from loka_onnx.core.engine import EngineSet
from loka_onnx.core.evaluation import EvaluationSet
from loka_onnx.core.formats import Precision
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.pipeline.rows import bind_columns, open_splits

Array = npt.NDArray[np.float64]
Arrays = Mapping[str, npt.NDArray[Any]]
CHOSEN = (
    "rechub-deepfm",
    "rechub-edcn",
    "rechub-autoint",
    "rechub-fibinet",
    "rechub-din",
    "rechub-bst",
    "rechub-mmoe",
    "deepctr-pnn",
    "deepctr-dcnmix",
    "deepctr-mmoe",
    "fuxictr-dcnv2",
    "fuxictr-finalmlp",
    "fuxictr-din",
)
"""Listed before the first measurement: multi-task, sequences, attention, crosses and experts, FM."""
ROWS = 200_000
JUDGED_ROWS = 32_768


def prepare(options: argparse.Namespace) -> None:
    """Copy what travels."""
    options.to.mkdir(parents=True, exist_ok=True)
    write_few_rows(options.cache / "rows.parquet", options.to / "rows.parquet", options.rows)
    for name in options.rankers:
        source, target = options.cache / name, options.to / name
        target.mkdir(exist_ok=True)
        for file in (*source.glob("model.onnx*"), source / PROGRAM):
            shutil.copyfile(file, target / file.name)
        document = yaml.safe_load((source / "run.yaml").read_text(encoding="utf-8"))
        columns = torch.load(source / PROGRAM, weights_only=False)["columns"]
        names, _ = names_of(target / "model.onnx")
        used = {key: value for key, value in columns.items() if value != [key] and key in names}
        document["data"] |= {"path": "../rows.parquet", **({"inputs": used} if used else {})}
        (target / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def write_few_rows(source: Path, target: Path, count: int) -> None:
    """Drawn rows of a file, well compressed."""
    import pyarrow.parquet as pq

    table = pq.read_table(source)
    drawn = np.sort(np.random.default_rng(0).permutation(table.num_rows)[:count])
    pq.write_table(table.take(drawn), target, compression="zstd", compression_level=15)


def run_ranker(name: str, options: argparse.Namespace) -> dict[str, float]:
    """`tune` and `run` of one ranker, in processes of their own; seconds of each."""
    work = options.work / name
    work.mkdir(parents=True, exist_ok=True)
    given = {
        "output": str(work / "run"),
        "targets": [{"device": options.target, "backends": ["inductor"]}],
        "batch": {"min": 2, "serve": list(options.serve), "max": max(options.serve)},
        "build": {"jobs": False, "cache": str(work / "cache"), "memory_gb": options.memory_gb},
        "refine": {"rounds": 1, "plans": 2, "seconds": 90.0},
        "serving": {"inputs": "device"},
        "threads": options.threads,
    }
    document = yaml.safe_load((options.to / name / "run.yaml").read_text(encoding="utf-8"))
    if options.formats:
        document["plan"] = {**document.get("plan", {}), "formats": options.formats}
    document["data"]["path"] = str((options.to / "rows.parquet").resolve())
    document["model"]["onnx"] = str((options.to / name / "model.onnx").resolve())
    run_file = work / "RUN.yaml"
    run_file.write_text(yaml.safe_dump(document | given, sort_keys=False), encoding="utf-8")
    seconds = {}
    for verb, more in (("tune", ["--rounds", "5"]), ("run", ["--resume"])):
        began = time.perf_counter()
        command = [sys.executable, "-P", "-c", "from loka_onnx.cli.main import main; main()", "--quiet"]
        command += [verb, str(run_file), *more]
        with (work / f"{verb}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        seconds[verb] = time.perf_counter() - began
        print(f"{time.perf_counter() - BEGAN:6.1f} s  {name} {verb}: exit {code}", flush=True)
        if code and verb == "run":
            raise RuntimeError((work / "run.log").read_text(encoding="utf-8")[-3000:])
    return seconds


def upper_over_budget(made: Arrays, exact: Arrays, columns: Arrays, outputs: Sequence[OutputConfig]) -> float:
    """The largest upper end (97.5 %, rows are independent) of an output's relative loss, over its budget."""
    found = []
    for output in outputs:
        value = made[output.name].astype(np.float64).reshape(-1)
        label = columns[str(output.label)][: len(value)].astype(np.float64)
        losses = [
            log_loss(each.astype(np.float64).reshape(-1)[: len(value)], label, str(output.kind))
            for each in (value, exact[output.name])
        ]
        change = losses[0] - losses[1]
        upper = change.mean() + 1.96 * change.std() / np.sqrt(len(change))
        found.append(upper / losses[1].mean() / output.budget)
    return float(max(found))


def log_loss(output: Array, label: Array, kind: str) -> Array:
    """Of logits or probabilities, by row."""
    if kind == "logit":
        return np.logaddexp(0.0, output) - label * output
    probability = np.clip(output, 1e-7, 1 - 1e-7)
    return -label * np.log(probability) - (1 - label) * np.log1p(-probability)


def compared(name: str, options: argparse.Namespace) -> Comparison:
    """What was chosen, beside today's."""
    work = options.work / name
    finished = Finished(work / "run")
    config = load_run_file(work / "RUN.yaml")
    bindings = bind_columns(
        config.data.inputs, finished.exported.inputs, id_bounds(GraphModel.load(finished.exported.path))
    )
    batch = next(open_splits(config, bindings).selection.batches(JUDGED_ROWS))
    judge = partial(upper_over_budget, columns=batch.columns, outputs=config.outputs)

    def module(precision: str) -> TorchCompiled:
        saved = torch.load(options.to / name / PROGRAM, weights_only=False)
        program = moved(saved["program"], TYPES[precision])
        return TorchCompiled(program, saved["inputs"], saved["outputs"], precision)

    precisions = tuple(map(Precision, options.precisions))
    today = work / "today"
    return Comparison(finished, batch.inputs, today, options, module, precisions, options.export, judge)


def moved(program: torch.fx.GraphModule, precision: torch.dtype) -> torch.fx.GraphModule:
    """A program whose constants are made on the GPU, where there is one, and whose casts to FP32 are to the
    precision of its weights: PyTorch multiplies no two types.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def move(value: Any) -> Any:
        if value is torch.float32:
            return precision
        return device if isinstance(value, torch.device) else value

    for node in program.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, move)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, move)
    program.recompile()
    return program


BEGAN = time.perf_counter()


def run(options: argparse.Namespace) -> None:
    """Every ranker, then every comparison; the record is written after each."""
    options.work = options.work.absolute()
    settings = {
        "target": options.target,
        "device": device_facts(),
        "serve": options.serve,
        "turns": options.turns,
    }
    figures: dict[str, Any] = {}
    with ThreadPoolExecutor(options.at_once) as pool:
        running = {name: pool.submit(run_ranker, name, options) for name in options.rankers}
        for name, future in running.items():
            try:
                figures[name] = {"seconds": future.result()}
            except Exception:
                figures[name] = {"failed": traceback.format_exc()[-3000:]}
    able = [name for name in options.rankers if "failed" not in figures[name]]
    with ThreadPoolExecutor(options.at_once) as pool:
        comparisons = {name: compared(name, options) for name in able}
        list(pool.map(lambda each: each.untouched, comparisons.values()))
    for name in able:
        try:
            figures[name] |= Finished(options.work / name / "run").figures()
            figures[name]["beside today"] = comparisons[name].figures()
            for size, found in figures[name]["beside today"]["batches"].items():
                print(name, size, json.dumps(found["inputs on the device"]), flush=True)
        except Exception:
            figures[name]["failed"] = traceback.format_exc()[-3000:]
            print(name, figures[name]["failed"], flush=True)
        write_record("gpu_rankers", figures, settings, options.out)


def plans(options: argparse.Namespace) -> None:
    """Time and accuracy of every plan of finished runs: a request, inputs on the device, timed by the run."""
    figures = {}
    for name in options.rankers:
        directory = options.work / name / "run"
        built = serde.read(EngineSet, directory / "engines.json").engines
        known = serde.read(EvaluationSet, directory / "evaluation.json").evaluations
        judged = {each.engine: each for each in known if each.split == "certification"}
        figures[name] = {
            engine.plan: {
                "within": judged[engine.id].is_within_budget,
                "p50_us": {str(timed.batch): timed.p50_us for timed in judged[engine.id].latencies},
                "loads_us": {str(timed.batch): timed.loads_us for timed in judged[engine.id].latencies},
            }
            for engine in built
            if engine.id in judged
        }
    write_record("gpu_formats", figures, {"target": options.target}, options.out)


def main() -> None:
    """Prepare, run, or record plans."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["prepare", "run", "plans"])
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--libraries", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--rankers", nargs="+", default=list(CHOSEN))
    parser.add_argument("--work", type=Path, default=Path("runs/public-gpu"))
    parser.add_argument("--target", default="nvidia-h200")
    parser.add_argument("--serve", nargs="+", type=int, default=[256, 2048])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp16"], help="of today's engines")
    parser.add_argument("--formats", nargs="+", help="of the plans: fp8, int8 or both; default the device's")
    parser.add_argument(
        "--export", action=argparse.BooleanOptionalAction, default=True, help="compile it too"
    )
    parser.add_argument("--memory-gb", type=float, default=16.0)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    {"prepare": prepare, "run": run, "plans": plans}[options.what](options)


if __name__ == "__main__":
    main()
