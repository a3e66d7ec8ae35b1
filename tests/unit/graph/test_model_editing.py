"""Edits that a rewrite is made of: tensors keep names, readers and place; branches and sequences survive."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from loka_onnx.errors import InternalError, ModelError
from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.model import GraphModel, consumers, producer
from loka_onnx.graph.naming import merged_name
from loka_onnx.sessions.onnx_session import OnnxSession

ROWS = {"x": np.arange(12, dtype=np.float32).reshape(3, 4) - 5}
BODY = "[first] a = Relu(x) [second] b = Neg(a) [third] y = Add(a, b)"


def graph(folder: Path, body: str = BODY, outputs: str = "float[batch,4] y") -> GraphModel:
    onnx.save(parsed(body, inputs="float[batch,4] x", outputs=outputs), folder / "model.onnx")
    return GraphModel.load(folder / "model.onnx")


def outputs(model: GraphModel, folder: Path) -> dict[str, np.ndarray]:
    model.save(folder / "edited.onnx")
    proto = onnx.load(folder / "edited.onnx")
    onnx.checker.check_model(proto, full_check=True)
    values = ReferenceEvaluator(proto).run(None, ROWS)
    return dict(zip([output.name for output in proto.graph.output], values, strict=True))


def test_a_tensor_is_handed_over_once(tmp_path: Path) -> None:
    model = graph(tmp_path)
    a = model.node("first").outputs[0]
    model.hand_over(a, model.add("Abs", [model.inputs[0]], "instead"))
    assert a.name == "a"
    assert producer(a).op == "Abs"
    assert [node.name for node in consumers(a)] == ["second", "third"]
    np.testing.assert_array_equal(outputs(model, tmp_path)["y"], 0)
    assert [node.op for node in GraphModel.load(tmp_path / "edited.onnx").nodes] == ["Abs", "Neg", "Add"]
    model = graph(tmp_path)
    with pytest.raises(InternalError, match="'a' cannot be handed over to 'second'"):
        model.hand_over(model.node("first").outputs[0], model.node("second").outputs[0])


def test_nodes_behind_a_tensor_and_splits_have_their_values(tmp_path: Path) -> None:
    model = graph(tmp_path, outputs="float[batch,4] a, float[batch,4] y")
    a = model.node("first").outputs[0]
    inner = model.insert_behind(a, "Mul", [model.constant("two", np.float32(2))], "twice")
    assert producer(inner).name == "first"
    assert producer(a).name == "twice"
    found = outputs(model, tmp_path)
    np.testing.assert_array_equal(found["a"], 2 * np.maximum(ROWS["x"], 0))
    np.testing.assert_array_equal(found["y"], 0)
    model = graph(tmp_path)
    a = model.node("first").outputs[0]
    parts = model.split(a, [1, 3], -1, "parts")
    assert [list(part.shape) for part in parts] == [["batch", 1], ["batch", 3]]
    joined = model.add("Concat", parts[::-1], "joined", attrs={"axis": 1})
    model.replace_uses(model.node("third").outputs[0], joined)
    relu = np.maximum(ROWS["x"], 0)
    np.testing.assert_array_equal(outputs(model, tmp_path)["y"], np.roll(relu, -1, axis=1))


@pytest.mark.parametrize(
    "renewed_by",
    [
        lambda model, folder: model.save(folder / "between.onnx"),
        lambda model, folder: model.sorted_nodes(),
        lambda model, folder: model.to_proto(),
    ],
)
def test_what_is_added_after_the_list_of_nodes_was_renewed_is_in_the_graph(renewed_by, tmp_path):
    """Cleaning and sorting replace the list: a node that went into the old one was lost."""
    model = graph(tmp_path)
    renewed_by(model, tmp_path)
    model.replace_uses(model.node("third").outputs[0], model.add("Exp", [model.inputs[0]], "instead"))
    model.insert_behind(model.outputs[0], "Sub", [model.constant("one", np.float32(1))], "less")
    assert {"instead", "less"} <= {node.name for node in model.nodes}
    np.testing.assert_allclose(outputs(model, tmp_path)["y"], np.expm1(ROWS["x"]), rtol=1e-5, atol=1e-6)


def test_a_node_has_a_name_of_its_own(tmp_path: Path) -> None:
    model = graph(tmp_path)
    second = model.node("second")
    model.rename(second, "other")
    assert model.node("other") is second
    with pytest.raises(InternalError, match="no node named 'second'"):
        model.node("second")
    a = model.node("first").outputs[0]
    instead = model.add("Abs", [model.inputs[0]], "instead")
    maker = producer(instead)
    model.hand_over(a, instead)
    model.rename(maker, "first")
    assert model.node("first") is maker
    model = graph(tmp_path)
    node = model.node("second")
    for base, expected in (("third", "third_1"), ("a", "a"), ("third", "third_1")):
        model.rename(node, base)
        assert node.name == expected
    model.fresh_name("any")  # names are read from here on
    model.rename(node, "later")
    assert model.fresh_name("later") == "later_1"


def test_a_part_of_a_graph_computes_its_outputs_from_all_that_it_reads(tmp_path: Path) -> None:
    model = graph(tmp_path)
    tensors = model.tensors()
    part = model.extract([tensors["a"]], [tensors["b"], tensors["y"]])
    assert [node.name for node in part.nodes] == ["second", "third"]
    assert [node.name for node in model.nodes] == ["first", "second", "third"]
    proto = part.to_proto()
    onnx.checker.check_model(proto)
    b, y = ReferenceEvaluator(proto).run(None, {"a": ROWS["x"]})
    np.testing.assert_array_equal(b, -ROWS["x"])
    np.testing.assert_array_equal(y, 0)
    model = graph(tmp_path)
    with pytest.raises(InternalError, match="the part of the graph needs 'x', which it is not given"):
        model.extract([model.tensors()["b"]], model.outputs)


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        (("attention.query", "attention.key"), "attention.query+key"),
        (("a", "b", "c"), "a+b+c"),
        (("layers.0.fmb.project", "layers.0.lcb.mix"), "layers.0.fmb.project+lcb.mix"),
        (("experts.0.fc", "experts.1.fc"), "experts.0.fc+1.fc"),
        (tuple(f"experts.{i}.fc" for i in range(64)), "experts.0.fc+63_more"),
        (("m.fc", "m.fc"), "m.fc"),
        (("m", "m.fc"), "m+m.fc"),
    ],
)
def test_the_name_of_a_merged_site(names: tuple[str, ...], merged: str) -> None:
    assert merged_name(names) == merged


def test_removed_nodes_read_nothing_any_more(tmp_path: Path) -> None:
    model = graph(tmp_path)
    a, second = model.node("first").outputs[0], model.node("second")
    model.replace_uses(second.outputs[0], a)
    model.remove([second])
    assert [node.name for node in model.nodes] == ["first", "third"]
    assert [node.name for node in consumers(a)] == ["third"]
    np.testing.assert_array_equal(outputs(model, tmp_path)["y"], 2 * np.maximum(ROWS["x"], 0))


WEIGHTS = {
    "w": np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32),
    "one": np.array(1),
    "three": np.array(3),
    "yes": np.array(True),
}
VALUES = {
    "sequence": "q = SequenceConstruct(h, h)  k = SequenceAt(q, one)",
    "sequence of a loop": """
        e = SequenceEmpty()
        f = Loop(three, yes, e) <body = b (int64 i, bool c, seq(float[n,4]) a) => (bool d, seq(float[n,4]) z)
            { d = Identity(c)  z = SequenceInsert(a, h) }>
        k = SequenceAt(f, one)
    """,
    "sequence of a branch": """
        q = If(yes2) <then_branch = t () => (seq(float[n,4]) a) { a = SequenceConstruct(h) },
                      else_branch = e () => (seq(float[n,4]) b) { b = SequenceConstruct(h, h) }>
        zero = Sub(one, one)
        k = SequenceAt(q, zero)
    """,
    "optional": "o = Optional(h)  k = OptionalGetElement(o)",
    "optional of a sequence": """
        q = SequenceConstruct(h)  o = Optional(q)  p = OptionalGetElement(o)
        z = Sub(one, one)  k = SequenceAt(p, z)
    """,
}


def written(text: str, write_model, **more: np.ndarray) -> Path:
    body = f"s = Shape(x)  m = ReduceMax<keepdims=0>(s)  yes2 = Greater(m, one)\n h = MatMul(x, w)\n {text}"
    graph = f"g (float[n,4] x) => (float[n,4] y) {{ {body} y = Relu(k) }}"
    return write_model(graph, WEIGHTS | more)


@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_no_tensors_survive_copies(name: str, write_model, tmp_path: Path) -> None:
    path = written(VALUES[name], write_model)
    rows = {"x": np.ones((3, 4), np.float32)}
    expected = OnnxSession(path).run(rows)["y"]
    model = canonicalize(path).model
    copies = [model, model.copy(), model.copy().copy(), GraphModel.read_back(model.copy().export())]
    copies.append(model.extract(model.inputs, model.outputs))
    for number, copy in enumerate(copies):
        target = tmp_path / f"copy{number}.onnx"
        copy.save(target)
        onnx.checker.check_model(onnx.load(target), full_check=True)
        np.testing.assert_array_equal(OnnxSession(target).run(rows)["y"], expected)


BRANCH = """
    k = If(yes2) <then_branch = t () => (float[n,4] a) { a = MatMul(h, w) },
                  else_branch = e () => (float[n,4] b) { b = Relu(h) }>
