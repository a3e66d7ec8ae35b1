"""Einsums and convolutions become products, and products of three matrices take the cheaper order."""

from dataclasses import replace

import pytest
from rewrite_models import op_types
from shape_cases import CHANNELS, CONVOLUTIONS, MANY_TOKENS, REASSOCIATED
from shape_models import Case, assert_left_alone, match, rewrite

from loka_onnx.core.site import SiteKind
from loka_onnx.transforms.interactions.conv_to_matmul import ConvToMatMul
from loka_onnx.transforms.interactions.einsum_to_matmul import EinsumToMatMul
from loka_onnx.transforms.interactions.reassociate_interaction import ReassociateInteraction


@pytest.mark.parametrize(("equation", "rank", "reason"), [
    ("bnd,bmd", 2, "sums over 2 axes, and their lengths are not known"),
    ("bnd,bnd->b", 1, "is not a product of two matrices"),
    ("bnd,bmd->bnmd", 4, "is not a product of two matrices"),
    ("bnd,bme->bnm", 3, "sums over an axis of one operand"),
    ("bnn,bmd->bnm", 3, "reads a diagonal"),
    ("bnd,bnd->bn", 2, "is not a product of two matrices"),
])  # fmt: skip
def test_other_einsums_are_left_alone_with_the_reason(equation, rank, reason, tmp_path):
    outputs = f"float[{','.join('pqrs'[:rank])}] y"
    case = Case(f'y = Einsum<equation="{equation}">(x, x)', inputs="float[batch,4,4] x", outputs=outputs)
    found = match(case.model(), EinsumToMatMul(), tmp_path)
    assert found.matches == ()
    assert reason in found.declined[0].reason


def test_axes_of_unknown_length_are_left_alone(tmp_path):
    case = Case('y = Einsum<equation="bqe,kme->bqkm">(x, x)', inputs="float[batch,tokens,8] x")
    assert "lengths that are not known" in match(case.model(), EinsumToMatMul(), tmp_path).declined[0].reason


def test_the_sites_keep_their_names_and_kinds(tmp_path):
    model = REASSOCIATED["learned_projection"].model()
    done = rewrite(model, ReassociateInteraction(least=0), tmp_path)
    sites = {site.name: (site.kind, site.k, site.n) for site in done.artifact.sites}
    assert sites == {"fmb.project": (SiteKind.LINEAR, 32, 4), "fmb.matmul": (SiteKind.INTERACTION, 8, 4)}
    assert done.record.applied[0].what == (
        "(A·B)·C → A·(B·C) with 'fmb.project': 6291456 → 1048576 operations at a batch of 256"
    )


