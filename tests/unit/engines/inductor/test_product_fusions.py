"""What fusions of products and concatenations take and leave, and that the fused graph computes the same."""

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from fusion_models import (
    BATCH,
    BF16,
    FP8,
    RANDOM,
    K,
    Model,
    bf16,
    close,
    close_quantized,
    fused,
    half,
    ops,
    product,
    quantized,
    rounded,
    run,
    sites_of,
    unchanged,
)

from loka_onnx.core.formats import Precision
from loka_onnx.engines.inductor import compile as compiling
from loka_onnx.engines.inductor.backend import InductorBackend
from loka_onnx.engines.inductor.fusions import DOMAIN, FusionReport, fuse, planned, products
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph


def with_epilogue(z, behind, rows, c):
    """What follows a product, in float64."""
    if "cross" in behind:
        x0 = rounded(rows @ c["m"])
        return x0 * z + x0
    return np.maximum(z, 0.25 * z if "leaky" in behind else 0.0) if "relu" in behind else z


def check(graph, model, x, z):
    """The output y is quantized; any other is not."""
    for name, found in zip(model.outputs, run(graph, x), strict=True):
        if name == "y":
            close_quantized(found, z, float(model.constants["s2"]))
        else:
            close(found, z)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("behind", ["", "relu", "leaky relu", "cross"])
@pytest.mark.parametrize("outputs", ["wide", "quantized", "quantized and wide"])
def test_a_product_takes_along_what_follows(bias, behind, outputs, tmp_path):
    model = product(bias, behind, outputs)
    graph, report = fused(model, tmp_path)
    assert sites_of(report, "quantized-product") == [("fc",)]
    left = ops(graph)
    assert f"{DOMAIN}::QuantizedProduct" in left
    assert not {"Gemm", "Relu", "LeakyRelu", "Add", "Mul"} & set(left)
    assert left.count("QuantizeLinear") == 1
    c, x = model.wide(), model.rows()
    rows = rounded(x)
    q = np.clip(rows / c["s"], -448, 448).astype(np.float32).astype(FP8).astype(np.float64)
    z = (q * c["s"]) @ (c["w"] * c["ws"][:, None]).T + (c["b"] if bias else 0.0)
    check(graph, model, x, with_epilogue(z, behind, rows, c))


@pytest.mark.parametrize("behind", ["", "relu", "leaky relu", "cross"])
def test_a_product_of_int8_takes_along_what_follows(behind, tmp_path):
    model = product(True, behind, "quantized and wide")
    stored = np.rint(model.constants["w"].astype(np.float32)).clip(-128, 127).astype(np.int8)
    model = model.then("", w=stored, wz=np.zeros(48, np.int8), zero=np.array(0, np.int8))
    graph, report = fused(model, tmp_path)
    assert sites_of(report, "quantized-product") == [("fc",)]
    assert not {"Gemm", "Relu", "Add", "Mul"} & set(ops(graph))
    c, x = model.wide(), model.rows()
    rows = rounded(x)
    q = np.rint(rows / c["s"]).clip(-128, 127).astype(np.int64)
    z = (q @ stored.T.astype(np.int64)) * (c["s"] * c["ws"]) + c["b"]
    z = with_epilogue(z, behind, rows, c)
    outputs = dict(zip(model.outputs, run(graph, x), strict=True))
    close(outputs["wide"], z)
    # The CPU's form rounds Z to BF16 in front of the Q.
    steps = np.rint(np.clip(z / c["s2"], -128, 127))
    off = np.abs(outputs["y"] / c["s2"] - steps)
    assert (off <= 1 + np.abs(steps) * 2.0**-7).all()
    # Another zero point is no INT8 product of the kernels.
    shifted = model.then("", zero=np.array(3, np.int8))
    assert "quantized-product" not in unchanged(shifted, tmp_path).fused


def test_both_scales_are_multiplied_when_the_graph_is_fused(tmp_path):
    """An engine would multiply them in every request, in a kernel of its own."""
    model = product(bias=True, behind="relu")
    graph, _ = fused(model, tmp_path)
    (made,) = [node for node in graph.nodes if node.op == f"{DOMAIN}::QuantizedProduct"]
    wanted = model.constants["ws"].astype(np.float32) * model.constants["s"].astype(np.float32)
    np.testing.assert_array_equal(made.reads(8).values, wanted)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("behind", ["", "relu", "leaky relu", "cross", "quantized", "relu, quantized"])
