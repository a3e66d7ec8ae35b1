"""What each mod that changes shapes must rewrite, in every form; the tests of mods and of engines use it."""

from collections.abc import Callable
from typing import Any

import numpy as np
from shape_models import IDS, Case, dyadic

from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.interactions.conv_to_matmul import ConvToMatMul
from loka_onnx.transforms.interactions.einsum_to_matmul import EinsumToMatMul
from loka_onnx.transforms.interactions.reassociate_interaction import ReassociateInteraction
from loka_onnx.transforms.linears.merge_parallel_linears import MergeParallelLinears
from loka_onnx.transforms.linears.pad_sites import CopyRule, PadSites
from loka_onnx.transforms.linears.split_concat import SplitConcat
from loka_onnx.transforms.lookups.merge_gathers import MergeGathers
from loka_onnx.transforms.tidying.fold_constants import FoldConstants
from loka_onnx.transforms.tidying.join_parts import JoinParts
from loka_onnx.transforms.tidying.remove_no_ops import RemoveNoOps
from loka_onnx.transforms.tidying.share_duplicates import ShareDuplicates

ACTIVATIONS = ("Relu", "Softplus", "Relu", "Softplus")
AXES = {"last": np.array([-1]), "one": np.array([1])}

MERGED: dict[str, Case] = {
    "gemms": Case("[a] ha = Gemm<transB=1>(x, wa, ba) [b] hb = Gemm<transB=1>(x, wb, bb) ra = Relu(ha)"
        " rb = Relu(hb) y = Concat<axis=1>(ra, rb)", {"wa": (3, 8), "ba": (3,), "wb": (5, 8), "bb": (5,)}),
    "gemms_one_without_bias": Case(
        "[a] ha = Gemm(x, wa) [b] hb = Gemm<transB=1>(x, wb, bb) ra = Tanh(ha) rb = Tanh(hb) y = Mul(ra, rb)",
        {"wa": (8, 8), "wb": (8, 8), "bb": (8,)}),
    "query_key_value": Case(
        "[attention__query] q0 = MatMul(x, wq) q = Add(q0, bq) [attention__key] k0 = MatMul(x, wk)"
        " k = Add(bk, k0) [attention__value] v = MatMul(x, wv) kt = Transpose<perm=[0,2,1]>(k)"
        " [dot] s = MatMul(q, kt) p = Softmax<axis=-1>(s) [mix] y = MatMul(p, v)",
        {"wq": (8, 8), "bq": (8,), "wk": (8, 8), "bk": (1, 8), "wv": (8, 8)}, "float[batch,4,8] x"),
    "gemm_and_matmul": Case(
        "[a] ha = Gemm<transB=1>(x, wa, ba) [b] hb = MatMul(x, wb) ra = Relu(ha) rb = Relu(hb)"
        " y = Add(ra, rb)", {"wa": (8, 8), "ba": (8,), "wb": (8, 8)}),
    "weights_on_the_left": Case("[a] ha = MatMul(wa, x) [b] hb = MatMul(wb, x) y = Concat<axis=1>(ha, hb)",
        {"wa": (3, 4), "wb": (2, 4)}, "float[batch,4,8] x"),
    "a_residual_stays_behind": Case(
        "[a] ha = MatMul(x, wa) ra = Add(ha, x) [b] hb = MatMul(x, wb) rb = Add(hb, row) y = Mul(ra, rb)",
        {"wa": (8, 8), "wb": (8, 8), "row": (4, 8)}, "float[batch,4,8] x"),
    "experts_then_experts": Case(
        "[a] ha = Gemm<transB=1>(x, wa, ba) [b] hb = Gemm<transB=1>(x, wb, bb) ra = Relu(ha)"
        " [c] hc = Gemm<transB=1>(ra, wc, bc) [d] hd = Gemm<transB=1>(ra, wd, bd) rc = Relu(hc)"
        " rd = Relu(hd) sc = Mul(rc, hb) y = Add(sc, rd)",
        {**{f"w{c}": (8, 8) for c in "abcd"}, **{f"b{c}": (8,) for c in "abcd"}}),
    "activations_with_constants_of_channels": Case(
        "[a] ha = Gemm(x, wa) pa = PRelu(ha, slopes) ta = Add(pa, half) sa = Mul(ta, row) la = LeakyRelu(sa)"
        " [b] hb = Gemm(x, wb) pb = PRelu(hb, slope) tb = Add(pb, half) sb = Mul(tb, rows) lb = LeakyRelu(sb)"
        " y = Concat<axis=1>(la, lb)", {"wa": (8, 3), "wb": (8, 5), "slopes": (3,), "slope": [0.25],
        "half": 0.5, "row": (1, 3), "rows": (5,)}),
    "unlike_activations_in_pairs": Case(" ".join(f"[{c}] h{c} = Gemm(x, w{c}) r{c} = {f}(h{c})" for c,
        f in zip("abcd", ACTIVATIONS, strict=True)) + " y = Concat<axis=1>(ra, rb, rc, rd)",
        {f"w{c}": (8, n) for c, n in zip("abcd", (2, 3, 4, 5), strict=True)}),
    "one_weight_is_zero": Case(
        "[a] ha = MatMul(x, wa) [b] hb = MatMul(x, wb) ra = Relu(ha) rb = Relu(hb) y = Add(ra, rb)",
        {"wa": (8, 8), "wb": np.zeros((8, 8))}),
}  # fmt: skip

