"""Sites, their sizes, products that are none; foreign models: unsound ones are refused, odd ones pass."""

import re
from collections.abc import Callable
from math import isclose
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx_text import parsed, with_constants

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.site import SiteKind
from loka_onnx.errors import LokaError, ModelError
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.naming import NAME_SCOPES
from loka_onnx.graph.products import other_products
from loka_onnx.graph.sites import channel_axis, find_sites
from loka_onnx.graph.soundness import parsing
from loka_onnx.planning.costs import able_share, useful_flops

# Body of a graph over x, shapes of its weights; then K, N, rows per example and FLOPs per example.
LINEAR = {
    "gemm, W (K, N)": ("float[b,24] x", "y = Gemm(x, w)", (24, 40), (24, 40, 1, 2 * 24 * 40)),
    "gemm, transB, W (N, K)": ("float[b,24] x", "y = Gemm<transB=1>(x, w)", (40, 24), (24, 40, 1, 1920)),
    "gemm, transA, x (K, batch)": ("float[24,b] x", "y = Gemm<transA=1>(x, w)", (24, 40), (24, 40, 1, 1920)),
    "matmul, 2-D": ("float[b,24] x", "y = MatMul(x, w)", (24, 40), (24, 40, 1, 1920)),
    "matmul, 3-D x": ("float[b,7,24] x", "y = MatMul(x, w)", (24, 40), (24, 40, 7, 7 * 1920)),
    "matmul, weight on the left": ("float[b,24,5] x", "y = MatMul(w, x)", (40, 24), (24, 40, 5, 5 * 1920)),
    "matmul, batched weight": ("float[b,3,7,24] x", "y = MatMul(x, w)", (3, 24, 40), (24, 40, 21, 21 * 1920)),
    "matmul, one weight an expert": ("float[3,b,24] x", "y = MatMul(x, w)", (3, 24, 40), (24, 40, 3, 5760)),
    "matmul, W (K,)": ("float[b,24] x", "y = MatMul(x, w)", (24,), (24, 1, 1, 48)),
    "matmul, 3-D x, W (K,)": ("float[b,7,24] x", "y = MatMul(x, w)", (24,), (24, 1, 7, 7 * 48)),
}


@pytest.mark.parametrize("case", LINEAR)
def test_size_of_a_linear_site(case, write_model):
    source, body, shape, (k, n, rows, flops) = LINEAR[case]
    model = GraphModel.load(write_model(f"g ({source}) => (float[] y) {{ {body} }}", {"w": shape}))
    (site,) = find_sites(model)
    assert (site.kind, site.k, site.n, site.rows) == (SiteKind.LINEAR, k, n, rows)
    assert site.flops_per_example == flops
    assert site.is_fp8_able == (n >= 16)
    assert (site.activation.tensor, site.weight.tensor) == ("x", "w")
    assert site.weight.shape == shape
    assert shape[site.weight.contracting_axis] == k
    axis = channel_axis(site.weight)
    assert shape[axis] == n if len(shape) > 1 else axis == 0


FOLDED = "r = Reshape(x, flat) h = Relu(r) p = Gemm(h, w) y = Reshape(p, steps)"
STEPS = {
    "matmul, 3-D": ("float[b,7,24] x", "y = MatMul(x, w)"),
    "gemm of rows and steps": ("float[b,7,24] x", FOLDED),
    "steps first": ("float[b,7,24] x", "t = Transpose<perm=[1,0,2]>(x) " + FOLDED.replace("(x,", "(t,")),
    "steps beside one another": ("float[b,168] x", "e = Reshape(x, steps) " + FOLDED.replace("(x,", "(e,")),
    "the batch read from the shape": (
        "float[b,7,24] x",
        "s = Shape<end=1>(x) q = Concat<axis=0>(s, free, k) c = Reshape(x, q) "
        + FOLDED.replace("(x,", "(c,"),
    ),
    "a sequence": ("float[b,7,24] x", "s = SequenceConstruct(x) z = SequenceAt(s, at) y = MatMul(z, w)"),
}


