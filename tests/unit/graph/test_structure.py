"""What makes two models the same but for their weights, and what is told where they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_text import with_constants

from loka_onnx.graph.structure import MOST, differences

TEXT = """<ir_version: 10, opset_import: ["" : 21]> g (float[batch,3] x, bool flag) => (float[batch,4] y) {
    [fc] h = Gemm<transB=1>(x, w, b)
    [reshape] r = Reshape(h, shape)
    [if] c = If(flag) <then_branch = then () => (float[1] t) { [t] t = Constant() },
                       else_branch = other () => (float[1] e) { [e] e = Constant() }>
    [add] y = Add(r, c)
}"""


def model(seed: int = 0) -> onnx.ModelProto:
    random = np.random.default_rng(seed)
    made = onnx.parser.parse_model(TEXT)
    for branch in made.graph.node[2].attribute:
        value = nh.from_array(random.random(1).astype(np.float32))
        branch.g.node[0].attribute.append(h.make_attribute("value", value))
    return with_constants(made, {"w": random.random((4, 3)), "b": random.random(4), "shape": [-1, 4]})


def found(tmp_path: Path, change: Callable[[onnx.GraphProto], object]) -> tuple[str, ...]:
    one, other = model(), model(1)
    change(other.graph)
    onnx.save(one, tmp_path / "one.onnx")
    onnx.save(other, tmp_path / "other.onnx")
    return differences(tmp_path / "one.onnx", tmp_path / "other.onnx")


def test_other_weights_are_the_same_structure_and_not_everything_is_told(tmp_path: Path) -> None:
    # Those in branches as well.
    assert found(tmp_path, lambda graph: None) == ()

    def rename(graph: onnx.GraphProto) -> None:
        graph.node.extend(h.make_node("Identity", ["y"], [f"o{i}"], f"n{i}") for i in range(20))

    assert len(found(tmp_path, rename)) == MOST


def _in_branch(graph: onnx.GraphProto) -> None:
    branch = next(a.g for a in graph.node[2].attribute if a.name == "then_branch")
    branch.node[0].attribute[0].t.CopyFrom(nh.from_array(np.zeros(2, np.float32)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda g: g.initializer[0].CopyFrom(nh.from_array(np.zeros((5, 3), np.float32), "w")),
            "weight 'w' was TensorProto.FLOAT[4, 3] and is TensorProto.FLOAT[5, 3]",
        ),
        (
            lambda g: g.initializer[2].CopyFrom(nh.from_array(np.array([4, -1]), "shape")),
            "weight 'shape' was TensorProto.INT64[2] [-1, 4] and is TensorProto.INT64[2] [4, -1]",
        ),
        (
            lambda g: setattr(g.node[3], "op_type", "Mul"),
            "node 'add' was Add<> from (r, c) to (y) and is Mul<> from (r, c) to (y)",
        ),
        (lambda g: setattr(g.node[0], "name", "first"), "node 'fc' is gone"),
        (
            lambda g: setattr(g.node[0].attribute[0], "i", 0),
            "node 'fc' was Gemm<transB=1> from (x, w, b) to (h) and is Gemm<transB=0> from (x, w, b) to (h)",
        ),
        (
            lambda g: g.node[3].input.__setitem__(0, "c"),
            "node 'add' was Add<> from (r, c) to (y) and is Add<> from (c, c) to (y)",
        ),
        (
            lambda g: setattr(g.input[0].type.tensor_type.shape.dim[1], "dim_value", 7),
            "input 'x' was TensorProto.FLOAT[?, 3] and is TensorProto.FLOAT[?, 7]",
        ),
        (
            _in_branch,
            "node 't' in then_branch of 'if' was Constant<value=TensorProto.FLOAT[1]> from () to (t) and is "
            "Constant<value=TensorProto.FLOAT[2]> from () to (t)",
        ),
    ],
)
def test_what_differs_is_named(
    tmp_path: Path, change: Callable[[onnx.GraphProto], object], said: str
) -> None:
    assert said in found(tmp_path, change)
