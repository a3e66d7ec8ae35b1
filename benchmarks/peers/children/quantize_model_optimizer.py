"""NVIDIA Model Optimizer's ONNX FP8 quantization, in an environment of its own."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from answering import answer
from modelopt.onnx.quantization import quantize


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Quantize once."""
    with np.load(job["data"]) as arrays:
        data = {name: arrays[name] for name in arrays.files}
    began = time.perf_counter()
    quantize(
        job["model"],
        quantize_mode="fp8",
        calibration_data=data,
        output_path=job["output"],
        **job["options"],
    )
    return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    answer(("nvidia-modelopt", "onnxruntime", "onnx", "torch", "numpy"), work)
