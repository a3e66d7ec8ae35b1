"""The request form answers like the model on plain rows, and computes a user's part once."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_text import parsed
from random_graphs import RandomGraph
from rewrite_models import evaluate, widened
from shape_models import feeds

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.rewrite import INDEX, Applied, Declined
from loka_onnx.export.torch_module import export_torch
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.requests.share_users import share_users
from loka_zoo import FeatureSpec, create

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(0)
SIZES = ((1, 1), (1, 5), (3, 1), (4, 9), (7, 7))
"""Users and candidates."""
U, C = "float[batch,4] u", "float[batch,6] c"
WEIGHTS = {
    "w4": RANDOM.standard_normal((4, 3)), "w10": RANDOM.standard_normal((10, 3)),
    "w10t": RANDOM.standard_normal((3, 10)), "w2": RANDOM.standard_normal((2, 5)),
    "b3": RANDOM.standard_normal(3), "table": RANDOM.standard_normal((9, 2)), "one": np.array([1]),
    "two": np.array([2]), "flat": np.array([-1, 10]), "rows2": np.array([-1, 2]),
    "tokens": np.array([-1, 2, 2]), "scale": np.array(0.05), "zero": np.array(3, np.int8),
}  # fmt: skip


def shared_form(model, shared, folder):
    onnx.save(model, folder / "plain.onnx")
    graph = GraphModel.load(folder / "plain.onnx")
    said = share_users(graph, shared)
    if any(isinstance(each, Applied) for each in said):
        graph.save(folder / "request.onnx")
        onnx.checker.check_model(folder / "request.onnx", full_check=True)
    return graph, said


def answers_alike(model, shared, draw=None, tolerance=2e-05, in_double=False):
    """Compare both forms on requests of several sizes, users in any order, to `tolerance` in ONNX Runtime,
    and to 1e-9 in float64 if asked for; return the request form.
    """
    draw = draw or (lambda rows, seed: feeds(model, rows, seed))
    with TemporaryDirectory() as name:
        folder = Path(name)
        _, said = shared_form(model, shared, folder)
        assert any(isinstance(each, Applied) for each in said), said
        sessions = [
            OnnxSession(folder / f"{form}.onnx", SessionOptions(1, optimize=optimize))
            for optimize in (False, True)
            for form in ("plain", "request")
        ]
        wide = [widened(onnx.load(folder / f"{form}.onnx")) for form in ("plain", "request")]
        for seed, (users, candidates) in enumerate(SIZES):
            drawn = draw(max(users, candidates), seed)
            index = np.random.default_rng(seed).integers(0, users, candidates)
            request = {n: v[: users if n in shared else candidates] for n, v in drawn.items()}
            plain = {n: v[index] if n in shared else v for n, v in request.items()}
            if in_double:
                doubles = [
                    {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in rows.items()}
                    for rows in (plain, {**request, INDEX: index})
                ]
                # The evaluator computes both branches of a sigmoid, of which one may overflow.
                with np.errstate(over="ignore", invalid="ignore"):
                    exact, made = (evaluate(*each) for each in zip(wide, doubles, strict=True))
                for output, expected in exact.items():
                    scale = max(1.0, float(np.abs(expected).max()))
                    np.testing.assert_allclose(made[output], expected, rtol=0, atol=1e-9 * scale)
            for whole, apart in zip(sessions[::2], sessions[1::2], strict=True):
                for output, expected in whole.run(plain).items():
                    got = apart.run({**request, INDEX: index})[output]
                    assert got.shape == expected.shape and len(got) == candidates
                    np.testing.assert_allclose(got, expected, tolerance, tolerance)
        return onnx.load(folder / "request.onnx").graph


def on_users(graph: onnx.GraphProto, *shared: str) -> set[str]:
    """Names of the operators that compute on users: no Gather by the index in front of them."""
    known, found = {"u", "u_ids", *shared, *(t.name for t in graph.initializer)}, set()
    for node in graph.node:
        if {name for name in node.input if name} <= known:
            known |= set(node.output)
            found.add(node.op_type)
    return found


@given(st.integers(0, 2**32 - 1), st.sampled_from(["x", "ids"]))
@settings(max_examples=3)
def test_random_rankers_answer_alike(seed, shared):
    answers_alike(RandomGraph(seed).model(), (shared,), tolerance=0.05, in_double=True)


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.sampled_from(["x", "ids"]))
@settings(max_examples=80)
def test_many_random_rankers_answer_alike(seed, shared):
    answers_alike(RandomGraph(seed).model(), (shared,), tolerance=0.05, in_double=True)


@pytest.mark.parametrize(("body", "k"), [
    ("j = Concat<axis=1>(u, c) y = MatMul(j, w10)", [4, 6]),
    ("j = Concat<axis=1>(c, u) p = MatMul(j, w10) y = Add(p, b3)", [4, 6]),
    ("j = Concat<axis=-1>(u, c) y = Gemm<transB=1>(j, w10t, b3)", [4, 6]),
    ("a = Relu(u) i = Concat<axis=1>(c) j = Concat<axis=1>(a, i) y = MatMul(j, w10)", [4, 6]),
])  # fmt: skip
def test_a_linear_over_users_and_candidates_has_a_product_of_each(body, k):
    graph = answers_alike(parsed(body, WEIGHTS, inputs=f"{U}, {C}"), ("u",))
    weights = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    assert sorted(weights[n.input[1]][0] for n in graph.node if n.op_type == "Gemm") == k
    assert "Gemm" in on_users(graph)


@pytest.mark.parametrize(("body", "inputs", "computed"), [
    # Fields of one table, looked up together, and flattened in front of a layer.
    ("j = Concat<axis=1>(c_ids, u_ids) e = Gather(table, j) f = Reshape(e, flat) y = MatMul(f, w10)",
        "int64[batch,2] u_ids, int64[batch,3] c_ids", {"Gather", "Gemm"}),
    # Tokens: a product and a softmax of each token by itself.
    ("a = Reshape(u, tokens) b = Reshape(c, three) t = Concat<axis=1>(a, b) p = MatMul(t, w2)"
        " s = Softmax(p) y = ReduceSum<keepdims=0>(s, one)", f"{U}, {C}", {"MatMul", "Softmax"}),
    # A column of the batch, transposed; and attention of candidates over what users did.
    ("h = Reshape(u, tokens) k = MatMul(h, square) t = Transpose<perm=[0,2,1]>(k)"
        " q = Reshape(c, three) y = MatMul(q, t)", f"{U}, {C}", {"MatMul", "Transpose"}),
    # Rows of the history in one axis with the batch: gathered once they are apart again.
    ("h = Reshape(u, rows2) k = Gemm(h, w2) r = Relu(k) b = Reshape(r, back)"
        " m = ReduceMean<keepdims=0>(b, one)" " j = Concat<axis=1>(m, c) y = MatMul(j, w11)", f"{U}, {C}",
        {"Gemm", "ReduceMean"}),
])  # fmt: skip  # fmt: skip
def test_what_users_decide_is_computed_on_users(body, inputs, computed):
    more = {
        "three": np.array([-1, 3, 2]), "back": np.array([-1, 2, 5]), "square": RANDOM.standard_normal((2, 2)),
        "w11": RANDOM.standard_normal((11, 3)),
    }  # fmt: skip
    graph = answers_alike(parsed(body, WEIGHTS | more, inputs=inputs), (inputs.split()[1].strip(","),))
    assert computed <= on_users(graph)


@pytest.mark.parametrize(
    "body",
    [
        # Over the batch: a user with more candidates has more rows there.
        "h = MatMul(u, w4) s = Softmax<axis=0>(h) d = MatMul(c, w63) y = Add(s, d)",
        "h = MatMul(u, w4) m = ReduceMax(h, first) n = Sub(h, m) d = MatMul(c, w63) y = Add(n, d)",
        "h = MatMul(u, w4) s = CumSum(h, start) d = MatMul(c, w63) y = Add(s, d)",
        # Both sides, in a branch too.
        "h = MatMul(u, w4) m = ReduceMean<keepdims=0>(c) z = Greater(m, scale) y = If(z) <"
        "then_branch = t () => (float[batch,3] p) { p = Relu(h) },"
        "else_branch = e () => (float[batch,3] q) { q = Neg(h) }>",
        # The shape of another tensor, and rows that cannot be gathered as they are.
        "h = MatMul(u, w4) v = Shape<start=0,end=1>(h) k = Concat<axis=0>(v, thirds) r = Reshape(h, k)"
        " w = MatMul(c, w63) e = Reshape(w, k) y = Add(r, e)",
        "h = MatMul(u, w4) f = Reshape(h, column) g = MatMul(c, w63) e = Reshape(g, column) s = Add(f, e)"
        " y = Reshape(s, rows3)",
    ],
)
def test_what_mixes_rows_computes_on_candidates(body):
    more = {
        "w63": RANDOM.standard_normal((6, 3)), "first": np.array([0]), "start": np.array(0),
        "thirds": np.array([3, 1]), "column": np.array([-1, 1]), "rows3": np.array([-1, 3]),
    }  # fmt: skip
    graph = answers_alike(parsed(body, WEIGHTS | more, inputs=f"{U}, {C}"), ("u",))
    assert on_users(graph) <= {"MatMul", "Gemm", "Reshape", "Shape", "Concat", "Relu"}


def test_a_quantized_product_stays_whole_and_outputs_of_users_alone_have_every_row():
    outputs = "float[batch,3] y, float[batch,1] z"
    body = "h = MatMul(u, w4) y = Relu(h) z = ReduceSum(c, one)"
    model = parsed(body, WEIGHTS, inputs=f"{U}, {C}", outputs=outputs)
    assert on_users(answers_alike(model, ("u",))) == {"MatMul", "Relu"}
    weight = RANDOM.integers(-100, 100, (10, 3)).astype(np.int8)
    body = (
        "r = Relu(u) j = Concat<axis=1>(r, c) q = QuantizeLinear(j, scale, zero)"
        " d = DequantizeLinear(q, scale, zero)"
        " w = DequantizeLinear(wq, scale) p = MatMul(d, w) uq = QuantizeLinear(r, scale, zero)"
        " ud = DequantizeLinear(uq, scale, zero) v = DequantizeLinear(vq, scale)"
        " o = MatMul(ud, v) y = Add(p, o)"
    )
    model = parsed(body, WEIGHTS | {"wq": weight, "vq": weight[:4]}, inputs=f"{U}, {C}")
    graph = answers_alike(model, ("u",), tolerance=1e-6)
    # The product of the user alone is computed once, with its Q and DQ.
    assert on_users(graph) >= {"Relu", "QuantizeLinear", "DequantizeLinear", "MatMul"}
    readers = {name: node.op_type for node in graph.node for name in node.input}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    makers = {name: node for node in graph.node for name in node.output}
    assert all(makers[n.input[0]].op_type == "DequantizeLinear" for n in products) and len(products) == 2
    assert readers[INDEX] == "Gather"


@pytest.mark.parametrize(("body", "inputs", "shared"), [
    ("h = MatMul(u, w4) y = Relu(h)", U, ("u",)),
    ("j = Add(u, c) y = MatMul(j, w4)", "float[batch,4] u, float[batch,4] c", ("u",)),
    ("h = MatMul(u, w4) y = Add(h, c)", "float[8,4] u, float[8,3] c", ("u",)),
    (f"h = MatMul(u, w4) y = Add(h, {INDEX})", f"float[batch,4] u, float[batch,3] {INDEX}", ("u",)),
])  # fmt: skip
def test_a_graph_without_a_request_form_is_declined_with_the_reason(body, inputs, shared, tmp_path):
    _, said = shared_form(parsed(body, WEIGHTS, inputs=inputs), shared, tmp_path)
    (declined,) = said
    assert isinstance(declined, Declined) and declined.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "dcnv2", "wukong", "interformer"])
def test_models_of_the_zoo_answer_alike(name, tmp_path):
    pytest.importorskip("torch", reason="needs torch: the zoo's models are exported")
    features = FeatureSpec((("item", 30), ("genre", 5)), ("age", "price"), history=("item", 6))
    has_history = name == "interformer"
    features = features if has_history else FeatureSpec(features.categorical, features.numeric)
    rows = {"dense": np.zeros((2, 2), np.float32), "ids": np.zeros((2, 2), np.int64)}
    if has_history:
        rows["history"] = np.zeros((2, 6), np.int64)
    specs = [OutputSpec("logit", OutputKind.LOGIT, None)]
    made = export_torch(create(name, features, "tiny"), rows, tmp_path / "model.onnx", specs)

    def draw(rows: int, seed: int) -> dict[str, Array]:
        random = np.random.default_rng(seed)
        drawn = {"dense": random.standard_normal((rows, 2)).astype(np.float32)}
        drawn["ids"] = random.integers(0, 5, (rows, 2))
        return drawn | ({"history": random.integers(0, 30, (rows, 6))} if has_history else {})

    shared = ("dense", "history") if has_history else ("dense",)
    graph = answers_alike(onnx.load(made.path), shared, draw)
    assert {"Gemm", "MatMul"} & on_users(graph, *shared)
