"""The first hour of a user: public rankers from `torch.onnx.export` to a served bundle, as a user would.

    python -m benchmarks.public_rankers.first_hour --place DIRECTORY --libraries DIRECTORY [--rankers NAME …]

A ranker is trained for a few steps and exported by its recipe in `docs/how-to/recipes.md`. Its rows are one
Parquet file: the columns that it reads in the library's order, the user, and a label for each output. Then
are typed: `loka-onnx init`, `run` and `bundle serve`, and a request for two rows, held against ONNX Runtime's
answer of the exported file. No line of the run file is changed by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.public_rankers.catalog import RANKERS, Library, Ranker
from benchmarks.public_rankers.modeling import EXPORT_ROWS, Built, feed, train
from benchmarks.public_rankers.prepare import build
from benchmarks.public_rankers.rows import Rows, read_rows, write_rows
from benchmarks.recording import write_record

NAMES = ("rechub-dcnv2", "rechub-deepfm", "deepctr-dcnmix", "deepctr-mmoe", "fuxictr-dcnv2", "torchrec-dlrm")
ROWS, STEPS, BATCH = 20_000, 20, 512
TYPES = {"tensor(int64)": ("INT64", np.int64), "tensor(float)": ("FP32", np.float32)}
LOKA = (sys.executable, "-P", "-c", "from loka_onnx.cli.main import main; main()")


class OneIdEach(nn.Module):
    """TorchRec's DLRM with one id a feature; made of the modules of the one that was trained."""

    def __init__(self, dlrm: Any) -> None:
        super().__init__()
        tables = dlrm.sparse_arch.embedding_bag_collection.embedding_bags.values()
        self.tables = nn.ModuleList(tables)
        self.dense, self.interactions, self.over = dlrm.dense_arch, dlrm.inter_arch, dlrm.over_arch

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits (rows, 1) of numbers (rows, numeric) and ids (rows, features)."""
        looked_up = [nn.functional.embedding(ids[:, i], t.weight) for i, t in enumerate(self.tables)]
        return self.over(self.interactions(self.dense(numbers), torch.stack(looked_up, dim=1)))  # type: ignore[no-any-return]


def export(ranker: Ranker, built: Built, rows: Rows, path: Path) -> None:
    """Export as a user does: a dict of features for Torch-RecHub, whose inputs the exporter names itself."""
    batch = {0: torch.export.Dim("batch", min=1, max=1 << 16)}
    example = feed(built.inputs, rows.train, np.arange(EXPORT_ROWS))
    names = [one.name for one in built.inputs]
    module: Any = built.module.eval()
    if ranker.library is Library.RECHUB:
        features = dict(zip(names, example, strict=True))
        torch.onnx.export(
            module.model, (features, {}), path, dynamic_shapes=(dict.fromkeys(names, batch),), dynamo=True
        )
        return
    if ranker.library is Library.TORCHREC:
        module = OneIdEach(module.model).eval()
    shapes: Any = tuple(batch for _ in example)
    if ranker.library is Library.FUXICTR:  # its wrapper takes `*features`
        shapes = (shapes,)
    torch.onnx.export(
        module,
        example,
        path,
        input_names=names,
        output_names=list(built.kinds),
        dynamic_shapes=shapes,
        dynamo=True,
    )


def rows_of(ranker: Ranker, built: Built, rows: Rows) -> dict[str, np.ndarray]:
    """Columns of the user's file."""
    read = [name for one in built.inputs for name in one.columns]
    wanted = dict.fromkeys(("user_id", *read, "clicked", *(["bought"] if len(built.kinds) > 1 else [])))
    return {name: rows.rest[name][:ROWS] for name in wanted}