def test_a_product_in_bf16_takes_along_what_follows(behind, transposed, tmp_path):
    model = half(behind, transposed=transposed)
    graph, report = fused(model, tmp_path)
    # The cross layer's x0 is a product with nothing behind it.
    assert sites_of(report, "half-product") == ([("fc",), ("other",)] if behind == "cross" else [("fc",)])
    assert not {"Gemm", "Relu", "Add", "Mul", "QuantizeLinear"} & set(ops(graph))
    # Quantizing the site would leave the fusion as it is.
    assert report.joined == {}
    c, x = model.wide(), model.rows()
    rows = rounded(x)
    z = rows @ (c["w"].T if transposed else c["w"]) + c["b"]
    check(graph, model, x, with_epilogue(z, behind, rows, c))


def test_where_a_product_ends(tmp_path):
    # Multiples of 8.
    for width, sites in ((13, []), (12, []), (24, [("fc",)])):
        assert sites_of(fused(half("relu", width=width), tmp_path)[1], "half-product") == sites
    # What it reads leaves the graph as well: the product ends there.
    graph, report = fused(product(behind="relu").then("before = Identity(g)", "wide", "before"), tmp_path)
    assert sites_of(report, "quantized-product") == [("fc",)]
    assert "Relu" in ops(graph)


def test_the_backend_looks_at_a_model_whose_weights_it_does_not_read(tmp_path, monkeypatch):
    """Large weights stay outside; products that are not stored transposed are among them."""
    path = half("relu", transposed=False).in_fp32(tmp_path / "model.onnx")
    options = {"save_as_external_data": True, "location": "model.data", "size_threshold": 0}
    onnx.save(onnx.load(path), path, **options)
    monkeypatch.setattr(planned, "MOST_READ", 100)
    graph = PlannedGraph.load(path, TensorProto.BFLOAT16)
    assert sites_of(fuse(graph), "half-product") == [("fc",)]
    # It computes no other site along: FP8 there parts nothing.
    assert InductorBackend().fused_sites(path, Precision.BF16) == {}


def test_a_weight_that_is_not_transposed_is_stored_so(tmp_path):
    """Matrix units read FP8 along K from both factors."""
    model = product(bias=True, behind="relu")
    x = model.rows()
    transposed, _ = fused(model, tmp_path)
    expected = run(transposed, x)[0]
    model = model.but("Gemm<transB=1>", "Gemm", w=np.ascontiguousarray(model.constants["w"].T))
    graph, _ = fused(model.but("<axis=0>", "<axis=1>"), tmp_path)
    np.testing.assert_array_equal(run(graph, x)[0], expected)
    read = (tensor for node in graph.live_nodes() for tensor in node.inputs if tensor is not None)
    shapes = {t.shape for t in read if t.kind == TensorProto.FLOAT8E4M3FN and len(t.shape or ()) == 2}
    assert shapes == {(48, 32), (None, 32)}


def test_products_that_share_a_weight_share_its_transpose() -> None:
    rows = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["N", 64]) for name in "ab"]
    made = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["N", 32]) for name in "yz"]
    nodes = [helper.make_node("MatMul", [x, "w"], [y], f"fc_{x}") for x, y in ("ay", "bz")]
    stored = numpy_helper.from_array(bf16(64, 32), "w")
    proto = helper.make_model(helper.make_graph(nodes, "towers", rows, made, [stored]))
    graph = PlannedGraph(proto)
    assert sites_of(fuse(graph), "half-product") == [("fc_a",), ("fc_b",)]
    first, second = (node.reads(2) for node in graph.nodes if node.outputs)
    assert first is second
    np.testing.assert_array_equal(first.values, numpy_helper.to_array(stored).T)


def test_broadcast_rows_and_scales_of_rows_are_not_taken_for_others(tmp_path):
    scales = np.abs(bf16(32)) * BF16(0.01) + BF16(0.005)
    model = product().but("<axis=0>", "<axis=1>", ws=scales, wz=np.zeros(32, FP8))
    assert "quantized-product" not in unchanged(model, tmp_path).fused
    model = product(outputs="").then(
        "row = Cast<to=16>(row32) gm = Mul(row, g) wide = Add(gm, row)",
        "wide",
        row32=RANDOM.standard_normal((1, 48)).astype(np.float32),
    )
    unchanged(model, tmp_path)
    assert "Mul" in ops(fused(model, tmp_path)[0])


@pytest.mark.parametrize(
    ("shape", "end", "is_bias"),
    [
        ((16,), ("batch", 16), True),
        ((1, 16), ("batch", 16), True),
        ((16,), None, False),
        ((1,), ("batch", 16), False),
        ((4, 16), (4, 16), False),
        ((1, 1, 16), ("batch", 16), False),
    ],
)
def test_a_bias_is_one_constant_a_column(shape, end, is_bias):
    end = SimpleNamespace(shape=end, kind="bf16")
    tensor = SimpleNamespace(is_constant=True, shape=shape, kind="bf16")
    assert products._is_bias(tensor, end) is is_bias
    # Of a computed tensor the numbers are not known.
    for change in ({"is_constant": False}, {"kind": "float"}):
        assert not products._is_bias(SimpleNamespace(**vars(tensor) | change), end)


