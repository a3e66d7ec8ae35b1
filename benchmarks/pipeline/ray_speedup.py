"""Calibration on a local Ray cluster of one and of two workers, beside one and two threads of one process.

Every run is a process of its own, that starts its cluster and calibrates a few rows before the clock starts:
what is timed is the work, not the start of Ray. The runs take turns. All profiles must be the same, to the
last bit of everything but the seconds; the benchmark fails otherwise::

    python -m benchmarks.pipeline.ray_speedup
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.pipeline.calibration_cost import BATCH, SPEC, TWO, Case, make_case
from benchmarks.processes import apart
from benchmarks.recording import write_record
from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.calibration.passes.executors import BatchExecutor, LocalExecutor
from loka_onnx.calibration.passes.ray_executor import RayExecutor
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_json
from loka_onnx.core.profile import Profile
from loka_zoo import MODEL_NAMES

WARM_ROWS = 8 * BATCH


@dataclass(frozen=True)
class Run:
    """One calibration.

    Attributes:
        seconds: Wall time.
        digest: Of the profile less its seconds.
    """

    seconds: float
    digest: str


def calibrated(case: Case, executor: BatchExecutor, rows: int | None) -> Profile:
    """The whole of calibration over the first rows; all of them for None."""
    options = ProbeOptions(
        recipes=TWO, batch_size=BATCH, rows=rows, error_precision=None, executor=executor, synthetic=True
    )
    with TemporaryDirectory() as scratch:
        return calibrate(case.artifact, (SPEC,), case.data, Path(scratch), options)


def timed_run(case: Case, kind: str, workers: int) -> Run:
    """Calibrate in this process; for a process of its own.

    Args:
        case: Model and rows.
        kind: ``ray`` or ``local``.
        workers: Worker processes, or threads.
    """
    executor = RayExecutor(workers=workers) if kind == "ray" else LocalExecutor(workers)
    try:
        calibrated(case, executor, WARM_ROWS)
        began = time.perf_counter()
        profile = calibrated(case, executor, None)
        seconds = time.perf_counter() - began
    finally:
        if isinstance(executor, RayExecutor):
            executor.close()
    return Run(seconds, digest_json(json.loads(serde.dumps(replace(profile, seconds={})))))


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="wukong", choices=MODEL_NAMES)
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runs: dict[str, list[Run]] = {}
    with TemporaryDirectory() as directory:
        case = make_case(options.model, Path(directory), options.batches, threads=1)
        for _ in range(options.rounds):
            for kind in ("local", "ray"):
                for workers in (1, 2):
                    found = apart(timed_run, case, kind, workers)
                    runs.setdefault(f"{kind}, {workers}", []).append(found)
                    print(f"{kind}, {workers}: {found.seconds:.2f} s, {found.digest[:12]}", flush=True)
    digests = {run.digest for each in runs.values() for run in each}
    if len(digests) > 1:
        sys.exit(f"the profiles differ: {sorted(digests)}")
    figures = {
        "same_profile": True,
        "rows": options.batches * BATCH,
        "median_seconds": {name: statistics.median(r.seconds for r in each) for name, each in runs.items()},
        "speed_up": {
            "ray, 2 workers over 1": _ratio(runs["ray, 1"], runs["ray, 2"]),
            "local, 2 threads over 1": _ratio(runs["local, 1"], runs["local, 2"]),
            "ray, 2 workers over local, 2 threads": _ratio(runs["local, 2"], runs["ray, 2"]),
        },
    }
    print(json.dumps(figures, indent=1))
    settings = {"model": options.model, "batch": BATCH, "rounds": options.rounds}
    print(write_record("ray_speedup", figures, settings))


def _ratio(slower: list[Run], faster: list[Run]) -> dict[str, float]:
    """How many times faster, round by round."""
    each = sorted(a.seconds / b.seconds for a, b in zip(slower, faster, strict=True))
    return {"median": statistics.median(each), "min": each[0], "max": each[-1]}


if __name__ == "__main__":
    main()
