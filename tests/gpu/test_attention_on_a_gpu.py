"""A package with fused attention: that a kernel for it is called, and that it answers as the graph says.

On the CPU PyTorch has a kernel of its own; on a GPU this project has one where keys are few, which is also
compared with float64 by itself.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

sys.path.append(str(Path(__file__).parents[1] / "unit" / "engines" / "inductor"))

from built_engines import DEVICES, Built  # noqa: E402
from kernel_cases import Draw, heads_of_one_product  # noqa: E402
from tiny_models import GraphWriter, TinyModel, make_plan  # noqa: E402

from loka_onnx.core.formats import Precision  # noqa: E402
from loka_onnx.core.site import SiteKind  # noqa: E402
from loka_onnx.engines.inductor.package import read_engine, read_sources  # noqa: E402
from loka_onnx.engines.inductor.site_precision import product_calls  # noqa: E402

TOKENS, WIDTH, HEADS, SEEDS, ROWS, EMPTY = 100, 32, 2, 60, 16, 2
"""Keys are no multiple of 8, as kernels want of a mask in memory; all tokens of row `EMPTY` are masked."""
AGAIN = 3
"""How often they are repeated for attention that is not short."""
KERNELS = {True: {"flash_for_cpu"}, False: {"flash", "efficient", "cudnn"}}
"""By whether it is the CPU; PyTorch 2.11 took cuDNN's on an H100. None is the composition of products."""
SHORT, OWN = 5, "loka.short_attention.default"
"""How many of the attentions our own kernel takes on a GPU: all but the repeated one."""
SITES = tuple(
    f"{name}.{part}"
    for name in ("whole", "few", "masked", "finite", "long", "single")
    for part in ("compare", "attend")
)
CALLS = re.compile(
    r"^(?!.*\b(?:void|extern)\b).*\baoti_torch_\w+?__scaled_dot_product_(\w+?)_attention(\w*)\(", re.M
)
INT64, BOOL = onnx.TensorProto.INT64, onnx.TensorProto.BOOL


