"""Site names: readable, unique, and unmoved by edits elsewhere in the model."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_runs import export

from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.sites import find_sites

torch = pytest.importorskip("torch", reason="needs torch")


def names_of(path: Path) -> list[str]:
    return [site.name for site in find_sites(canonicalize(path).model)]


class Tower(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.norm = torch.nn.Linear(width, 6), torch.nn.LayerNorm(6)
        self.fc2 = torch.nn.Linear(6, 6, bias=False)

    def forward(self, x):
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


class Pair(torch.nn.Module):
    """Products of raw parameters, and of activations, inside one module."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (torch.nn.Parameter(torch.randn(6, 5)) for _ in range(2))

    def forward(self, x):
        left, right = (x @ self.left).unsqueeze(2), (x @ self.right).unsqueeze(1)
        outer = left @ right
        return (outer @ outer).flatten(1)


class Ranker(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice = torch.nn.Linear(4, 4)
        self.tower, self.pair, self.head = Tower(4), Pair(), torch.nn.Linear(25, 1)

    def forward(self, x):
        x = self.twice(torch.relu(self.twice(x)))
        return self.head(self.pair(self.tower(x)))


class Edited(Ranker):
    """The same model with layers before, beside and after the old ones."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.beside = torch.nn.Linear(4, 4), Tower(4)
        self.after = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))

    def forward(self, x):
        x = self.twice(torch.relu(self.twice(self.before(x))))
        pair = self.pair(self.tower(x) + self.beside(x))
        return self.after(self.head(pair))


TOWER, PAIR = ["tower.fc1", "tower.norm", "tower.fc2"], ["left", "right", "matmul", "matmul_1"]
OLD = ["twice.gemm", "twice.gemm_1", *TOWER, *(f"pair.{name}" for name in PAIR), "head"]


@pytest.mark.slow
def test_names_are_module_paths_and_survive_edits_elsewhere(tmp_path):
    """A module that runs twice has two."""
    assert names_of(export(Ranker(), (3, 4), tmp_path / "old.onnx")) == OLD
    edited = names_of(export(Edited(), (3, 4), tmp_path / "new.onnx"))
    assert [name for name in edited if name in OLD] == OLD
    beside = {name.replace("tower", "beside") for name in TOWER}
    assert set(edited) - set(OLD) == {"before", "after.0", "after.2", *beside}


def named(write_model, nodes: list[tuple[str, str]], weight_name: str = "w{}") -> Path:
    """A chain of 4×4 products: operator and name of each node."""
    weights = {weight_name.format(index): np.eye(4, dtype=np.float32) for index in range(len(nodes))}
    body = " ".join(f"t{i + 1} = MatMul(t{i}, w)" for i in range(len(nodes)))
    path = write_model(f"g (float[b,4] t0) => (float[b,4] t{len(nodes)}) {{ {body} }}", weights)
    proto = onnx.load(path)
    for node, (op, name), weight in zip(proto.graph.node, nodes, weights, strict=True):
        node.op_type, node.name, node.input[1] = op, name, weight
    onnx.save(proto, path)
    return path


def of_one(op: str, *names: str) -> list[tuple[str, str]]:
    return [(op, name) for name in names]


@pytest.mark.parametrize(
    ("nodes", "weight_name", "names"),
    [
        # TorchScript's exporter: the module path is the directory of the node name. TensorFlow's, the same.
        (
            [("Gemm", "/over_arch/fc1/Gemm"), ("MatMul", "/over_arch/fc2/MatMul")],
            "onnx::MatMul_{}",
            ["over_arch.fc1", "over_arch.fc2"],
        ),
        (
            of_one("MatMul", "model/dense/MatMul", "model/dense_1/MatMul"),
            "k{}",
            ["model.dense", "model.dense_1"],
        ),
        # Two products of one module.
        (
            of_one("MatMul", "/attention/MatMul", "/attention/MatMul_1"),
            "onnx::MatMul_{}",
            ["attention.matmul", "attention.matmul_1"],
        ),
        # Names that say nothing, and none: the weight's name does.
        ([("MatMul", "node_MatMul_3"), ("Gemm", "")], "tower.{}.weight", ["tower.0", "tower.1"]),
        (of_one("MatMul", "n0", "n1"), "val_{}", ["matmul", "matmul_1"]),
        ([("MatMul", ""), ("MatMul", ""), ("Gemm", "")], "{}", ["matmul", "matmul_1", "gemm"]),
        # The same name twice, and a name that a generated one runs into.
        ([("MatMul", "fc"), ("Gemm", "fc")], "val_{}", ["fc.matmul", "fc.gemm"]),
        (of_one("MatMul", "matmul", "", ""), "val_{}", ["matmul", "matmul_1", "matmul_1_1"]),
    ],
)
def test_names_of_other_producers(nodes, weight_name, names, write_model):
    assert names_of(named(write_model, nodes, weight_name)) == names


@pytest.mark.parametrize("weight_name", ["{}", "w/{}", "a.weight{}", "fc/kernel:{}"])
@pytest.mark.parametrize(
    "node_names", [["", "", ""], ["a", "a/matmul", "a"], ["/a/matmul", "a/relu", "/a/relu/Relu"]]
)
def test_every_node_has_a_name_of_its_own(node_names, weight_name, write_model):
    path = named(write_model, of_one("MatMul", *node_names), weight_name)
    proto = onnx.load(path)
    for index, name in enumerate(node_names):
        proto.graph.node.add(op_type="Relu", input=[f"t{index + 1}"], output=[f"r{index}"], name=name)
        proto.graph.output.append(onnx.helper.make_tensor_value_info(f"r{index}", 1, ["b", 4]))
    onnx.save(proto, path)
    names = [node.name for node in canonicalize(path).model.nodes]
    assert len(set(names)) == len(names) == 6 and all(names)
