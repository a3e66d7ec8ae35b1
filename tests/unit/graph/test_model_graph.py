from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from pydantic import TypeAdapter

from loka_onnx.core import serde
from loka_onnx.core.model_graph import GraphEdge, GraphNode, ModelGraph, NodeKind
from loka_onnx.graph.model_graph import describe_graph, read_model_graph


def value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4])


def graph_of(nodes: list[onnx.NodeProto], inputs: list[str], outputs: list[str]) -> onnx.GraphProto:
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    return helper.make_graph(nodes, "g", [value(i) for i in inputs], [value(o) for o in outputs], [weight])


def two_layers() -> onnx.GraphProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="arch.fc1"),
        helper.make_node("Relu", ["a"], ["b"], name="arch/relu"),
        helper.make_node("MatMul", ["b", "w"], ["c"], name="arch.fc2+fc3"),
        helper.make_node("Add", ["c", "b"], ["d"], name="arch.fc2+fc3/split/add"),
        helper.make_node("Constant", [], ["k"], value_float=1.0),
        helper.make_node("Mul", ["d", "k"], ["y"], name="/mul"),
    ]
    return graph_of(nodes, ["x", "w"], ["y"])


def named(graph: ModelGraph) -> set[tuple[str, str, str]]:
    return {(graph.nodes[e.source].name, graph.nodes[e.target].name, e.tensor) for e in graph.edges}


def test_weights_and_constants_are_not_nodes_and_inputs_and_outputs_are():
    graph = describe_graph(two_layers(), ["arch.fc1", "arch.fc2+fc3"])
    assert [(n.name, n.kind, n.op, n.module, n.sites) for n in graph.nodes] == [
        ("x", NodeKind.INPUT, "", "", ()),
        ("arch.fc1", NodeKind.OPERATOR, "MatMul", "arch", ("arch.fc1",)),
        ("arch/relu", NodeKind.OPERATOR, "Relu", "arch", ()),
        ("arch.fc2+fc3", NodeKind.OPERATOR, "MatMul", "arch", ("arch.fc2+fc3",)),
        ("arch.fc2+fc3/split/add", NodeKind.OPERATOR, "Add", "arch", ()),
        ("/mul", NodeKind.OPERATOR, "Mul", "", ()),
        ("y", NodeKind.OUTPUT, "", "", ()),
    ]
    assert named(graph) == {
        ("x", "arch.fc1", "x"),
        ("arch.fc1", "arch/relu", "a"),
        ("arch/relu", "arch.fc2+fc3", "b"),
        ("arch/relu", "arch.fc2+fc3/split/add", "b"),
        ("arch.fc2+fc3", "arch.fc2+fc3/split/add", "c"),
        ("arch.fc2+fc3/split/add", "/mul", "d"),
        ("/mul", "y", "y"),
    }
    assert (graph.operators, graph.folded, graph.note) == (5, 0, "")


def test_what_a_branch_reads_its_node_reads():
    branch = helper.make_graph(
        [helper.make_node("Neg", ["b"], ["n"])], "then", [], [helper.make_tensor_value_info("n", 1, None)]
    )
    inner = helper.make_node("If", ["flag"], ["i"], then_branch=branch, else_branch=branch)
    nested = helper.make_graph([inner], "outer", [], [helper.make_tensor_value_info("i", 1, None)])
    nodes = [
        helper.make_node("Relu", ["x"], ["b"], name="/relu"),
        helper.make_node("If", ["flag"], ["y"], name="/if", then_branch=nested, else_branch=nested),
    ]
    graph = describe_graph(graph_of(nodes, ["x", "flag"], ["y"]), [])
    assert ("/relu", "/if", "b") in named(graph)
    assert ("flag", "/if", "flag") in named(graph)


def deep(blocks: int) -> onnx.GraphProto:
    """Blocks of two modules, between which data goes back and forth: no module is one piece."""
    nodes, x = [], "x"
    for block in range(blocks):
        stem = f"b{block}"
        nodes += [
            helper.make_node("MatMul", [x, "w"], [f"{stem}.a"], name=f"{stem}.left.fc"),
            helper.make_node("Relu", [f"{stem}.a"], [f"{stem}.r"], name=f"{stem}.right/relu"),
            helper.make_node("Neg", [f"{stem}.r"], [f"{stem}.n"], name=f"{stem}.left/neg"),
            helper.make_node("Add", [f"{stem}.n", f"{stem}.a"], [f"{stem}.y"], name=f"{stem}.left/add"),
        ]
        x = f"{stem}.y"
    return graph_of(nodes, ["x"], [x])


