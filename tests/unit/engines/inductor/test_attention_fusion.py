"""Which attention becomes one node, what is left alone, and that the fused graph computes the same."""

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

import torch
from fusion_models import BATCH, BF16, RANDOM, ULP, Model, bf16, close, fused, ops, quantized, run, sites_of
from onnx_text import in_fp32, parsed
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
BOTH = [("compare", "attend")]
PROJECTED = "[project] all = MatMul(x, w) q0, k0, v0 = Split<axis=-1>(all, sizes)"
WITH_HEADS = """
    q1 = Reshape(q0, heads) k1 = Reshape(k0, heads) v1 = Reshape(v0, heads_of_v)
    q = Transpose<perm=[0,2,1,3]>(q1) kt = Transpose<perm=[0,2,3,1]>(k1) v = Transpose<perm=[0,2,1,3]>(v1)
"""
WITHOUT = "q = Identity(q0) kt = Transpose<perm=[0,2,1]>(k0) v = Identity(v0)"
# A third of the tokens is masked, differently for every request; no row throughout.
MASKS = """
    numbers = Slice(x, n0, n1, n2) flat = Reshape(numbers, row) low = Less(flat, limit) keep = Or(low, always)
    drop = Not(keep) keys = Where(keep, none, lowest)
"""
SCALED = "a = Mul(c, s)"
GUARD = "nan = IsNaN(p) g = Where(nan, none, p)"


def attention(
    between: str = SCALED,
    behind: str = "",
    *,
    before: str = "",
    operands: tuple[str, str, str] = ("q", "kt", "v"),
    has_heads: bool = True,
    widths: tuple[int, int] = (WIDTH, WIDTH),
    **constants: Any,
) -> Model:
    """softmax(s · Q·Kᵀ + mask) · V of tokens, projected by one product.

    Args:
        between: Nodes from the product c to the softmax.
        behind: Nodes from the softmax p to the second product.
        before: Nodes from q, kt and v to `operands`.
        widths: Numbers of a head of Q and K, and of V.
    """
    heads = HEADS if has_heads else 1
    sizes = heads * np.array([widths[0], *widths])
    constants = {
        **{"w": bf16(24, sizes.sum(), scale=0.2), "sizes": sizes, "s": np.array(0.375, BF16)},
        **{"t": np.array(2.5, BF16), "s8": np.array(0.0625, BF16), "float": bf16(TOKENS, TOKENS)},
        **{f"n{n}": np.array([n]) for n in (0, 1, 2, 3)},
        **{"limit": np.array(0.4, BF16), "always": np.arange(TOKENS) == 3, "none": np.array(0.0, BF16)},
        **{"lowest": np.array(-np.inf, BF16), "row": np.array([-1, *[1] * has_heads, 1, TOKENS])},
        "heads": np.array([-1, TOKENS, heads, widths[0]]),
        "heads_of_v": np.array([-1, TOKENS, heads, widths[1]]),
        **constants,
    }
    q, kt, v = operands
    last, out = (re.findall(r"(\w+) =", text)[-1] for text in (f"c = {between}", f"p = {behind}"))
    text = (
        f"{PROJECTED} {WITH_HEADS if has_heads else WITHOUT} {MASKS} {before} [compare] c = MatMul({q}, {kt})"
    )
    text += f" {between} p = Softmax<axis=-1>({last}) {behind} [attend] y = MatMul({out}, {v})"
    return Model((TOKENS, 24), text, constants)


def numbers() -> np.ndarray:
    """Of BF16, so that both see the same mask."""
    return RANDOM.standard_normal((BATCH, TOKENS, 24)).astype(BF16).astype(np.float32)


def exact(planned: Path, x: np.ndarray) -> np.ndarray:
    """By ONNX's reference evaluator, everything in FP32; constants as BF16 has rounded them."""
    return np.asarray(ReferenceEvaluator(in_fp32(onnx.load(planned))).run(["y32"], {"x32": x})[0])


FORMS = {
    "plain": attention(""),
    "scaled": attention(),
    "divided": attention("a = Div(c, t)"),
    "scaled factors": attention("", before="qs = Mul(q, s) ks = Mul(s, kt)", operands=("qs", "ks", "v")),
    "without heads": attention(has_heads=False),
    "softmax in FP32": attention(f"{SCALED} b = Cast<to=1>(a)", "r = Cast<to=16>(p)"),
    "another head": attention(widths=(8, 8)),
    "added mask": attention(f"{SCALED} b = Add(float, a)"),
    "added mask of keys": attention(f"{SCALED} b = Add(a, keys)", GUARD),
    "added mask without heads": attention(f"{SCALED} b = Add(a, keys)", has_heads=False),
    "chosen": attention(f"{SCALED} b = Where(keep, a, lowest)"),
    "chosen, guarded": attention("a = Div(c, t) b = Where(drop, lowest, a)", GUARD),
    "chosen without heads": attention("a = Where(drop, lowest, c)", has_heads=False),
}


