"""Norms as TensorFlow and Keras export them through tf2onnx.

`tf_norm_forms.txt` is the text of models that tf2onnx wrote (its first line names the versions): TensorFlow
takes 1.6 GB, so that the tests do not install it.
"""

from functools import cache
from pathlib import Path

import onnx
import onnx.parser
import pytest
from norm_models import FOLDS, FUSIONS, assert_equal, assert_folded_equally, fused, taken_in

from loka_onnx.transforms.norms.fold_batch_norm import FoldBatchNorm

HERE = Path(__file__).parent
OPSETS = (13, 18)
"""Axes as an attribute, and as an input."""
LAYER, RMS = "LayerNormalization", "RMSNormalization"
FUSED = {
    "moments": [LAYER], "by_hand": [LAYER], "layer_norm": [LAYER], "layer_norm_of_rank_3": [LAYER],
    "layer_norm_of_two_axes": [LAYER], "layer_norm_without_affine": [LAYER],
    "layer_norm_in_float16": ["Cast", LAYER, "Cast"], "root_mean_square": [RMS], "rms_norm": [RMS],
    "rms_norm_in_float16": ["Cast", RMS, "Cast"],
}  # fmt: skip


@cache
def transcribed() -> dict[tuple[str, int], str]:
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


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", FUSED)
def test_every_form_becomes_one_operator(name, opset, tmp_path):
    result = fused(taken_in(parsed(transcribed()[name, opset]), tmp_path), tmp_path)
    assert result.ops == FUSED[name], result.reasons
    norm = next(node for node in result.after.graph.node if node.op_type.endswith("Normalization"))
    assert norm.name == "model.norm"
    # What is rounded to FP16 behind the norm may fall on the next number: 2⁻¹¹ of 4.
    assert_equal(result, single=4e-3 if "Cast" in result.ops else 5e-6)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(
    "name", ["norm", "l2_normalize", "unit_norm", "layer_norm_without_mean", "group_norm_of_last_channels"]
)
def test_a_near_miss_is_left_alone(name, opset, tmp_path):
    assert fused(taken_in(parsed(transcribed()[name, opset]), tmp_path), tmp_path).applied == ()


@pytest.mark.parametrize("opset", OPSETS)
def test_batch_norm_behind_dense_is_folded(opset, tmp_path):
    model = taken_in(parsed(transcribed()["dense_batch_norm", opset]), tmp_path)
    result = fused(model, tmp_path, (*FUSIONS, *FOLDS))
    assert result.ops == ["MatMul", "Add"]
    assert_folded_equally(onnx.load(model.path), FoldBatchNorm(), tmp_path)
