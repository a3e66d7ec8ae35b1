"""Which attention becomes one node, what is left alone, and that the fused graph computes the same."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

import torch
from fusion_models import BATCH, BF16, FP8, RANDOM, ULP, Model, bf16, fused, in_fp32, ops, run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from loka_onnx.core.formats import Precision
from loka_onnx.engines.inductor.backend import InductorBackend
from loka_onnx.engines.inductor.fusions import DOMAIN, fuse
from loka_onnx.engines.inductor.fusions.attention import MOVEMENTS, is_short
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.inductor.kernels.operators import _is_short
from loka_onnx.engines.inductor.lowering.model import lower
from loka_onnx.engines.inductor.lowering.node import OPERATORS
from loka_onnx.engines.inductor.site_precision import products_of

TOKENS, HEADS, WIDTH = 60, 2, 16


@dataclass(frozen=True)
class Form:
    """How an attention is written.

    Attributes:
        rank: 4 with heads, 3 without.
        scale: "Mul" or "Div" behind the product, "factors" in front of it; empty for none.
        mask: "float" or "keys" added to every query's products, "keep" or "drop" to choose
            −∞; empty for none.
        guard: Whether NaN become 0.
        wide: Whether softmax is computed in FP32.
        values: Numbers of a head of V.
        width: Numbers of a head of Q and K.
        axis: Of softmax.
        again: What reads the probabilities, or products, once more.
        quantized: Which operand of a product has Q and DQ.
    """

    rank: int = 4
    scale: str = "Mul"
    mask: str = ""
    guard: bool = False
    wide: bool = False
    values: int = WIDTH
    width: int = WIDTH
    axis: int = -1
    again: str = ""
    quantized: str = ""


def attention(form: Form) -> Model:
    """softmax(s · Q·Kᵀ + mask) · V of tokens, projected by one product."""
    heads = HEADS if form.rank == 4 else 1
    sizes = [heads * form.width, heads * form.width, heads * form.values]
    model = Model((TOKENS, 24)).constant("w", bf16(24, sum(sizes), scale=0.2))
    model.constant("sizes", np.array(sizes, np.int64))
    model.constant("s", np.array(2.5 if form.scale == "Div" else 0.375, BF16))
    model.add("MatMul", ["x", "w"], "all", name="project").add("Split", ["all", "sizes"], "q0 k0 v0", axis=-1)
    for name, numbers in (("q", form.width), ("k", form.width), ("v", form.values)):
        turned = "kt" if name == "k" else name
        if form.rank == 4:
            model.constant(f"{name}.shape", np.array([-1, TOKENS, heads, numbers], np.int64))
            model.add("Reshape", [f"{name}0", f"{name}.shape"], f"{name}1")
            model.add("Transpose", [f"{name}1"], turned, perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3])
        elif name == "k":
            model.add("Transpose", ["k0"], "kt", perm=[0, 2, 1])
        else:
            model.add("Identity", [f"{name}0"], name)
    return _attended(_masks(model, form), form)


def _masks(model: Model, form: Form) -> Model:
    """A third of the tokens is masked, differently for every request; no row throughout."""
    lead = [1] if form.rank == 4 else []
    model.constant("first", np.array([0], np.int64)).constant("one", np.array([1], np.int64))
    model.constant("last", np.array([2], np.int64)).constant("limit", np.array(0.4, BF16))
    model.constant("always", np.arange(TOKENS) == 3).constant("lowest", np.array(-np.inf, BF16))
    model.constant("none", np.array(0.0, BF16)).constant("row", np.array([-1, *lead, 1, TOKENS], np.int64))
    model.add("Slice", ["x", "first", "one", "last"], "numbers").add("Reshape", ["numbers", "row"], "flat")
    model.add("Less", ["flat", "limit"], "low").add("Or", ["low", "always"], "keep").add(
        "Not", ["keep"], "drop"
    )
    model.add("Where", ["keep", "none", "lowest"], "keys")
    return model.constant("float", bf16(TOKENS, TOKENS))


def _quantized(model: Model, form: Form, name: str) -> str:
    if name not in form.quantized.split():
        return name
    model.constant(f"{name}.s", np.array(0.0625, BF16)).constant(f"{name}.z", np.array(0, FP8))
    model.add("QuantizeLinear", [name, f"{name}.s", f"{name}.z"], f"{name}.q")
    model.add("DequantizeLinear", [f"{name}.q", f"{name}.s", f"{name}.z"], f"{name}.dq")
    return f"{name}.dq"


def _attended(model: Model, form: Form) -> Model:
    q, kt, v = (_quantized(model, form, name) for name in ("q", "kt", "v"))
    if form.scale == "factors":
        model.add("Mul", [q, "s"], "qs").add("Mul", ["s", kt], "kts")
        q, kt = "qs", "kts"
    model.add("MatMul", [q, kt], "scores", name="compare")
    last = "scores"
    if form.scale in {"Mul", "Div"}:
        model.add(form.scale, [last, "s"], "scaled")
        last = "scaled"
    if form.mask in {"float", "keys"}:
        model.add("Add", [last, form.mask] if form.mask == "keys" else [form.mask, last], "masked")
        last = "masked"
    elif form.mask:
        chosen = [last, "lowest"] if form.mask == "keep" else ["lowest", last]
        model.add("Where", [form.mask, *chosen], "masked")
        last = "masked"
    if form.wide:
        model.add("Cast", [last], "wide", to=TensorProto.FLOAT).add(
            "Softmax", ["wide"], "p32", axis=form.axis
        )
        model.add("Cast", ["p32"], "p", to=TensorProto.BFLOAT16)
    else:
        model.add("Softmax", [last], "p", axis=form.axis)
    last = "p"
    if form.guard:
        model.add("IsNaN", ["p"], "nan").add("Where", ["nan", "none", "p"], "guarded")
        last = "guarded"
    model.add("MatMul", [_quantized(model, form, last), v], "y", name="attend")
    if form.again:
        model.add("Identity", [form.again], "again")
        model.outputs = ("y", "again")
    return model


def numbers() -> np.ndarray:
    """Of BF16, so that both see the same mask."""
    return RANDOM.standard_normal((BATCH, TOKENS, 24)).astype(BF16).astype(np.float32)


def exact(planned: Path, x: np.ndarray) -> np.ndarray:
    """By ONNX's reference evaluator, everything in FP32; constants as BF16 has rounded them."""
    model = onnx.load(planned)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            tensor.CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
            )
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to":
                attribute.i = TensorProto.FLOAT
    return np.asarray(ReferenceEvaluator(model).run(["y32"], {"x32": x})[0])


