"""What the fusions of token mixers take, what they leave, and that the fused graph computes the same."""

import numpy as np
import pytest
from onnx import TensorProto

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from fusion_models import (
    BATCH,
    BF16,
    FP8,
    NF,
    D,
    K,
    Model,
    N,
    bf16,
    close,
    close_quantized,
    fused,
    ops,
    quantized,
    rounded,
    run,
    sites_of,
    unchanged,
)

from loka_onnx.core.formats import Precision
from loka_onnx.engines.inductor.backend import InductorBackend
from loka_onnx.engines.inductor.fusions import DOMAIN, fuse
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph

TURNED = "xt = Transpose<perm=[0,2,1]>(x)"
NORM = "[norm] y = LayerNormalization<epsilon=0.00001>(f, gamma, beta)"


def normalized(z, gamma, beta, epsilon=1e-5):
    """Layer normalization over the last axis, in float64."""
    z = z.astype(np.float64)
    centred = z - z.mean(-1, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(-1, keepdims=True) + epsilon)
    return centred / deviation * gamma.astype(np.float64) + beta.astype(np.float64)


def factorization(merged: bool = False, flat: str = "Reshape(s, to)") -> Model:
    """The interaction half of a Wukong block as exporters and mods write it."""
    constants = {"gamma": bf16(N * K), "beta": bf16(N * K), "to": np.array([-1, N * K])}
    mix = "[project] p = MatMul(xt, w)"
    if merged:
        mix = "[both] pm = MatMul(xt, w) p, other = Split<axis=-1>(pm, sizes)"
    constants |= {"w": bf16(N, K + 3 * merged, scale=0.3), "sizes": np.array([K, 3])}
    text = f"{TURNED} {mix} [interact] s = MatMul(x, p) f = {flat} {NORM}"
    return Model((N, D), text, constants, ("y", "other") if merged else ("y",))


def with_q(model: Model) -> Model:
    model = model.but("[norm] y = ", "[norm] n = ", s8=np.array(2**-7, BF16))
    return model.then(quantized("n", "s8"))


def expected_factorization(model: Model, x: np.ndarray) -> np.ndarray:
    c, tokens = model.wide(), rounded(x)
    p = rounded(np.einsum("bnd,nk->bdk", tokens, c["w"][:, :K]))
    s = np.einsum("bnd,bdk->bnk", tokens, p).reshape(len(x), -1)
    return normalized(s, c["gamma"], c["beta"])


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("flat", ["Reshape(s, to)", "Flatten<axis=1>(s)"])
def test_the_interaction_and_its_norm_become_one_node(merged, flat, tmp_path):
    model = factorization(merged, flat)
    graph, report = fused(model, tmp_path)
    assert sites_of(report, "factorization-norm") == [("both" if merged else "project", "interact", "norm")]
    rest = ["MatMul", "Split", "Transpose"] if merged else []
    assert ops(graph) == sorted(["Cast"] * (3 if merged else 2) + rest + [f"{DOMAIN}::FactorizationNorm"])
    x = model.rows()
    got, expected = run(graph, x)[0], expected_factorization(model, x)
    # On the CPU S is rounded to BF16 before the norm; the rest is the rounding of the output.
    close(got, expected, relative=2, absolute=8)
    # Dropping the gain or the shift would be seen.
    assert np.abs(got - normalized(expected, np.ones(1), np.zeros(1))).max() > 0.5


def test_the_q_behind_the_norm_is_taken_along(tmp_path):
    model = with_q(factorization())
    graph, _ = fused(model, tmp_path)
    assert ops(graph) == ["Cast", "Cast", "DequantizeLinear", f"{DOMAIN}::FactorizationNorm"]
    x, scale = model.rows(), 2**-7
    expected, (got,) = expected_factorization(model, x), run(graph, x)
    # A value may fall to either side where S was rounded: one step of E4M3, 2⁻³ of its magnitude.
    close_quantized(got, expected, scale, relative=8, absolute=16 / scale)
    exact = np.clip(expected / scale, -448, 448).astype(np.float32).astype(FP8).astype(np.float32)
    assert (got / scale == exact).mean() > 0.9


def residual(order: str = "c, x") -> Model:
    """The second half: F comes from a product so that its shape is known."""
    constants = {
        **{"gamma": bf16(D), "beta": bf16(D), "w": bf16(N, N - NF, scale=0.3)},
        **{"flat": np.array([-1, N * D]), "tokens": np.array([-1, NF, D])},
        "wf": bf16(N * D, NF * D, scale=0.05),
    }
    text = f"xf = Reshape(x, flat) [mlp] ff = MatMul(xf, wf) own = Reshape(ff, tokens) {TURNED}"
    text += " [mix] lt = MatMul(xt, w) l = Transpose<perm=[0,2,1]>(lt) c = Concat<axis=1>(own, l)"
    return Model((N, D), f"{text} f = Add({order}) {NORM}", constants)


