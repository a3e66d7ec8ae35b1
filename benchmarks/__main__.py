"""Run every benchmark that this machine can run: ``make bench``.

Each is a process of its own, so that none inherits another's memory or threads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.peers.environments import MODEL_OPTIMIZER_ENVIRONMENT
from loka_zoo.prepared import DATA_ENVIRONMENT


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        module: What is run.
        variables: Environment variables that it needs.
        packages: Packages that it needs beside what `make venv` always installs.
    """

    module: str
    variables: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    @property
    def obstacle(self) -> str | None:
        """Why it cannot run here; None when it can."""
        missing = [f"{name} is not set" for name in self.variables if name not in os.environ]
        missing += [f"{name} is not installed" for name in self.packages if find_spec(name) is None]
        return ", ".join(missing) or None


BENCHMARKS = (
    Benchmark("benchmarks.pipeline.calibration_cost"),
    Benchmark("benchmarks.pipeline.embedding_tables"),
    Benchmark("benchmarks.pipeline.ray_speedup", packages=("ray",)),
    Benchmark("benchmarks.pipeline.refresh_time", packages=("torch", "tensorrt_rtx")),
    Benchmark("benchmarks.pipeline.refresh_time"),
    Benchmark("benchmarks.pipeline.serve_soak", packages=("torch", "tritonclient")),
    Benchmark("benchmarks.pipeline.compare_with_itself"),
    Benchmark("benchmarks.pipeline.interval_tails"),
    Benchmark("benchmarks.engines.choice_errors"),
    Benchmark("benchmarks.micro.runtime_overhead"),
    Benchmark("benchmarks.micro.engine_size"),
    Benchmark("benchmarks.micro.report_size", packages=("playwright",)),
    Benchmark("benchmarks.micro.rewrite_time"),
    Benchmark("benchmarks.micro.site_shapes"),
    Benchmark("benchmarks.micro.mutants"),
    Benchmark("benchmarks.pipeline.demo_table", packages=("torch",)),
    Benchmark("benchmarks.pipeline.movielens1m", (DATA_ENVIRONMENT,)),
    Benchmark("benchmarks.peers.compare", (DATA_ENVIRONMENT,)),
    Benchmark("benchmarks.pipeline.additivity", (DATA_ENVIRONMENT,)),
    Benchmark("benchmarks.pipeline.interval_coverage", (DATA_ENVIRONMENT,)),
    Benchmark("benchmarks.pipeline.drift_alarms", (DATA_ENVIRONMENT,)),
    Benchmark(
        "benchmarks.peers.model_optimizer_calibration", (DATA_ENVIRONMENT, MODEL_OPTIMIZER_ENVIRONMENT)
    ),
)


def main() -> None:
    """Run them in turn; the first that fails ends the run with its exit code."""
    argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__).parse_args()
    for benchmark in BENCHMARKS:
        if benchmark.obstacle is not None:
            print(f"{benchmark.module}: not run, {benchmark.obstacle}", flush=True)
            continue
        print(f"== {benchmark.module}", flush=True)
        done = subprocess.run([sys.executable, "-m", benchmark.module], check=False)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