def journey(ranker: Ranker, place: Path, libraries: Path) -> dict[str, Any]:
    """Commands and seconds of one ranker."""
    home = place / ranker.name
    home.mkdir(parents=True, exist_ok=True)
    rows = read_rows()
    built = build(ranker, rows, libraries)
    train(built, rows.train, STEPS, BATCH)
    print("trained", flush=True)
    began = time.perf_counter()
    export(ranker, built, rows, home / "model.onnx")
    seconds = {"export": time.perf_counter() - began}
    write_rows(rows_of(ranker, built, rows), home / "rows.parquet")
    commands = [
        "loka-onnx init model.onnx rows.parquet",
        "loka-onnx run RUN.yaml",
        f"loka-onnx bundle serve runs/{ranker.name}/bundle --port 0",
    ]
    said = {}
    environment = os.environ | {"LOKA_ONNX_CACHE": str(home / "cache"), "PYTHONPATH": str(Path.cwd())}
    for verb, command in zip(("init", "run"), commands, strict=False):
        began = time.perf_counter()
        done = subprocess.run(
            [*LOKA, *command.split()[1:], "--force"],
            cwd=home, env=environment, text=True, capture_output=True, check=False,
        )  # fmt: skip
        seconds[verb] = time.perf_counter() - began
        said[verb] = done.stdout.splitlines()
        (home / f"{verb}.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            return {"commands": commands, "failed": verb, "error": done.stderr[-2000:], "seconds": seconds}
    difference, seconds["serve"] = served(home, commands[-1].split()[1:], environment)
    return {
        "commands": commands,
        "seconds": seconds,
        "inputs": len(built.inputs),
        "result": next(line for line in said["run"] if line.strip()),
        "served_difference": difference,
    }


def served(home: Path, command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Largest difference of two rows' served answers, and the seconds from the command to it."""
    import onnxruntime
    import yaml

    session = onnxruntime.InferenceSession(home / "model.onnx")
    listed = yaml.safe_load((home / "RUN.yaml").read_text(encoding="utf-8"))["data"].get("inputs", {})
    import pyarrow.parquet as pq

    table = pq.read_table(home / "rows.parquet").slice(0, 2)
    feeds, body = {}, []
    for one in session.get_inputs():
        named = listed.get(one.name, one.name)
        parts = [np.array(table[name].to_pylist()) for name in ([named] if isinstance(named, str) else named)]
        datatype, kind = TYPES[one.type]
        value = parts[0] if len(parts) == 1 else np.stack(parts, axis=1)
        feeds[one.name] = value.astype(kind)
        described = {"name": one.name, "shape": list(value.shape), "datatype": datatype}
        body.append(described | {"data": feeds[one.name].ravel().tolist()})
    wanted = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    began = time.perf_counter()
    server = subprocess.Popen([*LOKA, *command], cwd=home, env=environment, text=True, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        request = urllib.request.Request(f"{address}/infer", json.dumps({"inputs": body}).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            outputs = json.load(answer)["outputs"]
        seconds = time.perf_counter() - began
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    each = [np.abs(np.array(o["data"]) - wanted[o["name"]].ravel()).max() for o in outputs]
    return float(max(each)), seconds


def main() -> None:
    """Each in a process of its own: two libraries may not share one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--libraries", type=Path, required=True)
    parser.add_argument("--rankers", nargs="+", default=list(NAMES))
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    if options.here:
        (ranker,) = [each for each in RANKERS if each.name in options.rankers]
        figures = journey(ranker, options.place.absolute(), options.libraries)
        (options.place / f"{ranker.name}.json").write_text(json.dumps(figures), encoding="utf-8")
        return
    for name in options.rankers:
        command = [sys.executable, "-m", "benchmarks.public_rankers.first_hour", "--here", "--rankers", name]
        command += ["--place", str(options.place), "--libraries", str(options.libraries)]
        subprocess.run(command, check=True)
    made = {name: options.place / f"{name}.json" for name in NAMES}
    figures = {
        name: json.loads(path.read_text(encoding="utf-8")) for name, path in made.items() if path.exists()
    }
    settings = {"rows": ROWS, "steps": STEPS, "batch": BATCH, "beside": f"load {os.getloadavg()[1]:.0f}"}
    write_record("first_hour", figures, settings)


if __name__ == "__main__":
    main()