@pytest.mark.parametrize("case", STEPS)
def test_rows_that_are_the_batch_times_a_length_are_counted(case, write_model):
    """The same product of every step, written in several ways; shape inference names no length of them."""
    source, body = STEPS[case]
    numbers = {"flat": [-1, 24], "steps": [-1, 7, 24], "free": [-1], "k": [24], "at": 0}
    constants = {name: np.array(value, np.int64) for name, value in numbers.items() if name in body}
    model = GraphModel.load(
        write_model(f"g ({source}) => (float[] y) {{ {body} }}", {"w": (24, 24), **constants})
    )
    (site,) = find_sites(model)
    assert (site.k, site.n, site.rows) == (24, 24, 7)
    assert site.flops_per_example == 7 * 2 * 24 * 24
    assert site.activation.shape[-1] == 24 and None in site.activation.shape


@pytest.mark.parametrize(
    ("inputs", "k", "n", "rows"),
    [("float[b,5,8] x, float[b,8,6] z", 8, 6, 5), ("float[b,2,5,8] x, float[b,2,8,6] z", 8, 6, 10)],
)
def test_size_of_an_interaction(inputs, k, n, rows, write_model):
    model = GraphModel.load(write_model(f"g ({inputs}) => (float[] y) {{ y = MatMul(x, z) }}"))
    (site,) = find_sites(model)
    assert (site.kind, site.k, site.n, site.rows) == (SiteKind.INTERACTION, k, n, rows)
    assert site.weight is None and [o.tensor for o in site.operands] == ["x", "z"]
    assert not site.is_fp8_able


def test_lengths_of_attention_with_the_heads_in_the_batch_are_known(write_model):
    """As FuxiCTR's DESTINE writes it: (2·batch, -1, 16), of which shape inference knows the 16."""
    body = (
        "s = Shape<end=1>(x) t = Mul(s, two) q = Concat<axis=0>(t, rest) h = Reshape(x, q) "
        "k = Transpose<perm=[0,2,1]>(h) a = MatMul(h, k) y = MatMul(a, h)"
    )
    numbers = {"two": np.array([2]), "rest": np.array([-1, 16])}
    scores, mixed = find_sites(
        GraphModel.load(write_model(f"g (float[b,19,32] x) => (float[] y) {{ {body} }}", numbers))
    )
    assert (scores.k, scores.n, scores.rows) == (16, 19, 38)
    assert (mixed.k, mixed.n, mixed.rows) == (19, 16, 38)
    rows = GraphModel.load(
        write_model("g (float[b,8] x, float[b,8] z) => (float[b,b] y) { t = Transpose(z) y = MatMul(x, t) }")
    )
    assert find_sites(rows)[0].n == 0, "a column for each row of the batch is no length"


@pytest.mark.parametrize(
    ("source", "body", "k", "rows"),
    [
        ("float[b,24] x", "y = LayerNormalization(x, w)", 24, 1),
        ("float[b,7,24] x", "y = LayerNormalization<axis=-1>(x, w)", 24, 7),
        ("float[b,2,24] x", "y = LayerNormalization<axis=1>(x, v)", 48, 1),
        ("float[b,24] x", "y = RMSNormalization(x, w)", 24, 1),
        ("float[b,24] x", "y = GroupNormalization<num_groups=4>(x, w, w)", 6, 4),
        ("float[b,24,5,7] x", "y = GroupNormalization<num_groups=4>(x, w, w)", 6 * 5 * 7, 4),
        ("float[b,24,5,7] x", "y = InstanceNormalization(x, w, w)", 5 * 7, 24),
        ("float[b,7,24] x", "y = LpNormalization(x)", 24, 7),
        ("float[b,7,24] x", "y = LpNormalization<axis=1>(x)", 7, 24),
    ],
)
def test_size_of_a_norm(source, body, k, rows, write_model):
    weights = {"w": (24,), "v": (2, 24)}
    model = GraphModel.load(
        write_model(f"g ({source}) => (float[] y) {{ {body} }}", weights, 23 if "RMS" in body else 21)
    )
    (site,) = find_sites(model)
    assert (site.kind, site.k, site.n, site.rows) == (SiteKind.NORM, k, 0, rows)
    assert site.flops_per_example == 0 and site.weight is None


