"""Branches and values that are no tensors: copies, extracts and files keep them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from loka_onnx.errors import ModelError
from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.model import GraphModel, consumers
from loka_onnx.sessions.onnx_session import OnnxSession

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


def test_what_a_branch_reads_is_read_by_the_node_that_holds_it(write_model) -> None:
    model = GraphModel.load(written(BRANCH, write_model))
    for graph in (model, model.copy(), GraphModel.read_back(model.export())):
        (node,) = consumers(graph.tensors()["h"])
        assert node.op == "If"
        assert node in graph.nodes


def test_a_fresh_name_is_in_no_branch(write_model) -> None:
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