@pytest.mark.parametrize("order", ["c, x", "x, c"])
def test_the_residual_block_becomes_one_node(order, tmp_path):
    model = residual(order)
    graph, report = fused(model, tmp_path)
    assert sites_of(report, "token-residual-norm") == [("mix", "norm")]
    assert f"{DOMAIN}::TokenResidualNorm" in ops(graph)
    c, x = model.wide(), model.rows()
    tokens = rounded(x)
    own = rounded(tokens.reshape(BATCH, -1) @ c["wf"]).reshape(BATCH, NF, D)
    z = np.concatenate([own, np.einsum("bnd,nm->bmd", tokens, c["w"])], axis=1) + tokens
    close(run(graph, x)[0], normalized(z, c["gamma"], c["beta"]), absolute=8)


def test_what_looks_alike_is_left_alone(tmp_path):
    # The product reads other tokens than those it was projected from.
    other = factorization().but(TURNED, f"{TURNED} xr = Relu(x)").but("MatMul(x, p)", "MatMul(xr, p)")
    assert fused(other, tmp_path)[1].fused == {}
    swapped = residual().but("Concat<axis=1>(own, l)", "Concat<axis=1>(l, own)")
    assert "token-residual-norm" not in fused(swapped, tmp_path)[1].fused
    graph, report = fused(with_q(factorization()).then("", zero=np.array(0, np.uint8)), tmp_path)
    assert "factorization-norm" in report.fused
    assert "QuantizeLinear" in ops(graph)


def test_an_fp32_graph_declines_and_the_backend_names_what_it_would_fuse_in_bf16(tmp_path):
    """Plans are made for the FP32 model: the same places are found there, as of BF16."""
    path = factorization().in_fp32(tmp_path / "model.onnx")
    report = fuse(PlannedGraph.load(path))
    assert report.fused == {}
    assert report.declined == {"factorization-norm": ("norm: the kernel multiplies BF16 and FP16",)}
    joined = InductorBackend().fused_sites(path, Precision.BF16)
    assert joined == dict.fromkeys(["project", "interact", "norm"], "factorization-norm")
    assert InductorBackend().fused_sites(path, Precision.FP32) == {}


@pytest.mark.parametrize("axis", [0, 1])
def test_a_norm_over_something_else_is_left_alone(axis, tmp_path):
    """The gain has as many elements either way."""
    shape = (N, K) if axis else (N * K,)
    changed = {"to": np.array([-1, *shape]), "gamma": bf16(*shape), "beta": bf16(*shape)}
    _, report = fused(factorization().but("<epsilon=", f"<axis={axis}, epsilon=", **changed), tmp_path)
    assert "factorization-norm" not in report.fused
    assert report.declined["factorization-norm"] == (
        "norm: it does not normalize over all of the flattened product, and that alone",
    )


def test_products_that_the_plan_keeps_in_fp32_stay_there(tmp_path):
    wide = {name: bf16(N * K).astype(np.float32) for name in ("gamma", "beta")}
    model = factorization().but(
        "[interact] s = MatMul(x, p)",
        "xw = Cast<to=1>(x) pw = Cast<to=1>(p) [interact] s = MatMul(xw, pw)",
        **wide,
    )
    model = model.but("[norm] y =", "[norm] n32 =").then("y = Cast<to=16>(n32)")
    report = unchanged(model, tmp_path)
    assert report.declined["factorization-norm"] == ("norm: the plan keeps the product in FP32",)


# Mixes of tokens that no norm follows -----------------------------------------------------------------

MIXED, OTHERS = 9, 2
"""Tokens that the mix makes, and those beside it."""
MIX = f"{TURNED} [mix] mt = MatMul(xt, w) m = Transpose<perm=[0,2,1]>(mt)"
# Not a mix: something stands between.
BESIDE = "[other] ot = MatMul(xt, v) or = Relu(ot) f = Transpose<perm=[0,2,1]>(or)"


def mixed(beside: str = "f, m", flat: str = "", ends: str = "wide") -> Model:
    """W · X as exporters write it: `beside` says where the other tokens stand, if there are any."""
    constants = {"w": bf16(N, MIXED, scale=0.3), "v": bf16(N, OTHERS, scale=0.3)}
    constants |= {"s": np.array(0.03125, BF16), "to": np.array([-1, (MIXED + OTHERS * bool(beside)) * D])}
    text = f"{MIX} {BESIDE} c = Concat<axis=1>({beside})" if beside else MIX
    last = "c" if beside else "m"
    if flat:
        text, last = f"{text} z = {flat.format(last)}", "z"
    made = {"quantized": ("y", quantized(last)), "wide": ("wide", f"wide = Identity({last})")}
    outputs, nodes = zip(*(made[end] for end in ends.split(" and ")), strict=True)
    return Model((N, D), " ".join((text, *nodes)), constants, outputs)


