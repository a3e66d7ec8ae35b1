"""Shapes that a graph computes: they follow the batch of an exported module. And chains of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import onnx
import pytest
from onnx import helper

torch = pytest.importorskip("torch", reason="needs torch")
from lowering_models import assert_same, exported, lowered, model_of, parsed, reference, run  # noqa: E402

from loka_onnx.errors import EngineError  # noqa: E402

RANDOM = np.random.default_rng(0)
NUMBERS = {
    **{f"v{n}": np.array([n]) for n in (0, 1, 2, 3, 4, 6, 12)},
    "minus": np.array([-1]),
    **{f"s{n}": np.array(n) for n in (0, 1, 2)},
}
SHAPES = {
    "reshape to a computed shape": (
        "n = Shape(x) b = Gather(n, s0) u = Unsqueeze(b, v0) t = Concat<axis=0>(u, v12) y = Reshape(x, t)"
    ),
    "reshape by a slice of the shape": (
        "n = Shape<start=0, end=1>(x) t = Concat<axis=0>(n, v4, v3) y = Reshape(x, t)"
    ),
    "arithmetic on lengths": (
        "n = Shape(x) a, b, c = Split<num_outputs=3>(n) p = Mul(b, c) q = Div(p, v2) r = Add(q, v6)"
        " k = Sub(r, v0) m = Max(k, v1) t = Concat<axis=0>(a, m) y = Reshape(x, t)"
    ),
    "product of lengths": (
        "n = Shape(x) w = Slice(n, v1, v3) p = ReduceProd(w, v0) z = Size(x) u = Unsqueeze(z, v0)"
        " b = Div(u, p) t = Concat<axis=0>(b, p) y = Reshape(x, t)"
    ),
    "expand as TorchScript writes it": (
        "n = Shape(x) b = Gather(n, v0) g = Concat<axis=0>(b, v1, v4) k = Shape(g) o = ConstantOfShape"
        "<value=int64[1] {1}>(k) m = Mul(o, minus) e = Equal(g, m) t = Where(e, o, g) h = Expand(row, t)"
        " y = Add(x, h)"
    ),
    "tensors as long as the batch": (
        "n = Shape<start=0, end=1>(x) q = Squeeze(n) r = Range(s0, q, s1) c = Cast<to=1>(r)"
        " z = ConstantOfShape(n) a = Add(c, z) u = Unsqueeze(a, v1) k = ReduceSum(x, v1) f = Squeeze(k, v1)"
        " y = Mul(f, u)"
    ),
    "the scale of an attention": (
        "n = Shape(x) d = Gather(n, s2) f = Cast<to=1>(d) q = Sqrt(f) y = Div(x, q)"
    ),
    "a mean over a length": (
        "k = ReduceSum(x, v1) n = Shape(x) d = Gather(n, s1) f = Cast<to=1>(d) y = Div(k, f)"
    ),
    "numbers that meet a tensor": (
        "n = Shape(x) f = Cast<to=1>(n) m = ReduceMax<keepdims=0>(x) y = Add(f, m)"
    ),
    "repeats and bounds": (
        "n = Shape(x) l = Gather(n, v1) h = Sub(l, v1) c = Slice(x, v0, h, v1) r = Concat<axis=0>(v1, h, v1)"
        " y = Tile(c, r)"
    ),
    "a comparison of lengths": (
        "n = Shape(x) a = Gather(n, v1) b = Gather(n, v2) g = Greater(a, b) w = Where(g, v2, v12)"
        " t = Concat<axis=0>(minus, w) y = Reshape(x, t)"
    ),
    "a lookup and its flattening": (
        "e = Gather<axis=0>(table, ids) n = Shape(ids) b = Gather(n, v0) t = Concat<axis=0>(b, minus)"
        " y = Reshape(e, t)"
    ),
}


def feeds(text: str, batch: int) -> dict[str, Any]:
    if "ids" in text:
        return {"ids": RANDOM.integers(-9, 9, size=(batch, 3))}
    return {"x": RANDOM.normal(size=(batch, 3, 4)).astype(np.float32)}


@pytest.mark.parametrize("name", SHAPES)
def test_computed_shapes_follow_the_batch(name: str, tmp_path: Path) -> None:
    text = SHAPES[name]
    inputs = "int64[batch,3] ids" if "ids" in text else "float[batch,3,4] x"
    tables = {"row": RANDOM.normal(size=(1, 1, 4)), "table": RANDOM.normal(size=(9, 4))}
    constants = NUMBERS | {name: value.astype(np.float32) for name, value in tables.items()}
    proto = parsed(text, constants, inputs=inputs)
    model = lowered(proto, tmp_path)
    program = exported(model, feeds(text, 6))
    # None is that of the trace.
    for batch in (1, 3, 17):
        given = feeds(text, batch)
        expected = reference(proto, given)[0]
        assert_same(run(model, given)[0], expected, 1e-5)
        assert_same(run(program, given)[0], expected, 1e-5)


def test_a_shape_that_depends_on_elements_is_an_error(tmp_path: Path) -> None:
    proto = parsed("c = Cast<to=7>(x) [bad] y = Reshape(x, c)", {}, inputs="float[batch] x")
    with pytest.raises(EngineError, match="'shape' depends on the elements of a tensor") as caught:
        run(lowered(proto, tmp_path), {"x": np.array([1, 2], np.float32)})
    assert caught.value.where == "node 'bad' (Reshape)"


# Chains -----------------------------------------------------------------------------------------------

ELEMENTWISE = ("Tanh", "Relu", "Neg", "Sigmoid", "Abs", "Cos", "Softsign", "Identity")


@st.composite
def chains(draw: st.DrawFn) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """A chain of operators that change values, shapes or the order of axes, over (batch, 3, 4)."""
    nodes, constants = [], []
    shape: tuple[Any, ...] = ("batch", 3, 4)
    last = "x"
    kinds = ("elementwise", "transpose", "reshape", "unsqueeze", "concat", "slice", "reduce", "scale", "sum")
    for step in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(kinds))
        name, reads, attributes = f"t{step}", [last], {}
        axis = draw(st.integers(1, len(shape) - 1)) if len(shape) > 1 else 0

        def number(tag: str, *values: int, at: int = step) -> str:
            constants.append(onnx.numpy_helper.from_array(np.array(values), f"{tag}{at}"))
            return f"{tag}{at}"

        if kind == "elementwise" or axis == 0:
            op = draw(st.sampled_from(ELEMENTWISE))
        elif kind == "transpose":
            op, order = "Transpose", (0, *draw(st.permutations(range(1, len(shape)))))
            attributes, shape = {"perm": order}, tuple(shape[i] for i in order)
        elif kind == "reshape":
            op, length = "Reshape", int(np.prod(shape[1:]))
            reads, shape = [last, number("r", 0, -1)], ("batch", length)
        elif kind == "unsqueeze" and len(shape) < 5:
            op, reads = "Unsqueeze", [last, number("u", axis)]
            shape = (*shape[:axis], 1, *shape[axis:])
        elif kind == "concat" and np.prod(shape[1:]) < 200:
            op, reads, attributes = "Concat", [last, last], {"axis": axis}
            shape = (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
        elif kind == "slice" and shape[axis] > 1:
            op, reads = "Slice", [last, number("a", 1), number("b", 2**31), number("c", axis)]
            shape = (*shape[:axis], shape[axis] - 1, *shape[axis + 1 :])
        elif kind == "reduce":
            op, reads = (
                draw(st.sampled_from(["ReduceMean", "ReduceMax", "ReduceL2"])),
                [last, number("e", axis)],
            )
            shape = (*shape[:axis], 1, *shape[axis + 1 :])
        elif kind == "scale":
            op, reads = "Mul", [last, f"w{step}"]
            constants.append(onnx.numpy_helper.from_array(np.linspace(-1, 1, shape[-1]), f"w{step}"))
        else:
            op, reads = "Add", [last, last]
        nodes.append(helper.make_node(op, reads, [name], name, **attributes))
        last = name
    infos = [
        [helper.make_tensor_value_info(tensor, onnx.TensorProto.DOUBLE, [None] * rank)]
        for tensor, rank in (("x", 3), (last, len(shape)))
    ]
    return model_of(nodes, *infos, constants), shape[1:]


@hypothesis.given(chain=chains())
def test_chains_agree_with_the_reference(chain, tmp_path_factory) -> None:
    proto, shape = chain
    x = np.random.default_rng(1).normal(size=(5, 3, 4))
    found = run(lowered(proto, tmp_path_factory.mktemp("chain")), {"x": x})[0]
    assert found.shape == (5, *shape)
    assert_same(found, reference(proto, {"x": x})[0], 1e-13)