ANY_COPY = CopyRule(1, 1, 1)
WIDE = "float[batch,32] x"

PADDED: dict[str, Case] = {
    "absorbed_by_the_next_layer": Case(
        "[a] h = Gemm<transB=1>(x, wa, ba) r = Relu(h) [b] y = Gemm<transB=1>(r, wb, bb)",
        {"wa": (20, 32), "ba": (20,), "wb": (16, 20), "bb": (16,)}, WIDE),
    "absorbed_behind_a_product_of_two_ways": Case(
        "[a] h = MatMul(x, wa) r = Relu(h) s = Sigmoid(r) m = Mul(h, s) [b] y = MatMul(m, wb)",
        {"wa": (32, 20), "wb": (20, 16)}, WIDE),
    "absorbed_by_two_layers_behind_swish": Case(
        "[a] h0 = MatMul(x, wa) h = Add(h0, ba) s = Sigmoid(h) r = Mul(h, s) t = Clip(r, low, high)"
        " [b] yb = MatMul(t, wb) [c] yc = MatMul(r, wc) y = Add(yb, yc)",
        {"wa": (32, 20), "ba": (20,), "wb": (20, 16), "wc": (20, 16), "low": -1.0, "high": 1.0}, WIDE),
    "one_more_part_of_a_split": Case("[a] h = MatMul(x, wa) p, q = Split<axis=-1>(h, sizes) y = Mul(p, q)",
        {"wa": (32, 40), "sizes": [20, 20]}, WIDE),
    "a_gather_repeats_a_position": Case("g = Gather<axis=1>(x, positions) [a] y = Gemm<transB=1>(g, wa, ba)",
        {"wa": (16, 21), "ba": (16,), "positions": np.arange(21)}, WIDE),
    "a_gather_inside_a_concat": Case(
        "g = Gather<axis=1>(x, positions) c = Concat<axis=1>(x, g, z) [a] y = Gemm(c, wa, ba)",
        {"wa": (61, 16), "ba": (16,), "positions": np.arange(21)}, "float[batch,32] x, float[batch,8] z"),
    "a_part_of_a_concat_for_two_layers": Case(
        "c = Concat<axis=-1>(x, z, x) [a] ya = Gemm(c, wa) [b] yb = Gemm<transB=1>(c, wb, bb)"
        " y = Mul(ya, yb)", {"wa": (69, 16), "wb": (16, 69), "bb": (16,)},
        "float[batch,32] x, float[batch,5] z"),
    "a_pad_for_two_layers": Case(
        "[a] ya = MatMul(x, wa) [b] yb = MatMul(x, wb) y0 = Mul(ya, yb) y = Mul(y0, x1)",
        {"wa": (21, 32), "wb": (21, 32)}, "float[batch,4,21] x, float[batch,4,32] x1"),
    "a_slice_in_front_of_a_norm": Case(
        "[a] h = Gemm<transB=1>(x, wa, ba) [n] y = LayerNormalization(h, gain)",
        {"wa": (20, 32), "ba": (20,), "gain": np.linspace(0.5, 1.5, 20)}, WIDE),
    "a_slice_of_an_output": Case("[a] h = MatMul(x, wa) y = Add(h, ba)", {"wa": (32, 20), "ba": (20,)}, WIDE),
    "both_sides_of_a_chain": Case(
        "[a] h = Gemm<transB=1>(x, wa, ba) r = Relu(h) [b] g = Gemm<transB=1>(r, wb, bb) s = Gelu(g)"
        " [c] y = Gemm<transB=1>(s, wc, bc)",
        {"wa": (20, 21), "ba": (20,), "wb": (36, 20), "bb": (36,), "wc": (20, 36), "bc": (20,)},
        "float[batch,21] x"),
}  # fmt: skip

