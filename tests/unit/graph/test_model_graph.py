from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from loka_onnx.core.model_graph import GraphEdge, GraphNode, ModelGraph, NodeKind
from loka_onnx.graph.model_graph import describe_graph, read_model_graph


def value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4])


def made(name: str, op: str, inputs: str, output: str) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=name)


def graph_of(nodes: list[onnx.NodeProto], inputs: list[str], outputs: list[str]) -> onnx.GraphProto:
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    return helper.make_graph(nodes, "g", [value(i) for i in inputs], [value(o) for o in outputs], [weight])


def two_layers() -> onnx.GraphProto:
    nodes = [
        made("arch.fc1", "MatMul", "x w", "a"),
        made("arch/relu", "Relu", "a", "b"),
        made("arch.fc2+fc3", "MatMul", "b w", "c"),
        made("arch.fc2+fc3/split/add", "Add", "c b", "d"),
        helper.make_node("Constant", [], ["k"], value_float=1.0),
        made("/mul", "Mul", "d k", "y"),
    ]
    return graph_of(nodes, ["x", "w"], ["y"])


def named(graph: ModelGraph) -> set[tuple[str, str, str]]:
    return {(graph.nodes[e.source].name, graph.nodes[e.target].name, e.tensor) for e in graph.edges}


def test_weights_and_constants_are_not_nodes_and_inputs_and_outputs_are():
    graph = describe_graph(two_layers(), ["arch.fc1", "arch.fc2+fc3"])
    fc1, relu, fc2, add = names = ("arch.fc1", "arch/relu", "arch.fc2+fc3", "arch.fc2+fc3/split/add")
    operators = zip(names, ("MatMul", "Relu", "MatMul", "Add"), ((fc1,), (), (fc2,), ()), strict=True)
    assert [(n.name, n.kind, n.op, n.module, n.sites) for n in graph.nodes] == [
        ("x", NodeKind.INPUT, "", "", ()),
        *((name, NodeKind.OPERATOR, op, "arch", sites) for name, op, sites in operators),
        ("/mul", NodeKind.OPERATOR, "Mul", "", ()),
        ("y", NodeKind.OUTPUT, "", "", ()),
    ]
    inner = {(fc1, relu, "a"), (relu, fc2, "b"), (relu, add, "b"), (fc2, add, "c")}
    assert named(graph) == {("x", fc1, "x"), *inner, (add, "/mul", "d"), ("/mul", "y", "y")}
    assert (graph.operators, graph.folded, graph.note) == (5, 0, "")


def test_what_a_branch_reads_its_node_reads():
    branches = "then_branch = {0} () => ({0}y) {{ {1} }}, else_branch = {0}e () => ({0}z) {{ {2} }}"
    nested = branches.format("n", "ny = Neg(b)", "nz = Neg(b)")
    outer = branches.format("o", f"oy = If(flag) <{nested}>", "oz = Identity(flag)")
    graph = onnx.parser.parse_graph(
        f"g (float[b,4] x, bool flag) => (float[b,4] y) {{ [relu] b = Relu(x) [if] y = If(flag) <{outer}> }}"
    )
    assert {("relu", "if", "b"), ("flag", "if", "flag")} <= named(describe_graph(graph, []))


def deep(blocks: int) -> onnx.GraphProto:
    """Blocks of two modules, between which data goes back and forth: no module is one piece."""
    nodes, x = [], "x"
    for block in range(blocks):
        stem = f"b{block}"
        nodes += [
            made(f"{stem}.left.fc", "MatMul", f"{x} w", f"{stem}.a"),
            made(f"{stem}.right/relu", "Relu", f"{stem}.a", f"{stem}.r"),
            made(f"{stem}.left/neg", "Neg", f"{stem}.r", f"{stem}.n"),
            made(f"{stem}.left/add", "Add", f"{stem}.n {stem}.a", f"{stem}.y"),
        ]
        x = f"{stem}.y"
    return graph_of(nodes, ["x"], [x])


SITES = [f"b{block}.left.fc" for block in range(25)]


@pytest.mark.parametrize("most", [2, 7, 40, 81, 99])
def test_a_large_graph_is_folded_until_it_fits_and_no_node_and_no_site_is_lost(most):
    whole = describe_graph(deep(25), SITES)
    assert len(whole.nodes) == 102
    graph = describe_graph(deep(25), SITES, most)
    assert len(graph.nodes) <= most
    assert sum(node.stands_for for node in graph.nodes) == len(whole.nodes)
    assert graph.operators == 100
    assert sorted(s for node in graph.nodes for s in node.sites) == sorted(SITES)
    folded = [node for node in graph.nodes if node.kind is NodeKind.FOLDED]
    assert graph.folded == sum(node.stands_for for node in folded)
    # The blocks, the input and the output are 27 parts.
    how = "by module" if most >= 27 else "in runs of consecutive nodes: no modules make it small enough"
    assert f"{graph.folded} nodes are drawn as {len(folded)}, {how}." in graph.note
    # ModelGraph itself refuses an edge that leads backwards: no cycle was made.


def test_a_module_that_data_leaves_is_folded_in_two_parts_and_no_module_in_runs():
    graph = describe_graph(deep(1), SITES, 5)
    # `left.fc` is in front of `right`, the other two are behind it: joined, they would make a cycle.
    (folded,) = (n for n in graph.nodes if n.kind is NodeKind.FOLDED)
    assert (folded.name, folded.stands_for, folded.sites) == ("b0.left", 2, ())
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


def test_it_is_read_from_a_file_and_edges_lead_to_later_nodes(tmp_path: Path):
    model = helper.make_model(two_layers(), opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    assert read_model_graph(path, ["arch.fc1"]) == describe_graph(two_layers(), ["arch.fc1"])
    nodes = (GraphNode("a", NodeKind.INPUT), GraphNode("b", NodeKind.OUTPUT))
    for edge in (GraphEdge(1, 0, "t"), GraphEdge(0, 0, "t"), GraphEdge(0, 2, "t")):
        with pytest.raises(ValueError, match="an edge goes from a node to a later one"):
            ModelGraph(nodes, (edge,), 0)
