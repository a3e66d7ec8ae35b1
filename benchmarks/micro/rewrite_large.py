"""What rewriting a large model takes of time and memory: Wukong at production size, 1.1 GB of random weights.

The default mods run as in every run of the product, each checked on a few rows, in a process of its own that
does nothing else. Its files are in the page cache. Recorded are seconds, and the largest growth of that
process's memory: anonymous, and the resident part of mapped files, which the system may take back::

    python -m benchmarks.micro.rewrite_large

Where another copy of the package is given, both rewrite the same files in turns. Of any revision there is one
by ``git archive``::

    mkdir OTHER && git archive REVISION loka_onnx | tar -x -C OTHER
    python -m benchmarks.micro.rewrite_large --other OTHER --named REVISION

The record in `benchmarks/records` holds such a comparison; one without another copy would replace it, so that
``make bench`` leaves it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import loka_onnx
from benchmarks.engines.cases import CASES, export_case
from benchmarks.processes import apart
from benchmarks.recording import write_record
from loka_onnx.core import serde

HERE = Path(__file__).parents[2]
PACKAGE = Path(loka_onnx.__file__).parents[1]
MEASURED = ("wall_s", "cpu_s", "check_s", "anonymous_peak_mib", "mapped_peak_mib")
SAME = ("applied", "sites")
"""What two copies must agree on to have done the same work."""


def prepare(case: str, rows: int, directory: Path) -> dict[str, int]:
    """Export a case, with the rows that mods are checked on; what there is to rewrite.

    Args:
        case: Its name.
        rows: Number of rows.
        directory: Gets ``model.json``, ``rows.npz`` and the files of the model.
    """
    exported = export_case(CASES[case], directory)
    serde.write(exported.model, directory / "model.json")
    arrays: dict[str, Any] = dict(exported.rows(rows))
    np.savez(directory / "rows.npz", **arrays)
    files = directory.glob(f"{exported.model.path.name}*")
    return {"model_bytes": sum(file.stat().st_size for file in files), "sites": len(exported.model.sites)}


def rewrite(directory: Path, package: Path) -> dict[str, Any]:
    """Rewrite once, in a process of its own.

    Args:
        directory: As `prepare` left it.
        package: What holds the package ``loka_onnx`` that does it.

    Raises:
        RuntimeError: The process failed, or another copy of the package did it.
    """
    # Without -P the current directory would come first, and with it this copy.
    command = [sys.executable, "-P", "-m", "benchmarks.micro.rewrite_large_child"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.fspath, (package, HERE)))}
    with TemporaryDirectory(dir=directory) as scratch:
        arguments = {
            "--model": directory / "model.json",
            "--rows": directory / "rows.npz",
            "--target": Path(scratch) / "rewritten.onnx",
        }
        command += [os.fspath(part) for pair in arguments.items() for part in pair]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"rewriting with '{package}' failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not Path(found["package"]).samefile(package):
        raise RuntimeError(f"'{package}' was to rewrite, and '{found['package']}' did")
    return found


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median, least and most of each figure, and what was done."""
    values = {name: [run[name] for run in runs] for name in MEASURED}
    spread = {
        name: {"median": median(taken), "min": min(taken), "max": max(taken)}
        for name, taken in values.items()
    }
    return spread | {name: runs[0][name] for name in SAME}


def measure(directory: Path, packages: Mapping[str, Path], rounds: int) -> dict[str, Any]:
    """Every copy of the package in turns, on the same files.

    Raises:
        RuntimeError: They did not do the same work.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in packages}
    for _ in range(rounds):
        for name, package in packages.items():
            runs[name].append(rewrite(directory, package))
            print(name, json.dumps(runs[name][-1]), flush=True)
    works = [{name: run[name] for name in SAME} for done in runs.values() for run in done]
    if any(work != works[0] for work in works):
        raise RuntimeError(f"not the same work: {json.dumps(works)}")
    return {name: summary(done) for name, done in runs.items()}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), default="wukong-large")
    parser.add_argument("--rows", type=int, default=64, help="rows that each mod is checked on")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=Path, help="directory with another copy of loka_onnx")
    parser.add_argument("--named", default="other", help="what the other copy is, for the record")
    parser.add_argument("--directory", type=Path, help="where the models go; the system's place by default")
    parser.add_argument("--out", type=Path, help="directory of the record")
    options = parser.parse_args()
    packages = {"this": PACKAGE} | ({} if options.other is None else {"other": options.other})
    with TemporaryDirectory(dir=options.directory) as scratch:
        # In a process of its own: what exporting holds is not there for the others.
        figures: dict[str, Any] = apart(prepare, options.case, options.rows, Path(scratch))
        print(json.dumps(figures), flush=True)
        figures |= measure(Path(scratch), packages, options.rounds)
    if options.other is not None:
        figures["this over other"] = {
            name: figures["this"][name]["median"] / figures["other"][name]["median"]
            for name in ("wall_s", "cpu_s", "anonymous_peak_mib")
        }
    settings = {
        "case": options.case,
        "check_rows": options.rows,
        "rounds": options.rounds,
        "other": options.named if options.other is not None else None,
        "weights": "random",
    }
    print(write_record("rewrite_large", figures, settings, options.out))


if __name__ == "__main__":
    main()