def sites_of(blocks: int) -> list[str]:
    return [f"b{block}.left.fc" for block in range(blocks)]


@pytest.mark.parametrize("most", [2, 7, 40, 81, 99])
def test_a_large_graph_is_folded_until_it_fits_and_no_node_and_no_site_is_lost(most):
    whole = describe_graph(deep(25), sites_of(25))
    assert len(whole.nodes) == 102
    graph = describe_graph(deep(25), sites_of(25), most)
    assert len(graph.nodes) <= most
    assert sum(node.stands_for for node in graph.nodes) == len(whole.nodes)
    assert graph.operators == 100
    assert sorted(s for node in graph.nodes for s in node.sites) == sorted(sites_of(25))
    folded = [node for node in graph.nodes if node.kind is NodeKind.FOLDED]
    assert graph.folded == sum(node.stands_for for node in folded)
    # The blocks, the input and the output are 27 parts.
    how = "by module" if most >= 27 else "in runs of consecutive nodes: no modules make it small enough"
    assert f"{graph.folded} nodes are drawn as {len(folded)}, {how}." in graph.note
    # ModelGraph itself refuses an edge that leads backwards: no cycle was made.


def test_a_module_that_data_leaves_and_comes_back_to_is_folded_in_two_parts():
    graph = describe_graph(deep(1), sites_of(1), 5)
    assert {n.name for n in graph.nodes if n.kind is NodeKind.FOLDED} == {"b0.left"}
    # `left.fc` is in front of `right`, the other two are behind it: joined, they would make a cycle.
    (folded,) = (n for n in graph.nodes if n.kind is NodeKind.FOLDED)
    assert (folded.stands_for, folded.sites) == (2, ())


def test_names_without_modules_are_folded_in_runs():
    chain = [helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"], name=f"/relu_{i}") for i in range(50)]
    graph = describe_graph(graph_of(chain, ["t0"], ["t50"]), [], 10)
    assert len(graph.nodes) <= 10
    assert sum(node.stands_for for node in graph.nodes) == 52
    assert graph.nodes[0].name == "t0 and 5 more"
    assert "in runs of consecutive nodes" in graph.note and "by module" not in graph.note


@st.composite
def random_graphs(draw) -> onnx.GraphProto:
    count = draw(st.integers(1, 30))
    modules = st.sampled_from(["", "a", "a.b", "a.b.c", "d", "d.e"])
    nodes = []
    for index in range(count):
        reads = draw(st.lists(st.integers(-1, index - 1), min_size=1, max_size=3))
        names = ["x" if r < 0 else f"t{r}" for r in reads]
        nodes.append(helper.make_node("Sum", names, [f"t{index}"], name=f"{draw(modules)}/sum_{index}"))
    return graph_of(nodes, ["x"], [f"t{count - 1}"])


@given(random_graphs(), st.integers(1, 20))
def test_every_fold_of_every_graph_keeps_every_connection(proto, most):
    whole, graph = describe_graph(proto, []), describe_graph(proto, [], most)
    assert len(graph.nodes) <= max(most, 1)
    assert sum(n.stands_for for n in graph.nodes) == len(whole.nodes)
    tensors = {edge.tensor for edge in whole.edges}
    assert {edge.tensor for edge in graph.edges} <= tensors
    pairs = [(edge.source, edge.target) for edge in graph.edges]
    assert len(pairs) == len(set(pairs))


def test_it_is_read_from_a_file_without_what_lies_beside_it(tmp_path: Path):
    model = helper.make_model(two_layers(), opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    assert read_model_graph(path, ["arch.fc1"]) == describe_graph(two_layers(), ["arch.fc1"])


def test_an_edge_leads_to_a_later_node():
    nodes = (GraphNode("a", NodeKind.INPUT), GraphNode("b", NodeKind.OUTPUT))
    for edge in (GraphEdge(1, 0, "t"), GraphEdge(0, 0, "t"), GraphEdge(0, 2, "t")):
        with pytest.raises(ValueError, match="an edge goes from a node to a later one"):
            ModelGraph(nodes, (edge,), 0)


def test_it_is_the_same_after_a_round_trip():
    graph = describe_graph(deep(5), sites_of(5), 12)
    read = TypeAdapter(ModelGraph).validate_python(serde.to_plain(graph))
    assert read == graph
    with pytest.raises(ValueError, match="Unexpected keyword argument"):
        TypeAdapter(ModelGraph).validate_python({**serde.to_plain(graph), "colour": "red"})