CHAIN = "t = Transpose<perm=[0,2,1]>(x) [a] s = MatMul(x, t) [b] y = MatMul(s, z)"
NOT_CHEAPER = {
    "few_tokens": Case(CHAIN, inputs="float[batch,4,32] x, float[batch,4,8] z",
        why="it takes 327680 operations at a batch of 256, the other order 1048576: less than 25% saved"),
    "too_little_saved": Case(CHAIN, inputs="float[batch,64,128] x, float[batch,64,40] z",
        why="less than 25% saved"),
    "a_larger_intermediate_result": Case(CHAIN, inputs="float[batch,40,1000] x, float[batch,40,15] z",
        why="but its intermediate result has 3840000 elements instead of 409600"),
    "two_weights": Case("[down] s = MatMul(x, u) [up] y = MatMul(s, v)", {"u": (8, 200), "v": (200, 8)},
        "float[batch,4,8] x",
        why="two of the three factors are weights: their product would be rounded to one"),
    "an_unknown_length": Case(CHAIN, inputs="float[batch,tokens,8] x, float[batch,tokens,8] z",
        why="a rank is below 2, or a length besides the batch is not known"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_CHEAPER)
def test_other_chains_are_left_alone_with_the_cost_of_both(case, tmp_path):
    found = match(NOT_CHEAPER[case].model(), ReassociateInteraction(least=0), tmp_path)
    assert found.matches == ()
    assert NOT_CHEAPER[case].why in found.declined[0].reason


@pytest.mark.parametrize(("tokens", "is_changed"), [(64, False), (128, True)])
def test_the_order_of_few_operations_stays(tokens, is_changed, tmp_path):
    case = Case(CHAIN, inputs=f"float[batch,{tokens},64] x, float[batch,{tokens},16] z",
        outputs=f"float[batch,{tokens},16] y")  # fmt: skip
    found = match(case.model(), ReassociateInteraction(), tmp_path)
    assert len(found.matches) == is_changed
    if not is_changed:
        assert found.declined[0].reason == (
            "it takes 167772160 operations at a batch of 256, the other order 67108864: under 536870912 they "
            "do not decide the time"
        )


NOT_A_CHAIN = {
    "softmax_between": "t = Transpose<perm=[0,2,1]>(x) s = MatMul(x, t) p = Softmax(s) y = MatMul(p, z)",
    "a_second_reader": f"{CHAIN} r = ReduceSum(s, axes)",
    "transposed_between": "t = Transpose<perm=[0,2,1]>(x) s = MatMul(x, t) q ="
    " Transpose<perm=[0,2,1]>(s) y = MatMul(q, z)",
}


@pytest.mark.parametrize("case", NOT_A_CHAIN)
def test_what_is_between_ends_the_chain(case, tmp_path):
    model = Case(
        NOT_A_CHAIN[case],
        {"axes": [-1]},
        f"{MANY_TOKENS}, float[batch,32,2] z",
        outputs="float[batch,32,2] y" + (", float[batch,32,1] r" if " r = " in NOT_A_CHAIN[case] else ""),
    ).model()
    assert match(model, ReassociateInteraction(least=0), tmp_path).matches == ()


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_every_form_becomes_a_product(case, tmp_path):
    done = rewrite(CONVOLUTIONS[case].model(), ConvToMatMul(), tmp_path)
    operators = op_types(done.after)
    assert "Conv" not in operators
    assert "Transpose" not in operators
    (site,) = done.artifact.sites
    (product,) = [node for node in done.after.graph.node if node.op_type == "MatMul"]
    assert (site.name, site.kind, site.op_type) == (product.name, SiteKind.LINEAR, "MatMul")
    assert site.name.endswith(".conv")
    assert site.weight is not None
    assert (site.weight.index, site.k) == (0, 16)
    assert site.is_fp8_able
    # The engine adds in the same order: not a bit moves.
    assert done.record.max_abs == 0.0


LEFT_ALONE = {
    "kernel": Case("y = Conv(x, w)", {"w": (24, 16, 3)}, CHANNELS, why="its kernel is 3, not 1"),
    "groups": Case("y = Conv<group=2>(x, w)", {"w": (24, 8, 1)}, CHANNELS, why="it has group [2]"),
    "strides": Case("y = Conv<strides=[2]>(x, w)", {"w": (24, 16, 1)}, CHANNELS, why="it has strides [2]"),
    "padding": Case("y = Conv<pads=[1, 1]>(x, w)", {"w": (24, 16, 1)}, CHANNELS, why="it has pads [1, 1]"),
    "few": Case("y = Conv(x, w)", {"w": (15, 16, 1)}, CHANNELS,
        why="16 → 15 channels: FP8 products begin at 16"),
    "a_computed_weight": Case("v = Relu(z) y = Conv(x, v)", inputs=f"{CHANNELS}, float[24,16,1] z",
        why="its weight or its bias is computed"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_other_convolutions_are_left_alone_with_the_reason(case, tmp_path):
    near_miss = LEFT_ALONE[case]
    assert_left_alone(replace(near_miss, why={"block/y": near_miss.why}), ConvToMatMul(), tmp_path)