LISTED = "m = Greater(x, half) n = NonZero(m) i = Transpose<perm=[1,0]>(n)"
COUNTED = (
    f"{LISTED} c = Cast<to=7>(m) k0 = ReduceSum<keepdims=0>(c) k = Reshape(k0, minus) v = Expand(three, k)"
)
MASK = {"half": 0.5, "three": 3.0, "minus": [-1]}

MASKED: dict[str, Case] = {
    "elements": Case(f"{COUNTED} y = ScatterND(x, i, v)", MASK),
    "rows": Case("m = Greater(z, half) n = NonZero(m) i = Transpose<perm=[1,0]>(n) s = Shape(n)"
        " k = Slice(s, one, two) c = Concat<axis=0>(k, width) v = Expand(three, c) y = ScatterND(x, i, v)",
        {**MASK, "one": [1], "two": [2], "width": [8]}, "float[batch,8] x, float[batch] z"),
    "a_mask_of_numbers": Case("n = NonZero(z) i = Transpose<perm=[1,0]>(n) s = Shape(n)"
        " k = Slice(s, one, two) v = Expand(three, k) y = ScatterND(x, i, v)",
        {**MASK, "one": [1], "two": [2]}, "float[batch,8] x, float[batch,8] z"),
    "booleans": Case("g = Less(x, half) " + COUNTED.replace("three", "no") + " w = ScatterND(g, i, v)"
        " y = Cast<to=1>(w)", {**MASK, "no": np.array(False)}),
    "integers": Case("g = Cast<to=7>(x) " + COUNTED.replace("three", "five") + " w = ScatterND(g, i, v)"
        " y = Cast<to=1>(w)", {**MASK, "five": np.array(5)}),
}  # fmt: skip

BAG = (
    "f = Reshape(ids, minus) z = Shape(f) o = Concat<axis=0>(r, z) e = Slice(o, one, far, zero)"
    " n = Shape(e) k = Squeeze(n) y = Loop(k, yes) <body = b (int64 i, bool c) => (bool d, float[4] q) {{"
    " d = Cast<to=9>(c) p0 = Gather(o, i) p = Unsqueeze(p0, zero) t0 = Gather(e, i) t = Unsqueeze(t0, zero)"
    " j = Slice(f, p, t, zero) g = Gather(table, j) {} }}>"
)
OF_THREE = "s = Shape(ids) a = ReduceProd<keepdims=0>(s) r = Range(none, a, three)"
SUMMED = BAG.format("q = ReduceSum<keepdims=0>(g, zero)")
BAG_OF = {"table": (7, 4), "minus": [-1], "zero": [0], "one": [1], "far": [2**31], "yes": np.array(True),
    "none": np.array(0), "three": np.array(3)}  # fmt: skip
