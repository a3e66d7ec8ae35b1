"""K and N grow to multiples of 16 where that is free or pays; norms never see the padding."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from rewrite_models import initializer, named, op_types
from shape_cases import ANY_COPY, PADDED, WIDE
from shape_models import Case, assert_left_alone, match, rewrite

from loka_onnx.transforms.linears.pad_sites import PadSites, widened_shape

EXPECTED: dict[str, tuple[list[str], dict[str, tuple[int, int]]]] = {
    "absorbed_by_the_next_layer": (["Gemm", "Relu", "Gemm"], {"a": (32, 32), "b": (32, 16)}),
    "absorbed_behind_a_product_of_two_ways": (
        ["MatMul", "Relu", "Sigmoid", "Mul", "MatMul"],
        {"a": (32, 32), "b": (32, 16)},
    ),
    "absorbed_by_two_layers_behind_swish": (
        ["MatMul", "Add", "Sigmoid", "Mul", "Clip", "MatMul", "MatMul", "Add"],
        {"a": (32, 32), "b": (32, 16), "c": (32, 16)},
    ),
    "one_more_part_of_a_split": (["MatMul", "Split", "Mul"], {"a": (32, 48)}),
    "a_gather_repeats_a_position": (["Gather", "Gemm"], {"a": (32, 16)}),
    "a_gather_inside_a_concat": (["Gather", "Concat", "Gemm"], {"a": (64, 16)}),
    "a_pad_for_two_layers": (["Pad", "MatMul", "MatMul", "Mul", "Mul"], {"a": (32, 32), "b": (32, 32)}),
    "a_slice_in_front_of_a_norm": (["Gemm", "Slice", "LayerNormalization"], {"a": (32, 32), "n": (20, 0)}),
    "a_slice_of_an_output": (["MatMul", "Add", "Slice"], {"a": (32, 32)}),
    "both_sides_of_a_chain": (
        ["Pad", "Gemm", "Relu", "Gemm", "Gelu", "Gemm", "Slice"],
        {"a": (32, 32), "b": (32, 48), "c": (48, 32)},
    ),
}


@pytest.mark.parametrize("case", PADDED)
def test_every_form_is_padded_and_equal(case: str, tmp_path: Path) -> None:
    operators, sites = EXPECTED[case]
    done = rewrite(PADDED[case].model(), PadSites(ANY_COPY), tmp_path)
    assert sorted(op_types(done.after)) == sorted(operators)
    assert done.sites() == sites


def test_what_is_added_to_weights_is_zero(tmp_path: Path) -> None:
    done = rewrite(PADDED["a_gather_inside_a_concat"].model(), PadSites(), tmp_path)
    stored = onnx.numpy_helper.to_array(initializer(done.after, named(done.after, "a").input[1]))
    weight = onnx.numpy_helper.to_array(initializer(done.before, "wa"))
    # x takes rows 0 to 31, the gathered columns 32 to 52 and three more, z the last eight.
    np.testing.assert_array_equal(stored[53:56], 0)
    np.testing.assert_array_equal(np.delete(stored, slice(53, 56), axis=0), weight)


def test_the_record_says_what_became_of_the_columns(tmp_path: Path) -> None:
    done = rewrite(PADDED["both_sides_of_a_chain"].model(), PadSites(ANY_COPY), tmp_path)
    assert [(applied.at, applied.what) for applied in done.record.applied] == [
        ("a", "N 20 → 32: taken up by the K of 'b'"),
        ("b", "N 36 → 48: taken up by the K of 'c'"),
        ("c", "N 20 → 32: a Slice behind it"),
        ("a", "K 21 → 32: a Pad in front of 'a'"),
    ]


LAYER = "[a] y = Gemm<transB=1>(x, wa, ba)"


def layer(k: int, n: int, why: str = "") -> Case:
    constants = {"wa": (n, k), "ba": (n,)}
    return Case(LAYER, constants, f"float[batch,{k}] x", why={"a": why} if why else None)


COPY = "would need a copy, which costs more than {} below K·N = {}; here it is"
LEFT_ALONE = {
    "aligned": layer(32, 16),
    "few": layer(5, 1, "N = 1 is under 16; K = 5 is under 16"),
    "a_copy_of_a_small_k": layer(53, 512, f"K = 53 {COPY.format('it gains', 131072)} 27136"),
    "a_copy_for_fp8_alone": layer(1000, 256, f"K = 1000 {COPY.format('FP8 alone gains', 4194304)} 256000"),
    "a_copy_of_a_small_n": layer(256, 18, f"N = 18 {COPY.format('it gains', 16384)} 4608"),
    "fp8_is_out_for_the_site": layer(
        8,
        40,
        "N = 40: BF16 runs at full speed on multiples of 8, and FP8 is out for a site of K = 8; "
        "K = 8 is under 16",
    ),
    "a_weight_on_the_left": Case(
        "[a] y = MatMul(wa, x)",
        {"wa": (20, 24)},
        "float[batch,24,16] x",
        why={"a": "its weight stands on the left"},
    ),
    "an_aligned_weight_on_the_left": Case("[a] y = MatMul(wa, x)", {"wa": (32, 16)}, "float[batch,16,16] x"),
    "a_shared_weight": Case(
        "[a] ha = MatMul(x, wa) [b] hb = MatMul(z, wa) y = Add(ha, hb)",
        {"wa": (32, 20)},
        f"{WIDE}, float[batch,32] z",
        why=dict.fromkeys("ab", "its weight has other readers, of which each would need a padded copy"),
    ),
    "a_weight_for_each_token": Case(
        "[a] y = MatMul(x, wa)",
        {"wa": (4, 32, 20)},
        "float[4,4,32] x",
        why={"a": "its weight has rank 3, not 2"},
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_near_misses_are_left_alone_with_the_reason(case: str, tmp_path: Path) -> None:
    assert_left_alone(LEFT_ALONE[case], PadSites(), tmp_path)


@pytest.mark.parametrize(
    ("k", "n", "letter"),
    [(300, 512, "K"), (2048, 2056, "N"), (2056, 2048, "K"), (128, 300, "N")],
    ids=["odd_k", "fp8_n", "fp8_k", "odd_n"],
)
def test_a_copy_is_made_where_it_pays(k: int, n: int, letter: str, tmp_path: Path) -> None:
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
def test_columns_are_not_passed_through(between: str, tmp_path: Path) -> None:
    """Nothing but a Slice would do, and a Slice does not pay here."""
    case = Case(
        f"[a] h = MatMul(x, wa) {NOT_ABSORBED[between]} [b] y0 = MatMul(r, wb) "
        + ("y = Add(y0, m)" if " m = " in NOT_ABSORBED[between] else "y = Relu(y0)"),
        {"wa": (32, 20), "wb": (20, 16), "gain": np.ones(20), "axes": [-1]},
        f"{WIDE}, float[batch,20] z",
        outputs="float[batch,16] y",
    )
    found = match(case.model(), PadSites(), tmp_path)
    assert found.matches == ()
    assert [declined.at for declined in found.declined] == ["a", "b"]


@pytest.mark.parametrize(
    ("shape", "wider"), [(None, None), (("batch", "n"), None), (("batch", 20), ["batch", 32])]
)
def test_columns_are_added_where_their_number_is_known(shape: object, wider: object) -> None:
    assert widened_shape(SimpleNamespace(shape=shape), 12) == wider  # type: ignore[arg-type]
