"""Runs in the environment of NVIDIA Model Optimizer, which this project's is not.

Reads one JSON object a line from standard input and answers each with one: the arguments of one quantization,
and the seconds that it took. Imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx

PACKAGES = ("nvidia-modelopt", "onnxruntime", "onnx", "numpy")


def quantize_once(job: dict[str, Any]) -> dict[str, Any]:
    """Quantize to FP8; returns seconds of the call, and what came of it."""
    from modelopt.onnx.quantization import quantize

    with np.load(job["data"]) as arrays:
        data = {name: arrays[name] for name in arrays.files}
    began = time.perf_counter()
    quantize(
        job["model"],
        quantize_mode="fp8",
        calibration_data=data,
        calibration_method=job["method"],
        calibration_shapes=job["shapes"],
        calibration_eps=["cpu"],
        # What is not FP8 stays as it is: converting it is no part of calibration.
        high_precision_dtype="fp32",
        output_path=job["output"],
        log_level="WARNING",
    )
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "sites": _quantized_products(Path(job["output"]))}


def _quantized_products(path: Path) -> int:
    """Products of which every matrix operand comes from a DequantizeLinear."""
    graph = onnx.load(os.fspath(path)).graph
    source = {name: node.op_type for node in graph.node for name in node.output}
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    return sum(all(source.get(name) == "DequantizeLinear" for name in node.input[:2]) for node in products)


def main() -> None:
    """Answer until the input ends."""
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    print(json.dumps({name: version(name) for name in PACKAGES}), file=answers)
    for line in sys.stdin:
        print(json.dumps(quantize_once(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