TAKEN = (
    "t = Transpose<perm=[1,0]>(ids) f = Reshape(t, minus) s = Shape(f) o = Expand(one, s)"
    " m = Reshape(o, three) n = ReduceSum<keepdims=0>(m, one) a, b, c = Split<axis=0>(f, n)"
    " d = Sub(a, b) e = Mul(d, c) g = Cast<to=1>(e) y = Unsqueeze(g, one)"
)
IDS_OF_THREE = "int64[batch,3] ids"
"""As `nn.EmbeddingBag` and TorchRec are exported."""

BAGS: dict[str, Case] = {
    "three_ids_a_row": Case(f"{OF_THREE} {SUMMED}", BAG_OF, IDS_OF_THREE),
    "the_largest": Case(f"{OF_THREE} {SUMMED.replace('Sum', 'Max')}", BAG_OF, IDS_OF_THREE),
    "weighted": Case("u = Reshape(w, minus) " + OF_THREE + BAG.format("h0 = Slice(u, p, t, zero)"
        " h = Unsqueeze(h0, one) l = Mul(g, h) q = ReduceSum<keepdims=0>(l, zero)"), BAG_OF,
        "int64[batch,3] ids, float[batch,3] w"),
    "counted": Case(SUMMED.replace("z = Shape(f) o = Concat<axis=0>(r, z)", "s = Shape(ids)"
        " b = Slice(s, zero, one) v = Expand(three, b) w = CumSum(v, none) o = Concat<axis=-1>(zero, w)"),
        BAG_OF, IDS_OF_THREE),
}  # fmt: skip
ROWS_OF_IDS: dict[str, Case] = {
    "turned": Case(TAKEN, {"minus": [-1], "one": [1], "three": [3, -1]}, IDS_OF_THREE),
    "of_several_ids": Case(
        TAKEN.replace("<perm=[1,0]>", "<perm=[1,0,2]>"),
        {"minus": [-1], "one": [1], "three": [3, -1]},
        "int64[batch,3,2] ids",
    ),
}

FOLDED: dict[str, Case] = {
    "a_transposed_weight": Case("wt = Transpose<perm=[1,0]>(w) y = MatMul(x, wt)", {"w": (8, 8)}),
    "a_cast_weight": Case("w = Cast<to=1>(half) y = MatMul(x, w)", {"half": dyadic(8, 8).astype(np.float16)}),
    "a_chain_with_two_ends": Case("a = Mul(p, q) b = Add(a, q) c = Relu(a) y0 = Add(x, b) y = Mul(y0, c)",
        {"p": dyadic(8), "q": dyadic(8, seed=1)}),
    "a_shape_that_is_put_together": Case(
        "s = Concat<axis=0>(minus, four, two) r = Reshape(x, s) y0 = Relu(r) y = Reshape(y0, back)",
        {"minus": [-1], "four": [4], "two": [2], "back": [-1, 8]}),
    "rows_of_a_table_that_nothing_else_reads": Case("r = Gather<axis=0>(w, first) y = Add(x, r)",
        {"w": (50, 8), "first": 3}),
}  # fmt: skip

