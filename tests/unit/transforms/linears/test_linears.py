"""Linears that read one tensor are merged, shared parts multiplied once, K and N padded; near misses stay."""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewrite_models import artifact, op_types
from shape_cases import ANY_COPY, EXPANDED, MERGED, PADDED, WIDE
from shape_models import Case, assert_left_alone, dyadic, feeds, match, rewrite, weight

from loka_onnx.core.site import SiteKind
from loka_onnx.transforms.linears.merge_parallel_linears import MergeParallelLinears
from loka_onnx.transforms.linears.pad_sites import PadSites, widened_shape
from loka_onnx.transforms.linears.split_concat import SplitConcat
from loka_onnx.transforms.sequence import apply_mods


def test_names_of_merged_sites_tell_the_exported_ones_and_a_site_merged_twice_all(tmp_path):
    done = rewrite(MERGED["query_key_value"].model(), MergeParallelLinears(), tmp_path)
    site = done.artifact.site("attention.query+key+value")
    assert site.merged_from == ("attention.query", "attention.key", "attention.value")
    assert (site.k, site.n, site.rows) == (8, 24, 4)
    assert [s.name for s in done.artifact.sites] == [site.name, "dot", "mix"]
    assert done.record.applied[0].what == "3 linears of K = 8 → one of N = 8 + 8 + 8"
    body = " ".join(f"[experts__{i}__fc] h{i} = Gemm(x, w{i}) r{i} = Relu(h{i})" for i in range(6))
    case = Case(f"{body} y = Concat<axis=1>({', '.join(f'r{i}' for i in range(6))})",
        {**{f"w{i}": (8, 2) for i in range(6)}}, outputs="float[batch,12] y")  # fmt: skip
    done = rewrite(case.model(), MergeParallelLinears(), tmp_path)
    assert list(done.sites()) == ["experts.0.fc+5_more"]
    # The second pass sees a merged site beside one that it may not have taken before.
    case = Case("[a] ha = Gemm(x, wa) [b] hb = Gemm(x, wb) [c] hc = Gemm(x, wc) ra = Relu(ha) rb = Relu(hb)"
        " rc = Relu(hc) s = Add(ra, rb) y = Mul(s, rc)",
        {"wa": (8, 8), "wb": (8, 8), "wc": 100 * weight(8, 8, seed=5)})  # fmt: skip
    source = artifact(case.model(), tmp_path / "before.onnx")
    mods = [MergeParallelLinears(spread=10), MergeParallelLinears(spread=1000)]
    result = apply_mods(source, [feeds(case.model())], tmp_path / "after.onnx", mods)
    assert [len(record.applied) for record in result.log.records] == [0, 1]
    assert result.model.sites[0].merged_from == ("a", "b", "c")


SQUARE = {"wa": (8, 8), "wb": (8, 8)}


def two(a: str, b: str, weights: Any = SQUARE, inputs: str = "float[batch,8] x", **case: Any) -> Case:
    """Two products with a ReLU each, joined."""
    body = f"[a] ha = {a} [b] hb = {b} ra = Relu(ha) rb = Relu(hb) y = Concat<axis=-1>(ra, rb)"
    return Case(body, weights, inputs, **case)


