"""How often `compare` finds a model faster or slower than its own copy, over one load and over several.

Two copies of one small ranker are timed in turns, again and again, each time loaded anew: whatever differs is
noise. Over one load the interval covers how the requests of that load vary, and not that another load has its
memory elsewhere; over six loads it does. For each number of loads: the share of comparisons whose 95 %
interval lies wholly above or below 1, the share where it lies beyond 1 % (what the text calls faster or
slower), and the largest ratio that was found::

    python -m benchmarks.pipeline.compare_with_itself
"""

from __future__ import annotations

import argparse
import json
import shutil
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.recording import write_record
from loka_onnx.core.intervals import Interval
from loka_onnx.operations.compare.deployments import CompareOptions, compare
from loka_onnx.operations.compare.sides import Opening
from loka_onnx.planning.choice import NOISE

WIDTHS = (32, 64, 64, 1)
BATCHES = (8, 32, 512)
LOADS = (1, 6)


def write_ranker(path: Path) -> Path:
    """From dense (batch, 32) to ctr (batch, 1) in three layers."""
    random = np.random.default_rng(0)
    nodes, weights, last = [], [], "dense"
    for index, (k, n) in enumerate(pairwise(WIDTHS)):
        weight = (random.standard_normal((k, n)) / np.sqrt(k)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        made = "ctr" if index == len(WIDTHS) - 2 else f"m{index}"
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], [made], f"fc{index}"))
        last = made
        if made != "ctr":
            nodes.append(helper.make_node("Relu", [made], [f"r{index}"], f"relu{index}"))
            last = f"r{index}"
    graph = helper.make_graph(
        nodes,
        "ranker",
        [helper.make_tensor_value_info("dense", TensorProto.FLOAT, ["batch", WIDTHS[0]])],
        [helper.make_tensor_value_info("ctr", TensorProto.FLOAT, ["batch", 1])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def ratios(directory: Path, loads: int, options: argparse.Namespace) -> list[tuple[float, Interval]]:
    """Median of A, microseconds, and B over A, of every comparison and batch size."""
    one = write_ranker(directory / "one.onnx")
    other = Path(shutil.copy(one, directory / "other.onnx"))
    rows = directory / "rows.npz"
    dense = np.random.default_rng(1).standard_normal((2048, WIDTHS[0])).astype(np.float32)
    np.savez(rows, dense=dense)
    asked = CompareOptions(opening=Opening(threads=1), batches=BATCHES, seconds=options.seconds, loads=loads)
    found = list[tuple[float, Interval]]()
    for index in range(options.comparisons):
        sides = (one, other) if index % 2 else (other, one)
        for row in compare(*sides, rows, asked).rows("latency"):
            if row.before is not None and row.verdict is not None and len(row.verdict.numbers) == 3:
                found.append((row.before.numbers[0], Interval(*row.verdict.numbers, 0.95, loads)))
    return found


def summary(found: list[tuple[float, Interval]]) -> dict[str, Any]:
    """Shares and extremes of intervals that should hold 1."""
    intervals = [interval for _, interval in found]
    apart = sum(interval.lower > 1.0 or interval.upper < 1.0 for interval in intervals)
    beyond = sum(interval.lower > 1.0 + NOISE or interval.upper < 1.0 - NOISE for interval in intervals)
    times = [us for us, _ in found]
    return {
        "comparisons": len(found),
        "without_1": apart,
        f"beyond_{NOISE:g}": beyond,
        "largest_change": max(abs(interval.value - 1.0) for interval in intervals),
        "median_us": {"least": min(times), "most": max(times)},
    }


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comparisons", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.4, help="for each side at each batch size")
    options = parser.parse_args()
    figures = {}
    for loads in LOADS:
        with TemporaryDirectory() as directory:
            figures[f"{loads} loads"] = summary(ratios(Path(directory), loads, options))
        print(loads, json.dumps(figures[f"{loads} loads"]), flush=True)
    settings = {"batches": BATCHES, "seconds": options.seconds, "threads": 1, "widths": WIDTHS}
    print(write_record("compare_with_itself", figures, settings))


if __name__ == "__main__":
    main()