NO_OPS: dict[str, Case] = {
    "identity_and_dropout": Case("a = Identity(x) b = Dropout(a, half) c = Identity(b) y = Relu(c)",
        {"half": 0.5}),
    "casts": Case("a = Cast<to=1>(x) b = Cast<to=11>(a) c = Cast<to=1>(b) y = Relu(c)"),
    "transposes_that_cancel": Case(
        "a = Transpose<perm=[0,2,1]>(x) b = Transpose<perm=[0,2,1]>(a) y = Relu(b)",
        inputs="float[batch,4,8] x"),
    "transposes_that_compose": Case(
        "a = Transpose<perm=[0,2,3,1]>(x) b = Transpose<perm=[0,2,1,3]>(a) c = Relu(a)"
        " d = Transpose<perm=[0,3,1,2]>(c) e = Transpose<perm=[0,3,2,1]>(b) y = Add(e, d)",
        inputs="float[batch,2,3,4] x"),
    "reshapes": Case(
        "a = Reshape(x, s1) b = Unsqueeze(a, one) c = Reshape(b, s2) d = Flatten<axis=1>(c) y = Relu(d)",
        {"s1": [-1, 4, 2], "s2": [-1, 2, 4], **AXES}),
    "a_reshape_past_another": Case("a = Reshape(x, s1) b = Reshape(a, s2) y = Relu(b)",
        {"s1": [-1, 8, 1], "s2": [-1, 2, 4]}, outputs="float[batch,2,4] y"),
    "neutral_elements": Case(
        "a = Mul(one, x) b = Add(a, zero) c = Div(b, one) d = Sub(c, zero) e = Pow(d, one)"
        " f = Concat<axis=1>(e) g = Pad(f, none) h = Slice(g, none1, end, axis) y = Relu(h)", {"one": 1.0,
        "zero": [0.0], "none": np.zeros(4, np.int64), "none1": [0], "end": [2**31 - 1], "axis": [1]}),
}  # fmt: skip

SHARED: dict[str, Case] = {
    "transposes": Case("a = Transpose<perm=[0,2,1]>(x) b = Transpose<perm=[0,2,1]>(x) [p] c = MatMul(a, wp)"
        " [q] d = MatMul(b, wq) e = Relu(c) f = Relu(d) y = Add(e, f)", {"wp": (4, 3), "wq": (4, 3)},
        "float[batch,4,8] x"),
    "chains_with_equal_constants": Case(
        "a = Reshape(x, s1) b = Relu(a) c = Reshape(x, s2) d = Relu(c) e = Sigmoid(d) f = Mul(b, e)"
        " y = Flatten(f)", {"s1": [-1, 2, 4], "s2": [-1, 2, 4]}),
}  # fmt: skip

EINSUMS: dict[str, Case] = {
    "interaction": Case("y = Einsum<equation='bnd,bmd->bnm'>(x, x)".replace("'", '"'),
        inputs="float[batch,4,8] x"),
    "linear": Case('y = Einsum<equation="bnd,de->bne">(x, w)', {"w": (8, 5)}, "float[batch,4,8] x"),
    "linear_of_the_middle_axis": Case('y = Einsum<equation="bnd,kn->bkd">(x, w)', {"w": (3, 4)},
        "float[batch,4,8] x"),
    "weight_first": Case('y = Einsum<equation="ke, bne -> bnk">(w, x)', {"w": (3, 8)}, "float[batch,4,8] x"),
    "a_weight_for_each_token": Case('y = Einsum<equation="bnd,nde->bne">(x, w)', {"w": (4, 8, 3)},
        "float[batch,4,8] x"),
    "implicit": Case('y = Einsum<equation="bnd,od">(x, w)', {"w": (5, 8)}, "float[batch,4,8] x"),
    "any_rank": Case('y = Einsum<equation="...nd,...md->...nm">(x, x)', inputs="float[batch,4,8] x"),
    "projection_to_heads": Case('y = Einsum<equation="bnd,hde->bhne">(x, w)', {"w": (2, 8, 3)},
        "float[batch,4,8] x", outputs="float[batch,2,4,3] y"),
    "projection_of_heads": Case('y = Einsum<equation="hed,bnhe->bnd">(w, x)', {"w": (2, 8, 3)},
        "float[batch,4,2,8] x", outputs="float[batch,4,3] y"),
    "projection_in_each_head": Case('y = Einsum<equation="bnhd,hde->bnhe">(x, w)', {"w": (2, 8, 3)},
        "float[batch,4,2,8] x", outputs="float[batch,4,2,3] y"),
    "heads": Case('a = Reshape(x, s) y = Einsum<equation="bqhd,bkhd->bhqk">(a, a)', {"s": [-1, 4, 2, 4]},
        "float[batch,4,8] x", outputs="float[batch,2,4,4] y"),
}  # fmt: skip