UNLIKE = "no other layer that reads its input has its activation, an epilogue of the product"
LEFT_ALONE = {
    "they_read_different_tensors": Case(
        "s = Sigmoid(x) [a] ha = Gemm(x, wa) [b] hb = Gemm(s, wb) y = Mul(ha, hb)", SQUARE),
    "an_interaction_beside_a_linear": Case(
        "t = Transpose<perm=[0,2,1]>(x) [a] ha = MatMul(x, wa) [dot] s = MatMul(x, t) y = MatMul(s, ha)",
        SQUARE, "float[batch,4,8] x"),
    "unlike_activations": Case(
        "[a] ha = Gemm(x, wa) [b] hb = Gemm(x, wb) [c] hc = Gemm(x, wc) ra = Elu<alpha=1.0>(ha)"
        " rb = Elu<alpha=0.5>(hb) y0 = Mul(ra, rb) y = Mul(y0, hc)",
        {"wa": (8, 8), "wb": (8, 8), "wc": (8, 8)}, why=dict.fromkeys("abc", UNLIKE)),
    "wide": two("Gemm(x, wa)", "Gemm(x, wb)", {"wa": (8, 8), "wb": (8, 1025)},
        why={"b": "N = 1025 fills a device by itself: layers of N ≤ 1024 are merged"}),
    "results_that_leave_the_graph": Case("[ctr] y = Gemm(x, wa) [cvr] z = Gemm(x, wb)",
        {"wa": (8, 1), "wb": (8, 1)}, outputs="y, z",
        why=dict.fromkeys(("ctr", "cvr"), "its result leaves the graph: a head keeps a product of its own")),
    "factors": two("Gemm<alpha=0.3>(x, wa)", "Gemm(x, wb)",
        why={"a": "a Gemm with factors alpha or beta, which would round the weight"}),
    "a_third_operand_of_the_batch": two("Gemm(x, wa, z)", "Gemm(x, wb)",
        inputs="float[batch,8] x, float[batch,8] z",
        why={"a": "a Gemm whose third operand is not a constant bias of N elements"}),
    "a_weight_for_each_token": two("MatMul(x, wa)", "MatMul(x, wb)", {"wa": (4, 8, 8), "wb": (8, 8)},
        "float[4,4,8] x", why={"a": "its weight has rank 3, not 2"}),
    "weights_of_different_sides": Case("[a] ha = MatMul(wa, x) [b] hb = MatMul(x, wb) y = Add(ha, hb)",
        SQUARE, "float[batch,8,8] x"),
    "weights_of_different_range": two("Gemm(x, wa)", "Gemm(x, wb)",
        {"wa": np.full((8, 8), 0.001), "wb": np.full((8, 8), 0.1)},
        why={"a": "its weights reach 0.001, those of 'b' 0.1: one scale for both would cost precision"}),
}  # fmt: skip

STEPS = {
    "relu": "Relu({0})", "leaky": "LeakyRelu<alpha=0.25>({0})", "tanh": "Tanh({0})", "gelu": "Gelu({0})",
    "add": "Add({0}, v{1})", "mul": "Mul(v{1}, {0})", "from": "Sub(half, {0})", "prelu": "PRelu({0}, v{1})",
    "swish": "Mul({0}, gate{1})",
}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.lists(st.sampled_from(sorted(STEPS)), max_size=3)), max_size=4)
)
def test_layers_with_any_chains_are_merged_and_equal(layers):
    """Two layers have one chain at least; constants are those of each layer."""
    layers = [*layers[:1], *layers, (3, ["add", "relu"]), (2, ["add", "relu", "mul"])]
    constants: dict[str, Any] = {"half": 0.5}
    body, ends = [], []
    for i, (n, chain) in enumerate(layers):
        constants |= {f"w{i}": weight(8, n, seed=i), f"v{i}": weight(*((1, n) if i % 2 else (n,)), seed=i)}
        body.append(f"[fc{i}] t{i}_0 = Gemm(x, w{i}{f', v{i}' if i % 3 else ''}) gate{i} = Sigmoid(x{i})")
        body += [f"t{i}_{j + 1} = {STEPS[step].format(f't{i}_{j}', i)}" for j, step in enumerate(chain)]
        ends.append(f"t{i}_{len(chain)}")
    columns = ", ".join(f"float[batch,{n}] x{i}" for i, (n, _) in enumerate(layers))
    case = Case(f"{' '.join(body)} y0 = Concat<axis=1>({', '.join(ends)}) y = Neg(y0)", constants,
        f"float[batch,8] x, {columns}")  # fmt: skip
    with TemporaryDirectory() as folder:
        done = rewrite(case.model(), MergeParallelLinears(spread=1e6), Path(folder))
    # Of layers that became one, each has its activation in front of the Split.
    for split in (node for node in done.after.graph.node if node.op_type == "Split"):
        readers = [node.op_type for node in done.after.graph.node if set(node.input) & {*split.output}]
        assert not {*readers} & {"Relu", "Tanh", "Gelu", "LeakyRelu", "PRelu"}