def test_sites_come_in_topological_order_and_constants_are_none(write_model):
    model = GraphModel.load(
        write_model(
            "g (float[b,4] x) => (float[b,6] y) { c = MatMul(u, v)  y = MatMul(x, c) }",
            {"u": (4, 5), "v": (5, 6)},
        )
    )
    (site,) = find_sites(model)
    # Until the product of the constants is folded, what x meets is no constant.
    assert (site.output, site.kind) == ("y", SiteKind.INTERACTION)
    model = GraphModel.load(
        write_model(
            "g (float[b,4] x) => (float[b,1] y) {"
            " p = MatMul(x, u)  q = MatMul(x, v)  r = Add(p, q)  y = MatMul(r, w) }",
            {"u": (4, 5), "v": (4, 5), "w": (5, 1)},
        )
    )
    sites = find_sites(model, {"": ("a", "b")})
    assert [site.output for site in sites] == ["p", "q", "y"]
    assert [site.activation.tensor for site in sites] == ["x", "x", "r"]
    assert sites[0].merged_from == ("a", "b")


def graph_of(body: str, weights: dict[str, tuple[int, ...]], inputs: str, output: str) -> GraphModel:
    constants = {name: np.ones(shape) for name, shape in weights.items()}
    model = parsed(body, constants, inputs=inputs, outputs=output)
    onnx.checker.check_model(model)
    return GraphModel.from_proto(onnx.shape_inference.infer_shapes(model), Path())


# Operator, weights, inputs, output, and products of one example.
# fmt: off
CASES = {
    # 24 channels at 6 - 3 + 1 positions, each a sum over 16 channels and 3 taps.
    "convolution": ("Conv(x, w)", {"w": (24, 16, 3)}, "float[b,16,6] x", "float[b,24,4] y", 24 * 4 * 48),
    "groups": ("Conv<group=4>(x, w)", {"w": (24, 4, 1)}, "float[b,16,6] x", "float[b,24,6] y", 24 * 6 * 4),
    "pixels": ("Conv(x, w)", {"w": (8, 4, 3, 2)}, "float[b,4,5,5] x", "float[b,8,3,4] y", 8 * 12 * 4 * 6),
    # Each of 16 · 6 inputs meets 8 channels and 2 taps.
    "transposed": ("ConvTranspose(x, w)", {"w": (16, 8, 2)}, "float[b,16,6] x", "float[b,8,7] y", 96 * 16),
    "einsum": ('Einsum<equation="bnd,bme->bnm">(x, x)', {}, "float[b,4,8] x", "float[b,4,4] y", 4**2 * 8**2),
    # 5 steps; 4 gates of 3 read 7 inputs and 3 states.
    "lstm": ("LSTM<hidden_size=3>(x, w, r)", {"w": (1, 12, 7), "r": (1, 12, 3)},
             "float[5,b,7] x", "float[5,1,b,3] y", 5 * 12 * 10),
    "gru both ways": ('GRU<hidden_size=3, direction="bidirectional">(x, w, r)',
                      {"w": (2, 9, 7), "r": (2, 9, 3)}, "float[5,b,7] x", "float[5,2,b,3] y", 5 * 2 * 9 * 10),
    "integers": ("MatMulInteger(x, v)", {}, "uint8[b,8] x, uint8[8,3] v", "int32[b,3] y", 8 * 3),
    "any length": ("Conv(x, w)", {"w": (24, 16, 3)}, "float[b,16,l] x", "float[b,24,m] y", None),
    "any steps": ("RNN<hidden_size=3>(x, w, r)", {"w": (1, 3, 7), "r": (1, 3, 3)},
                  "float[t,b,7] x", "float[t,1,b,3] y", None),
}
# fmt: on