@pytest.mark.parametrize("model", FORMS.values(), ids=FORMS)
def test_attention_becomes_one_node(model: Model, tmp_path: Path) -> None:
    graph, report = fused(model, tmp_path)
    assert sites_of(report, "attention") == BOTH
    assert report.joined == {"compare": "attention", "attend": "attention"}
    left = ops(graph)
    assert left.count(f"{DOMAIN}::Attention") == 1
    assert not {"Softmax", "IsNaN", "Add", "Div", "MatMul"} & {*left}
    assert left.count(f"{DOMAIN}::HalfProduct") == 1
    x = numbers()
    (got,), (planned,) = run(graph, x), run(tmp_path / "planned.onnx", x)
    target = exact(tmp_path / "planned.onnx", x)
    magnitude = float(np.abs(target).max())
    # Measured over all forms, 8 draws each, in half units of the largest value: fused at most 3.1 from the
    # reference, 3.8 from the graph unfused, which rounds products and probabilities as well.
    close(got, target)
    close(got, planned, absolute=4 * magnitude)
    # Nothing that is masked, and no scale, was forgotten: values are not those of a plain mean.
    assert np.abs(target - target.mean(axis=-2, keepdims=True)).max() > 64 * ULP * magnitude


@pytest.mark.parametrize("lowest", [-np.inf, -1e9, float(ml_dtypes.finfo(BF16).min)])
def test_rows_that_are_masked_throughout(lowest: float, tmp_path: Path) -> None:
    """Zero behind the guard that PyTorch exports; uniform where a finite mask swallows the products."""
    changed = {"always": np.zeros(TOKENS, bool), "lowest": np.array(lowest, BF16)}
    model = attention(f"{SCALED} b = Add(a, keys)", GUARD if np.isinf(lowest) else "", **changed)
    x = numbers()
    x[2, :, 0] = 1.0
    graph, report = fused(model, tmp_path)
    assert "attention" in report.fused
    values = (x[2].astype(np.float64) @ model.wide()["w"])[:, 2 * HEADS * WIDTH :]
    mean = (0 if np.isinf(lowest) else 1) * values.mean(0).reshape(HEADS, 1, WIDTH)
    for path in (graph, tmp_path / "planned.onnx"):
        (got,) = run(path, x)
        close(got[2], np.broadcast_to(mean, got[2].shape))
        assert np.abs(got[[0, 1, 3, 4]]).max() > 0.5 and np.isfinite(got).all()


def exported(module: Any, example: Any) -> Any:
    batch = torch.export.Dim("batch", min=1, max=64)
    with torch.no_grad():
        shapes = module.dynamic_shapes(batch)
        return torch.export.export(module, (example,), dynamic_shapes=shapes, strict=False)


def test_the_batch_stays_open(tmp_path: Path) -> None:
    graph, _ = fused(FORMS["added mask of keys"], tmp_path)
    module = lower(graph).eval()
    program = exported(module, torch.from_numpy(numbers()))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("aten.scaled_dot_product_attention.default") == 1
    x = torch.from_numpy(numbers()[:3])
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x)[0], module(x)[0], rtol=0, atol=0)


Q8, K8, V8 = quantized("q", "s8", "qd"), quantized("kt", "s8", "kd"), quantized("v", "s8", "vd")
FLOAT8 = "a product of it is planned in eight bits"
# The lowering multiplies what is moved in FP8; a fused attention would multiply what it is dequantized to.
MOVED = f"{Q8} {K8} qm = Gather<axis=1>(qd, order) km = Gather<axis=1>(kd, order)"
FEW_KEYS = "fk = Slice(kt, n0, until, n3) fv = Slice(v, n0, until, n2)"
AGAIN = ("y", "again")
LOOK_ALIKES = [
    ("its softmax is not over the keys", attention().but("Softmax<axis=-1>", "Softmax<axis=2>")),
    ("'p' is read by again as well", attention().then("again = Identity(p)", *AGAIN)),
    ("'c' is read by again as well", attention().then("again = Identity(c)", *AGAIN)),
    (FLOAT8, attention(before=f"{Q8} {K8}", operands=("qd", "kd", "v"))),
    (FLOAT8, attention(before=V8, operands=("q", "kt", "vd"))),
    (FLOAT8, attention(before=MOVED, operands=("qm", "km", "v"), order=np.array([1, 0]))),
    ("its keys have 16 numbers a head, its values 8", attention(widths=(16, 8))),
    ("a head has 12 numbers; the kernels take multiples of 8 up to 256", attention(widths=(12, 12))),
    ("mask 'float' is not one of 60 keys", attention(f"{SCALED} b = Add(float, a)", float=bf16(TOKENS, 1))),
    # A tile of few keys would be mostly padding.
    (
        "60 queries of 15 keys are too few to gain by it",
        attention(before=FEW_KEYS, operands=("q", "fk", "fv"), until=np.array([15])),
    ),
]


@pytest.mark.parametrize(("reason", "model"), LOOK_ALIKES)
def test_what_looks_alike_is_left_alone(reason: str, model: Model, tmp_path: Path) -> None:
    _, report = fused(model, tmp_path)
    assert "attention" not in report.fused
    assert report.declined["attention"] == (f"attend: {reason}",)