def test_one_wide_layer_does_not_keep_the_others_apart(tmp_path):
    case = Case(
        "[a] ha = Gemm(x, wa) [b] hb = Gemm(x, wb) [c] hc = Gemm(x, wc) ra = Relu(ha) rb = Relu(hb)"
        " rc = Relu(hc) y = Concat<axis=1>(ra, rb, rc)",
        {"wa": (8, 2), "wb": (8, 2000), "wc": (8, 4)},
    )
    done = rewrite(case.model(), MergeParallelLinears(), tmp_path)
    assert done.sites() == {"a+c": (8, 6), "b": (8, 2000)}
    assert list(done.reasons()) == ["b"]


def test_the_row_of_a_user_is_a_site(tmp_path):
    """A computed row is no constant: its product stays, once instead of once a candidate."""
    case = Case(
        f"u = Relu(user) {EXPANDED.replace('row', 'u')} c = Concat<axis=1>(x, e) [fc] h = Gemm(c, w, b)"
        " y = Relu(h)", {"w": dyadic(40, 16), "b": (16,), "width": [32]},
        "float[batch,8] x, float[1,32] user")  # fmt: skip
    done = rewrite(case.model(), SplitConcat(), tmp_path)
    assert [(s.name, s.kind, s.rows, s.k, s.merged_from) for s in done.artifact.sites] == [
        ("fc", SiteKind.LINEAR, 1, 8, ()),
        ("fc.shared", SiteKind.LINEAR, 1, 32, ("fc",)),
    ]


COPIES = {
    "expand": "{0} = Expand({1}, whole)",
    "tile": "{0} = Tile({1}, times)",
    "concat": "{0} = Concat<axis={2}>({1}, {1}, {1})",
    "ones": "o_{0} = ConstantOfShape<value=float[1]{{1}}>(whole) {0} = Mul({1}, o_{0})",
}
COMBINED = {
    "difference": "{0} = Sub({1}, {2})",
    "sum": "{0} = Add({2}, {1})",
    "product": "{0} = Mul({1}, {2})",
    "negative": "{0} = Neg({1})",
    "scaled": "s_{0} = Mul(channels, {1}) {0} = Sub(s_{0}, {2})",
    "divided": "s_{0} = Div({1}, two) {0} = Add(s_{0}, half)",
    "position": "{0} = Add({1}, positions)",
}
LAYERS = {
    "matmul": "[fc] y = MatMul(c, w)",
    "matmul_add": "[fc] h = MatMul(c, w) y = Add(h, b)",
    "gemm": "r = Reshape(c, rows) [fc] h = Gemm(r, w) y = Relu(h)",
    "gemm_bias": "r = Reshape(c, rows) [fc] h = Gemm<transB=1>(r, wt, b) y = Relu(h)",
}


@settings(max_examples=15)
@given(
    st.booleans(),
    st.sampled_from(sorted(LAYERS)),
    st.lists(st.sampled_from(sorted(COPIES)), max_size=2),
    st.lists(st.tuples(st.sampled_from(sorted(COMBINED)), st.integers(0, 9), st.integers(0, 9)), max_size=5),
    st.randoms(use_true_random=False),
)
def test_linear_parts_of_any_layer_are_multiplied_once(is_deep, layer, copied, combined, random):
    """q is copied along an axis of 3, and at rank 4 u along one of 2; a part of q and k may copy it, too."""
    lead, ones, more = ("2, ", "1, ", [2]) if is_deep else ("", "", [])
    parts, body = ["u0", "k"], ["u0 = Expand(u, whole)", "d0 = Sub(k, q)"]
    for copy in copied:
        parts.append(f"t{len(parts)}")
        body.append(COPIES[copy].format(parts[-1], "q", 1 + is_deep))
    for op, one, other in combined:
        operands = (parts[one % len(parts)], parts[other % len(parts)])
        parts.append(f"t{len(parts)}")
        body.append(COMBINED[op].format(parts[-1], *operands))
    parts = random.sample([*parts, "d0"], len(parts) + 1)
    body += [f"c = Concat<axis=-1>({', '.join(parts)})", LAYERS[layer]]
    k = 8 * len(parts)
    case = Case(" ".join(body), {
        "whole": [1, *more, 3, 1],
        "times": [1, *(1 for _ in more), 3, 1],
        "channels": [0.5, -2.0, 1.0, 4.0, -1.0, 0.25, 2.0, 8.0],
        "two": 2.0,
        "half": 0.5,
        "positions": dyadic(3, 8),
        "rows": [-1, k],
        "w": dyadic(k, 2),
        "wt": dyadic(2, k),
        "b": dyadic(2, seed=3),
    }, f"float[batch,{lead}1,8] q, float[batch,{lead}3,8] k, float[batch,{ones}3,8] u")  # fmt: skip
    with TemporaryDirectory() as folder:
        done = rewrite(case.model(), SplitConcat(), Path(folder))
    # k is a part, and k − q is no other one.
    assert done.sites()["fc"][0] < k