CHANNELS = "float[batch,16,6] x"
CONVOLUTIONS: dict[str, Case] = {
    "of_positions": Case("[layers__conv] y = Conv(x, w, b)", {"w": (24, 16, 1), "b": (24,)}, CHANNELS),
    "without_bias_told_in_full": Case(
        "[layers__conv] h = Conv<group=1, kernel_shape=[1], strides=[1], pads=[0,0], dilations=[2]>(x, w)"
        " y = Relu(h)", {"w": (24, 16, 1)}, CHANNELS),
    "of_pixels": Case('[layers__conv] h = Conv<auto_pad="SAME_UPPER">(x, w, b) y = Relu(h)',
        {"w": (24, 16, 1, 1), "b": (24,)}, "float[batch,16,3,2] x"),
    "of_a_sequence_of_any_length": Case("[layers__conv] y = Conv(x, w, b)", {"w": (24, 16, 1), "b": (24,)},
        "float[batch,16,steps] x", outputs="float[batch,24,steps] y"),
    "of_a_grid_of_any_height": Case("[layers__conv] y = Conv(x, w, b)", {"w": (24, 16, 1, 1), "b": (24,)},
        "float[batch,16,steps,2] x", outputs="float[batch,24,steps,2] y"),
    "a_compressed_interaction": Case(
        "a = Unsqueeze(x, two) c = Unsqueeze(x, one) m = Mul(a, c) z = Reshape(m, flat)"
        " [cin__conv] h = Conv(z, w, b) r = Relu(h) y = ReduceSum<keepdims=0>(r, two)",
        {"w": (20, 16, 1), "b": (20,), "one": [1], "two": [2], "flat": [0, 16, 6]}, "float[batch,4,6] x"),
}  # fmt: skip

MANY_TOKENS = "float[batch,32,8] x"

REASSOCIATED: dict[str, Case] = {
    "learned_projection": Case(
        "t = Transpose<perm=[0,2,1]>(x) [fmb__matmul] s = MatMul(x, t) [fmb__project] p = MatMul(s, y0)"
        " y = Relu(p)", {"y0": (32, 4)}, MANY_TOKENS),
    "projection_of_the_batch": Case(
        "t = Transpose<perm=[0,2,1]>(x) [gram] s = MatMul(x, t) [mix] y = MatMul(s, z)",
        inputs=f"{MANY_TOKENS}, float[batch,32,4] z"),
    "the_other_way": Case("t = Transpose<perm=[0,2,1]>(x) [outer] o = MatMul(t, z) [mix] y = MatMul(x, o)",
        inputs="float[batch,4,32] x, float[batch,4,32] z"),
    "a_weight_on_the_left": Case(
        "t = Transpose<perm=[0,2,1]>(x) [outer] s = MatMul(x, t) [mix] y = MatMul(w, s)", {"w": (4, 32)},
        "float[batch,32,8] x"),
}  # fmt: skip

COLUMNS = {f"c{i}": np.array(i) for i in range(4)}
TABLES = {f"t{i}": (IDS + i, 4) for i in range(4)}
LOOK_UP = " ".join(f"i{i} = Gather<axis=1>(ids, c{i}) e{i} = Gather<axis=0>(t{i}, i{i})" for i in range(4))

