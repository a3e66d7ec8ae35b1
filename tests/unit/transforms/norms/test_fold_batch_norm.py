"""BatchNorm is folded into the linear in front of it, or behind it, and stays where neither is allowed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
import shape_models
from norm_models import DYNAMO, Exporter, assert_folded_equally, fused, taken_in
from rewrite_models import artifact, named, op_types, random_rows
from shape_models import match, weight

from loka_onnx.transforms.norms.fold_batch_norm import FoldBatchNorm

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

    class Sequence(torch.nn.Module):
        """BatchNorm1d over the channels of a sequence, which PyTorch wants second."""

        def __init__(self) -> None:
            super().__init__()
            self.fc, self.bn = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)

        def forward(self, x: Any) -> Any:
            return self.bn(self.fc(x).transpose(1, 2)).transpose(1, 2).relu()

    flat = torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 8),
        torch.nn.ReLU(),
        torch.nn.BatchNorm1d(8),
        torch.nn.Linear(8, 3),
    )
    for module in (sequence := Sequence(), flat):
        for norm in module.modules():
            if isinstance(norm, torch.nn.BatchNorm1d):
                norm.running_mean = torch.linspace(-1, 1, 8)
                norm.running_var = torch.linspace(0.5, 3, 8)
                torch.nn.init.uniform_(norm.weight, -1, 1)
                torch.nn.init.uniform_(norm.bias, -1, 1)
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
