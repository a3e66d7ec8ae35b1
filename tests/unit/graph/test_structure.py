"""Models that are the same but for their weights, and dimensions that a graph computes, without a run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_text import parsed, with_constants

from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.model import GraphModel, Tensor, values_of
from loka_onnx.graph.shape_values import dimensions, read_dimensions, read_number, reshaped
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
def test_what_differs_is_named(tmp_path, change, said):
    assert said in found(tmp_path, change)


CONSTANTS = {
    "zero": np.array([0]),
    "one": np.array([1]),
    "two": np.array([2]),
    "end": np.array([2**31 - 1]),
    "minus": np.array([-1]),
    "picked": np.array([2, 0]),
    "second": np.array(1),
    "number": np.array([3.5], np.float32),
    "long": np.arange(100),
    "one_by_two": np.array([1, 2]),
}


def tensor(body: str, folder: Path, inputs: str = "float[batch,4,8] x") -> Tensor:
    """The tensor ``r`` of a graph."""
    onnx.save(parsed(body, CONSTANTS, inputs=inputs, outputs="int64[n] r"), folder / "m.onnx")
    return GraphModel.load(folder / "m.onnx").tensors()["r"]


READ = {
    "shape": ("r = Shape(x)", ("batch", 4, 8)),
    "part_of_a_shape": ("r = Shape<start=1, end=2>(x)", (4,)),
    "last_of_a_shape": ("r = Shape<start=-2>(x)", (4, 8)),
    "gathered": ("s = Shape(x) r = Gather(s, picked)", (8, "batch")),
    "one_gathered": ("s = Shape(x) i = Gather(s, second) r = Unsqueeze(i, zero)", (4,)),
    "sliced": ("s = Shape(x) r = Slice(s, one, end)", (4, 8)),
    "sliced_in_steps": ("s = Shape(x) r = Slice(s, zero, end, zero, two)", ("batch", 8)),
    "joined": ("s = Shape<end=1>(x) r = Concat<axis=0>(s, minus, two)", ("batch", -1, 2)),
    "through_other_types": (
        "s = Shape(x) i = Cast<to=6>(s) f = Cast<to=1>(i) r = Cast<to=7>(f)",
        ("batch", 4, 8),
    ),
    "reshaped": ("s = Shape<end=1>(x) t = Reshape(s, minus) r = Identity(t)", ("batch",)),
    "product": ("s = Shape<start=1>(x) p = ReduceProd<keepdims=0>(s) r = Unsqueeze(p, zero)", (32,)),
    "of_another_tensor": ("y = Relu(x) r = Shape(y)", ("batch", 4, 8)),
}
UNREAD = {
    "product_with_the_batch": "s = Shape(x) p = ReduceProd<keepdims=0>(s) r = Unsqueeze(p, zero)",
    "sum": "s = Shape(x) r = Add(s, one)",
    "data": "r = Cast<to=7>(x)",
    "gathered_by_data": "s = Shape(x) i = NonZero(x) j = Reshape(i, minus) r = Gather(s, j)",
    "row_of_a_matrix": "s = Shape<start=1>(x) t = Reshape(s, one_by_two) r = Gather(t, zero)",
    "beyond_its_end": "s = Shape<start=1>(x) r = Gather(s, two)",
    "flags": "s = Shape(x) f = Cast<to=9>(s) r = Cast<to=7>(f)",
    "too_long_for_dimensions": "r = Identity(long)",
    "partly_unknown": "s = Shape(x) t = Add(s, one) r = Concat<axis=0>(s, t)",
}


@pytest.mark.parametrize("case", READ)
def test_what_is_computed_from_dimensions_is_read(case: str, tmp_path: Path) -> None:
    body, expected = READ[case]
    assert read_dimensions(tensor(body, tmp_path)) == expected


@pytest.mark.parametrize("case", UNREAD)
def test_anything_else_is_not_read(case: str, tmp_path: Path) -> None:
    assert read_dimensions(tensor(UNREAD[case], tmp_path)) is None


def test_numbers_and_dimensions_without_a_name(tmp_path: Path) -> None:
    shape = "s = Shape<start=1>(x) p = ReduceProd<keepdims=0>(s) r = Cast<to=1>(p)"
    assert read_number(tensor(shape, tmp_path)) == 32.0
    graph = GraphModel.load(tmp_path / "m.onnx")
    made = {name: graph.constant(name, np.asarray(value)) for name, value in CONSTANTS.items()}
    assert read_number(made["number"]) == 3.5
    assert read_number(made["long"]) is None
    assert read_number(tensor("r = Shape<end=1>(x)", tmp_path)) is None
    read = read_dimensions(tensor("r = Shape(x)", tmp_path, "float[?,8] x"))
    assert read is not None
    assert read[1] == 8
    assert isinstance(read[0], str)
    assert reshaped(("n", 0), (0, "n"), zero_copies=False) == (0, "n")
    result = tensor("r = Shape(x)", tmp_path)
    result.shape = None
    assert dimensions(result) is None


RESHAPED = {
    "as_written": (("n", 4, 8), ("n", 32), ("n", 32)),
    "rest_is_a_number": (("n", 4, 8), ("n", -1), ("n", 32)),
    "rest_is_a_name": (("n", 4, 8), (-1, 32), ("n", 32)),
    "zero_copies": (("n", 4, 8), (0, 2, -1), ("n", 2, 16)),
    "rest_is_one": (("n", 4), ("n", 4, -1), ("n", 4, 1)),
    "rest_is_a_product_with_a_name": (("n", 4, 8), (-1, 8), None),
    "a_name_that_is_not_there": (("n", 4, 8), ("m", -1), None),
    "not_divisible": (("n", 4), ("n", 3, -1), None),
    "zero_beyond_the_rank": (("n",), (0, 0), None),
    "same_name_twice": (("n", "n", 4), ("n", -1), None),
}


@pytest.mark.parametrize("case", RESHAPED)
def test_reshaped_dimensions(case: str) -> None:
    before, target, after = RESHAPED[case]
    assert reshaped(before, target, zero_copies=True) == after


def test_padding_that_layers_compute_from_their_input_is_folded(write_model):
    """The second length is known once the first padding is; shape inference does not follow a division."""
    layer = (
        "s{0} = Shape({1}) n{0} = Gather(s{0}, at) m{0} = Sub(to{0}, n{0}) p{0} = Div(m{0}, two)"
        " z{0} = Concat<axis=0>(none, none, none, p{0}) {2} = Pad({1}, z{0})"
    )
    text = f"{layer.format(0, 'x', 'h')} r = Tanh(h) {layer.format(1, 'r', 'y')}"
    values = {"at": [1], "two": [2], "none": [0], "to0": [12], "to1": [16]}
    path = write_model(
        f"g (float[b,4] x) => (float[b,c] y) {{ {text} }}", {n: np.array(v) for n, v in values.items()}
    )
    model = canonicalize(path).model
    assert [node.op for node in model.nodes] == ["Pad", "Tanh", "Pad"]
    pads = [values_of(node.inputs[1]).tolist() for node in model.nodes if node.op == "Pad"]
    assert pads == [[0, 0, 0, 4], [0, 0, 0, 4]]
