"""Constants are folded, and what changes nothing or is computed twice goes."""

import numpy as np
import pytest
from rewrite_models import op_types, parse
from shape_cases import AXES, COUNTED, LISTED, MASK, MASKED
from shape_models import Case, assert_left_alone, match, reasons_of, rewrite, run, weight

from loka_onnx.transforms.tidying.fold_constants import FoldConstants
from loka_onnx.transforms.tidying.masks_to_where import MasksToWhere
from loka_onnx.transforms.tidying.remove_no_ops import RemoveNoOps
from loka_onnx.transforms.tidying.share_duplicates import ShareDuplicates


def test_values_are_those_that_onnxruntime_computes(tmp_path):
    # Bit for bit, also where another order of the sums would round otherwise.
    body = "p = MatMul(wa, wb) e = Exp(p) y = MatMul(x, e)"
    constants = {"wa": weight(8, 8), "wb": weight(8, 8, seed=1)}
    model = parse(body, constants)
    source = match(model, FoldConstants(), tmp_path)
    computed = parse("p = MatMul(x, wb) y = Exp(p)", {"wb": constants["wb"]})
    values = run(computed, {"x": constants["wa"]})["y"]
    assert [m.tensor.name for m in source.matches] == ["e"]
    assert source.matches[0].values.tobytes() == values.tobytes()
    body = "p = Reshape(a, five) y = Add(x, p)"
    found = match(parse(body, {"a": weight(8), "five": np.array([5])}), FoldConstants(), tmp_path)
    assert found.matches == ()
    assert "ONNX Runtime does not compute it" in found.declined[0].reason


LEFT_ALONE = {
    "expand": Case("r = Expand(row, shape) y = MatMul(x, r)", {"row": np.ones((1, 1024)), "shape": [8, 1024]},
        why={"block/r": "its result takes 32768 bytes, what it is made of 4112"}),
    "a_product_of_thin_weights": Case("w = MatMul(u, v) y = MatMul(x, w)", {"u": (8, 1), "v": (1, 1000)},
        why={"block/w": "its result takes 32000 bytes, what it is made of 4032"}),
    "a_tied_embedding": Case(
        "e = Gather<axis=0>(table, ids) t = Transpose<perm=[1,0]>(table) z = MatMul(x, t)"
        " y = Concat<axis=1>(z, e)", {"table": (50, 8)}, "float[batch,8] x, int64[batch] ids",
        why={"block/t": "made of the embedding table 'table', which would be stored twice"}),
    "a_result_that_leaves": Case("z = Relu(row) y = Add(x, row)", {"row": (8,)}, outputs="y, z",
        why={"block/z": "its result leaves the graph"}),
    "random": Case("r = RandomNormal<shape=[8]>() y = Add(x, r)"),
    "quantized_on_purpose": Case("q = QuantizeLinear(w, s, z) d = DequantizeLinear(q, s, z) y = MatMul(x, d)",
        {"w": (8, 8), "s": 0.1, "z": np.array(0, np.int8)}),
    "a_shape_of_the_batch": Case("s = Shape(x) r = Reshape(x, s) y = Relu(r)"),
    "behind_something_left_alone": Case("r = Expand(row, shape) n = Neg(r) y = MatMul(x, n)",
        {"row": np.ones((1, 1024)), "shape": [8, 1024]},
        why={"block/r": "its result takes 32768 bytes, what it is made of 4112"}),
}  # fmt: skip

NO_OPS_LEFT_ALONE: dict[str, Case] = {
    "a_rounding_cast": Case("a = Cast<to=10>(x) b = Cast<to=1>(a) y = Relu(b)"),
    "a_reshape_that_copies_a_length": Case("a = Reshape(x, s1) b = Reshape(a, s2) y = Relu(b)",
        {"s1": [-1, 2, 4], "s2": [0, 4, 2]}, outputs="float[batch,4,2] y"),
    "a_transpose_of_equal_lengths": Case("a = Transpose<perm=[0,2,1]>(x) y = Relu(a)",
        inputs="float[batch,4,4] x"),
    "a_reshape_with_two_dynamic_lengths": Case("a = Reshape(x, s) y = Relu(a)", {"s": [-1, 4]},
        "float[batch,tokens] x", outputs="float[rows,4] y"),
    "a_slice_of_a_part": Case("a = Slice(x, start, end, one) y = Relu(a)",
        {"start": [1], "end": [2**31 - 1], **AXES}),
    "a_slice_backwards": Case("a = Slice(x, start, end, one, step) y = Relu(a)",
        {"start": [-1], "end": [-(2**31)], "step": [-1], **AXES}),
    "a_factor_that_adds_an_axis": Case("a = Mul(x, one1) y = Relu(a)", {"one1": np.ones((1, 1, 1))}),
    "one_divided_by": Case("a = Div(one1, x) y = Relu(a)", {"one1": 1.0}),
    "one_for_each_column": Case("a = Mul(x, ones) y = Relu(a)", {"ones": np.ones(8)}),
    "a_bias_of_zero": Case("a = MatMul(x, w) b = Add(a, zero) y = Relu(b)",
        {"w": (8, 1), "zero": np.zeros(1)}),
    "zero_minus": Case("a = Sub(zero, x) y = Relu(a)", {"zero": 0.0}),
    "a_pad": Case("a = Pad(x, ends) y = Relu(a)", {"ends": [0, 0, 0, 1]}),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_OPS_LEFT_ALONE)
