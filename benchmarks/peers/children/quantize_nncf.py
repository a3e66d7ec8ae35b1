"""NNCF's INT8 for ONNX, with or without accuracy control.

Arguments: where NNCF is installed, model, target, calibration rows, selection rows with their label, judged
output, its kind, and the largest accepted relative rise of NE (empty for none).
"""

from __future__ import annotations

import sys

target_directory, model_path, output, calibration, selection, judged, kind, drop = sys.argv[1:]
sys.path.append(target_directory)

import nncf  # type: ignore[import-not-found]  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnx.version_converter  # noqa: E402
import onnxruntime as ort  # noqa: E402

BATCH = 256


def batches(path: str) -> list[dict[str, np.ndarray]]:
    """The rows of an ``.npz``, batch by batch."""
    with np.load(path) as arrays:
        rows = {name: arrays[name] for name in arrays.files}
    count = len(next(iter(rows.values())))
    return [{n: v[at : at + BATCH] for n, v in rows.items()} for at in range(0, count, BATCH)]


def score(model: onnx.ModelProto, data: list[dict[str, np.ndarray]]) -> float:
    """Minus the cross entropy of the first output, for which more is better."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    total = rows = 0.0
    for batch in data:
        feeds = {name: values for name, values in batch.items() if name != "label"}
        found = np.float64(session.run([judged], feeds)[0]).reshape(-1)
        chance = np.clip(1.0 / (1.0 + np.exp(-found)) if kind == "logit" else found, 1e-7, 1 - 1e-7)
        label = np.float64(batch["label"]).reshape(-1)
        total += float((label * np.log(chance) + (1 - label) * np.log(1 - chance)).sum())
        rows += len(label)
    return total / rows


# From opset 21 on, NNCF 3.4 writes `output_dtype` INT8 beside zero points in UINT8: ONNX Runtime refuses it.
model = onnx.version_converter.convert_version(onnx.load(model_path), 20)
given = nncf.Dataset(batches(calibration))
size = len(batches(calibration))
if drop:
    judging = batches(selection)
    accepted = float(drop) * abs(score(model, judging))
    quantized = nncf.quantize_with_accuracy_control(
        model,
        given,
        nncf.Dataset(judging),
        lambda tried, data: (score(tried, list(data)), None),
        max_drop=accepted,
        drop_type=nncf.DropType.ABSOLUTE,
        subset_size=size,
    )
else:
    quantized = nncf.quantize(model, given, subset_size=size)
onnx.save(quantized, output)