"""


def test_names_and_readers_reach_into_branches(write_model) -> None:
    model = GraphModel.load(written(BRANCH, write_model))
    for graph in (model, model.copy(), GraphModel.read_back(model.export())):
        (node,) = consumers(graph.tensors()["h"])
        assert node.op == "If"
        assert node in graph.nodes
    model = GraphModel.load(written(BRANCH, write_model))
    assert model.fresh_name("a") != "a"
    assert model.fresh_name("k") != "k"
    assert model.fresh_name("free") == "free"


@pytest.mark.parametrize("end", ["seq(float[n,4]) z", "optional(float[n,4]) z"])
def test_ends_that_are_no_tensors_are_refused(end: str, write_model) -> None:
    make = "SequenceConstruct" if end.startswith("seq") else "Optional"
    graph = f"g (float[n,4] x) => (float[n,4] y, {end}) {{ y = MatMul(x, w)  z = {make}(y) }}"
    with pytest.raises(ModelError, match="is no tensor") as refused:
        canonicalize(write_model(graph, {"w": WEIGHTS["w"]}))
    assert refused.value.where == "output 'z'"


TAKEN = {
    "passed on": """
        k = If(yes) <then_branch = t () => (a) { a = Identity(h) },
                     else_branch = e () => (b) { b = Neg(h) }>""",
    "a constant": """
        p = If(yes) <then_branch = t () => (c) { c = Constant<value_float = 2.0>() },
                     else_branch = e () => (b) { b = Constant<value_float = 3.0>() }>
        k = Mul(h, p)""",
    "read inside too": """
        k, q = If(yes) <then_branch = t () => (a, c) { a = Exp(h)  c = Neg(a) },
                        else_branch = e () => (b, d) { b = Neg(h)  d = Neg(b) }>""",
    "one name in two branches": """
        p = If(yes) <then_branch = t () => (a) { c = Constant<value_float = 2.0>()  a = Mul(h, c) },
                     else_branch = e () => (b) { b = Neg(h) }>
        k = If(no) <then_branch = u () => (b) { b = Neg(h) },
                    else_branch = f () => (a) { c = Constant<value_float = 5.0>()  a = Mul(p, c) }>""",
    "a branch in a branch": """
        k = If(yes) <then_branch = t () => (a) {
            a = If(no) <then_branch = v () => (b) { b = Neg(h) },
                        else_branch = g () => (d) { d = MatMul(h, w) }>
        }, else_branch = e () => (b) { b = Neg(h) }>""",
    "an open one in a branch": """
        k = If(yes) <then_branch = t () => (a) {
            a = If(yes2) <then_branch = v () => (b) { b = Neg(h) },
                        else_branch = g () => (d) { d = MatMul(h, w) }>
        }, else_branch = e () => (b) { b = Neg(h) }>""",
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_branch_whose_condition_is_constant_takes_the_place_of_its_if(
    name: str, write_model, tmp_path
) -> None:
    path = written(TAKEN[name], write_model, no=np.array(False))
    rows = {"x": np.arange(12, dtype=np.float32).reshape(3, 4) - 5}
    model = canonicalize(path).model
    ifs = [node for node in model.nodes if node.op == "If"]
    assert len(ifs) == ("open" in name)
    assert len({node.name for node in model.nodes} - {""}) == len(model.nodes)
    stale = [
        (t.name, n.name, n.op) for t in model.tensors().values() for n in consumers(t) if n not in model.nodes
    ]
    assert not stale
    model.save(tmp_path / "flat.onnx")
    np.testing.assert_array_equal(
        OnnxSession(tmp_path / "flat.onnx").run(rows)["y"], OnnxSession(path).run(rows)["y"]
    )


PLAIN = {
    # torch.hstack as the TorchScript exporter writes it.
    "hstack": """
        q = SequenceConstruct(h, x)  f = SequenceAt(q, zero)
        s = Shape(f)  rank = Size(s)  vector = Equal(rank, one)
        k = If(vector) <then_branch = t () => (a) { a = ConcatFromSequence<axis = 0>(q) },
                        else_branch = e () => (b) { b = ConcatFromSequence<axis = 1, new_axis = 0>(q) }>""",
    "castlike": "l = Shape<end = 1>(x)  n1 = CastLike(half, l)  c = CastLike(n1, h)  k = Add(h, c)",
}


@pytest.mark.parametrize("name", PLAIN)
def test_sequences_and_types_that_are_known_are_written_plainly(name: str, write_model, tmp_path) -> None:
    text = f"h = MatMul(x, w)  {PLAIN[name]}"
    graph = f"g (float[n,4] x) => (float[n,m] y) {{ {text} y = Relu(k) }}"
    path = write_model(graph, WEIGHTS | {"zero": np.array(0), "half": np.array([1.5])})
    model = canonicalize(path).model
    assert not {"SequenceConstruct", "SequenceAt", "If", "CastLike"} & {node.op for node in model.nodes}
    model.save(tmp_path / "plain.onnx")
    rows = {"x": np.arange(12, dtype=np.float32).reshape(3, 4) - 5}
    np.testing.assert_array_equal(
        OnnxSession(tmp_path / "plain.onnx").run(rows)["y"], OnnxSession(path).run(rows)["y"]
    )