def expected_mix(model: Model, x: np.ndarray, beside: str) -> np.ndarray:
    """In float64, rounded to BF16 where the graph rounds."""
    c, tokens = model.wide(), rounded(x)
    w, v = (rounded(np.einsum("bnd,nm->bmd", tokens, c[name])) for name in "wv")
    parts = [{"m": w, "f": np.maximum(v, 0)}[name] for name in (beside or "m").split(", ")]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("beside", ["", "f, m", "m, f"])
@pytest.mark.parametrize("flat", ["", "Reshape({}, to)", "Flatten<axis=1>({})"])
@pytest.mark.parametrize("ends", ["wide", "quantized", "quantized and wide"])
def test_a_mix_is_joined_flattened_and_quantized_as_it_is_made(beside, flat, ends, tmp_path):
    model = mixed(beside, flat, ends)
    graph, report = fused(model, tmp_path)
    assert sites_of(report, "token-concat") == [("mix",)]
    left = ops(graph)
    assert f"{DOMAIN}::TokenConcat" in left and not {"Concat", "QuantizeLinear", "Reshape"} & set(left)
    (node,) = [each for each in graph.nodes if each.op == f"{DOMAIN}::TokenConcat"]
    # The model's FP32 input is rounded as it is read.
    assert node.reads(0).kind == TensorProto.FLOAT
    x = model.rows()
    exact = expected_mix(model, x, beside)
    exact = exact.reshape(BATCH, -1) if flat else exact
    got = dict(zip(model.outputs, run(graph, x), strict=True))
    if "y" in got:
        close_quantized(got["y"], exact, 0.03125, absolute=4 / 0.03125)
    if "wide" in got:
        close(got["wide"], exact, absolute=4)


ALONE = {
    # Along the length of tokens, of which there must be as many.
    "another axis": mixed().but("Concat<axis=1>", "Concat<axis=2>", v=bf16(N, MIXED, scale=0.3)),
    "read elsewhere": mixed().then("again = Identity(m)", "wide", "again"),
    "three parts": mixed().but("(f, m)", "(f, m, f)"),
}


@pytest.mark.parametrize("model", ALONE.values(), ids=ALONE)
def test_the_mix_alone_is_fused_where_the_rest_is_not_its_own(model, tmp_path):
    graph, report = fused(model, tmp_path)
    assert sites_of(report, "token-concat") == [("mix",)]
    assert {"Concat", f"{DOMAIN}::TokenConcat"} <= set(ops(graph))
    unchanged(model, tmp_path)


BACK = "m = Transpose<perm=[0,2,1]>(mt)"


@pytest.mark.parametrize(
    "other",
    ["m = Identity(mt)", "m = Transpose<perm=[2,0,1]>(mt)", "rt = Relu(mt) m = Transpose<perm=[0,2,1]>(rt)"],
    ids=["not transposed back", "other transpose", "relu between"],
)
def test_what_is_no_mix_stays(other, tmp_path):
    _, report = fused(mixed("").but(BACK, other), tmp_path)
    assert "token-concat" not in {**report.fused, **report.declined}


def test_tokens_that_fill_no_program_are_declined_with_the_reason(tmp_path):
    many = 4096
    _, report = fused(Model((many, D), MIX, {"w": bf16(many, MIXED, scale=0.1)}, ("m",)), tmp_path)
    assert report.declined["token-concat"] == (f"mix: {many}×{D} tokens are too large for one program",)


@pytest.mark.parametrize("second", ["Transpose<perm=[0,2,1]>(b)", "Relu(b)"])
def test_parts_of_a_merged_mix_are_fused_together_or_not_at_all(second, tmp_path):
    """Where something else reads a part, the product would be computed twice."""
    split = f"a, b = Split<axis=-1>(mt, sizes) y = Transpose<perm=[0,2,1]>(a) z = {second}"
    model = mixed("").but(BACK, split, ("y", "z"), sizes=np.array([4, MIXED - 4]))
    model = model.but(" wide = Identity(m)", "")
    report = unchanged(model, tmp_path)
    if "Relu" in second:
        reason = "mix: something else reads the product, which would be computed twice"
        assert report.declined["token-concat"] == (reason,)
        assert "token-concat" not in report.fused
    else:
        assert len(report.fused["token-concat"]) == 2
        assert "MatMul" not in ops(fused(model, tmp_path)[0])