def test_what_is_printed_of_declined_fusions_is_read_back(tmp_path, monkeypatch, capsys):
    path = Model((8,), "y = Relu(x)", {}).save(tmp_path / "planned.onnx")
    declined = {
        "factorization-norm": ("norm/0: the kernel multiplies BF16 and FP16", "norm/1: 40000 elements"),
        "quantized-product": ("fc: its activation has several scales",),
    }
    monkeypatch.setattr(compiling, "fuse", lambda graph: FusionReport({}, declined))
    compiling.planned_graph(path, fuses=True)
    log = f"before\n{capsys.readouterr().out}fc: scaled_mm: declined by nobody\nnorm: a: declined b\n"
    assert InductorBackend().read_remarks(log) == tuple(
        f"{fusion}: {reason}" for fusion, reasons in declined.items() for reason in reasons
    )


# Concatenations ---------------------------------------------------------------------------------------


def joined(reader: str = "wide", more: str = "") -> Model:
    """Computed columns beside rounded ones, and their Q."""
    text = "rows = Reshape(x, flat) [other] left = MatMul(rows, m)"
    text += f" [cat] joined = Concat<axis=1>(left, rows{more}) {quantized('joined')}"
    constants = {"flat": np.array([0, 32]), "m": bf16(32, 16, scale=0.3), "s": np.array(2**-7, BF16)}
    model = Model((4, 8), text, constants)
    return model.then("wide = Identity(joined)", "y", "wide") if reader == "wide" else model


@pytest.mark.parametrize("reader", ["wide", "none"])
def test_a_concatenation_is_quantized_as_it_is_written(reader, tmp_path):
    model = joined(reader)
    graph, report = fused(model, tmp_path)
    assert sites_of(report, "concat-quantize") == [()]
    left = ops(graph)
    assert f"{DOMAIN}::ConcatQuantize" in left and not {"Concat", "QuantizeLinear"} & set(left)
    (made,) = [node for node in graph.nodes if node.op == f"{DOMAIN}::ConcatQuantize"]
    # The columns that come from the model's FP32 input are read before they are rounded.
    assert [made.reads(0).kind, made.reads(1).kind] == [TensorProto.BFLOAT16, TensorProto.FLOAT]
    c, x = model.wide(), model.rows()
    rows = rounded(x.reshape(BATCH, 32))
    whole = np.concatenate([rounded(rows @ c["m"]), rows], axis=1)
    got, *wide = run(graph, x)
    close_quantized(got, whole, c["s"], absolute=4)
    for each in wide:
        close(each, whole)


@pytest.mark.parametrize("depth", [32, 24])
@pytest.mark.parametrize("first", [True, False])
def test_rows_of_a_table_are_looked_up_by_the_concatenation(first, depth, tmp_path):
    """Where tiles of at least 32 columns lie in one row of it."""
    text = "rows = Reshape(x, flat) left = MatMul(rows, m) top = Slice(rows, begin, end, axis) "
    text += "scaled = Mul(top, far) ids = Cast<to=7>(scaled) e = Gather(t, ids) r = Reshape(e, wide_shape) "
    order = "r, left" if first else "left, r"
    text += f"[cat] joined = Concat<axis=1>({order}) {quantized('joined')}"
    constants = {"flat": np.array([0, 32]), "m": bf16(32, 32, scale=0.3), "s": np.array(2**-7, BF16)}
    constants |= {"t": bf16(9, depth, scale=0.5), "wide_shape": np.array([0, 2 * depth])}
    constants |= {
        "begin": np.array([0]),
        "end": np.array([2]),
        "axis": np.array([1]),
        "far": np.array(2, BF16),
    }
    model = Model((4, 8), text, constants).then("wide = Identity(joined)", "y", "wide")
    graph, _ = fused(model, tmp_path)
    (made,) = [node for node in graph.live_nodes() if node.op == f"{DOMAIN}::ConcatQuantize"]
    assert made.has(3) == (depth == 32)
    assert ("Gather" in {node.op for node in graph.live_nodes()}) == (depth != 32)
    c, x = model.wide(), model.rows()
    rows = rounded(x.reshape(BATCH, 32))
    looked_up = c["t"][np.trunc(rounded(rows[:, :2] * 2)).astype(int)].reshape(BATCH, -1)
    parts = [looked_up, rounded(rows @ c["m"])]
    whole = np.concatenate(parts if first else parts[::-1], axis=1)
    got, wide = run(graph, x)
    close_quantized(got, whole, c["s"], absolute=4)
    close(wide, whole)


