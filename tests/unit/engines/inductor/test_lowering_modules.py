"""The module as a whole: names, weights, devices, computed shapes, chains of operators, errors."""

from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import onnx
import pytest
from onnx import helper

torch = pytest.importorskip("torch", reason="needs torch")
from lowering_models import assert_same, exported, lowered, reference, renamed, run  # noqa: E402
from onnx_text import parsed  # noqa: E402

from loka_onnx.engines.inductor.lowering.model import lower  # noqa: E402
from loka_onnx.engines.inductor.lowering.node import OPERATORS, Node, Operator  # noqa: E402
from loka_onnx.engines.inductor.lowering.values import Value  # noqa: E402
from loka_onnx.errors import EngineError, ModelError  # noqa: E402

RANDOM = np.random.default_rng(0)
RANKER = """
    [bottom] h0 = Gemm<transB=1>(dense, bottom_weight, bottom_bias)
    n0 = LayerNormalization(h0, gain, shift)
    first, second = Split<axis=1, num_outputs=2>(ids)
    e1 = Gather(table, first) e2 = Gather(table, second)
    one = Unsqueeze(n0, axis)
    z = Concat<axis=1>(e1, e2, one)
    zt = Transpose<perm=[0,2,1]>(z)
    [dot] s = MatMul(z, zt)
    flat = Flatten(s)
    folded = Transpose<perm=[1,0]>(top_weight)
    top = Concat<axis=1>(flat, n0)
    a = Relu(top)
    [head] logit = MatMul(a, folded)
    probability = Sigmoid(logit)
"""


def ranker() -> onnx.ModelProto:
    shapes = {"bottom_weight": (16, 8), "bottom_bias": 16, "top_weight": (1, 25), "table": (50, 16)}
    shapes |= {"gain": 16, "shift": 16}
    constants = {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    proto = parsed(
        RANKER,
        constants | {"axis": np.array([1])},
        inputs="float[batch,8] dense, int64[batch,2] ids",
        outputs="float[batch,1] logit, float[batch,1] probability",
    )
    return renamed(proto, {"bottom_weight": "bottom.weight", "bottom_bias": "bottom.bias"})


def rows(batch: int) -> dict[str, np.ndarray]:
    return {
        "dense": RANDOM.normal(size=(batch, 8)).astype(np.float32),
        "ids": RANDOM.integers(0, 50, size=(batch, 2)),
    }


def test_a_ranker_runs_at_every_batch_size(tmp_path: Path) -> None:
    proto = ranker()
    model = lowered(proto, tmp_path)
    assert (model.input_names, model.output_names) == (("dense", "ids"), ("logit", "probability"))
    program = exported(model, rows(4))
    for batch in (1, 7, 64):
        given = rows(batch)
        expected = reference(proto, given)
        for runner in (model, program):
            for found, wanted in zip(run(runner, given), expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * max(1, np.abs(wanted).max()))
    kernels = {site.site: site.kernel for site in model.sites.values()}
    assert kernels == dict.fromkeys(("bottom", "dot", "head"), "dense")
    assert model.sites["dot"].operands == ("float32", "float32")


def test_long_weights_are_held_once(tmp_path: Path) -> None:
    values = {"w": RANDOM.normal(size=(8, 1024)), "b": RANDOM.normal(size=1024)}
    proto = parsed("[fc] y = Gemm(x, w, b)", values, inputs="float[batch,8] x", outputs="float[batch,1024] y")
    constants = vars(lowered(proto, tmp_path))["_constants"]
    assert {name: constants[name].array is None for name in values} == {"w": True, "b": False}


def test_an_input_of_fixed_length_stays_fixed(tmp_path: Path) -> None:
    inputs = "float[batch,3] x, float[1,3] row, float one"
    proto = parsed("s = Mul(row, one) y = Add(x, s)", inputs=inputs)
    model = lowered(proto, tmp_path)
    assert model.batched == {"x"}
    given = {"x": np.ones((4, 3), np.float32), "row": np.ones((1, 3), np.float32), "one": np.float32(2)}
    program = exported(model, given)
    for batch in (1, 9):
        x = np.ones((batch, 3), np.float32)
        np.testing.assert_array_equal(run(program, given | {"x": x})[0], x + 2)


def test_names_that_a_module_cannot_have(tmp_path: Path) -> None:
    proto = parsed(
        "a = Add(x, train) b = Mul(a, forward) y = Sub(b, dotted)",
        {name: np.ones(3, np.float32) * k for k, name in enumerate(("train", "forward", "dotted"), 2)},
        inputs="float[batch,3] x",
    )
    model = lowered(renamed(proto, {"dotted": "block.0/weight:0"}), tmp_path)
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(run(model, {"x": x})[0], (x + 2) * 3 - 4)
    names = {name for name, _ in model.named_buffers()}
    assert names == {"weights.train_1", "weights.forward_1", "weights.block_0_weight_0"}


def test_weights_beside_the_model(tmp_path: Path) -> None:
    proto = ranker()
    inline = run(lowered(proto, tmp_path), rows_ := rows(3))
    folder = tmp_path / "external"
    folder.mkdir()
    options = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 16}
    onnx.save(proto, folder / "model.onnx", **options)
    model = lower(folder / "model.onnx")
    for found, expected in zip(run(model, rows_), inline, strict=True):
        np.testing.assert_array_equal(found, expected)
    (folder / "weights.bin").unlink()
    with pytest.raises(ModelError, match="are missing"):
        lower(folder / "model.onnx")