@pytest.mark.parametrize("case", CASES)
def test_operations_of_one_example(case: str) -> None:
    operator, weights, inputs, output, products = CASES[case]
    (found,) = other_products(graph_of(f"[n] y = {operator}", weights, inputs, output))
    assert (found.name, found.op_type) == ("n", re.match(r"\w+", operator)[0])
    assert found.flops_per_example == (None if products is None else 2 * products)
    assert found.reason


@pytest.mark.parametrize(
    ("operator", "weights", "products"),
    [
        ("Conv(r, w)", {"w": (24, 16, 3)}, 5 * 24 * 4 * 48),
        ('Einsum<equation="bnd,bnd->b">(r, r)', {}, 5 * 16 * 6),
    ],
)
def test_an_axis_that_is_the_batch_times_a_length_counts_by_that_length(operator, weights, products) -> None:
    body = f"r = Reshape(x, shape) [n] y = {operator}"
    constants = {name: np.ones(shape) for name, shape in weights.items()} | {"shape": np.array([-1, 16, 6])}
    model = parsed(body, constants, inputs="float[b,5,16,6] x", outputs="float[] y")
    (found,) = other_products(GraphModel.from_proto(onnx.shape_inference.infer_shapes(model), Path()))
    assert found.flops_per_example == 2 * products


@pytest.mark.parametrize("equation", ["bnd,bnm->bndm", "...d,...m->...dm", "bnd->bdn", "bnd->bn"])
def test_an_einsum_that_sums_no_products_is_none(equation: str) -> None:
    """FuxiCTR's AOANet writes outer products so: that counted as 19 % of all products."""
    operands = ", ".join("x" * (1 + equation.count(",")))
    body = f'y = Einsum<equation="{equation}">({operands})'
    model = parsed(body, {}, inputs="float[b,4,4] x", outputs="float[] y")
    assert other_products(GraphModel.from_proto(model, Path())) == ()


def test_branches_count_and_sites_do_not() -> None:
    graph = graph_of(
        "[s] h = MatMul(x, w) [choice] y = If (c) <"
        "then_branch = t () => (float[b,3] p) { [in_then] p = MatMul(h, v) },"
        "else_branch = e () => (float[b,3] q) { [in_else] q = MatMul(h, v) }>",
        {"w": (8, 4), "v": (4, 3)},
        "float[b,8] x, bool c",
        "float[b,3] y",
    )
    assert [site.name for site in find_sites(graph)] == ["s"]
    found = other_products(graph)
    assert [(each.name, each.op_type, each.reason) for each in found] == [
        ("in_then", "MatMul", "inside of If 'choice'"),
        ("in_else", "MatMul", "inside of If 'choice'"),
    ]
    assert {each.flops_per_example for each in found} <= {2 * 4 * 3, None}


def test_a_share_of_all_products_counts_what_is_no_site() -> None:
    """Half of the operations are a convolution's: what FP8 can have is the other half."""
    graph = graph_of(
        "[c] h = Conv(x, k) f = Flatten(h) [fc] y = MatMul(f, w)",
        {"k": (16, 16, 3), "w": (64, 48)},
        "float[b,16,6] x",
        "float[b,48] y",
    )
    model = ModelArtifact(
        Path(), "", 21, (), (), find_sites(graph), "test", other_products=other_products(graph)
    )
    assert (model.fp8_able_flops, model.product_flops) == (2 * 64 * 48, 4 * 64 * 48)
    (site,) = model.sites
    assert isclose(able_share(model, useful_flops(graph, site)), 0.5)