FORMS = {
    "plain": Form(scale=""),
    "scaled": Form(),
    "divided": Form(scale="Div"),
    "scaled factors": Form(scale="factors"),
    "without heads": Form(rank=3),
    "softmax in FP32": Form(wide=True),
    "another head": Form(width=8, values=8),
    "added mask": Form(mask="float"),
    "added mask of keys": Form(mask="keys", guard=True),
    "added mask without heads": Form(mask="keys", rank=3),
    "chosen": Form(mask="keep"),
    "chosen, guarded, in FP32": Form(mask="drop", guard=True, scale="Div"),
    "chosen without heads": Form(mask="drop", rank=3, scale=""),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_attention_becomes_one_node(form: Form, tmp_path: Path) -> None:
    graph, report = fused(attention(form), tmp_path)
    (place,) = report.fused["attention"]
    assert place.sites == ("compare", "attend")
    assert report.joined == {"compare": "attention", "attend": "attention"}
    left = ops(graph)
    assert left.count(f"{DOMAIN}::Attention") == 1
    assert not {"Softmax", "IsNaN", "Add", "Div"} & {*left} and left.count("MatMul") == 1
    x = numbers()
    (got,), (planned,) = run(graph, x), run(tmp_path / "planned.onnx", x)
    target = exact(tmp_path / "planned.onnx", x)
    magnitude = np.abs(target).max()
    # Measured over all forms, 8 draws each, in half units of the largest value: fused at most 3.1 from the
    # reference, 3.8 from the graph unfused, which rounds products and probabilities as well.
    np.testing.assert_allclose(got, target, rtol=4 * ULP, atol=4 * ULP * magnitude)
    np.testing.assert_allclose(got, planned, rtol=4 * ULP, atol=4 * ULP * magnitude)
    # Nothing that is masked, and no scale, was forgotten: values are not those of a plain mean.
    assert np.abs(target - target.mean(axis=-2, keepdims=True)).max() > 64 * ULP * magnitude


@pytest.mark.parametrize("lowest", [-np.inf, -1e9, float(ml_dtypes.finfo(BF16).min)])
def test_rows_that_are_masked_throughout(lowest: float, tmp_path: Path) -> None:
    """Zero behind the guard that PyTorch exports; uniform where a finite mask swallows the products."""
    model = attention(Form(mask="keys", guard=np.isinf(lowest)))
    model.constants |= {"always": np.zeros(TOKENS, bool), "lowest": np.array(lowest, BF16)}
    x = numbers()
    x[2, :, 0] = 1.0
    graph, report = fused(model, tmp_path)
    assert "attention" in report.fused
    values = (x[2].astype(np.float64) @ model.constants["w"].astype(np.float64))[:, 2 * HEADS * WIDTH :]
    mean = (0 if np.isinf(lowest) else 1) * values.mean(0).reshape(HEADS, 1, WIDTH)
    for path in (graph, tmp_path / "planned.onnx"):
        (got,) = run(path, x)
        expected = np.broadcast_to(mean, got[2].shape)
        np.testing.assert_allclose(got[2], expected, rtol=4 * ULP, atol=4 * ULP * np.abs(mean).max())
        assert np.abs(got[[0, 1, 3, 4]]).max() > 0.5 and np.isfinite(got).all()


def test_the_batch_stays_open(tmp_path: Path) -> None:
    graph, _ = fused(attention(Form(mask="keys")), tmp_path)
    module = lower(graph).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    example = (torch.from_numpy(numbers()),)
    program = torch.export.export(module, example, dynamic_shapes=module.dynamic_shapes(batch), strict=False)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("aten.scaled_dot_product_attention.default") == 1
    x = torch.from_numpy(numbers()[:3])
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x)[0], module(x)[0], rtol=0, atol=0)


