"""Expected against actual seconds of runs: the outlook that a run tells first, and the record of its stages.

Runs are those of prepared public rankers (`benchmarks.public_rankers.prepare`), with few rows. Load of the
host is that of the record, in the trial and in the stages alike.

    python -m benchmarks.pipeline.outlook CACHE RANKER…
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.recording import write_record
from loka_onnx.config import load_run_file
from loka_onnx.pipeline.outlook import Outlook
from loka_onnx.pipeline.run import RunOptions, run

FRACTIONS = {"calibration": 0.002, "selection": 0.006, "certification": 0.01}
GROUPED = {"loud channels": "recalibrate", "choose": "report", "bundle": "report", "plan": "ladder"}
"""Stages that the outlook has no line for, and those that they count with."""
BEFORE = {"export", "check data"}
"""Stages before the outlook."""


def main() -> None:
    """Run, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", type=Path, help="directory of prepared rankers")
    parser.add_argument("rankers", nargs="+")
    given = parser.parse_args()
    command, figures = "python -m benchmarks.pipeline.outlook CACHE RANKER…", {}
    for name in given.rankers:
        figures[name] = measured(given.cache / name / "run.yaml")
        write_record("outlook", figures, {"command": command, "fractions": FRACTIONS})


def measured(run_file: Path) -> dict[str, Any]:
    """Expected and actual seconds, in all and by stage, and the load of the host before and after."""
    told: list[Outlook] = []
    with tempfile.TemporaryDirectory() as place:
        replaced = {
            "data.split.fractions": FRACTIONS,
            "output": f"{place}/run",
            "build.cache": f"{place}/cache",
        }
        began, load = time.perf_counter(), os.getloadavg()[0]
        result = run(load_run_file(run_file, replaced), RunOptions(on_outlook=told.append))
        wall = time.perf_counter() - began
        record = json.loads((result.directory / "run.json").read_text(encoding="utf-8"))["value"]
    stages: dict[str, float] = {}
    for stage in record["stages"]:
        if stage["stage"] not in BEFORE:
            name = GROUPED.get(stage["stage"], stage["stage"])
            stages[name] = stages.get(name, 0.0) + stage["seconds"]
    expected, actual = sum(told[0].seconds.values()), sum(stages.values())
    print(f"{run_file.parent.name}: expected {expected:.0f} s, took {actual:.0f} s", told[0].seconds, stages)
    return {
        "expected": expected,
        "actual": actual,
        "ratio": actual / expected,
        "wall": wall,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "expected_stages": told[0].seconds,
        "actual_stages": stages,
    }


if __name__ == "__main__":
    main()