def test_functions_of_the_model_are_inlined(tmp_path: Path) -> None:
    nodes, opsets = [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 21)]
    twice = helper.make_function("local", "Twice", ["a"], ["b"], nodes, opsets)
    proto = parsed("y = Neg(x)", inputs="float[batch] x")
    proto.graph.node.insert(0, helper.make_node("Twice", ["x"], ["t"], "t", domain="local"))
    proto.graph.node[1].input[0] = "t"
    proto.functions.append(twice)
    proto.opset_import.append(helper.make_opsetid("local", 1))
    x = np.array([1, 2], np.float32)
    assert run(lowered(proto, tmp_path), {"x": x})[0].tolist() == [-2, -4]


def test_what_grows_when_it_is_folded_is_computed_at_run_time(tmp_path: Path) -> None:
    proto = parsed(
        "big = Expand(row, shape) small = Add(row, row) h = Add(x, big) y = Add(h, small)",
        {"row": np.ones(4, np.float32), "shape": np.array([9000, 4])},
        inputs="float[batch,4] x",
    )
    model = lowered(proto, tmp_path)
    sizes = {name: value.numel() for name, value in model.named_buffers()}
    assert sizes == {"weights.row": 4, "weights.small": 4}
    x = np.zeros((9000, 4), np.float32)
    np.testing.assert_array_equal(run(model, {"x": x})[0], x + 3)


def test_constants_and_inputs_may_be_outputs(tmp_path: Path) -> None:
    proto = parsed(
        "y = Neg(x) s = Shape(x)",
        {"c": np.array([1.5], np.float32)},
        inputs="float[batch,3] x",
        outputs="float[batch,3] y, float[1] c, int64[2] s, float[batch,3] x",
    )
    x = np.ones((2, 3), np.float32)
    found = run(lowered(proto, tmp_path), {"x": x})
    assert [value.tolist() for value in found[1:3]] == [[1.5], [2, 3]]
    np.testing.assert_array_equal(found[3], x)


def test_a_module_moves_to_another_device(tmp_path: Path) -> None:
    """On ``meta`` nothing is computed, but every operand must be there."""
    proto = parsed(
        "n = Shape<start=0, end=1>(x) q = Squeeze(n) r = Range(zero, q, one) c = Cast<to=1>(r)"
        " u = Unsqueeze(c, axis) a = Mul(x, u) [fc] y = MatMul(a, w)",
        {"zero": np.array(0), "one": np.array(1), "axis": np.array([1]), "w": np.ones((3, 5), np.float32)},
        inputs="float[batch,3] x",
    )
    model = lowered(proto, tmp_path).to("meta")
    assert {value.device.type for value in model.buffers()} == {"meta"}
    (found,) = model(torch.empty(4, 3, device="meta"))
    assert (found.device.type, found.shape) == ("meta", (4, 5))


# Shapes that a graph computes follow the batch ------------------------------------------------------------

