"""Every public ranker through `loka-onnx run` on the CPU, FP8 simulated, one JSON for each run.

    python -m benchmarks.public_rankers.sweep --cache DIRECTORY --results DIRECTORY [--splits 0 1 2 3 4]

`--cache` is what `prepare` made. A run that has its JSON is not repeated. `--tree` runs another checkout of
this project, for a comparison; `--at-once` runs several, each on a processor of its own; `--set` changes run
files, as in ``plan.formats=[fp8,int8]``. `benchmarks.public_rankers.table` prints the results.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from typing import Any

from benchmarks.public_rankers.catalog import RANKERS, Ranker
from benchmarks.public_rankers.prepare import DONE
from benchmarks.public_rankers.shares import products_of, two_rows

TIMEOUT_SECONDS = 1800
WIDTHS = {"history": 20, "history_genre": 20, "other": 20}


def run_one(
    ranker: Ranker, cache: Path, seed: int, scratch: Path, tree: Path, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Run the pipeline on one ranker, in a process of its own.

    Args:
        ranker: Which.
        cache: Where it was prepared.
        seed: Of the split of users into calibration, selection and certification.
        tree: Checkout that is run.
        scratch: Of run directories; this one's is removed behind the run.
        overrides: Of the run file, as ``key=value``.

    Returns:
        What is recorded.
    """
    output = scratch / f"{ranker.name}-{seed}"
    command = [sys.executable, "-P", "-c", "from loka_onnx.cli.main import main; main()"]
    command += ["--log", "json", "run", str(cache / ranker.name / "run.yaml"), "--force"]
    command += ["--output", str(output), "--set", f"data.split.seed={seed}"]
    command += [word for override in overrides for word in ("--set", override)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    path = os.pathsep.join((str(tree), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"LOKA_ONNX_CACHE": str(output) + "-cache", "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS, env=environment
        )
        code, said = done.returncode, done.stderr
    except subprocess.TimeoutExpired as error:
        code, said = None, (error.stderr or b"").decode(errors="replace")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: dict[str, Any] = {
        "ranker": ranker.name,
        "seed": seed,
        "exit_code": code,
        "wall_seconds": time.perf_counter() - began,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        **events_of(said),
    }
    report = output / "report.json"
    if code == 0 and report.exists():
        found |= figures_of(json.loads(report.read_text(encoding="utf-8"))["value"])
    for left in (output, Path(str(output) + "-cache")):
        shutil.rmtree(left, ignore_errors=True)
    return found


def events_of(said: str) -> dict[str, Any]:
    """Seconds of each stage and the error, of the JSON lines that a run wrote."""
    stages: dict[str, float] = {}
    error = None
    others = []
    for line in said.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            others.append(line)
            continue
        if event.get("event") == "error":
            error = {key: event.get(key) for key in ("kind", "message", "traceback")}
        elif "stage" in event and "seconds" in event:
            stages[event["stage"]] = event["seconds"]
    if error is None and others:
        error = {"kind": "stderr", "message": "\n".join(others[-12:]), "traceback": None}
    return {"stages": stages, "error": error}


def figures_of(report: dict[str, Any]) -> dict[str, Any]:
    """What the tables are made of: shares, changes of the loss and what was emitted."""
    exported = report["exported"]["sites"]
    able = sum(_flops(site) for site in exported if _is_able(site))
    plans = {
        plan["id"]: {
            "share": plan["fp8_share"],
            **{
                f"{precision}_sites": sum(1 for d in plan["decisions"] if d["precision"] == precision)
                for precision in ("fp8", "int8")
            },
        }
        for plan in report["plans"]["plans"]
    }
    for entry in report["evaluations"]["evaluations"]:
        plan = plans.get(entry["plan"])
        if plan is None or not entry["outputs"] or entry["engine"] == "reference":
            continue
        plan[entry["split"]] = {
            "rows": entry["rows"],
            "outputs": {
                one["output"]: {
                    "status": one["budget_status"],
                    **{
                        name: [one["difference"][name][end] for end in ("value", "lower", "upper")]
                        for name in ("delta_ne", "kl", "delta_auc")
                        if one["difference"] and one["difference"][name]
                    },
                }
                for one in entry["outputs"]
            },
        }
    return {
        "sites": len(exported),
        "able_flops": able,
        "plans": plans,
        "emitted": [(one["plan"], one["reason"]) for one in report["choice"]["targets"]],
    }


def _flops(site: dict[str, Any]) -> int:
    return int(2 * site["rows"] * site["n"] * site["k"])


def _is_able(site: dict[str, Any]) -> bool:
    return site["kind"] == "linear" and min(site["k"], site["n"]) >= 16


def products(ranker: Ranker, cache: Path) -> dict[str, int]:
    """Operations of all products of the exported file, by operator."""
    path = cache / ranker.name / "model.onnx"
    found: dict[str, int] = {}
    for one in products_of(path, two_rows(path, WIDTHS)):
        found[one.op_type] = found.get(one.op_type, 0) + one.flops
    return found


def _take_processor(processors: Queue[int]) -> None:
    os.sched_setaffinity(0, {processors.get()})


def _sweep_one(ranker: Ranker, seed: int, options: argparse.Namespace) -> str:
    """Run a ranker on a split, write its JSON, and return a line about it."""
    scratch = options.results / "runs"
    overrides = [f"plan.plans=[{','.join(options.plans)}]"] if options.plans else []
    overrides += options.set
    # ONNX Runtime counts processors that it may not use.
    overrides += ["threads=1"] if options.at_once > 1 else []
    result = run_one(ranker, options.cache, seed, scratch, options.tree, overrides)
    result["products"] = products(ranker, options.cache)
    result["plans_given"], result["set"] = options.plans, options.set
    target = options.results / f"{ranker.name}-{seed}.json"
    part = target.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.rename(target)
    message = (result["error"] or {}).get("message") or ""
    return (
        f"{ranker.name} split {seed}: exit {result['exit_code']} in {result['wall_seconds']:.0f} s "
        f"({result['cpu_seconds']:.0f} s CPU) {message[:300]}"
    )


def main() -> None:
    """Run what has no result yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--splits", nargs="+", type=int, default=[0], help="seeds of splits, each a run")
    parser.add_argument("--rankers", nargs="+", default=[ranker.name for ranker in RANKERS])
    parser.add_argument("--plans", nargs="+", default=[], help="plans that compete, in place of all of them")
    parser.add_argument("--set", nargs="+", default=[], help="of the run file, as key=value")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time; above 1, a processor each")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    by_name = {ranker.name: ranker for ranker in RANKERS}
    wanted = [
        (by_name[name], seed)
        for name in options.rankers
        for seed in options.splits
        if (options.cache / name / DONE).exists() and not (options.results / f"{name}-{seed}.json").exists()
    ]
    if options.at_once == 1:
        for ranker, seed in wanted:
            print(_sweep_one(ranker, seed, options), flush=True)
        return
    context = get_context("spawn")
    with context.Manager() as manager:
        processors: Queue[int] = manager.Queue()
        for processor in sorted(os.sched_getaffinity(0)):
            processors.put(processor)
        with ProcessPoolExecutor(options.at_once, context, _take_processor, (processors,)) as pool:
            for future in [pool.submit(_sweep_one, ranker, seed, options) for ranker, seed in wanted]:
                print(future.result(), flush=True)


if __name__ == "__main__":
    main()
