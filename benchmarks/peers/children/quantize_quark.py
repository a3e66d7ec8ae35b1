"""AMD Quark's ONNX quantization to FP8, in an environment of its own."""

from __future__ import annotations

import time
from typing import Any

from answering import answer
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config.config import Config, QuantizationConfig
from quark.onnx.quantization.config.custom_config import get_default_config
from rows import Rows


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Quantize once."""
    options = dict(job["options"])
    preset = options.pop("preset", None)
    if preset is not None:
        config = get_default_config(preset)
    else:
        config = QuantizationConfig(
            quant_format=QuantFormat.QDQ,
            calibrate_method=CalibrationMethod.MinMax,
            activation_type=QuantType.QFLOAT8E4M3FN,
            weight_type=QuantType.QFLOAT8E4M3FN,
            **options,
        )
    reader = Rows(job["data"], job["batch"])
    began = time.perf_counter()
    ModelQuantizer(Config(global_quant_config=config)).quantize_model(job["model"], job["output"], reader)
    return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    answer(("amd-quark", "onnxruntime", "onnx", "torch", "numpy"), work)