LOOKED_UP: dict[str, Case] = {
    "stacked": Case(f"{LOOK_UP} u0 = Unsqueeze(e0, one) u1 = Unsqueeze(e1, one) u2 = Unsqueeze(e2, one)"
        " u3 = Unsqueeze(e3, one) s = Concat<axis=1>(u0, u1, u2, u3) y = Relu(s)",
        {**TABLES, **COLUMNS, **AXES}, "int64[batch,4] ids"),
    "flat_and_out_of_order": Case(f"{LOOK_UP} y = Concat<axis=1>(e2, x, e0, e1, e3)", {**TABLES, **COLUMNS},
        "int64[batch,5] ids, float[batch,8] x"),
    "int32_ids_cast_on_the_way": Case("k0 = Slice(ids, s0, s1, one) q0 = Squeeze(k0, one) i0 = Cast<to=7>(q0)"
        " e0 = Gather<axis=0>(t0, i0) i1a = Gather<axis=1>(ids, c1) i1 = Cast<to=7>(i1a)"
        " e1 = Gather<axis=0>(t1, i1) y = Concat<axis=1>(e0, e1)",
        {**{name: TABLES[name] for name in ("t0", "t1")}, "s0": [0], "s1": [1], "c1": 1, **AXES},
        "int32[batch,2] ids"),
    "columns_that_keep_their_axis": Case(
        "k0, k1 = Split<axis=1>(ids, sizes) e0 = Gather<axis=0>(t0, k0) e1 = Gather<axis=0>(t1, k1)"
        " y = Concat<axis=1>(e0, e1)", {**{name: TABLES[name] for name in ("t0", "t1")}, "sizes": [1, 1]},
        "int64[batch,2] ids"),
    "one_table": Case("i0 = Gather<axis=1>(ids, c0) i2 = Gather<axis=1>(ids, c2) e0 = Gather<axis=0>(t0, i0)"
        " e2 = Gather<axis=0>(t0, i2) y = Concat<axis=1>(e0, e2)", {"t0": (IDS, 4), "c0": 0, "c2": 2},
        "int64[batch,3] ids"),
}  # fmt: skip

JOINED: dict[str, Case] = {
    "flat": Case("a, b = Split<axis=1>(x, sizes) y = Concat<axis=1>(z, a, b)", {"sizes": [3, 5]},
        "float[batch,8] x, float[batch,2] z"),
    "nothing_else": Case("a, b = Split<axis=1>(x, sizes) c = Concat<axis=-1>(a, b) y = Relu(c)",
        {"sizes": [3, 5]}),
    "stacked": Case("a, b = Split<axis=1>(x, sizes) ua = Unsqueeze(a, one) ub = Reshape(b, as_row)"
        " s = Concat<axis=1>(ua, ub, z) y = Relu(s)", {"sizes": [4, 4], "as_row": [-1, 1, 4], **AXES},
        "float[batch,8] x, float[batch,2,4] z"),
    "what_was_joined_is_split_and_joined_again": Case(
        "a, b = Split<axis=1>(x, sizes) c = Concat<axis=1>(a, b) d, e = Split<axis=1>(c, sizes)"
        " f = Concat<axis=1>(d, e) y = Relu(f)", {"sizes": [3, 5]}),
    "two_runs": Case(
        "a, b = Split<axis=1>(x, sizes) c, d = Split<axis=1>(z, sizes) y = Concat<axis=1>(a, b, x, c, d)",
        {"sizes": [3, 5]}, "float[batch,8] x, float[batch,8] z"),
}  # fmt: skip

EXPANDED = "n = Shape<start=0, end=1>(x) s = Concat<axis=0>(n, width) e = Expand(row, s)"

TARGET = "e = Expand(q, times) d = Sub(e, k) p = Mul(e, k) c = Concat<axis=-1>(e, k, d, p)"
HISTORY = "float[batch,1,16] q, float[batch,6,16] k"