def test_what_changes_something_stays(case, tmp_path):
    assert match(NO_OPS_LEFT_ALONE[case].model(), RemoveNoOps(), tmp_path).matches == ()


def test_the_name_of_an_output_is_kept(tmp_path):
    found = match(Case("a = Identity(x) y = Identity(a)").model(), RemoveNoOps(), tmp_path)
    assert [m.node.name for m in found.matches] == ["block/a"]
    assert reasons_of(found) == {"block/y": "it gives the graph's output its name"}


NOT_TWINS = {
    "other_attributes": Case("a = LeakyRelu<alpha=0.1>(x) b = LeakyRelu<alpha=0.2>(x) y = Add(a, b)"),
    "other_constants": Case("a = Mul(x, p) b = Mul(x, q) y = Add(a, b)", {"p": (8,), "q": np.ones(8)}),
    "operands_the_other_way": Case("a = Sub(x, z) b = Sub(z, x) y = Mul(a, b)",
        inputs="float[batch,8] x, float[batch,8] z"),
    "random": Case("a = RandomNormalLike(x) b = RandomNormalLike(x) y = Add(a, b)"),
    "sites": Case("[p] a = MatMul(x, w) [q] b = MatMul(x, w) y = Add(a, b)", {"w": (8, 8)},
        why={"q": "computes what 'p' does, but is a site"}),
    "outputs": Case("y = Relu(x) z = Relu(x)", outputs="y, z",
        why={"block/z": "computes what 'block/y' does, but leaves the graph"}),
}  # fmt: skip

NOT_ONE = {"block/y": "the values at the positions of a mask are not one value"}
NOT_ALIKE = {"block/y": "shapes of the mask and of what it masks are not known to agree"}
MASKS_LEFT_ALONE = {
    "values_of_their_own": Case(f"{COUNTED} u = CumSum(v, zero) y = ScatterND(x, i, u)", {**MASK, "zero": 0},
        why=NOT_ONE),
    "a_sum": Case(f"{COUNTED} y = ScatterND<reduction=\"add\">(x, i, v)", MASK, why=NOT_ONE),
    "another_shape": Case(COUNTED.replace("(x, half)", "(z, half)") + " y = ScatterND(x, i, v)", MASK,
        "float[batch,8] x, float[few,8] z", why=NOT_ALIKE),
    "no_mask": Case(f"{LISTED} y0 = GatherND(x, i) y = Relu(y0)", MASK, outputs="float[some] y"),
}  # fmt: skip

NEAR = [(FoldConstants, case) for case in LEFT_ALONE.values()]
NEAR += [(ShareDuplicates, case) for case in NOT_TWINS.values()]
NEAR += [(MasksToWhere, case) for case in MASKS_LEFT_ALONE.values()]


@pytest.mark.parametrize(("mod", "case"), NEAR, ids=[*LEFT_ALONE, *NOT_TWINS, *MASKS_LEFT_ALONE])
def test_near_misses_are_left_alone_with_the_reason(mod, case, tmp_path):
    assert_left_alone(case, mod(), tmp_path)


@pytest.mark.parametrize("case", MASKED.values(), ids=MASKED)
def test_a_value_at_the_positions_of_a_mask_is_written_elementwise(case, tmp_path):
    done = rewrite(case.model(), MasksToWhere(), tmp_path)
    assert done.record.max_abs == 0.0
    assert not {"NonZero", "ScatterND"} & set(op_types(done.after))
