"""Share of the FLOPs in eight bits of certified plans: models of the zoo on MovieLens 1M, on the CPU.

FP8 and INT8 are planned, plans are judged by what ONNX Runtime's engines put out, FP8 simulated. Beside the
share stands the KL that a plan was predicted to have, the sum over its sites, and the one that certification
measured: do effects of sites add up in plans of two formats? Files are those of `benchmarks.engines.zoo
prepare`; a model whose directory holds a report is not run again::

    python -m benchmarks.engines.zoo_shares --data DIR --checkpoints DIR --directory DIR --commit COMMIT
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engines import zoo
from benchmarks.public_rankers.shares import products_of, two_rows
from benchmarks.public_rankers.sweep import figures_of
from benchmarks.recording import write_record

PLANS = ("fp32", "fp8-safe", "int8-safe", "mixed")
COMMAND = (sys.executable, "-P", "-c", "from loka_onnx.cli.main import main; main()", "run")


def run(model: str, options: argparse.Namespace) -> Path:
    """Run the pipeline on a model unless that was done; returns the run directory."""
    directory = options.directory.absolute() / model
    output = directory / "run"
    if not (output / "report.json").exists():
        given = ["run", "--formats", "fp8", "int8", "--target", "cpu", "--backends", "onnxruntime"]
        given += ["--data", str(options.data), "--checkpoints", str(options.checkpoints), "--serve", "2048"]
        directory.mkdir(parents=True, exist_ok=True)
        path = zoo.write_run_file(model, zoo.arguments().parse_args(given), directory)
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        values["targets"][0]["options"] = {"onnxruntime": {"time_products": 0}}
        values["plan"]["plans"] = list(PLANS)
        values["refine"] = {"rounds": 0}
        del values["serving"], values["build"]["memory_gb"]
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        subprocess.run((*COMMAND, str(path)), check=True)
    return output


def figures(output: Path) -> dict[str, Any]:
    """What the record holds of one run."""
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))["value"]
    found = figures_of(report)
    for plan in report["plans"]["plans"]:
        found["plans"][plan["id"]]["predicted_kl"] = plan["predicted_kl"]
    exported = output / "model" / "exported.onnx"
    found["all_flops"] = sum(product.flops for product in products_of(exported, two_rows(exported, {})))
    return found


def main() -> None:
    """Run what has no result yet, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="parquet files of the three splits")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="of the runs")
    parser.add_argument("--models", nargs="+", default=list(zoo.MODELS), choices=zoo.MODELS)
    parser.add_argument("--commit", default="", help="commit of the tree that was run, for the record")
    options = parser.parse_args()
    found = {model: figures(run(model, options)) for model in options.models}
    budget = zoo.arguments().get_default("budget")
    print(write_record("zoo_shares", found, {"budget": budget, "plans": PLANS, "commit": options.commit}))


if __name__ == "__main__":
    main()
