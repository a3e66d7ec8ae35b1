"""Run every benchmark that this machine can run: ``make bench``.

Each is a process of its own, so that none inherits another's memory or threads.
"""

from __future__ import annotations

import os
import subprocess
import sys

from loka_onnx.data.prepared import DATA_ENVIRONMENT

BENCHMARKS = (
    "benchmarks.pipeline.calibration_cost",
    "benchmarks.micro.engine_size",
    "benchmarks.micro.rewrite_time",
    "benchmarks.micro.site_shapes",
    "benchmarks.pipeline.movielens1m",
)


def main() -> None:
    """Run them in turn; the first that fails ends the run with its exit code."""
    for module in BENCHMARKS:
        if module.endswith("movielens1m") and DATA_ENVIRONMENT not in os.environ:
            print(f"{module}: not run, {DATA_ENVIRONMENT} is not set", flush=True)
            continue
        print(f"== {module}", flush=True)
        done = subprocess.run([sys.executable, "-m", module], check=False)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
