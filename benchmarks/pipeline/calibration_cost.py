"""What calibration costs: time over a plain ONNX Runtime pass, and memory as the data grows.

The plain pass runs the exported model over the same batches with full optimization and as many threads, one
batch after the other as a user would; the probe runs a batch on each thread. The ratio over a plain pass in
such streams is given as well. All are timed in turns in one process, so that the ratio holds when the machine
drifts; each memory figure is the peak of anonymous memory of a process of its own. The rows are generated
(`data.synthetic`): cost does not depend on their values::

    python -m benchmarks.pipeline.calibration_cost
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.recording import write_record
from loka_onnx.calibration.probe import Probe, ProbeOptions
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.data import Dataset
from loka_onnx.data.synthetic import SyntheticOptions, prepare_synthetic
from loka_onnx.export.torch_module import export_torch
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.streams import map_in_order
from loka_onnx.zoo import MODEL_NAMES, FeatureSpec, create

BATCH = 512
ROWS = 120 * BATCH


def exported(model: str, directory: Path, rows: int) -> tuple[ModelArtifact, Dataset]:
    """A model of the zoo with random weights, and generated rows."""
    options = SyntheticOptions(rows=(64, rows, 64, 64))
    data = prepare_synthetic(directory / "data", options)
    calibration = data.open("calibration")
    example = next(calibration.batches(64)).inputs
    spec = OutputSpec("logit", OutputKind.LOGIT, data.label)
    module = create(model, FeatureSpec.of(data), "reference")
    return export_torch(module, example, directory / "model.onnx", (spec,)), calibration


def plain_pass(artifact: ModelArtifact, data: Dataset, threads: int) -> None:
    """What the probe is compared with: a session on all threads, one batch after the other."""
    session = OnnxSession(artifact.path, SessionOptions(threads=threads))
    for batch in data.batches(BATCH):
        session.run(batch.inputs)


def plain_streams(artifact: ModelArtifact, data: Dataset, threads: int) -> None:
    """The same pass with as many batches at once as the probe runs."""
    session = OnnxSession(artifact.path, SessionOptions(threads=1))
    for _ in map_in_order(lambda batch: session.run(batch.inputs), data.batches(BATCH), threads):
        pass


def probe_pass(artifact: ModelArtifact, data: Dataset, threads: int, recipes: tuple[Recipe, ...]) -> None:
    """Ranges, and the errors that follow from them."""
    with TemporaryDirectory() as scratch:
        options = ProbeOptions(recipes=recipes, batch_size=BATCH, threads=threads)
        probe = Probe(artifact, artifact.sites, data, options)
        ranges = probe.ranges(Path(scratch))
        probe.errors(Path(scratch), ranges)


def time_in_turns(passes: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each pass, round by round; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(rounds + 1):
        for name, run in passes.items():
            began = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Median and spread of each pass over another, round by round."""
    found = {}
    for name in ("one recipe", "two recipes"):
        values = sorted(a / b for a, b in zip(seconds[name], seconds[base], strict=True))
        found[name] = {"median": statistics.median(values), "min": values[0], "max": values[-1]}
    return found


def anonymous_peak_mib(work: Callable[[], None]) -> float:
    """Largest growth of anonymous resident memory while work runs, MiB."""
    peak, is_done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.005):
            peak = max(peak, _anonymous_mib())

    watcher = threading.Thread(target=watch)
    start = _anonymous_mib()
    watcher.start()
    work()
    is_done.set()
    watcher.join()
    return peak - start


def _anonymous_mib() -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("this system does not report RssAnon")


def memory_child(model: str, batches: int, threads: int) -> None:
    """In a process of its own: print the peak of one probe over that many batches."""
    with TemporaryDirectory() as directory:
        artifact, data = exported(model, Path(directory), batches * BATCH)
        print(json.dumps(anonymous_peak_mib(lambda: probe_pass(artifact, data, threads, (PER_TENSOR,)))))


def memory(model: str, batches: int, threads: int) -> float:
    """Peak of a probe in a fresh process, MiB."""
    command = [sys.executable, "-m", "benchmarks.pipeline.calibration_cost", "--memory-child", model]
    command += ["--batches", str(batches), "--threads", str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure(model: str, rounds: int, threads: int) -> dict[str, Any]:
    """Ratios and memory of one model."""
    with TemporaryDirectory() as directory:
        artifact, data = exported(model, Path(directory), ROWS)
        seconds = time_in_turns(
            {
                "plain": lambda: plain_pass(artifact, data, threads),
                "plain, in streams": lambda: plain_streams(artifact, data, threads),
                "one recipe": lambda: probe_pass(artifact, data, threads, (PER_TENSOR,)),
                "two recipes": lambda: probe_pass(artifact, data, threads, (PER_TENSOR, PER_CHANNEL_WEIGHT)),
            },
            rounds,
        )
    return {
        "sites": len(artifact.sites),
        "rows": ROWS,
        "plain_seconds_median": statistics.median(seconds["plain"]),
        "ratio_over_plain": ratios(seconds, "plain"),
        "ratio_over_plain_in_streams": ratios(seconds, "plain, in streams"),
        "anonymous_peak_mib": {str(n): memory(model, n, threads) for n in (10, 1000)},
    }


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["dcnv2", "wukong"], choices=MODEL_NAMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-child", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, default=10, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_child:
        memory_child(options.memory_child, options.batches, options.threads)
        return
    figures = {model: measure(model, options.rounds, options.threads) for model in options.models}
    print(json.dumps(figures, indent=1))
    settings = {"batch": BATCH, "rounds": options.rounds, "threads": options.threads}
    print(write_record("calibration_cost", figures, settings))


if __name__ == "__main__":
    main()