TOGETHER = "c = Concat<axis={axis}>({parts}) [fc] y = MatMul(c, w)"

NONE_LESS = (
    "no part of its Concat is the same along an axis, or a sum of others: the copy costs less than 2 products"
)
SPLIT_LEFT_ALONE = {
    "parts_that_differ_by_row": Case(TOGETHER.format(axis=1, parts="x, z"), {"w": (11, 8)},
        "float[batch,8] x, float[batch,3] z", why={"fc": NONE_LESS}),
    "rows_are_concatenated": Case(TOGETHER.format(axis=1, parts="x, z"), {"w": (8, 8)},
        "float[batch,2,8] x, float[batch,3,8] z"),
    "nothing_else": Case(f"{EXPANDED} {TOGETHER.format(axis=1, parts='e, e')}",
        {"row": (1, 4), "w": (8, 8), "width": [4]},
        why={"fc": "every part of its Concat is the same along an axis"}),
    "a_difference_of_what_is_not_there": Case(f"d = Sub(u, z) {TOGETHER.format(axis=1, parts='x, d')}",
        {"w": (16, 8)}, "float[batch,8] x, float[batch,8] z, float[batch,8] u", why={"fc": NONE_LESS}),
    "a_copied_channel_beside_many_outputs": Case(
        "e = Expand(q, times) c = Concat<axis=2>(k, e) r = Reshape(c, rows) [fc] y = Gemm(r, w)",
        {"times": [1, 6, 1], "rows": [-1, 9], "w": (9, 256)}, "float[batch,6,8] k, float[batch,1,1] q", why={
        "fc": "it takes 7077888 operations at a batch of 256, with each tensor by itself 6422528 and "
        "1362432 more elements to move"}),
    "a_product_with_another_tensor": Case(f"p = Mul(x, z) {TOGETHER.format(axis=1, parts='x, p')}",
        {"w": (16, 8)}, "float[batch,8] x, float[batch,8] z", why={"fc": NONE_LESS}),
    "a_length_that_may_be_one": Case(f"d = Sub(k, z) {TOGETHER.format(axis=2, parts='k, d')}", {"w": (16, 8)},
        "float[batch,6,8] k, float[batch,steps,8] z", why={"fc": NONE_LESS}),
    "a_factor_for_each_position": Case(f"d = Mul(k, positions) {TOGETHER.format(axis=2, parts='k, d')}",
        {"w": (16, 8), "positions": (8, 1)}, "float[batch,8,8] k", why={"fc": NONE_LESS}),
    "another_reader_of_the_concat": Case(f"{TOGETHER.format(axis=1, parts='x, z, x')} v = Relu(c)",
        {"w": (24, 2)}, "float[batch,8] x, float[batch,8] z", "y, v", why={
        "fc": "it takes 24576 operations at a batch of 256, with each tensor by itself 16384 and 4096 "
        "more elements to move"}),
    "columns_are_copied": Case(f"e = Expand(q, whole) {TOGETHER.format(axis=2, parts='k, e')}",
        {"w": (16, 8), "whole": [1, 6, 8]}, "float[batch,6,8] k, float[batch,1,1] q", why={"fc": NONE_LESS}),
    "a_tile_of_several_positions": Case(f"e = Tile(q, times) {TOGETHER.format(axis=3, parts='k, e')}",
        {"w": (16, 8), "times": [1, 3, 2, 1]}, "float[batch,3,4,8] k, float[batch,1,2,8] q",
        why={"fc": NONE_LESS}),
    "several_positions_twice": Case(
        f"f = Expand(q, times) e = Concat<axis=2>(f, f) {TOGETHER.format(axis=3, parts='k, e')}",
        {"w": (16, 8), "times": [1, 3, 1, 1]}, "float[batch,3,4,8] k, float[batch,1,2,8] q",
        why={"fc": NONE_LESS}),
    "a_view_that_divides_rows": Case(
        "e = Expand(q, times) c = Concat<axis=2>(k, e) r = Reshape(c, rows) [fc] y = Gemm(r, w)",
        {"times": [1, 6, 1], "rows": [-1, 4], "w": (4, 8)}, "float[batch,6,4] k, float[batch,1,4] q"),
    "an_unknown_width": Case(TOGETHER.format(axis=1, parts="x, z"), {"w": (11, 8)},
        "float[batch,8] x, float[batch,rest] z",
        why={"fc": "the width of a part of its Concat is not known"}),
    "a_weight_on_the_left": Case("c = Concat<axis=1>(x, z) [fc] y = MatMul(w, c)", {"w": (3, 5)},
        "float[batch,2,8] x, float[batch,3,8] z"),
}  # fmt: skip

