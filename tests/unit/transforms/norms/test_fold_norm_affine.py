"""A norm's scale and shift move into the linears that alone read it, and nowhere else."""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import shape_models
from norm_models import assert_folded_equally, fused
from onnx import numpy_helper
from rewrite_models import artifact, evaluate, initializer, random_rows
from shape_models import assert_left_alone, weight

from loka_onnx.transforms.norms.fold_norm_affine import FoldNormAffine

GAIN = np.linspace(-0.5, 1.75, 8, dtype=np.float32)
SHIFT = np.linspace(1.5, -1, 8, dtype=np.float32)
LAYER = "[norm] n = LayerNormalization<axis=-1, epsilon=0.001>(x, gain, shift)"

W, B = weight(8, 4), weight(4)


class Case(shape_models.Case):
    shared: ClassVar[Any] = {"gain": GAIN, "shift": SHIFT, "w": W, "b": B}

    def model(self) -> onnx.ModelProto:
        model = super().model()
        if "GroupNormalization" in self.body:
            # ONNX infers no shape behind it: exporters note it.
            info = model.graph.value_info.add(name="n", type=model.graph.input[0].type)
            assert info.type.tensor_type.shape.dim
        return model


FOLDED = {
    "gemm": Case(f"{LAYER} [fc] y = Gemm(n, w, b)"),
    "gemm_transposed": Case(f"{LAYER} [fc] y = Gemm<transB=1>(n, w, b)", {"w": W.T}),
    "matmul": Case(f"{LAYER} [fc] y = MatMul(n, w)"),
    "rank_3": Case(f"{LAYER} [fc] y = MatMul(n, w)", inputs="float[batch,3,8] x"),
    "without_shift": Case("[norm] n = LayerNormalization(x, gain) [fc] y = MatMul(n, w)"),
    "rms": Case("[norm] n = RMSNormalization<axis=-1>(x, gain) [fc] y = Gemm(n, w, b)", opset=23),
    "three_linears": Case(
        f"{LAYER} [q] u = MatMul(n, w) [k] v = Gemm(n, w, b) [v] p = MatMul(n, w2) s = Add(u, v)"
        " y = Mul(s, p)", {"w2": weight(8, 4) + 1}),
    "a_weight_that_another_linear_reads": Case(
        f"{LAYER} [fc] h = MatMul(n, w) [other] k = MatMul(x, w) y = Add(h, k)", {"w": weight(8, 8)}),
    "left_of_a_transposed_norm": Case(f"{LAYER} t = Transpose<perm=[0,2,1]>(n) [fc] y = MatMul(w, t)",
        {"w": W.T}, "float[batch,3,8] x"),
    "flattened": Case(f"{LAYER} f = Flatten<axis=1>(n) [fc] y = MatMul(f, w)", {"w": weight(24, 4)},
        "float[batch,3,8] x"),
    "reshaped_with_a_length_that_zero_copies": Case(
        f"{LAYER} f = Reshape(n, halves) g = Reshape(f, rows) [fc] y = MatMul(g, w)",
        {"halves": [0, 0, 2, 4], "rows": [0, -1, 8]}, "float[batch,3,8] x"),
    "reshaped_by_a_computed_shape": Case(
        f"{LAYER} s = Shape<start=0, end=1>(x) t = Concat<axis=0>(s, rest) f = Reshape(n, t)"
        " [fc] y = MatMul(f, w)", {"w": weight(24, 4), "rest": [-1]}, "float[batch,3,8] x"),
    "two_ways": Case(f"{LAYER} f = Flatten<axis=1>(n) [a] u = MatMul(f, w24) t = Transpose<perm=[0,2,1]>(n)"
        " [b] v = MatMul(left, t) g = Flatten<axis=1>(v) [c] p = MatMul(g, w2) y = Add(u, p)",
        {"w24": weight(24, 4), "left": W.T, "w2": weight(12, 4)}, "float[batch,3,8] x"),
    "two_axes": Case(
        "[norm] n = LayerNormalization<axis=-2>(x, gain, shift) f = Flatten<axis=1>(n) [fc] y = MatMul(f, w)",
        {"w": weight(24, 4), "gain": weight(3, 8), "shift": weight(8, 3).T}, "float[batch,3,8] x"),
    "group": Case("[norm] n = GroupNormalization<num_groups=2>(x, gain, shift) f = Flatten<axis=1>(n)"
        " [fc] y = MatMul(f, w)", {"w": weight(40, 4)}, "float[batch,8,5] x", outputs="float[batch,4] y"),
    "instance": Case("[norm] n = InstanceNormalization(x, gain, shift) t = Transpose<perm=[0,2,1]>(n)"
        " [fc] y = MatMul(t, w)", inputs="float[batch,8,5] x"),
}  # fmt: skip


