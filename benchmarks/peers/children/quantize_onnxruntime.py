"""ONNX Runtime's `quantize_static` to FP8, in an environment of its own."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from answering import answer
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from rows import Rows


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Quantize once."""
    reader = Rows(job["data"], job["batch"])
    options = {key: value for key, value in job["options"].items() if key != "preprocess"}
    model = job["model"]
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        if job["options"].get("preprocess"):
            prepared = os.fspath(Path(scratch) / "prepared.onnx")
            quant_pre_process(model, prepared)
            model = prepared
        quantize_static(
            model,
            job["output"],
            reader,
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QFLOAT8E4M3FN,
            weight_type=QuantType.QFLOAT8E4M3FN,
            calibrate_method=CalibrationMethod.Distribution,
            **options,
        )
        return {"seconds": time.perf_counter() - began, "calibration_seconds": reader.seconds}


if __name__ == "__main__":
    answer(("onnxruntime", "onnx", "numpy"), work)