EXPECTED: dict[str, tuple[str, dict[str, tuple[int, int]]]] = {
    "absorbed_by_the_next_layer": ("Gemm Relu Gemm", {"a": (32, 32), "b": (32, 16)}),
    "absorbed_behind_a_product_of_two_ways": ("MatMul Relu Sigmoid Mul MatMul",
        {"a": (32, 32), "b": (32, 16)}),
    "absorbed_by_two_layers_behind_swish": ("MatMul Add Sigmoid Mul Clip MatMul MatMul Add",
        {"a": (32, 32), "b": (32, 16), "c": (32, 16)}),
    "one_more_part_of_a_split": ("MatMul Split Mul", {"a": (32, 48)}),
    "a_gather_repeats_a_position": ("Gather Gemm", {"a": (32, 16)}),
    "a_gather_inside_a_concat": ("Gather Concat Gemm", {"a": (64, 16)}),
    "a_part_of_a_concat_for_two_layers": ("Concat Gemm Gemm Mul Pad", {"a": (80, 16), "b": (80, 16)}),
    "a_pad_for_two_layers": ("Pad MatMul MatMul Mul Mul", {"a": (32, 32), "b": (32, 32)}),
    "a_slice_in_front_of_a_norm": ("Gemm Slice LayerNormalization", {"a": (32, 32), "n": (20, 0)}),
    "a_slice_of_an_output": ("MatMul Add Slice", {"a": (32, 32)}),
    "both_sides_of_a_chain": ("Pad Gemm Relu Gemm Gelu Gemm Slice",
        {"a": (32, 32), "b": (32, 48), "c": (48, 32)}),
}  # fmt: skip


@pytest.mark.parametrize("case", PADDED)
def test_every_form_is_padded_and_equal(case, tmp_path):
    operators, sites = EXPECTED[case]
    done = rewrite(PADDED[case].model(), PadSites(ANY_COPY), tmp_path)
    assert sorted(op_types(done.after)) == sorted(operators.split())
    assert done.sites() == sites


LAYER = "[a] y = Gemm<transB=1>(x, wa, ba)"


def layer(k: int, n: int, why: str = "") -> Case:
    constants = {"wa": (n, k), "ba": (n,)}
    return Case(LAYER, constants, f"float[batch,{k}] x", why={"a": why} if why else None)


