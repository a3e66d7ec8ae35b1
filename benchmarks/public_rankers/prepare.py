"""Trains and exports rankers, and writes the run file that a user would write.

    python -m benchmarks.public_rankers.prepare --cache DIRECTORY --libraries DIRECTORY [--rankers NAME …]

The cache holds ``<ranker>/model.onnx``, ``run.yaml``, and for `on_gpu` the module as ``program.pt``. Rows are
in ``rows.parquet`` (one column a feature, histories as lists) or, for models that take one float matrix, in
``<ranker>/rows.npz``. Nothing is committed: the terms of MovieLens forbid it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.public_rankers.catalog import RANKERS, Inputs, Library, Ranker
from benchmarks.public_rankers.libraries import install, use
from benchmarks.public_rankers.modeling import (
    BATCH,
    LABELS,
    SLOW,
    SLOW_STEPS,
    STEPS,
    Built,
    array_of,
    export,
    save_program,
    train,
)
from benchmarks.public_rankers.rows import Rows, read_rows, write_rows

BUDGET = 0.0002
FRACTIONS = {"calibration": 0.02, "selection": 0.15, "certification": 0.3}
"""Of users: about 12,000, 93,000 and 185,000 rows."""
DONE, PROGRAM = "prepared.json", "program.pt"


def build(ranker: Ranker, rows: Rows, libraries: Path) -> Built:
    """The untrained model of a ranker."""
    install(ranker.library, libraries)
    directory = use(ranker.library, libraries)
    if ranker.library is Library.RECHUB:
        from benchmarks.public_rankers.rechub import build_rechub

        return build_rechub(ranker.model, rows)
    if ranker.library is Library.DEEPCTR:
        from benchmarks.public_rankers.deepctr import build_deepctr

        return build_deepctr(ranker.model, rows, ranker.inputs, directory)
    if ranker.library is Library.FUXICTR:
        from benchmarks.public_rankers.fuxi import build_fuxi

        return build_fuxi(ranker.model, rows)
    from benchmarks.public_rankers.torchrec_models import build_torchrec

    return build_torchrec(ranker.model, rows)


def prepare(ranker: Ranker, cache: Path, libraries: Path, rows: Rows, steps: int | None = None) -> None:
    """Train, export and write the run file of one ranker.

    Args:
        ranker: Which.
        cache: Where it is written.
        libraries: Where the libraries lie, or are put.
        rows: Of training, and those that runs draw their splits from.
        steps: Of training; None for what the ranker takes.
    """
    home = cache / ranker.name
    home.mkdir(parents=True, exist_ok=True)
    built = build(ranker, rows, libraries)
    began = time.perf_counter()
    is_slow = ranker.name in SLOW
    batch = BATCH // 2 if is_slow else BATCH
    steps = steps or (SLOW_STEPS if is_slow else STEPS)
    loss = train(built, rows.train, steps, batch)
    trained = time.perf_counter() - began
    export(built, ranker.exporter, rows.train, home / "model.onnx")
    save_program(built, rows.train, names_of(home / "model.onnx")[1], home / PROGRAM)
    data = "../rows.parquet"
    if ranker.inputs is Inputs.MIXED:
        data = "rows.npz"
        kept = {name: rows.rest[name] for name in ("user_id", *LABELS.values())}
        matrix = {one.name: array_of(one, rows.rest, slice(None)) for one in built.inputs}
        np.savez(home / data, **kept, **matrix)
    elif not (cache / "rows.parquet").exists():
        write_rows(rows.rest, cache / "rows.parquet")
    document = run_file(ranker, built, data, names_of(home / "model.onnx"))
    (home / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    said = {"loss": loss, "train_seconds": trained, "steps": steps, "batch": batch}
    (home / DONE).write_text(json.dumps(said) + "\n", encoding="utf-8")
    print(f"{ranker.name}: loss {loss:.4f}, trained in {trained:.0f} s", flush=True)


def names_of(model: Path) -> tuple[list[str], list[str]]:
    """Inputs and outputs of a model file, in order; exporters leave out an input that nothing reads."""
    import onnx

    graph = onnx.load(model, load_external_data=False).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def run_file(ranker: Ranker, built: Built, data: str, names: tuple[list[str], list[str]]) -> dict[str, Any]:
    """What a user writes: the model, its outputs and labels, the rows, the budget."""
    inputs, outputs = names
    named = zip(outputs, built.kinds.items(), strict=True)
    matrix = ranker.inputs is Inputs.MIXED
    used = [one for one in built.inputs if one.name in inputs]
    feeds = {one.name: list(one.columns) for one in used if one.columns != (one.name,)}
    return {
        "name": ranker.name,
        "model": {"onnx": "model.onnx"},
        "outputs": [
            {"name": output, "kind": str(kind), "label": LABELS[task], "budget": BUDGET}
            for output, (task, kind) in named
        ],
        "data": {
            "path": data,
            "split": {"by": "hash", "column": "user_id", "fractions": dict(FRACTIONS)},
            "group": "user_id",
            **({} if matrix or not feeds else {"inputs": feeds}),
        },
        # The tables are of FP8, which a CPU simulates; by default it would plan the INT8 that it multiplies.
        "plan": {"formats": ["fp8"]},
        "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
    }


def main() -> None:
    """Prepare what is not there yet, each in a process of its own: two libraries may not share one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--libraries", type=Path, required=True)
    parser.add_argument("--rankers", nargs="+", default=[ranker.name for ranker in RANKERS])
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    for ranker in RANKERS:
        if ranker.name not in options.rankers or (options.cache / ranker.name / DONE).exists():
            continue
        if options.here:
            prepare(ranker, options.cache, options.libraries, read_rows())
            continue
        command = [sys.executable, "-m", "benchmarks.public_rankers.prepare", "--here"]
        command += ["--cache", str(options.cache), "--libraries", str(options.libraries)]
        ended = subprocess.run([*command, "--rankers", ranker.name], check=False)
        if ended.returncode:
            print(f"{ranker.name}: failed with {ended.returncode}", flush=True)


if __name__ == "__main__":
    main()
