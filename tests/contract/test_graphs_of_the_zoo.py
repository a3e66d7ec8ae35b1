"""The graph of the zoo's models, exported and after all mods, against what ONNX's own file says."""

from __future__ import annotations

import networkx
import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec  # noqa: E402
from loka_onnx.core.model_graph import ModelGraph, NodeKind  # noqa: E402
from loka_onnx.export.torch_module import export_torch  # noqa: E402
from loka_onnx.graph.model_graph import read_model_graph  # noqa: E402
from loka_onnx.report.graph_layout import lay_out  # noqa: E402
from loka_onnx.transforms.sequence import apply_mods  # noqa: E402
from loka_zoo import FeatureSpec, create  # noqa: E402

FEATURES = FeatureSpec(tuple((f"c{i}", 20 + i) for i in range(6)), tuple(f"n{i}" for i in range(5)))
LOGIT = (OutputSpec("logit", OutputKind.LOGIT, "label"),)
pytestmark = pytest.mark.slow


def rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        "dense": random.normal(size=(32, 5)).astype(np.float32),
        "ids": random.integers(0, 20, size=(32, 6)),
    }


@pytest.fixture(scope="module", params=["dlrm", "dcnv2", "wukong", "interformer"])
def both(request, tmp_path_factory) -> tuple[ModelArtifact, ModelArtifact]:
    """A model as exported, and after all mods."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("graph")
    exported = export_torch(create(request.param, FEATURES, "tiny").eval(), rows(), folder / "a.onnx", LOGIT)
    return exported, apply_mods(exported, [rows()], folder / "b.onnx").model


def graph_of(model: ModelArtifact, most: int = 5000) -> ModelGraph:
    return read_model_graph(model.path, [site.name for site in model.sites], most)


@pytest.mark.parametrize("modified", [False, True])
def test_it_has_every_operator_every_site_and_every_tensor_between_them(both, modified):
    model = both[modified]
    graph, proto = graph_of(model), onnx.load(model.path).graph
    operators = [node for node in graph.nodes if node.kind is NodeKind.OPERATOR]
    assert [(node.name, node.op) for node in operators] == [(node.name, node.op_type) for node in proto.node]
    assert graph.operators == len(proto.node)
    assert [node.name for node in graph.nodes if node.kind is NodeKind.INPUT] == ["dense", "ids"]
    assert [node.name for node in graph.nodes if node.kind is NodeKind.OUTPUT] == ["logit"]
    sites = [site for node in graph.nodes for site in node.sites]
    assert sorted(sites) == sorted(site.name for site in model.sites)
    assert all(node.sites == (node.name,) for node in operators if node.sites)
    made = {tensor: node.name for node in proto.node for tensor in node.output}
    read = {(made[t], node.name) for node in proto.node for t in node.input if t in made}
    names = [node.name for node in graph.nodes]
    kinds = [node.kind for node in graph.nodes]
    between = {
        (names[e.source], names[e.target])
        for e in graph.edges
        if kinds[e.source] == kinds[e.target] == NodeKind.OPERATOR
    }
    assert between == read


@pytest.mark.parametrize("most", [5000, 25, 8])
def test_its_drawing_is_layered_and_whole_also_when_it_is_folded(both, most):
    graph = graph_of(both[1], most)
    assert len(graph.nodes) <= most
    layout = lay_out(graph)
    assert all(layout.layers[e.source] < layout.layers[e.target] for e in graph.edges)
    joined = networkx.DiGraph((e.source, e.target) for e in graph.edges)
    assert set(joined) == set(range(len(graph.nodes)))
    assert networkx.is_weakly_connected(joined)
    assert sum(node.stands_for for node in graph.nodes) == len(graph_of(both[1]).nodes)