COPY = "would need a copy, which costs more than {} below K·N = {}; here it is"
PAD_LEFT_ALONE = {
    "aligned": layer(32, 16),
    "few": layer(5, 1, "N = 1 is under 16; K = 5 is under 16"),
    "a_copy_of_a_small_k": layer(53, 512, f"K = 53 {COPY.format('it gains', 131072)} 27136"),
    "a_copy_for_fp8_alone": layer(1000, 256, f"K = 1000 {COPY.format('FP8 alone gains', 4194304)} 256000"),
    "a_copy_of_a_small_n": layer(256, 18, f"N = 18 {COPY.format('it gains', 16384)} 4608"),
    "fp8_is_out_for_the_site": layer(8, 40,
        "N = 40: BF16 runs at full speed on multiples of 8, and FP8 is out for a site of K = 8; "
        "K = 8 is under 16"),
    "a_concat_that_is_read_elsewhere": Case(
        "c = Concat<axis=1>(x, z) [a] ya = MatMul(c, wa) m = ReduceMean(c, axes) y = Add(ya, m)",
        {"wa": (37, 16), "axes": [-1]}, f"{WIDE}, float[batch,5] z",
        why={"a": f"K = 37 {COPY.format('it gains', 131072)} 592"}),
    "a_weight_on_the_left": Case("[a] y = MatMul(wa, x)", {"wa": (20, 24)}, "float[batch,24,16] x",
        why={"a": "its weight stands on the left"}),
    "an_aligned_weight_on_the_left": Case("[a] y = MatMul(wa, x)", {"wa": (32, 16)}, "float[batch,16,16] x"),
    "a_shared_weight": Case("[a] ha = MatMul(x, wa) [b] hb = MatMul(z, wa) y = Add(ha, hb)", {"wa": (32, 20)},
        f"{WIDE}, float[batch,32] z",
        why=dict.fromkeys("ab", "its weight has other readers, of which each would need a padded copy")),
    "a_weight_for_each_token": Case("[a] y = MatMul(x, wa)", {"wa": (4, 32, 20)}, "float[4,4,32] x",
        why={"a": "its weight has rank 3, not 2"}),
}  # fmt: skip

NEAR = {MergeParallelLinears: LEFT_ALONE, SplitConcat: SPLIT_LEFT_ALONE, PadSites: PAD_LEFT_ALONE}


@pytest.mark.parametrize(("mod", "name"), [(mod, name) for mod, cases in NEAR.items() for name in cases])
def test_near_misses_are_left_alone_with_the_reason(mod, name, tmp_path):
    assert_left_alone(NEAR[mod][name], mod(), tmp_path)


@pytest.mark.parametrize(
    ("k", "n", "letter"),
    [(300, 512, "K"), (2048, 2056, "N"), (2056, 2048, "K"), (128, 300, "N")],
    ids=["odd_k", "fp8_n", "fp8_k", "odd_n"],
)
def test_a_copy_is_made_where_it_pays(k, n, letter, tmp_path):
    found = match(layer(k, n).model(), PadSites(), tmp_path)
    assert [m.letter for m in found.matches] == [letter]


NOT_ABSORBED = {
    "a_norm": "[n] r = LayerNormalization(h, gain)",
    "a_softmax": "r = Softmax<axis=-1>(h)",
    "a_residual": "r = Add(h, z)",
    "an_infinite_function_of_zero": "r = Log(h)",
    "a_slope_for_each_column": "r = PRelu(h, gain)",
    "a_reader_besides_the_layer": "r = Relu(h) m = ReduceMean(r, axes)",
}


@pytest.mark.parametrize("between", NOT_ABSORBED)
def test_columns_are_not_passed_through(between, tmp_path):
    """Nothing but a Slice would do, and a Slice does not pay here."""
    case = Case(f"[a] h = MatMul(x, wa) {NOT_ABSORBED[between]} [b] y0 = MatMul(r, wb) " + (
        "y = Add(y0, m)" if " m = " in NOT_ABSORBED[between] else "y = Relu(y0)"),
        {"wa": (32, 20), "wb": (20, 16), "gain": np.ones(20), "axes": [-1]}, f"{WIDE}, float[batch,20] z",
        outputs="float[batch,16] y")  # fmt: skip
    found = match(case.model(), PadSites(), tmp_path)
    assert found.matches == ()
    assert [declined.at for declined in found.declined] == ["a", "b"]


@pytest.mark.parametrize(
    ("shape", "wider"), [(None, None), (("batch", "n"), None), (("batch", 20), ["batch", 32])]
)
def test_columns_are_added_where_their_number_is_known(shape, wider):
    assert widened_shape(SimpleNamespace(shape=shape), 12) == wider  # type: ignore[arg-type]