TAKEN_APART: dict[str, Case] = {
    "a_learned_row": Case(
        f"{EXPANDED} c = Concat<axis=1>(x, e, z) [fc] h = Gemm<transB=1>(c, w, b) y = Relu(h)",
        {"row": dyadic(1, 4), "w": dyadic(8, 15), "b": dyadic(8), "width": [4]},
        "float[batch,8] x, float[batch,3] z"),
    "a_row_for_two_layers": Case(
        f"{EXPANDED} c = Concat<axis=-1>(e, x, z) [fc] h0 = MatMul(c, w) h = Add(h0, b)"
        " [gate] g = MatMul(c, v) y = Mul(h, g)",
        {"row": dyadic(1, 4), "w": dyadic(15, 8), "b": dyadic(8), "v": dyadic(15, 8, seed=1), "width": [4]},
        "float[batch,8] x, float[batch,3] z"),
    "target_attention": Case(f"{TARGET} [fc] h = MatMul(c, w) i = Add(h, b) y = Relu(i)",
        {"times": [1, 6, 1], "w": dyadic(64, 8), "b": dyadic(8)}, HISTORY),
    "target_attention_of_rows": Case(
        f"{TARGET} r = Reshape(c, rows) [fc] h = Gemm<transB=1>(r, w, b) y = Relu(h)",
        {"times": [1, 6, 1], "rows": [-1, 64], "w": dyadic(24, 64), "b": dyadic(24)}, HISTORY),
    "target_attention_of_any_length": Case(
        f"s = Shape<start=1, end=2>(k) times = Concat<axis=0>(one, s, one) {TARGET}"
        " r = Flatten<axis=2>(c) [fc] h = MatMul(r, w) y = Relu(h)", {"one": [1], "w": dyadic(64, 8)},
        "float[batch,1,16] q, float[batch,steps,16] k"),
    "a_tensor_twice": Case(f"{EXPANDED.replace('row', 'x')} c = Concat<axis=1>(x, e) [fc] y = MatMul(c, w)",
        {"w": dyadic(16, 8), "width": [8]}),
    "two_towers": Case("d = Sub(x, z) p = Mul(x, z) c = Concat<axis=-1>(x, p, d, z) [fc] y = MatMul(c, w)",
        {"w": dyadic(32, 8)}, "float[batch,1,8] x, float[batch,1,8] z"),
    "two_candidates": Case(
        "d = Expand(q, times) e = Expand(u, times) c = Concat<axis=-1>(d, k, e) r = Reshape(c, rows)"
        " [fc] h0 = MatMul(r, w) h = Add(h0, b) y = Relu(h)",
        {"times": [1, 6, 1], "rows": [-1, 48], "w": dyadic(48, 8), "b": dyadic(8)},
        f"{HISTORY}, float[batch,1,16] u"),
    "learned_positions": Case(
        "p = Add(k, positions) c = Concat<axis=-1>(p, k) r = Reshape(c, rows) [fc] y = Gemm(r, w, b)",
        {"positions": dyadic(6, 16), "rows": [-1, 32], "w": dyadic(32, 8), "b": dyadic(8)},
        "float[batch,6,16] k"),
    "a_bias_stays_with_its_layer": Case(
        f"{TARGET} [fc] h0 = MatMul(c, w) h = Add(h0, b) m = Neg(h) n = Mul(h, two)"
        " t = Concat<axis=-1>(m, n) [top] y = MatMul(t, v)",
        {"times": [1, 6, 1], "w": dyadic(64, 8), "b": dyadic(8), "two": 2.0, "v": dyadic(16, 8)}, HISTORY),
}  # fmt: skip

MODS: dict[str, tuple[Callable[[], Mod[Any]], dict[str, Case]]] = {
    "merged": (MergeParallelLinears, MERGED),
    "padded": (lambda: PadSites(ANY_COPY), PADDED),
    "folded": (FoldConstants, FOLDED),
    "no_ops": (RemoveNoOps, NO_OPS),
    "shared": (ShareDuplicates, SHARED),
    "einsum": (EinsumToMatMul, EINSUMS),
    "convolution": (ConvToMatMul, CONVOLUTIONS),
    "reassociated": (lambda: ReassociateInteraction(least=0), REASSOCIATED),
    "looked_up": (MergeGathers, LOOKED_UP),
    "joined": (JoinParts, JOINED),
    "apart": (SplitConcat, TAKEN_APART),
}
"""By kind, what must be rewritten, and by which mod."""
