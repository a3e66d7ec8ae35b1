"""What calibration costs beside NVIDIA Model Optimizer's FP8 quantization of the same models and rows.

Model Optimizer takes ranges and writes Q/DQ; there is nothing in it to compare errors or sensitivities with.
Its shapes are given to it: without them it takes dynamic dimensions for 1 and leaves out most products, or
all of them; how many sites it then takes is recorded. Its `max` is compared, which is what its scales for FP8
are meant for; its default, `entropy`, is reported. Both tools run in turns, with all cores and batches of the
same size; its process is started once and its imports are not counted. It needs an environment of its own::

    python3.11 -m venv /tmp/modelopt
    /tmp/modelopt/bin/pip install 'torch==2.13.0' 'nvidia-modelopt[onnx]==0.47.0'
    /tmp/modelopt/bin/pip uninstall -y onnxruntime-gpu
    /tmp/modelopt/bin/pip install onnxruntime==1.24.4
    python -m benchmarks.peers.model_optimizer_calibration --python /tmp/modelopt/bin/python

Needs the files under ``$LOKA_ONNX_DATA`` too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.peers.environments import MODEL_OPTIMIZER_ENVIRONMENT
from benchmarks.pipeline.site_effects import exported, output_of, split_of
from benchmarks.pipeline.training import TRAINING
from benchmarks.recording import write_record
from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.calibration.passes.executors import LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.data import Dataset
from loka_zoo.movielens1m import movielens_1m
from loka_zoo.prepared import PreparedData

BATCH = 512
BASE = "model optimizer, max"
PRECISION = 0.02
FEW_ROWS = 16
CHILD = Path(__file__).with_name("model_optimizer_child.py")


class Peer:
    """Model Optimizer in its own process.

    Args:
        process: The child.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.versions = self._read()

    def quantize(self, job: dict[str, Any]) -> dict[str, Any]:
        """Quantize once; returns seconds and sites."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"Model Optimizer's process ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def peer_of(python: Path) -> Iterator[Peer]:
    """Start the child; it ends with the block."""
    process = subprocess.Popen(
        [os.fspath(python), os.fspath(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Peer(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


def probe(artifact: ModelArtifact, data: Dataset, rows: int, precision: float | None) -> None:
    """Ranges, and the errors of one recipe."""
    options = PassOptions(recipes=(PER_TENSOR,), batch_size=BATCH, rows=rows, error_precision=precision)
    with TemporaryDirectory() as scratch:
        passes = Probe(artifact, artifact.sites, data, options, LocalExecutor())
        ranges = passes.ranges(Path(scratch))
        passes.errors(Path(scratch), ranges, scales_of(ranges, options.recipes))


def whole(artifact: ModelArtifact, data: Dataset, rows: int) -> None:
    """Everything that calibration does by default, sensitivities over all rows included."""
    with TemporaryDirectory() as scratch:
        options = ProbeOptions(recipes=(PER_TENSOR,), batch_size=BATCH, rows=rows)
        calibrate(artifact, (output_of(movielens_1m(), 0.0005),), data, Path(scratch), options)


def timed(work: Callable[[], None]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(model: str, data: PreparedData, peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    """Both tools in turns over one model; a first round is not counted."""
    rows = options.batches * BATCH
    calibration = split_of(data, "calibration")
    seconds: dict[str, list[float]] = {}
    sites: dict[str, int] = {}
    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        artifact = exported(model, data, options.directory, scratch)
        jobs = peer_jobs(artifact, calibration, rows, scratch)
        unshaped = peer_jobs(artifact, calibration, FEW_ROWS, scratch / "few")[BASE] | {"shapes": None}
        sites["max, without its shapes"] = peer.quantize(unshaped)["sites"]
        ours = {
            "probe, one recipe": lambda: probe(artifact, calibration, rows, None),
            "probe, one recipe, with stopping": lambda: probe(artifact, calibration, rows, PRECISION),
            "calibrate, sensitivities included": lambda: whole(artifact, calibration, rows),
        }
        for number in range(options.rounds + 1):
            took = {name: timed(work) for name, work in ours.items()}
            for name, job in jobs.items():
                answer = peer.quantize(job)
                took[name], sites[name] = answer["seconds"], answer["sites"]
            if number:
                for name, value in took.items():
                    seconds.setdefault(name, []).append(value)
    return {
        "rows": rows,
        "linear_sites": len(artifact.linear_sites),
        "sites_of_model_optimizer": sites,
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "over_model_optimizer_max": {name: _ratio(seconds[name], seconds[BASE]) for name in ours},
        "entropy_over_max": _ratio(seconds["model optimizer, entropy"], seconds[BASE]),
    }


def peer_jobs(artifact: ModelArtifact, data: Dataset, rows: int, scratch: Path) -> dict[str, dict[str, Any]]:
    """What Model Optimizer is asked for, by name; the rows go to a file."""
    scratch.mkdir(exist_ok=True)
    batches = list(data.batches(BATCH, stop=rows))
    arrays = {name: np.concatenate([b.inputs[name] for b in batches]) for name in batches[0].inputs}
    np.savez(scratch / "rows.npz", **arrays)  # type: ignore[arg-type]  # allow_pickle is the other keyword
    shapes = ",".join(f"{name}:{BATCH}x{array.shape[1]}" for name, array in arrays.items())
    return {
        f"model optimizer, {method}": {
            "model": os.fspath(artifact.path),
            "data": os.fspath(scratch / "rows.npz"),
            "shapes": shapes,
            "method": method,
            "output": os.fspath(scratch / f"{method}.onnx"),
        }
        for method in ("max", "entropy")
    }


def _ratio(values: list[float], base: list[float]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(values, base, strict=True))
    return {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]}


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python",
        type=Path,
        default=os.environ.get(MODEL_OPTIMIZER_ENVIRONMENT),
        help=f"of Model Optimizer's environment; ${MODEL_OPTIMIZER_ENVIRONMENT} by default",
    )
    parser.add_argument("--models", nargs="+", default=["dcnv2", "wukong"], choices=sorted(TRAINING))
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/bench-movielens1m"), help="of checkpoints"
    )
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.directory = options.directory.absolute()
    if options.python is None or not options.python.is_file():
        sys.exit(
            f"Model Optimizer's Python, '{options.python}', is not there: see --help for its environment"
        )
    data, figures = movielens_1m(), {}
    with peer_of(options.python) as peer:
        for model in options.models:
            figures[model] = measure(model, data, peer, options)
            print(model, json.dumps(figures[model], indent=1), flush=True)
        versions = peer.versions
    settings = {
        "batch": BATCH,
        "rounds": options.rounds,
        "error_precision": PRECISION,
        "model_optimizer": versions,
        "call": 'quantize(quantize_mode="fp8", calibration_shapes=…, calibration_eps=["cpu"], '
        'high_precision_dtype="fp32")',
    }
    print(write_record("peer_calibration", figures, settings))


if __name__ == "__main__":
    main()
