"""Rewrites one model and prints what that took; the process that `benchmarks.micro.rewrite_large` measures.

It stands alone, so that it runs with whichever copy of the package comes first on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

import loka_onnx
from benchmarks.processes import used
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.transforms.sequence import Rewritten, apply_mods


def main() -> None:
    """Rewrite and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="document of the model")
    parser.add_argument("--rows", type=Path, required=True, help="rows that mods are checked on")
    parser.add_argument("--target", type=Path, required=True)
    options = parser.parse_args()
    model = serde.read(ModelArtifact, options.model)
    with np.load(options.rows) as arrays:
        rows = dict(arrays)
    began, cpu_began = time.perf_counter(), time.process_time()
    usage = used(lambda: apply_mods(model, [rows], options.target))
    took, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    rewritten: Rewritten = usage.result
    found = {
        "package": os.fspath(Path(loka_onnx.__file__).parents[1]),
        "wall_s": took,
        "cpu_s": cpu,
        "check_s": sum(record.check_seconds for record in rewritten.log.records),
        "anonymous_peak_mib": usage.anonymous_peak_mib,
        "mapped_peak_mib": usage.mapped_peak_mib,
        "applied": {each.transform: len(each.applied) for each in rewritten.log.records if each.applied},
        "sites": len(rewritten.model.sites),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