LOOK_ALIKES = {
    "softmax over queries": (Form(axis=2), "its softmax is not over the keys"),
    "probabilities read twice": (Form(again="p"), "'p' is read by again as well"),
    "products read twice": (Form(again="scores"), "'scores' is read by again as well"),
    "Q and K in FP8": (Form(quantized="q kt"), "a product of it is planned in FP8"),
    "V in FP8": (Form(quantized="v"), "a product of it is planned in FP8"),
    "heads unlike": (Form(values=8), "its keys have 16 numbers a head, its values 8"),
    "odd heads": (
        Form(width=12, values=12),
        "a head has 12 numbers; the kernels take multiples of 8 up to 256",
    ),
    "mask of queries": (Form(mask="float"), "mask 'float' is not one of 60 keys"),
}


@pytest.mark.parametrize(("form", "reason"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_what_looks_alike_is_left_alone(form: Form, reason: str, tmp_path: Path) -> None:
    model = attention(form)
    if form.mask:
        model.constants["float"] = bf16(TOKENS, 1)
    _, report = fused(model, tmp_path)
    assert "attention" not in report.fused
    assert report.declined["attention"] == (f"attend: {reason}",)


def test_every_movement_of_fp8_is_known() -> None:
    """Beside those that the lowering registers as such, three decide by what they are given."""
    moves = {op for (_, op), how in OPERATORS.items() if how.moves}
    assert moves | {"Concat", "Identity", "Transpose"} == MOVEMENTS


def test_fp8_that_is_moved_to_a_product_is_left_alone(tmp_path: Path) -> None:
    """The lowering multiplies it in FP8; `attention` would multiply what it is dequantized to."""
    model = attention(Form(quantized="q kt"))
    model.constant("heads", np.arange(HEADS)[::-1].copy())
    position = next(i for i, node in enumerate(model.nodes) if node.name == "compare")
    for place, name in enumerate(("q", "kt")):
        model.nodes[position + place].input[place] = f"{name}.turned"
        model.add("Gather", [f"{name}.dq", "heads"], f"{name}.turned", axis=1)
        model.nodes.insert(position, model.nodes.pop())
    _, report = fused(model, tmp_path)
    assert report.declined["attention"] == ("attend: a product of it is planned in FP8",)


def bare_attention(path: Path, **axis: int) -> Path:
    """In FP16, with a softmax over an axis."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["kt"], name="turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "kt"], ["scores"], name="compare"),
        helper.make_node("Softmax", ["scores"], ["p"], name="softmax", **axis),
        helper.make_node("MatMul", ["p", "x"], ["y"], name="attend"),
    ]
    values = [helper.make_tensor_value_info(n, 10, ["batch", TOKENS, WIDTH]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def test_a_softmax_over_queries_and_keys_is_left_alone(tmp_path: Path) -> None:
    x = RANDOM.standard_normal((BATCH, TOKENS, WIDTH)).astype(np.float16)
    both = ("compare", "attend")
    for axis, sites in (({}, both), ({"axis": 1}, ()), ({"axis": 2}, both)):
        graph = PlannedGraph.load(bare_attention(tmp_path / "planned.onnx", **axis))
        found = fuse(graph).fused.get("attention", ())
        (got,), (planned,) = run(graph, x), run(tmp_path / "planned.onnx", x)
        np.testing.assert_allclose(got, planned, rtol=2e-3, atol=2e-3 * np.abs(planned).max())
        assert tuple(site for place in found for site in place.sites) == sites


def with_few(model: Model, which: str, count: int) -> Model:
    """Q alone, or Kᵀ and V, of the first tokens."""
    model.constant("from", np.array([0], np.int64)).constant("until", np.array([count], np.int64))
    axes = {"q": 2} if which == "queries" else {"kt": 3, "v": 2}
    for name, axis in axes.items():
        model.constant(f"axis{axis}", np.array([axis], np.int64))
        place, position = (1, "attend") if name == "v" else (("q", "kt").index(name), "compare")
        at = next(i for i, node in enumerate(model.nodes) if node.name == position)
        model.nodes[at].input[place] = f"few.{name}"
        model.add("Slice", [name, "from", "until", f"axis{axis}"], f"few.{name}")
        model.nodes.insert(at, model.nodes.pop())
    return model


@pytest.mark.parametrize(("which", "count"), [("queries", 2), ("keys", 16), ("keys", 15)])
def test_few_keys_are_left_to_the_compiler(which: str, count: int, tmp_path: Path) -> None:
    """Our own kernel takes few queries; a tile of few keys would be mostly padding."""
    graph, report = fused(with_few(attention(Form()), which, count), tmp_path)
    if count == 15:
        reason = "attend: 60 queries of 15 keys are too few to gain by it"
        assert report.declined["attention"] == (reason,)
        return
    assert [place.sites for place in report.fused["attention"]] == [("compare", "attend")]
    x = numbers()
    (got,), (planned,) = run(graph, x), run(tmp_path / "planned.onnx", x)
    np.testing.assert_allclose(got, planned, rtol=4 * ULP, atol=4 * ULP * np.abs(planned).max())


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((104, 104, 16), True),
        ((2, 100, 16), True),
        ((256, 256, 64), True),
        ((257, 256, 64), False),
        ((2, 257, 16), False),
        ((2, 15, 16), False),
        ((2, 128, 128), True),
        ((2, 129, 128), False),
        ((2, 16, 136), False),
    ],
)
def test_our_own_kernel_takes_keys_of_one_tile(sizes: tuple[int, int, int], expected: bool) -> None:
    assert is_short(*sizes) is expected


@pytest.mark.parametrize("mask", ["", "float"])
@pytest.mark.parametrize("rank", [3, 4])
def test_on_a_gpu_views_are_handed_to_our_own_kernel(rank: int, mask: str, tmp_path: Path) -> None:
    """Nothing is copied in front of it, nor behind; on tensors without values, so that no GPU is needed."""
    pytest.importorskip("triton", reason="needs triton: pip install --group dev")
    graph, _ = fused(attention(Form(rank=rank, mask=mask)), tmp_path)
    module = lower(graph).eval()
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        module._apply(lambda tensor: torch.empty_like(tensor, device="cuda"))
        example = (torch.empty(BATCH, TOKENS, 24, device="cuda"),)
    batch = torch.export.Dim("batch", min=1, max=64)
    with torch.no_grad():
        program = torch.export.export(
            module, example, dynamic_shapes=module.dynamic_shapes(batch), strict=False
        )
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("loka.short_attention.default") == 1
    assert not [name for name in targets if re.search("clone|contiguous|copy|softmax|scaled_dot", name)]
    (node,) = (node for node in program.graph.nodes if "short_attention" in str(node.target))
    q, kt, v, masks = (each and each.meta["val"] for each in node.args[:4])
    row = 3 * WIDTH * (HEADS if rank == 4 else 1)
    axes = [0, 1, 2, 3] if rank == 4 else [0, 2, 3]
    strides = {0: TOKENS * row, 1: WIDTH, 2: row, 3: 1}
    assert [[each.stride(axis) for axis in axes] for each in (q, v, kt.transpose(2, 3))] == [
        [strides[axis] for axis in axes]
    ] * 3
    assert (masks is None) == (not mask)
    (product,) = (each for each in products_of(program.graph) if each.operator.startswith("loka."))
    assert product.operands == ("bfloat16", "bfloat16")


def looking_alike(case: str) -> Model:
    if case in {"finite", "not a constant"}:
        # A row of −10⁴ throughout is uniform; what is chosen by a kernel's mask is 0 there.
        model = attention(Form(mask="keep"))
        model.constants["lowest"] = np.array(-1e4, BF16) if case == "finite" else bf16(TOKENS)
        return model
    if case == "quantized probabilities":
        return attention(Form(quantized="p v"))
    if case == "another softmax":
        model = Model((TOKENS, TOKENS)).add("Softmax", ["x"], "p")
        return model.add("MatMul", ["p", "x"], "y", name="attend")
    # A mask in front of the scale, which would be one of the mask as well.
    model = attention(Form(mask="keys", scale=""))
    position = next(i for i, node in enumerate(model.nodes) if node.op_type == "Softmax")
    model.nodes[position].input[0] = "late"
    model.add("Mul", ["masked", "s"], "late")
    model.nodes.insert(position, model.nodes.pop())
    return model


@pytest.mark.parametrize(
    "case", ["finite", "not a constant", "quantized probabilities", "another softmax", "early mask"]
)
def test_what_is_no_attention_is_not_looked_at(case: str, tmp_path: Path) -> None:
    _, report = fused(looking_alike(case), tmp_path)
    assert "attention" not in {**report.fused, **report.declined}


def test_fp32_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "fp32.onnx"
    in_fp32(attention(Form()), path)
    report = fuse(PlannedGraph.load(path))
    assert report.declined["attention"] == ("attend: the kernels multiply BF16 and FP16",)
    # What a plan in BF16 would have, planners are told of the FP32 model.
    joined = InductorBackend().fused_sites(path, Precision.BF16)
    assert joined == {"compare": "attention", "attend": "attention"}


@pytest.mark.parametrize("alike", [True, False])
def test_a_batch_of_one_that_is_broadcast_is_not_short(alike: bool) -> None:
    """Our own kernel has a program for each example of Q."""
    q = torch.zeros(3 if alike else 1, 2, 5, 16)
    k, v = torch.zeros(3, 2, 20, 16), torch.zeros(3, 2, 20, 16)
    assert _is_short(q, k.transpose(2, 3), v, None) is alike
    assert _is_short(q, k.transpose(2, 3), v, torch.zeros(1, 1, 5, 20)) is alike
    assert not _is_short(q, k.transpose(2, 3), v, torch.zeros(2, 1, 5, 20))
