"""Norms as TensorFlow and Keras export them through tf2onnx.

`tf_norm_forms.txt` is what tf2onnx wrote (its first line names the versions), transcribed to text by
`tf_norms.py`: TensorFlow takes 1.6 GB, so that the tests do not install it. Where it is installed, the slow
tests export each form anew, and hold the transcription against it.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import tf_norms
from norm_models import FOLDS, FUSIONS, assert_equal, assert_folded_equally, fused, taken_in
from rewrite_models import op_types

from loka_onnx.transforms.norms.fold_batch_norm import FoldBatchNorm

HERE = Path(__file__).parent
LAYER, RMS, GROUP, LENGTH = (
    "LayerNormalization",
    "RMSNormalization",
    "GroupNormalization",
    "LpNormalization",
)
FUSED = {
    "moments": [LAYER],
    "by_hand": [LAYER],
    "layer_norm": [LAYER],
    "layer_norm_of_rank_3": [LAYER],
    "layer_norm_of_two_axes": [LAYER],
    "layer_norm_without_affine": [LAYER],
    "layer_norm_in_float16": ["Cast", LAYER, "Cast"],
    "keras_2_layer_norm": [LAYER],
    "keras_2_layer_norm_of_rank_3": [LAYER],
    "root_mean_square": [RMS],
    "rms_norm": [RMS],
    "rms_norm_in_float16": ["Cast", RMS, "Cast"],
    "group_norm_of_first_channels": [GROUP],
    "norm": [LENGTH],
}
BOUNDED = "its divisor is bounded by a constant ({} with {}), which no norm operator does"
DECLINED = {
    "l2_normalize": BOUNDED.format("Max", "1e-12"),
    "unit_norm": BOUNDED.format("Min", "1e+12"),
    "layer_norm_without_mean": "its divisor is a standard deviation, but its mean is not subtracted",
    "group_norm_of_last_channels": "it normalizes axes [-3, -1], which are not the last ones",
}
EACH = [(name, opset) for name in tf_norms.NAMES for opset in tf_norms.OPSETS]


@cache
def transcribed() -> dict[tuple[str, int], str]:
    """The text of each form, by name and operator set."""
    forms: dict[tuple[str, int], str] = {}
    key = ("", 0)
    for line in (HERE / "tf_norm_forms.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            forms[key] = forms.get(key, "") + line + "\n"
        elif line.split()[-1].isdigit():
            name, opset = line.split()[1:]
            key = (name, int(opset))
    return forms


def parsed(text: str) -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.parser.parse_model(text)
    for node in model.graph.node:
        # As TensorFlow names the operations of a layer.
        node.name = f"model/norm/{node.output[0]}"
    return model


def test_every_form_is_transcribed() -> None:
    assert set(transcribed()) == set(EACH)
    assert set(FUSED) | set(DECLINED) | {"dense_batch_norm"} == set(tf_norms.NAMES)


@pytest.mark.parametrize("opset", tf_norms.OPSETS)
@pytest.mark.parametrize("name", FUSED)
def test_every_form_becomes_one_operator(name: str, opset: int, tmp_path: Path) -> None:
    result = fused(taken_in(parsed(transcribed()[name, opset]), tmp_path), tmp_path)
    assert result.ops == FUSED[name], result.reasons
    norm = next(node for node in result.after.graph.node if node.op_type.endswith("Normalization"))
    assert norm.name == "model.norm"
    # What is rounded to FP16 behind the norm may fall on the next number: 2⁻¹¹ of 4.
    assert_equal(result, single=4e-3 if "Cast" in result.ops else 5e-6)


@pytest.mark.parametrize("opset", tf_norms.OPSETS)
@pytest.mark.parametrize("name", DECLINED)
def test_a_near_miss_is_declined_with_the_reason(name: str, opset: int, tmp_path: Path) -> None:
    result = fused(taken_in(parsed(transcribed()[name, opset]), tmp_path), tmp_path)
    assert (result.applied, result.reasons) == ((), [DECLINED[name]])


@pytest.mark.parametrize("opset", tf_norms.OPSETS)
def test_batch_norm_behind_dense_is_folded(opset: int, tmp_path: Path) -> None:
    model = taken_in(parsed(transcribed()["dense_batch_norm", opset]), tmp_path)
    result = fused(model, tmp_path, (*FUSIONS, *FOLDS))
    assert result.ops == ["MatMul", "Add"]
    assert_folded_equally(onnx.load(model.path), FoldBatchNorm(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "opset"), EACH)
def test_the_transcription_is_what_tensorflow_exports(name: str, opset: int, tmp_path: Path) -> None:
    pytest.importorskip("tf2onnx", reason="needs tensorflow")
    # In a process of its own: TensorFlow's warnings, threads and logs are not ours.
    script = f"import tf_norms; print(tf_norms.convert({name!r}, {opset}))"
    ran = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True, check=True)
    live = onnx.parser.parse_model(ran.stdout)
    noted = parsed(transcribed()[name, opset])
    # tf2onnx orders what does not depend on one another differently in each run.
    assert sorted(op_types(live)) == sorted(op_types(noted))
    ours, theirs = (
        sorted(float(np.sum(onnx.numpy_helper.to_array(t).astype(np.float64))) for t in m.graph.initializer)
        for m in (live, noted)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    if name in FUSED:
        assert fused(taken_in(live, tmp_path), tmp_path).ops == FUSED[name]
