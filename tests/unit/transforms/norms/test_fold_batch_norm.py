"""BatchNorm is folded into a linear beside it; a norm's scale and shift move into its linears."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import shape_models
from norm_models import DYNAMO, Exporter, assert_folded_equally, fused, taken_in
from onnx import numpy_helper
from rewrite_models import artifact, evaluate, initializer, named, op_types, random_rows
from shape_models import assert_left_alone, match, weight

from loka_onnx.transforms.norms.fold_batch_norm import FoldBatchNorm
from loka_onnx.transforms.norms.fold_norm_affine import FoldNormAffine

STATISTICS = {
    "gamma": np.linspace(-0.5, 1.75, 8, dtype=np.float32), "beta": np.linspace(1.5, -1, 8, dtype=np.float32),
    "mean": np.linspace(-2, 2, 8, dtype=np.float32), "variance": np.linspace(0.25, 4, 8, dtype=np.float32),
}  # fmt: skip
NORM = "[norm_{0}] {0} = BatchNormalization<epsilon=0.001>({1}, gamma, beta, mean, variance)"
LAST = NORM.format("y", "h")

W, B, NEXT = weight(6, 8), weight(8), weight(8, 3)


@dataclass(frozen=True)
class Case(shape_models.Case):
    inputs: str = "float[batch,6] x"
    shared = STATISTICS | {"w": W, "b": B, "s": STATISTICS["gamma"], "c": STATISTICS["beta"]}


BEHIND = {
    "gemm": Case(f"[fc] h = Gemm(x, w, b) {LAST}"),
    "gemm_transposed": Case(f"[fc] h = Gemm<transB=1>(x, w, b) {LAST}", {"w": W.T}),
    "gemm_without_bias": Case(f"[fc] h = Gemm(x, w) {LAST}"),
    "matmul": Case(f"[fc] h = MatMul(x, w) {LAST}"),
    "matmul_with_bias": Case(f"[fc] g = MatMul(x, w) h = Add(g, b) {LAST}"),
    "before_relu": Case(f"[fc] h = Gemm(x, w, b) {NORM.format('g', 'h')} y = Relu(g)"),
    "channels_between_transposes": Case("[fc] g = MatMul(x, w)"
        f" h = Transpose<perm=[0,2,1]>(g) {NORM.format('n', 'h')} y = Transpose<perm=[0,2,1]>(n)",
        inputs="float[batch,5,6] x"),
    "weight_on_the_left": Case(f"[fc] h = MatMul(w, x) {LAST}", {"w": W.T}, "float[batch,6,5] x"),
    "left_with_bias": Case(f"[fc] g = MatMul(w, x) h = Add(g, b) {LAST}", {"w": W.T, "b": B.reshape(8, 1)},
        "float[batch,6,5] x"),
    "mul_and_add": Case("[fc] h = MatMul(x, w) g = Mul(h, s) y = Add(g, c)"),
    "mul_and_add_behind_a_bias": Case("[fc] h = MatMul(x, w) k = Add(h, b) g = Mul(s, k) y = Add(c, g)"),
    "mul_alone": Case("[fc] h = Gemm(x, w, b) y = Mul(h, s)"),
    "twice": Case(f"[fc] h = MatMul(x, w) {NORM.format('g', 'h')} {NORM.format('y', 'g')}"),
    "flattened_rows": Case(f"[fc] g = MatMul(x, w) h = Reshape(g, rows) {LAST}", {"rows": [-1, 8]},
        "float[batch,5,6] x", outputs="float[rows,8] y"),
}  # fmt: skip
BEFORE = {
    "before_gemm": Case(f"a = Relu(x) {NORM.format('n', 'a')} [fc] y = Gemm(n, w, b)",
        {"w": NEXT, "b": weight(3)}, "float[batch,8] x"),
    "matmul": Case(f"a = Relu(x) {NORM.format('n', 'a')} [fc] y = MatMul(n, w)", {"w": NEXT},
        "float[batch,8] x"),
    "two_linears_and_a_residual_in_front": Case(
        f"a = Relu(x) {NORM.format('n', 'a')} [fc] h = MatMul(n, w) [gate] g = MatMul(n, w2)"
        " m = Mul(h, g) y = Add(m, a)", {"w": weight(8, 8), "w2": weight(8, 8) + 1}, "float[batch,8] x"),
    "left": Case(f"a = Relu(x) {NORM.format('n', 'a')} [fc] y = MatMul(w, n)", {"w": NEXT.T},
        "float[batch,8,5] x"),
}  # fmt: skip

SEVERAL = {
    "one_linear_behind_and_one_before_another": (Case(
        f"[fc1] h = MatMul(x, w) {NORM.format('n', 'h')} [fc2] k = MatMul(n, w2) {NORM.format('y', 'k')}", {
        "w2": weight(8, 8)}), ["MatMul", "Add", "MatMul", "Add"]),
    "both_sides_of_a_linear": (Case(
        f"a = Relu(x) {NORM.format('n', 'a')} [fc] k = MatMul(n, w) {NORM.format('y', 'k')}", {"w": weight(8,
        8)}, "float[batch,8] x"), ["Relu", "MatMul", "Add"]),
    # A temperature stays, and so does a scalar summand behind it.
    "not_one_number_behind_the_norm": (Case(
        f"[fc] h = MatMul(x, w) {NORM.format('n', 'h')} t = Mul(n, temperature) y = Add(t, offset)", {
        "temperature": 0.7, "offset": 0.1}), ["MatMul", "Add", "Mul", "Add"]),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BEHIND.values(), *BEFORE.values()], ids=[*BEHIND, *BEFORE])
def test_beside_a_linear_it_goes(case, tmp_path):
    before = case.model()
    result = fused(artifact(before, tmp_path / "before.onnx"), tmp_path, (FoldBatchNorm,))
    assert len(result.applied) == 1, result.reasons
    assert "BatchNormalization" not in result.ops
    assert result.ops.count("Mul") == case.body.count("Mul(h, g)")
    assert named(result.after, "fc").op_type == named(before, "fc").op_type
    assert_folded_equally(before, FoldBatchNorm(), tmp_path)
    onnx.checker.check_model(result.after, full_check=True)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_are_folded_where_they_can_be(name, tmp_path):
    case, ops = SEVERAL[name]
    result = fused(artifact(case.model(), tmp_path / "before.onnx"), tmp_path, (FoldBatchNorm,))
    assert result.ops == ops
    assert_folded_equally(case.model(), FoldBatchNorm(), tmp_path)


STAYS = {
    "linear_read_elsewhere": Case(f"[fc] h = MatMul(x, w) {NORM.format('n', 'h')} y = Add(n, h)", why=1),
    "linear_is_an_output": Case(f"[fc] h = MatMul(x, w) {LAST}", outputs="y, h", why=1),
    "of_an_input": Case(f"{NORM.format('n', 'x')} [fc] y = MatMul(n, w)", {"w": NEXT}, "float[batch,8] x",
        why=1),
    "along_another_axis": Case(f"[fc] h = MatMul(x, w) {LAST}", {"w": weight(6, 4)}, "float[batch,8,6] x",
        why=1),
    "training": Case("[fc] h = MatMul(x, w)"
        " [norm_y] y, m, v = BatchNormalization<training_mode=1>(h, gamma, beta, mean, variance)", why=1),
    "temperature": Case("[fc] h = MatMul(x, w) y = Mul(h, t)", {"t": np.float32(0.5)}, why=0),
    "factors_read_elsewhere": Case("[fc] h = MatMul(x, w) g = Mul(h, s) y = Add(g, h)", why=0),
    "per_token": Case("[fc] h = MatMul(x, w) y = Mul(h, t)", {"t": weight(5, 1)}, "float[batch,5,6] x",
        why=0),
    "behind_no_linear": Case("a = Relu(x) y = Mul(a, s)", inputs="float[batch,8] x", why=0),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_others_stay_and_a_batch_norm_is_declined(name, tmp_path):
    found = match(STAYS[name].model(), FoldBatchNorm(), tmp_path)
    assert found.matches == ()
    assert len(found.declined) == STAYS[name].why


def tower() -> Any:
    import torch
    from torch import nn

    class Sequence(nn.Module):
        """BatchNorm1d over the channels of a sequence, which PyTorch wants second."""

        def __init__(self) -> None:
            super().__init__()
            self.fc, self.bn = nn.Linear(6, 8), nn.BatchNorm1d(8)

        def forward(self, x: Any) -> Any:
            return self.bn(self.fc(x).transpose(1, 2)).transpose(1, 2).relu()

    first, second = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), (nn.Linear(8, 8), nn.ReLU())
    flat = nn.Sequential(*first, *second, nn.BatchNorm1d(8), nn.Linear(8, 3))
    for module in (sequence := Sequence(), flat):
        for norm in module.modules():
            if isinstance(norm, nn.BatchNorm1d):
                norm.running_mean = torch.linspace(-1, 1, 8)
                norm.running_var = torch.linspace(0.5, 3, 8)
                nn.init.uniform_(norm.weight, -1, 1)
                nn.init.uniform_(norm.bias, -1, 1)
    return {"flat": (flat, (6,)), "sequence": (sequence, (5, 6))}


@pytest.mark.parametrize(
    "exporter",
    [pytest.param(DYNAMO, marks=pytest.mark.slow), Exporter("torchscript", 11), Exporter("torchscript", 20)],
    ids=str,
)
@pytest.mark.parametrize("name", ["flat", "sequence"])
def test_what_pytorch_exports_is_folded(name, exporter, tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    module, shape = tower()[name]
    model = taken_in(exporter.export(module, random_rows(4, *shape)), tmp_path)
    result = fused(model, tmp_path, (FoldBatchNorm,))
    # torch.export folds what stands behind a linear by itself.
    assert "BatchNormalization" in op_types(result.before) or exporter is DYNAMO
    assert "BatchNormalization" not in result.ops, result.reasons
    assert_folded_equally(result.before, FoldBatchNorm(), tmp_path)


GAIN = np.linspace(-0.5, 1.75, 8, dtype=np.float32)
SHIFT = np.linspace(1.5, -1, 8, dtype=np.float32)
LAYER = "[norm] n = LayerNormalization<axis=-1, epsilon=0.001>(x, gain, shift)"

W84, B4 = weight(8, 4), weight(4)


class Affine(shape_models.Case):
    shared: ClassVar[Any] = {"gain": GAIN, "shift": SHIFT, "w": W84, "b": B4}

    def model(self) -> onnx.ModelProto:
        model = super().model()
        if "GroupNormalization" in self.body:
            # ONNX infers no shape behind it: exporters note it.
            info = model.graph.value_info.add(name="n", type=model.graph.input[0].type)
            assert info.type.tensor_type.shape.dim
        return model


FOLDED = {
    "gemm": Affine(f"{LAYER} [fc] y = Gemm(n, w, b)"),
    "gemm_transposed": Affine(f"{LAYER} [fc] y = Gemm<transB=1>(n, w, b)", {"w": W84.T}),
    "matmul": Affine(f"{LAYER} [fc] y = MatMul(n, w)"),
    "rank_3": Affine(f"{LAYER} [fc] y = MatMul(n, w)", inputs="float[batch,3,8] x"),
    "without_shift": Affine("[norm] n = LayerNormalization(x, gain) [fc] y = MatMul(n, w)"),
    "rms": Affine("[norm] n = RMSNormalization<axis=-1>(x, gain) [fc] y = Gemm(n, w, b)", opset=23),
    "three_linears": Affine(
        f"{LAYER} [q] u = MatMul(n, w) [k] v = Gemm(n, w, b) [v] p = MatMul(n, w2) s = Add(u, v)"
        " y = Mul(s, p)", {"w2": weight(8, 4) + 1}),
    "a_weight_that_another_linear_reads": Affine(
        f"{LAYER} [fc] h = MatMul(n, w) [other] k = MatMul(x, w) y = Add(h, k)", {"w": weight(8, 8)}),
    "left_of_a_transposed_norm": Affine(f"{LAYER} t = Transpose<perm=[0,2,1]>(n) [fc] y = MatMul(w, t)",
        {"w": W84.T}, "float[batch,3,8] x"),
    "flattened": Affine(f"{LAYER} f = Flatten<axis=1>(n) [fc] y = MatMul(f, w)", {"w": weight(24, 4)},
        "float[batch,3,8] x"),
    "reshaped_with_a_length_that_zero_copies": Affine(
        f"{LAYER} f = Reshape(n, halves) g = Reshape(f, rows) [fc] y = MatMul(g, w)",
        {"halves": [0, 0, 2, 4], "rows": [0, -1, 8]}, "float[batch,3,8] x"),
    "reshaped_by_a_computed_shape": Affine(
        f"{LAYER} s = Shape<start=0, end=1>(x) t = Concat<axis=0>(s, rest) f = Reshape(n, t)"
        " [fc] y = MatMul(f, w)", {"w": weight(24, 4), "rest": [-1]}, "float[batch,3,8] x"),
    "two_ways": Affine(f"{LAYER} f = Flatten<axis=1>(n) [a] u = MatMul(f, w24) t = Transpose<perm=[0,2,1]>(n)"
        " [b] v = MatMul(left, t) g = Flatten<axis=1>(v) [c] p = MatMul(g, w2) y = Add(u, p)",
        {"w24": weight(24, 4), "left": W84.T, "w2": weight(12, 4)}, "float[batch,3,8] x"),
    "two_axes": Affine(
        "[norm] n = LayerNormalization<axis=-2>(x, gain, shift) f = Flatten<axis=1>(n) [fc] y = MatMul(f, w)",
        {"w": weight(24, 4), "gain": weight(3, 8), "shift": weight(8, 3).T}, "float[batch,3,8] x"),
    "group": Affine("[norm] n = GroupNormalization<num_groups=2>(x, gain, shift) f = Flatten<axis=1>(n)"
        " [fc] y = MatMul(f, w)", {"w": weight(40, 4)}, "float[batch,8,5] x", outputs="float[batch,4] y"),
    "instance": Affine("[norm] n = InstanceNormalization(x, gain, shift) t = Transpose<perm=[0,2,1]>(n)"
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
    "interaction": Affine(f"{LAYER} t = Transpose<perm=[0,2,1]>(n) [dot] y = MatMul(n, t)",
        inputs="float[batch,3,8] x", why="'dot' reads it, a MatMul"),
    "constant_scale_missing": Affine("[norm] n = LayerNormalization(x, g, shift) [fc] y = MatMul(n, w)",
        inputs="float[batch,8] x, float[8] g", why="they are not constant"),
    "left_of_the_norm": Affine(f"{LAYER} [fc] y = MatMul(w, n)", {"w": weight(4, 3)}, "float[batch,3,8] x",
        why="a row of a weight meets several channels"),
    "scale_over_two_axes": Affine(
        "[norm] n = LayerNormalization<axis=-2>(x, gain, shift) [fc] y = MatMul(n, w)",
        {"gain": weight(3, 8), "shift": weight(3, 8)}, "float[batch,3,8] x",
        why="a row of a weight meets several channels"),
    "as_a_bias": Affine(f"{LAYER} [fc] y = Gemm(x, w, n)", {"w": weight(8, 8)},
        why="'fc' reads it: a Gemm whose third operand is not a constant bias of N elements"),
    "unknown_length": Affine(f"{LAYER} [fc] y = MatMul(n, w)", inputs="float[batch,tokens,8] x",
        why="the length of axis 'tokens' is not known"),
    "statistics_read": Affine("[norm] n, mean = LayerNormalization(x, gain, shift) [fc] y = MatMul(n, w)",
        outputs="y, mean", why="its statistics are read as well"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_a_norm_with_another_use_keeps_its_scale(name, tmp_path):
    case = DECLINED[name]
    why = {"norm": f"its scale and shift stay: {case.why}"}
    assert_left_alone(replace(case, why=why), FoldNormAffine(), tmp_path)