def norm_of(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type.endswith("Normalization"))


@pytest.mark.parametrize("name", FOLDED)
def test_scale_and_shift_move_into_every_linear(name, tmp_path):
    before = FOLDED[name].model()
    result = fused(artifact(before, tmp_path / "before.onnx"), tmp_path, (FoldNormAffine,))
    assert len(result.applied) == 1, result.reasons
    norm = norm_of(result.after)
    constants = [numpy_helper.to_array(initializer(result.after, tensor)) for tensor in norm.input[1:]]
    assert np.all(constants[0] == 1)
    assert constants[0].shape == numpy_helper.to_array(initializer(before, norm_of(before).input[1])).shape
    assert not any(constant.any() for constant in constants[1:])
    assert len(norm.input) == (3 if norm.op_type in {"GroupNormalization", "InstanceNormalization"} else 2)
    assert_folded_equally(before, FoldNormAffine(), tmp_path)
    onnx.checker.check_model(result.after, full_check=True)
    # Sites keep their names.
    assert {node.name for node in before.graph.node} <= {node.name for node in result.after.graph.node}


def test_the_normalized_value_has_a_known_range(tmp_path):
    """What the docstring promises: |z| ≤ √(K−1), reached by a row with one element that differs."""
    source = artifact(FOLDED["gemm"].model(), tmp_path / "before.onnx")
    after = fused(source, tmp_path, (FoldNormAffine,)).after
    after.graph.output.append(onnx.helper.make_tensor_value_info("n", 1, ["batch", 8]))
    x = np.concatenate([random_rows(100, 8) * 30, 1e4 * np.eye(8, dtype=np.float32)])
    z = evaluate(after, {"x": x})["n"]
    assert np.abs(z).max() == pytest.approx(np.sqrt(7), rel=1e-4)


DECLINED = {
    "interaction": Case(f"{LAYER} t = Transpose<perm=[0,2,1]>(n) [dot] y = MatMul(n, t)",
        inputs="float[batch,3,8] x", why="'dot' reads it, a MatMul"),
    "constant_scale_missing": Case("[norm] n = LayerNormalization(x, g, shift) [fc] y = MatMul(n, w)",
        inputs="float[batch,8] x, float[8] g", why="they are not constant"),
    "left_of_the_norm": Case(f"{LAYER} [fc] y = MatMul(w, n)", {"w": weight(4, 3)}, "float[batch,3,8] x",
        why="a row of a weight meets several channels"),
    "scale_over_two_axes": Case(
        "[norm] n = LayerNormalization<axis=-2>(x, gain, shift) [fc] y = MatMul(n, w)",
        {"gain": weight(3, 8), "shift": weight(3, 8)}, "float[batch,3,8] x",
        why="a row of a weight meets several channels"),
    "as_a_bias": Case(f"{LAYER} [fc] y = Gemm(x, w, n)", {"w": weight(8, 8)},
        why="'fc' reads it: a Gemm whose third operand is not a constant bias of N elements"),
    "unknown_length": Case(f"{LAYER} [fc] y = MatMul(n, w)", inputs="float[batch,tokens,8] x",
        why="the length of axis 'tokens' is not known"),
    "statistics_read": Case("[norm] n, mean = LayerNormalization(x, gain, shift) [fc] y = MatMul(n, w)",
        outputs="y, mean", why="its statistics are read as well"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_a_norm_with_another_use_keeps_its_scale(name, tmp_path):
    case = DECLINED[name]
    why = {"norm": f"its scale and shift stay: {case.why}"}
    assert_left_alone(replace(case, why=why), FoldNormAffine(), tmp_path)