def attentions(folder: Path) -> TinyModel:
    """Of all tokens, of a few queries, with a mask of keys, of repeated keys, and without heads."""
    folder.mkdir(parents=True)
    w = GraphWriter(Precision.BF16)
    x = w.enter("x")
    numbers = [w.constant(f"at{n}", [n], INT64) for n in (0, 1, 2, SEEDS)]
    nothing, lowest = w.constant("nothing", 0.0), w.constant("lowest", -np.inf)

    def part(name: str, tokens: str, count: int, heads: int, order: list[int]) -> str:
        shape = w.constant(f"{name}/shape", [-1, count, heads, WIDTH // heads], INT64)
        made = w.op("MatMul", [tokens, w.weight(name, (WIDTH, WIDTH))], name)
        return w.op(
            "Transpose", [w.op("Reshape", [made, shape], f"{name}/heads")], f"{name}/turned", perm=order
        )

    def attention(name: str, queries: str, count: int, mask: str = "", again: int = 1) -> str:
        q = part(f"{name}.q", queries, count, HEADS, [0, 2, 1, 3])
        tokens = w.op("Concat", [x] * again, f"{name}/again", axis=1) if again > 1 else x
        kt, v = (
            part(f"{name}.{n}", tokens, again * TOKENS, HEADS, o)
            for n, o in (("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
        )
        scores = w.op("MatMul", [q, kt], f"{name}.compare")
        last = w.op("Mul", [scores, w.constant("scale", (WIDTH // HEADS) ** -0.5)], f"{name}/scaled")
        last = w.op("Add", [last, mask], f"{name}/masked") if mask else last
        last = w.op("Softmax", [last], f"{name}/softmax", axis=-1)
        if mask:
            test = w.op("IsNaN", [last], f"{name}/nan")
            last = w.op("Where", [test, nothing, last], f"{name}/guard")
        out = w.op("MatMul", [last, v], f"{name}.attend")
        out = w.op("Transpose", [out], f"{name}/joined", perm=[0, 2, 1, 3])
        return w.op("Reshape", [out, w.constant(f"row{count}", [-1, count * WIDTH], INT64)], f"{name}/row")

    def single(name: str) -> str:
        kt = w.op("Transpose", [x], f"{name}/kt", perm=[0, 2, 1])
        scores = w.op(
            "MatMul",
            [w.op("MatMul", [x, w.weight(name, (WIDTH, WIDTH))], f"{name}.q"), kt],
            f"{name}.compare",
        )
        shares = w.op("Softmax", [scores], f"{name}/softmax", axis=-1)
        out = w.op("MatMul", [shares, x], f"{name}.attend")
        return w.op("Reshape", [out, w.constant(f"row{TOKENS}", [-1, TOKENS * WIDTH], INT64)], f"{name}/row")

    seeds = w.op("Slice", [x, numbers[0], numbers[3], numbers[1]], "seeds")
    first = w.op("Slice", [x, numbers[0], numbers[1], numbers[2]], "first")
    first = w.op("Reshape", [first, w.constant("keys", [-1, 1, 1, TOKENS], INT64)], "first/keys")
    keep = w.op("Less", [first, w.constant("limit", 0.5)], "keep")
    mask = w.op("Where", [keep, nothing, lowest], "mask")
    # A row of the least number of BF16 throughout is uniform.
    least = w.constant("least", float(ml_dtypes.finfo(ml_dtypes.bfloat16).min))
    finite = w.op("Where", [keep, nothing, least], "finite/mask")
    rows = [
        attention("whole", x, TOKENS),
        attention("few", seeds, SEEDS),
        attention("masked", x, TOKENS, mask),
        attention("finite", x, TOKENS, finite),
        attention("long", x, TOKENS, again=AGAIN),
    ]
    w.leave(w.op("Concat", [*rows, single("single")], "rows", axis=1))
    for name in SITES:
        w.site(name, SiteKind.INTERACTION, WIDTH, TOKENS, f"{name}:0")
    path, sites = w.save(folder / "model.onnx", {"x": (TOKENS, WIDTH)}), tuple(w.sites)
    x = np.random.default_rng(1).normal(size=(ROWS, TOKENS, WIDTH))
    x[EMPTY, :, 0] = 1.0
    # Of BF16, so that the reference sees the same mask.
    np.savez(folder / "sample.npz", x=x.astype(ml_dtypes.bfloat16).astype(np.float32))
    return TinyModel(path, make_plan(sites, base=Precision.BF16), sites, folder / "sample.npz")


@pytest.fixture(scope="module", params=DEVICES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built.on(request.param, tmp_path_factory.mktemp("attention"), attentions)


def test_kernels_of_attention_are_called(built: Built) -> None:
    assert not built.artifact.fallbacks, [site.evidence for site in built.artifact.fallbacks]
    engine = read_engine(built.engine)
    kernels = {site.site: site.kernel for site in engine.sites}
    assert {name: kernels[name] for name in SITES} == dict.fromkeys(SITES, "fused Attention")
    on_cpu = built.artifact.architecture == "cpu"
    for program in engine.programs:
        sources = read_sources(built.engine, program.name)
        called = [kind + where for text in sources for kind, where in CALLS.findall(text)]
        own = product_calls(sources)[OWN]
        assert (len(called), own) == ((6, 0) if on_cpu else (1, SHORT)), program.name
        assert {*called} <= KERNELS[on_cpu], program.name


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 16])
def test_it_answers_as_the_graph_says(built: Built, rows: int) -> None:
    """Sizes with a CUDA graph, sizes that are padded to one, and one without."""
    with built.open() as runner:
        found = runner.run(built.inputs(rows))["out"]
    exact = built.exact(rows)
    assert found.shape == exact.shape == (rows, (5 * TOKENS + SEEDS) * WIDTH)
    error = np.abs(found - exact)
    # BF16 has 8 bits: factors, products and results are rounded, of values up to 4.
    assert 1e-5 < error.mean() < 0.01
    assert error.max() < 0.1
    masked = slice((TOKENS + SEEDS) * WIDTH, (2 * TOKENS + SEEDS) * WIDTH)
    if rows > EMPTY:
        assert not found[EMPTY, masked].any()
    assert np.abs(found[:EMPTY, masked]).max() > 0.5


@pytest.mark.gpu
@pytest.mark.usefixtures("float8_gpu")
@pytest.mark.parametrize("base", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["none", "added", "keep", "drop", "keys", "least"])
@pytest.mark.parametrize(
    "sizes",
    [(8, 104, 104, 16), (8, 2, 100, 16), (1, 50, 50, 128), (3, 70, 17, 24), (2, 256, 256, 64)],
    ids=str,
)
def test_short_attention_is_exact(sizes: tuple[int, int, int, int], mask: str, base: Any) -> None:
    """Of views of one product; `EMPTY` is masked throughout. The next product takes the result as it is."""
    from loka_onnx.engines.inductor.kernels.triton_attention import short_attention

    heads, queries, keys, width = sizes
    q, kt, v = heads_of_one_product(Draw(base), sizes, ROWS)
    shape = (ROWS, 1, 1, keys) if mask in {"keys", "least"} else (ROWS, heads, queries, keys)
    drop = torch.rand(shape, device="cuda") < 0.4
    drop[EMPTY] = True
    lowest = torch.finfo(torch.bfloat16).min if mask == "least" else float("-inf")
    added = torch.zeros(shape, device="cuda").masked_fill(drop, lowest)
    if mask == "added":
        added += torch.randn(shape, device="cuda").to(base).float()
    given = {"none": None, "keep": ~drop, "drop": drop, "least": added}.get(mask, added.to(base))
    scale = width**-0.5
    found = short_attention(q, kt, v, given, scale, mask == "drop")
    assert found.dtype is base and found.is_contiguous() and found.shape == (ROWS, queries, heads, width)
    scores = q.double() @ kt.double() * scale
    if mask == "least":
        # It swallows what it is added to, so that a row of it is uniform.
        scores = torch.where(drop.all(-1, keepdim=True), 0.0, scores.masked_fill(drop, float("-inf")))
    elif mask != "none":
        scores = scores + added.double()
    shares = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    exact = (shares @ v.double()).transpose(1, 2)
    # Probabilities and results are rounded; values are up to 5.
    unit = torch.finfo(base).eps
    torch.testing.assert_close(found.double(), exact, rtol=2 * unit, atol=4 * unit)
    if mask not in {"none", "least"}:
        assert not found[EMPTY].any()
    assert exact[0].abs().max() > 0.1


@pytest.mark.gpu
@pytest.mark.usefixtures("float8_gpu")
def test_short_attention_takes_any_strides() -> None:
    """Kᵀ and V whose last axis is not contiguous, and one Q of all examples."""
    from loka_onnx.engines.inductor.kernels.triton_attention import short_attention

    q = torch.randn(1, 2, 5, 16, device="cuda").bfloat16().expand(ROWS, -1, -1, -1)
    kt, v = (torch.randn(ROWS, 2, 16, 33, device="cuda").bfloat16() for _ in range(2))
    found = short_attention(q, kt, v.transpose(2, 3), None, 0.25, False)
    plain = short_attention(q.contiguous(), kt, v.transpose(2, 3).contiguous(), None, 0.25, False)
    assert torch.equal(found, plain)
    shares = torch.softmax(q.double() @ kt.double() * 0.25, dim=-1)
    unit = torch.finfo(torch.bfloat16).eps
    exact = (shares @ v.transpose(2, 3).double()).transpose(1, 2)
    torch.testing.assert_close(found.double(), exact, rtol=2 * unit, atol=4 * unit)
