"""INT8 and FP8 sites of engines that TensorRT for RTX builds for sm75, sm86 and sm89: planned, and read back.

Needs no GPU: engines are built here and not run. Models are those whose run files `zoo_shares` wrote; they
run again with RTX targets, FP16 or BF16 as the base by what fits. A site counts as read back where both of
its operands have the planned type in the compiled graph::

    python -m benchmarks.engines.rtx_formats --runs DIR --models dlrm dcnv2 --directory DIR --commit COMMIT
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.engines.zoo import MODELS
from benchmarks.engines.zoo_shares import COMMAND
from benchmarks.recording import write_record

DEVICES = ("nvidia-rtx-turing", "nvidia-rtx-ampere", "nvidia-rtx-ada")
PLANS = ("fp32", "fp16", "fp8-all", "int8-all", "mixed")


def run(run_file: Path, output: Path) -> Path:
    """Run the pipeline for all devices unless that was done; returns the run directory."""
    targets = ", ".join(f"{{device: {device}, backends: [tensorrt_rtx]}}" for device in DEVICES)
    changes = (
        f"targets=[{targets}]",
        f"plan.plans=[{', '.join(PLANS)}]",
        "plan.base=auto",
        f"build.cache={output}-cache",
    )
    if not (output / "report.json").exists():
        given = [word for change in changes for word in ("--set", change)]
        subprocess.run((*COMMAND, str(run_file), "--output", str(output), *given), check=True)
    return output


def engines(output: Path) -> list[dict[str, Any]]:
    """Sites of each engine by format, planned and read back; why there is none, and what fell back."""
    document, plans = (
        json.loads((output / f"{name}.json").read_text(encoding="utf-8"))["value"]
        for name in ("engines", "plan")
    )
    shares = {plan["id"]: plan["fp8_share"] for plan in plans["plans"]}
    found = []
    for engine in document["engines"]:
        sites = [site for site in engine["sites"] if site["planned"] in {"fp8", "int8"}]
        is_built = engine["status"].startswith("built")
        found.append(
            {
                "architecture": engine["architecture"],
                "plan": engine["plan"],
                "share": shares[engine["plan"]],
                "declined": "" if is_built else engine["detail"],
                "planned": Counter(site["planned"] for site in sites),
                "read_back": Counter(site["planned"] for site in sites if site["engaged"]),
                "fallbacks": {site["site"]: site["evidence"] for site in sites if not site["engaged"]},
            }
        )
    return found


def main() -> None:
    """Run what has no result yet, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="directory of `zoo_shares`")
    parser.add_argument("--directory", type=Path, required=True, help="of these runs")
    parser.add_argument("--models", nargs="+", default=["dlrm", "dcnv2"], choices=MODELS)
    parser.add_argument("--commit", default="", help="commit of the tree that was run, for the record")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    found = {}
    for model in options.models:
        output = options.directory.absolute() / model
        found[model] = engines(run(options.runs / model / "RUN.yaml", output))
    settings = {"backend": "tensorrt_rtx", "plans": PLANS, "commit": options.commit}
    print(write_record("rtx_formats", found, settings))


if __name__ == "__main__":
    main()