NUMBERS = {
    **{f"v{n}": np.array([n]) for n in (0, 1, 2, 3, 4, 6, 12)},
    "minus": np.array([-1]),
    **{f"s{n}": np.array(n) for n in (0, 1, 2)},
}
SHAPES = {
    "reshape to a computed shape": (
        "n = Shape(x) b = Gather(n, s0) u = Unsqueeze(b, v0) t = Concat<axis=0>(u, v12) y = Reshape(x, t)"
    ),
    "reshape by a slice": "n = Shape<start=0, end=1>(x) t = Concat<axis=0>(n, v4, v3) y = Reshape(x, t)",
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
    "a length that is replaced, as `index_fill` is exported": (
        "q = ReduceSum(x, v1) n = Shape(q) t = ScatterElements<axis=0>(n, v1, v2) y = Expand(q, t)"
    ),
    "tensors as long as the batch": (
        "n = Shape<start=0, end=1>(x) q = Squeeze(n) r = Range(s0, q, s1) c = Cast<to=1>(r)"
        " z = ConstantOfShape(n) a = Add(c, z) u = Unsqueeze(a, v1) k = ReduceSum(x, v1) f = Squeeze(k, v1)"
        " y = Mul(f, u)"
    ),
    "scale of an attention": "n = Shape(x) d = Gather(n, s2) f = Cast<to=1>(d) q = Sqrt(f) y = Div(x, q)",
    "a mean": "k = ReduceSum(x, v1) n = Shape(x) d = Gather(n, s1) f = Cast<to=1>(d) y = Div(k, f)",
    "numbers that meet a tensor": "n = Shape(x) f = Cast<to=1>(n) m = ReduceMax<keepdims=0>(x) y = Add(f, m)",
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
    text += f" y = Identity({last})"
    return parsed(
        text, constants, inputs="double[batch,3,4] x", outputs="double[] y", keeps_double=True
    ), shape[1:]


@hypothesis.given(chain=chains())
def test_chains_agree_with_the_reference(chain, tmp_path_factory) -> None:
    proto, shape = chain
    x = np.random.default_rng(1).normal(size=(5, 3, 4))
    found = run(lowered(proto, tmp_path_factory.mktemp("chain")), {"x": x})[0]
    assert found.shape == (5, *shape)
    assert_same(found, reference(proto, {"x": x})[0], 1e-13)


# Errors -----------------------------------------------------------------------------------------------


def with_operator(op_type: str, domain: str = "") -> onnx.ModelProto:
    proto = parsed("[place] y = Neg(x)", {}, inputs="float[batch] x")
    proto.graph.node[0].op_type, proto.graph.node[0].domain = op_type, domain
    if domain:
        proto.opset_import.append(helper.make_opsetid(domain, 1))
    return proto


@pytest.mark.parametrize(("op_type", "domain"), [("GatherElementz", ""), ("Blend", "com.acme")])
def test_an_unknown_operator_is_named_with_its_domain(op_type: str, domain: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"operator {op_type} of domain '{domain or 'ai.onnx'}'") as caught:
        lowered(with_operator(op_type, domain), tmp_path)
    assert caught.value.where == f"node 'place' ({domain}{'.' if domain else ''}{op_type})"


def test_what_cannot_be_run_is_named(tmp_path: Path) -> None:
    proto = parsed("[mix] y = MatMul(x, w)", {"w": np.ones((4, 2), np.float32)}, inputs="float[batch,3] x")
    with pytest.raises(EngineError, match=r"node 'mix' \(MatMul\): torch refuses the node") as caught:
        run(lowered(proto, tmp_path), {"x": np.ones((2, 3), np.float32)})
    assert "evidence: inputs 'x' float32[2, 3], 'w' float32[4, 2]" in str(caught.value)
    with pytest.raises(EngineError, match="the graph has 2 inputs\n  evidence: it was given 1"):
        lowered(ranker(), tmp_path)(torch.ones(1, 8))
    proto = parsed("y = Identity(x)", {}, inputs="string[batch] x", outputs="string[batch] y")
    with pytest.raises(EngineError, match="tensor 'x': values of type STRING are not lowered"):
        lowered(proto, tmp_path)
    proto = parsed("c = Cast<to=7>(x) [bad] y = Reshape(x, c)", {}, inputs="float[batch] x")
    with pytest.raises(EngineError, match="'shape' depends on the elements of a tensor") as caught:
        run(lowered(proto, tmp_path), {"x": np.array([1, 2], np.float32)})
    assert caught.value.where == "node 'bad' (Reshape)"


@pytest.mark.parametrize(("wide", "stored"), [((1,), "float32"), ((), "bfloat16")])
def test_scales_of_an_operator_may_be_stored_in_float32(wide, stored, tmp_path, monkeypatch) -> None:
    seen = []

    def scale(node: Node, x: torch.Tensor, factor: Value) -> torch.Tensor:
        seen.append(node.tensor(factor).dtype)
        return x * node.tensor(factor).to(torch.float32)

    monkeypatch.setitem(OPERATORS, ("com.acme", "Scale"), Operator(scale, raw=True, wide=wide))
    proto = with_operator("Scale", "com.acme")
    proto.graph.node[0].input.append("s")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1.5, "bfloat16"), "s"))
    assert run(lowered(proto, tmp_path), {"x": np.array([4], np.float32)})[0].tolist() == [6]
    assert [str(kind) for kind in seen] == [f"torch.{stored}"]