TEXT = """<ir_version: 10, opset_import: ["": 21, "own": 1]>
g (float[b,8] x) => (float[b,4] y) {
    h = own.layer(x, w)
    s = ReduceSum<keepdims=0>(x)
    zero = Constant<value = float {0.0}>()
    more = Greater(s, zero)
    r = If (more) <then_branch = t () => (p) { p = Relu(h) }, else_branch = f () => (q) { q = Identity(h) }>
    axes = Constant<value_ints=[0,1]>()
    z = Transpose<perm=[0,1]>(r)
    [fc] y = MatMul(z, v)
}
<domain: "own", opset_import: ["": 21]>
layer (a, m) => (o) { o = MatMul(a, m) }"""


def model() -> onnx.ModelProto:
    w, v = (np.random.default_rng(0).standard_normal(shape) for shape in ((8, 16), (16, 4)))
    return with_constants(onnx.parser.parse_model(TEXT), {"w": w, "v": v})


def node(of: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    return next(node for node in of.graph.node if node.op_type == kind)


def recursive(of: onnx.ModelProto) -> None:
    of.functions[0].node.append(helper.make_node("layer", ["a", "m"], ["again"], domain="own"))


def mutual(of: onnx.ModelProto) -> None:
    for name, called in (("one", "two"), ("two", "one")):
        body = [helper.make_node(called, ["a"], ["o"], domain="own")]
        of.functions.append(
            helper.make_function("own", name, ["a"], ["o"], body, [helper.make_opsetid("", 18)])
        )
    of.graph.node.append(helper.make_node("one", ["x"], ["unused"], domain="own"))


def vector(of: onnx.ModelProto) -> None:
    of.graph.initializer.append(numpy_helper.from_array(np.array([True, False]), "both"))
    node(of, "If").input[0] = "both"


def reshape(of: onnx.ModelProto, *sizes: int) -> None:
    of.graph.initializer[0].dims[:] = sizes


UNSOUND: dict[str, Callable[[onnx.ModelProto], object]] = {
    "a cycle": lambda m: node(m, "Transpose").input.__setitem__(0, "y"),
    "a function that calls itself": recursive,
    "functions that call one another": mutual,
    "a function that is not there": lambda m: m.functions.pop(),
    "an input that nothing makes": lambda m: node(m, "MatMul").input.__setitem__(0, "nowhere"),
    "a product of one input": lambda m: node(m, "MatMul").input.pop(),
    "a product without inputs": lambda m: node(m, "MatMul").ClearField("input"),
    "a factor that is left out": lambda m: m.graph.node.append(
        helper.make_node("Einsum", ["x", ""], ["unused"], equation="bi,ij->bj")
    ),
    "no outputs": lambda m: node(m, "MatMul").ClearField("output"),
    "an operator of nobody without a name and outputs": lambda m: m.graph.node.append(
        helper.make_node("Own", ["x"], [], domain="own")
    ),
    "a condition that is a vector": vector,
    "a branch without outputs": lambda m: node(m, "If").attribute[0].g.ClearField("output"),
    "a missing branch": lambda m: node(m, "If").attribute.pop(),
    "a constant without a value": lambda m: node(m, "Constant").attribute[0].ClearField("t"),
    "the value of an attribute of no function": lambda m: setattr(
        node(m, "Transpose").attribute[0], "ref_attr_name", "z"
    ),
    "an attribute of another type": lambda m: setattr(node(m, "Transpose").attribute[0], "type", 1),
    "a permutation of more axes": lambda m: node(m, "Transpose").attribute[0].ints.extend([7]),
    "an unknown opset": lambda m: setattr(m.opset_import[0], "version", 100),
    "no opset": lambda m: m.ClearField("opset_import"),
    "an operator that is not UTF-8": lambda m: m.ParseFromString(
        m.SerializeToString().replace(b"Transpose", b"\xff" * 9)
    ),
    "a weight of another shape": lambda m: reshape(m, 8, 17),
    "a weight of negative shape": lambda m: reshape(m, -8, -16),
    "a weight of no type": lambda m: setattr(m.graph.initializer[0], "data_type", 77),
    "two weights of one name": lambda m: m.graph.initializer.append(m.graph.initializer[0]),
    "half a weight": lambda m: setattr(m.graph.initializer[0], "raw_data", bytes(508)),
    "shapes that do not fit": lambda m: reshape(m, 16, 8),
}  # fmt: skip


@pytest.mark.parametrize("change", UNSOUND.values(), ids=UNSOUND.keys())
def test_an_unsound_model_is_refused(change: Callable[[onnx.ModelProto], object], tmp_path: Path) -> None:
    broken = model()
    change(broken)
    (tmp_path / "model.onnx").write_bytes(broken.SerializeToString())
    with pytest.raises(ModelError) as caught:
        take(tmp_path)
    assert str(tmp_path / "model.onnx") in str(caught.value) or caught.value.where
    assert len(str(caught.value)) < 2000 and not (tmp_path / "taken.onnx").exists()


def unsorted(of: onnx.ModelProto) -> None:
    nodes = list(of.graph.node)[::-1]
    del of.graph.node[:]
    of.graph.node.extend(nodes)


ODD: dict[str, Callable[[onnx.ModelProto], object]] = {
    "as it is": lambda m: None,
    "nodes out of order": unsorted,
    "an output without a shape": lambda m: m.graph.output[0].type.tensor_type.ClearField("shape"),
    "an output without a type": lambda m: m.graph.output[0].ClearField("type"),
    "a graph without a name": lambda m: setattr(m.graph, "name", ""),
    "a very long note": lambda m: setattr(m, "doc_string", "x" * 100000),
    "names of scopes that are no list": lambda m: node(m, "MatMul").metadata_props.add(
        key=NAME_SCOPES, value="1+1"
    ),
    "names of scopes nested without end": lambda m: node(m, "MatMul").metadata_props.add(
        key=NAME_SCOPES, value="[" * 9000
    ),
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD.keys())
def test_an_odd_model_that_runs_comes_through_with_its_outputs(change, tmp_path):
    """onnx's checker refuses several of these; ONNX Runtime does not."""
    odd = model()
    change(odd)
    (tmp_path / "model.onnx").write_bytes(odd.SerializeToString())
    rows = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    (before,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": rows})
    take(tmp_path)
    assert "model-local functions inlined" in canonicalize(tmp_path / "model.onnx").notes
    (after,) = onnxruntime.InferenceSession(tmp_path / "taken.onnx").run(None, {"x": rows})
    np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6)


def take(place: Path) -> None:
    import_onnx(place / "model.onnx", place / "taken.onnx", (OutputSpec("y", OutputKind.LOGIT, "label"),))


def test_inputs_that_are_left_out_at_the_end_are_not_there(write_model):
    """Optimizing a LayerNormalization with "" for its bias, ONNX Runtime 1.31 ends the process."""
    body = "y = LayerNormalization(x, w, ) z = Clip(y, , lo)"
    path = write_model(
        "g (float[b,8] x) => (float[b,8] z) { " + body + " }", {"w": (8,), "lo": np.float32(0)}
    )
    written = onnx.load(path)
    written.graph.node[0].input[:] = ["x", "w", ""]
    onnx.save(written, path)
    taken = canonicalize(path).model.to_proto()
    assert [list(node.input) for node in taken.graph.node] == [["x", "w"], ["y", "", "lo"]]


def test_our_own_errors_and_the_lack_of_memory_pass_the_door_as_they_are(tmp_path: Path) -> None:
    for error in (MemoryError(), LokaError("ours")):
        with pytest.raises(type(error)) as caught, parsing(tmp_path, "read"):
            raise error
        assert caught.value is error
    with pytest.raises(ModelError) as told, parsing(tmp_path, "read"):
        raise KeyError("x" * 100000)
    assert isinstance(told.value.__cause__, KeyError) and len(str(told.value)) < 2000