def test_other_concatenations_are_left_to_the_compiler(tmp_path):
    _, report = fused(joined(more=", rows"), tmp_path)
    assert report.declined["concat-quantize"] == ("cat: it joins 3 tensors, the kernel two",)
    # Nothing quantizes it.
    _, report = fused(joined().but(quantized("joined"), "", ("wide",)), tmp_path)
    assert "concat-quantize" not in {**report.fused, **report.declined}


# Biases behind a Split --------------------------------------------------------------------------------

TOKENS, WIDTH, PARTS = 6, 32, (16, 32)
MERGED = (
    "[project] all = MatMul(x, w) [parts] a, b = Split<axis=-1>(all, sizes) ya = Add(a, ba) yb = Add(b, bb)"
)


def merged(sizes=PARTS, bias=(PARTS[1],), first=PARTS[0]) -> Model:
    """Two linears merged into one product; the bias of the second one is of a given shape."""
    constants = {"w": bf16(WIDTH, sum(PARTS), scale=0.2), "sizes": np.array(sizes)}
    return Model((TOKENS, WIDTH), MERGED, constants | {"ba": bf16(first), "bb": bf16(*bias)}, ("ya", "yb"))


@pytest.mark.parametrize(
    "model",
    [
        merged(),
        merged().but("axis=-1", "axis=2"),
        merged(bias=(1, 1, 32)),
        merged().but("Add(a, ba)", "Add(ba, a)"),
    ],
    ids=["last axis", "axis 2", "bias of rank 3", "bias first"],
)
def test_biases_become_one_of_the_product(model, tmp_path):
    graph, report = fused(model, tmp_path)
    assert [place.name for place in report.fused["merged-bias"]] == ["parts/biased"]
    left = ops(graph)
    assert left.count(f"{DOMAIN}::HalfProduct") == left.count("Split") == 1
    assert "Add" not in left
    unchanged(model, tmp_path)


@pytest.mark.parametrize(
    "model",
    [
        merged((2, 4), (sum(PARTS),), sum(PARTS)).but("axis=-1", "axis=1"),
        merged(bias=(1,)),
        merged(bias=(TOKENS, 32)),
        merged().then("", "ya", "yb", "b"),
        merged().then("", "ya", "yb", "all"),
        merged().but(" yb = Add(b, bb)", "", ("ya", "b")),
    ],
    ids=["other axis", "one number", "of tokens", "part is an output", "product is an output", "no bias"],
)
def test_other_sums_stay_where_they_are(model, tmp_path):
    assert "merged-bias" not in unchanged(model, tmp_path).fused


def test_a_split_that_leaves_an_output_out_keeps_its_biases(tmp_path):
    """Their widths would be of other columns."""
    text = "[project] all = MatMul(x, w) skipped, b = Split<axis=-1>(all, sizes) y = Add(b, bb)"
    constants = {"w": bf16(WIDTH, 2, scale=0.2), "sizes": np.array([1, 1]), "bb": bf16(1)}
    path = Model((TOKENS, WIDTH), text, constants).save(tmp_path / "planned.onnx")
    proto = onnx.load(path)
    next(node for node in proto.graph.node if node.op_type == "Split").output[0] = ""
    onnx.save(proto, path)
    assert "merged-bias" not in fuse(PlannedGraph.load(path)).fused


PARTS = 10
"""Of a concatenation: two of products, in the middle, and eight that the compiler computes."""


def test_many_features_are_concatenated_in_groups(tmp_path):
    light = {
        f"p{k}": f"e{k} = Mul(x, c{k}) p{k} = Reshape(e{k}, shape)" for k in range(PARTS) if k not in {4, 5}
    }
    heavy = {f"p{k}": f"p{k} = MatMul(x, w)" for k in (4, 5)}
    parts = [f"p{k}" for k in range(PARTS)]
    body = " ".join((light | heavy)[name] for name in parts)
    constants = {f"c{k}": bf16(K) for k in range(PARTS)} | {"w": bf16(K, K), "shape": np.array([-1, K])}
    model = Model((K,), f"{body} y = Concat<axis=-1>({', '.join(parts)})", constants)
    graph, report = fused(model, tmp_path)
    (joined,) = (node for node in graph.live_nodes() if node.name == report.fused["grouped-concat"][0].name)
    # Products write their part of the result themselves; a group is a kernel.
    assert [tensor.name for tensor in joined.inputs if tensor.name in parts] == ["p4", "p5"]
    assert [len(t.producer.inputs) for t in joined.inputs if t.producer.op == "Concat"] == [4, 4]
    assert [tensor.shape[-1] for tensor in joined.inputs] == [4 * K, K, K, 4 * K]
    x = model.rows()
    np.testing.assert_array_equal(run(graph, x)[0], run(tmp_path / "planned.onnx", x)[0])
    # Few are one kernel as they are.
    few = Model((K,), model.text.replace(", p8, p9", ""), constants)
    assert "grouped-concat" not in fused(few, tmp_path)[1].fused
