"""Shapes that a graph computes: they follow the batch of an exported module. And chains of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from lowering_models import assert_same, exported, lowered, parsed, reference, run  # noqa: E402

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
REDUCTIONS = ("ReduceMean", "ReduceMax", "ReduceL2")
FIXED = {f"a{n}": np.array([n]) for n in range(1, 5)} | {"flat": np.array([0, -1]), "end": np.array([2**31])}


@st.composite
def chains(draw: st.DrawFn) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """A chain of operators that change values, shapes or the order of axes, over (batch, 3, 4)."""
    text, last, constants, shape = "", "x", dict(FIXED), (0, 3, 4)
    for number in range(draw(st.integers(1, 7))):
        axis = draw(st.integers(1, len(shape) - 1))
        before, length, behind = shape[:axis], shape[axis], shape[axis + 1 :]
        order = (0, *draw(st.permutations(range(1, len(shape)))))
        constants[f"w{shape[-1]}"] = np.linspace(-1, 1, shape[-1])
        steps = [
            (f"{draw(st.sampled_from(ELEMENTWISE))}({last})", shape),
            (f"Transpose<perm={list(order)}>({last})", tuple(shape[i] for i in order)),
            (f"Reshape({last}, flat)", (0, int(np.prod(shape[1:])))),
            (f"{draw(st.sampled_from(REDUCTIONS))}({last}, a{axis})", (*before, 1, *behind)),
            (f"Mul({last}, w{shape[-1]})", shape),
            (f"Add({last}, {last})", shape),
        ]
        if len(shape) < 5:
            steps.append((f"Unsqueeze({last}, a{axis})", (*before, 1, length, *behind)))
        if np.prod(shape[1:]) < 200:
            steps.append((f"Concat<axis={axis}>({last}, {last})", (*before, 2 * length, *behind)))
        if length > 1:
            steps.append((f"Slice({last}, a1, end, a{axis})", (*before, length - 1, *behind)))
        node, shape = draw(st.sampled_from(steps))
        text, last = f"{text} t{number} = {node}", f"t{number}"
    proto = parsed(
        f"{text} y = Identity({last})", constants, inputs="double[batch,3,4] x", output="double[] y"
    )
    return proto, shape[1:]


@hypothesis.given(chain=chains())
def test_chains_agree_with_the_reference(chain, tmp_path_factory) -> None:
    proto, shape = chain
    x = np.random.default_rng(1).normal(size=(5, 3, 4))
    found = run(lowered(proto, tmp_path_factory.mktemp("chain")), {"x": x})[0]
    assert found.shape == (5, *shape)
    assert_same(found, reference(proto, {"x": x})[0], 1e-13)