def test_every_movement_of_fp8_is_known() -> None:
    """Beside those that the lowering registers as such, three decide by what they are given."""
    moves = {op for (_, op), how in OPERATORS.items() if how.moves}
    assert moves | {"Concat", "Identity", "Transpose"} == MOVEMENTS


@pytest.mark.parametrize(("axis", "sites"), [("", BOTH), ("<axis=1>", []), ("<axis=2>", BOTH)])
def test_a_softmax_over_queries_and_keys_is_left_alone(axis: str, sites: Any, tmp_path: Path) -> None:
    text = f"kt = Transpose<perm=[0,2,1]>(x) [compare] c = MatMul(x, kt) p = Softmax{axis}(c)"
    shape, path = f"float16[batch,{TOKENS},{WIDTH}]", tmp_path / "planned.onnx"
    onnx.save(parsed(f"{text} [attend] y = MatMul(p, x)", inputs=f"{shape} x", outputs=f"{shape} y"), path)
    x = RANDOM.standard_normal((BATCH, TOKENS, WIDTH)).astype(np.float16)
    graph = PlannedGraph.load(path)
    assert sites_of(fuse(graph), "attention") == sites
    (got,), (planned,) = run(graph, x), run(path, x)
    np.testing.assert_allclose(got, planned, rtol=2e-3, atol=2e-3 * np.abs(planned).max())


FEW = {"queries": ("fq = Slice(q, n0, n2, n2)", ("fq", "kt", "v")), "keys": (FEW_KEYS, ("q", "fk", "fv"))}


@pytest.mark.parametrize(("before", "operands"), FEW.values(), ids=FEW)
def test_our_own_kernel_takes_few(before: str, operands: tuple[str, str, str], tmp_path: Path) -> None:
    model = attention(before=before, operands=operands, until=np.array([16]))
    graph, report = fused(model, tmp_path)
    assert sites_of(report, "attention") == BOTH
    x = numbers()
    (got,), (planned,) = run(graph, x), run(tmp_path / "planned.onnx", x)
    close(got, planned)


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


@pytest.mark.parametrize("mask", ["", "b = Add(float, a)"])
@pytest.mark.parametrize("has_heads", [False, True])
def test_on_a_gpu_views_are_handed_to_our_own_kernel(has_heads: bool, mask: str, tmp_path: Path) -> None:
    """Nothing is copied in front of it, nor behind; on tensors without values, so that no GPU is needed."""
    pytest.importorskip("triton", reason="needs triton: pip install --group dev")
    graph, _ = fused(attention(f"{SCALED} {mask}", has_heads=has_heads), tmp_path)
    module = lower(graph).eval()
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        module._apply(lambda tensor: torch.empty_like(tensor, device="cuda"))
        example = torch.empty(BATCH, TOKENS, 24, device="cuda")
    program = exported(module, example)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("loka.short_attention.default") == 1
    assert not [name for name in targets if re.search("clone|contiguous|copy|softmax|scaled_dot", name)]
    (node,) = (node for node in program.graph.nodes if "short_attention" in str(node.target))
    q, kt, v, masks = (each and each.meta["val"] for each in node.args[:4])
    row = 3 * WIDTH * (HEADS if has_heads else 1)
    strides = {0: TOKENS * row, 1: WIDTH, 2: row, 3: 1}
    for each in (q, v, kt.transpose(2, 3)):
        axes = [0, 1, 2, 3] if has_heads else [0, 2, 3]
        assert [each.stride(axis) for axis in axes] == [strides[axis] for axis in axes]
    assert (masks is None) == (not mask)
    (product,) = (each for each in products_of(program.graph) if each.operator.startswith("loka."))
    assert product.operands == ("bfloat16", "bfloat16")


NONE_OF_IT = {
    # A row of −10⁴ throughout is uniform; what is chosen by a kernel's mask is 0 there.
    "finite": attention(f"{SCALED} b = Where(keep, a, lowest)", lowest=np.array(-1e4, BF16)),
    "not a constant": attention(f"{SCALED} b = Where(keep, a, lowest)", lowest=bf16(TOKENS)),
    "quantized probabilities": attention(
        behind=quantized("p", "s8", "pd"), before=V8, operands=("q", "kt", "vd")
    ),
    "another softmax": Model((TOKENS, TOKENS), "p = Softmax(x) [attend] y = MatMul(p, x)", {}),
    # A mask in front of the scale, which would be one of the mask as well.
    "early mask": attention("a = Add(c, keys) b = Mul(a, s)"),
}


@pytest.mark.parametrize("model", NONE_OF_IT.values(), ids=NONE_OF_IT)
def test_what_is_no_attention_is_not_looked_at(model: Model, tmp_path: Path) -> None:
    _, report = fused(model, tmp_path)
    assert "attention" not in {**report.fused, **report.declined}


def test_fp32_is_left_alone(tmp_path: Path) -> None:
    path = attention().in_fp32(tmp_path / "fp32.onnx")
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
