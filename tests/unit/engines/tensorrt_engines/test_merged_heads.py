"""Splitting a merged product by heads: the same values, and only where all parts are read by heads."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from ml_dtypes import float8_e4m3fn
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from loka_onnx.engines.tensorrt.dialect import split_by_heads

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[batch,5,8] x) => (float[batch,5,2,4] q, float[batch,5,3,4] k) {
  [xq] xq = QuantizeLinear(x, one, zero) [xd] xd = DequantizeLinear(xq, one, zero)
  [wd] wd = DequantizeLinear<axis=1>(w, scales, zeros)
  [qk] p = MatMul(xd, wd)
  [cut] a, b = Split<axis=-1>(p, sizes)
  [hq] q = Reshape(a, two) [hk] k = Reshape(b, three)
}"""


def model(text: str = TEXT, **shapes: list[int]) -> onnx.ModelProto:
    made: onnx.ModelProto = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).integers(-8, 8, (8, 20))
    constants = {"one": np.float32(1), "scales": np.linspace(1, 3, 20).astype(np.float32)}
    float8 = {"w": weight, "zero": 0, "zeros": np.zeros(20)}
    constants |= {name: np.asarray(v, np.float32).astype(float8_e4m3fn) for name, v in float8.items()}
    integers = {"sizes": [8, 12], "two": [-1, 5, 2, 4], "three": [-1, 5, 3, 4], **shapes}
    constants |= {name: np.array(v, np.int64) for name, v in integers.items()}
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())
    return made


def check_split(text: str, shapes: dict[str, list[int]], *row: int) -> onnx.ModelProto:
    """Splits it, and holds all outputs against the model before."""
    before, after = model(text, **shapes), model(text, **shapes)
    assert split_by_heads(after) == ("cut",)
    onnx.checker.check_model(after, full_check=True)
    x = np.random.default_rng(1).normal(size=(3, *row)).astype(np.float32)
    expected, got = (ReferenceEvaluator(each).run(None, {"x": x}) for each in (before, after))
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_array_equal(one, other)
    return after


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"two": [0, 5, 2, 4], "three": [0, 5, 3, 4]},
        {"two": [3, -1, 2, 4], "three": [3, -1, 3, 4]},
        {"two": [-1, 2, 4], "three": [-1, 3, 4]},
    ],
    ids=["batch", "copied", "rows", "flat"],
)
def test_the_values_are_the_same(shapes: dict[str, list[int]]) -> None:
    text = TEXT
    if len(shapes.get("two", [0] * 4)) == 3:
        text = TEXT.replace("batch,5,2,4", "n,2,4").replace("batch,5,3,4", "n,3,4")
    after = check_split(text, shapes, 5, 8)
    assert [node.op_type for node in after.graph.node][4:6] == ["Reshape", "Split"]
    # A second time there is nothing left to do.
    assert split_by_heads(after) == ()


def test_a_gemm_and_a_known_axis_are_taken() -> None:
    text = TEXT.replace("float[batch,5,8] x", "float[batch,8] x").replace("MatMul", "Gemm")
    text = text.replace("axis=-1", "axis=1").replace("batch,5,", "batch,")
    check_split(text, {"two": [0, 2, 4], "three": [0, 3, 4]}, 8)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        (TEXT.replace("DequantizeLinear<axis=1>(w, scales, zeros)", "Cast<to=1>(w)"), {}),
        (TEXT.replace("axis=-1", "axis=1"), {}),
        (TEXT.replace("k = Reshape(b, three)", "k = Relu(b)"), {}),
        (TEXT.replace("=> (", "=> (float[batch,5,8] a, "), {}),
        (TEXT.replace("q = Reshape(a, two)", "q = Reshape<allowzero=1>(a, two)"), {}),
        (TEXT, {"two": [-1, 5, 4, 2]}),
        (TEXT, {"two": [-1, 10, 1, 4]}),
        (TEXT, {"two": [-1, 5, 2, -1]}),
        (TEXT, {"two": [-1, 0, 2, 4], "three": [-1, 0, 3, 4]}),
        (TEXT, {"two": [-1, 5, 8], "three": [-1, 5, 12]}),
    ],
    ids=[
        *("base_precision", "another_axis", "one_part_whole", "part_leaves", "zero_means_zero"),
        *("other_width", "other_rows", "width_not_told", "copied_axis", "no_heads"),
    ],
)
def test_what_is_not_read_by_heads_stays(text: str, shapes: dict[str, list[int]]) -> None:
    made = model(text, **shapes)
    before = made.SerializeToString()
    assert split_by_heads(made) == ()
    assert made.SerializeToString() == before
