"""Retrained weights in the graph of an earlier export, and graphs that they must not be put into."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.export.retrained import Declined, EarlierExport, export_retrained, put_weights
from loka_onnx.export.torch_module import export_torch, measure_parity
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_zoo.builders import build

torch = pytest.importorskip("torch", reason="needs torch")

WIDTH = 8
SPECS = (OutputSpec("score", OutputKind.REGRESSION, "label", None, 0.01),)


class Tied(torch.nn.Module):
    """x·W·Wᵀ over a buffer: a converter may hold the transposed weight under a name of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        weight = random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        self.w = torch.nn.Parameter(torch.from_numpy(weight))
        self.register_buffer("variance", torch.from_numpy(random.uniform(0.5, 1, WIDTH).astype(np.float32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w @ self.w.T / self.variance).sum(1)


def graph(module: Tied, path: Path, *, folded: bool) -> ModelArtifact:
    """The module as ONNX: its weight transposed by the product, or before under another name."""
    w, variance = module.w.detach().numpy(), module.variance.numpy()
    arrays = {"w": w, "variance": variance, "axes": np.array([1])}
    nodes = [
        h.make_node("MatMul", ["x", "w"], ["h"], "first"),
        h.make_node("Gemm", ["h", "w_t" if folded else "w"], ["y"], "second", transB=0 if folded else 1),
        h.make_node("Div", ["y", "variance"], ["z"], "divide"),
        h.make_node("ReduceSum", ["z", "axes"], ["score"], "sum", keepdims=0),
    ]
    if folded:
        arrays["w_t"] = np.ascontiguousarray(w.T)
    weights = [nh.from_array(array, name) for name, array in arrays.items()]
    value = h.make_tensor_value_info
    inputs, outputs = [value("x", T.FLOAT, ["batch", WIDTH])], [value("score", T.FLOAT, ["batch"])]
    made = h.make_graph(nodes, "tied", inputs, outputs, weights)
    onnx.save(h.make_model(made, opset_imports=[h.make_opsetid("", 21)], ir_version=10), path)
    return import_onnx(path, path.with_suffix(".canonical.onnx"), SPECS)


@pytest.fixture
def rows() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((300, WIDTH)).astype(np.float32)}


def expected(module: Tied, rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {"score": module(torch.from_numpy(rows["x"]))}


def test_weights_and_buffers_are_put_into_the_graph(tmp_path: Path, rows: dict[str, np.ndarray]) -> None:
    earlier = graph(Tied(0), tmp_path / "sunday.onnx", folded=False)
    retrained = Tied(1)
    before = {name: tensor.clone() for name, tensor in retrained.state_dict().items()}
    found = put_weights(
        retrained, rows, tmp_path / "monday" / "exported.onnx", SPECS, EarlierExport(earlier, dict)
    )
    assert isinstance(found, ModelArtifact)
    anew = graph(retrained, tmp_path / "monday.onnx", folded=False)
    assert found.digest == anew.digest != earlier.digest
    assert (found.sites, found.producer, found.notes) == (earlier.sites, earlier.producer, earlier.notes)
    assert found.parity is not None and found.parity.rows == 300
    got = OnnxSession(found.path).run(rows)["score"]
    x, w = rows["x"].astype(np.float64), retrained.w.detach().numpy().astype(np.float64)
    wanted = (x @ w @ w.T / retrained.variance.numpy()).sum(1)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    for name, tensor in retrained.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_what_a_converter_computed_from_weights_is_found_stale(
    tmp_path: Path, rows: dict[str, np.ndarray]
) -> None:
    """Also where a day of training moved the weights so little that outputs agree within the tolerance."""
    trained = Tied(0)
    earlier = graph(trained, tmp_path / "sunday.onnx", folded=True)
    retrained = Tied(0)
    with torch.no_grad():
        retrained.w += 1e-7
    assert "w_t" in {tensor.name for tensor in onnx.load(earlier.path).graph.initializer}
    measure_parity(earlier.path, rows, expected(retrained, rows))
    found = put_weights(retrained, rows, tmp_path / "exported.onnx", SPECS, EarlierExport(earlier, dict))
    assert isinstance(found, Declined)
    assert "the exported graph does not agree with the module" in found.reason
    assert not (tmp_path / "exported.onnx").exists()
    # With the weights of that day it is known whose transpose that is.
    known = EarlierExport(earlier, lambda: {"w": trained.w.detach().numpy()})
    taken = put_weights(Tied(1), rows, tmp_path / "exported.onnx", SPECS, known)
    assert isinstance(taken, ModelArtifact)
    assert taken.digest == graph(Tied(1), tmp_path / "monday.onnx", folded=True).digest


def test_graphs_of_other_modules_are_declined(tmp_path: Path, rows: dict[str, np.ndarray]) -> None:
    earlier = graph(Tied(0), tmp_path / "sunday.onnx", folded=False)
    target = tmp_path / "exported.onnx"

    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tied(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    class Twice(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    wider = Tied(1)
    wider.variance = torch.ones(1)
    for module, said in (
        (Renamed(), "none of its tensors is named like one of the module"),
        (wider, "'variance' is of another shape or type"),
        (Twice(1), "the exported graph does not agree with the module"),
    ):
        found = put_weights(module, rows, target, SPECS, EarlierExport(earlier, dict))
        assert isinstance(found, Declined) and said in found.reason, found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["dcnv2", "wukong", "dlrm", "interformer"])
def test_models_of_the_zoo_need_no_second_export(architecture: str, tmp_path: Path) -> None:
    """The bytes that the exporter gives; a graph of other weights is exported anew."""
    torch.manual_seed(0)
    categorical, numeric = {"user": 50, "item": 70}, tuple(f"n{i}" for i in range(8))
    specs = (replace(SPECS[0], name="logit", kind=OutputKind.LOGIT),)
    random = np.random.default_rng(0)

    def made(seed: int) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
        torch.manual_seed(seed)
        module, example = build(architecture, "reference", categorical, numeric)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        shapes = {name: (64, *array.shape[1:]) for name, array in example.items()}
        rows = {
            name: random.integers(0, 50, shape) if name == "ids" else random.standard_normal(shape)
            for name, shape in shapes.items()
        }
        return module, {name: values.astype(example[name].dtype) for name, values in rows.items()}

    sunday, rows = made(0)
    earlier = export_torch(sunday, rows, tmp_path / "sunday.onnx", specs)
    monday, rows = made(1)
    known = EarlierExport(earlier, lambda: {name: t.numpy() for name, t in sunday.state_dict().items()})
    found = put_weights(monday, rows, tmp_path / "monday.onnx", specs, known)
    assert isinstance(found, ModelArtifact), found
    anew = export_torch(monday, rows, tmp_path / "anew.onnx", specs)
    assert found.digest == anew.digest != earlier.digest
    assert found.parity is not None and found.parity.max_abs <= found.parity.tolerance
    assert replace(found, path=anew.path, parity=anew.parity) == anew
    # What cannot take the weights does not get them.
    broken = replace(known, model=replace(earlier, path=anew.path.with_name("none.onnx")))
    assert export_retrained(monday, rows, tmp_path / "again.onnx", specs, broken).digest == anew.digest
