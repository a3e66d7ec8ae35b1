"""Operators that change nothing go, and layout operators that follow one another become one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rewrite_models import attribute, named, op_types
from shape_cases import AXES, NO_OPS, SHARED
from shape_models import Case, assert_left_alone, match, reasons_of, rewrite

from loka_onnx.transforms.tidying.remove_no_ops import RemoveNoOps
from loka_onnx.transforms.tidying.share_duplicates import ShareDuplicates

EXPECTED = {
    "identity_and_dropout": ["Relu"],
    "casts": ["Relu"],
    "transposes_that_cancel": ["Relu"],
    "transposes_that_compose": ["Transpose", "Relu", "Transpose", "Add"],
    "reshapes": ["Relu"],
    "a_reshape_past_another": ["Reshape", "Relu"],
    "neutral_elements": ["Relu"],
}


@pytest.mark.parametrize("case", NO_OPS)
def test_every_form_is_removed_and_equal(case: str, tmp_path: Path) -> None:
    done = rewrite(NO_OPS[case].model(), RemoveNoOps(), tmp_path)
    assert op_types(done.after) == EXPECTED[case]


def test_permutations_are_composed(tmp_path: Path) -> None:
    case = Case(
        "a = Transpose<perm=[1,0,3,2]>(x) b = Transpose<perm=[3,0,1,2]>(a) c = Relu(a) y = Relu(b) z"
        " = Relu(c)",
        inputs="float[batch,2,3,4] x",
        outputs="float[p,q,r,s] y, float[t,u,v,w] z",
    )
    done = rewrite(case.model(), RemoveNoOps(), tmp_path)
    # Axis i of b is axis (3,0,1,2)[i] of a, which is axis (1,0,3,2) of that of x.
    assert attribute(named(done.after, "block/b"), "perm") == [2, 1, 0, 3]


LEFT_ALONE: dict[str, Case] = {
    "a_rounding_cast": Case("a = Cast<to=10>(x) b = Cast<to=1>(a) y = Relu(b)"),
    "a_reshape_that_copies_a_length": Case(
        "a = Reshape(x, s1) b = Reshape(a, s2) y = Relu(b)",
        {"s1": [-1, 2, 4], "s2": [0, 4, 2]},
        outputs="float[batch,4,2] y",
    ),
    "a_transpose_of_equal_lengths": Case(
        "a = Transpose<perm=[0,2,1]>(x) y = Relu(a)", inputs="float[batch,4,4] x"
    ),
    "a_reshape_with_two_dynamic_lengths": Case(
        "a = Reshape(x, s) y = Relu(a)", {"s": [-1, 4]}, "float[batch,tokens] x", outputs="float[rows,4] y"
    ),
    "a_slice_of_a_part": Case(
        "a = Slice(x, start, end, one) y = Relu(a)", {"start": [1], "end": [2**31 - 1], **AXES}
    ),
    "a_slice_backwards": Case(
        "a = Slice(x, start, end, one, step) y = Relu(a)",
        {"start": [-1], "end": [-(2**31)], "step": [-1], **AXES},
    ),
    "a_factor_that_adds_an_axis": Case("a = Mul(x, one1) y = Relu(a)", {"one1": np.ones((1, 1, 1))}),
    "one_divided_by": Case("a = Div(one1, x) y = Relu(a)", {"one1": 1.0}),
    "one_for_each_column": Case("a = Mul(x, ones) y = Relu(a)", {"ones": np.ones(8)}),
    "a_bias_of_zero": Case(
        "a = MatMul(x, w) b = Add(a, zero) y = Relu(b)", {"w": (8, 1), "zero": np.zeros(1)}
    ),
    "zero_minus": Case("a = Sub(zero, x) y = Relu(a)", {"zero": 0.0}),
    "a_pad": Case("a = Pad(x, ends) y = Relu(a)", {"ends": [0, 0, 0, 1]}),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_changes_something_stays(case: str, tmp_path: Path) -> None:
    assert match(LEFT_ALONE[case].model(), RemoveNoOps(), tmp_path).matches == ()


def test_the_name_of_an_output_is_kept(tmp_path: Path) -> None:
    found = match(Case("a = Identity(x) y = Identity(a)").model(), RemoveNoOps(), tmp_path)
    assert [m.node.name for m in found.matches] == ["block/a"]
    assert reasons_of(found) == {"block/y": "it gives the graph's output its name"}


@pytest.mark.parametrize("case", SHARED)
def test_what_is_computed_twice_is_computed_once(case: str, tmp_path: Path) -> None:
    done = rewrite(SHARED[case].model(), ShareDuplicates(), tmp_path)
    expected = {
        "transposes": ["Transpose", "MatMul", "MatMul", "Relu", "Relu", "Add"],
        "chains_with_equal_constants": ["Reshape", "Relu", "Sigmoid", "Mul", "Flatten"],
    }
    assert op_types(done.after) == expected[case]


NOT_TWINS = {
    "other_attributes": Case("a = LeakyRelu<alpha=0.1>(x) b = LeakyRelu<alpha=0.2>(x) y = Add(a, b)"),
    "other_constants": Case("a = Mul(x, p) b = Mul(x, q) y = Add(a, b)", {"p": (8,), "q": np.ones(8)}),
    "operands_the_other_way": Case(
        "a = Sub(x, z) b = Sub(z, x) y = Mul(a, b)", inputs="float[batch,8] x, float[batch,8] z"
    ),
    "random": Case("a = RandomNormalLike(x) b = RandomNormalLike(x) y = Add(a, b)"),
    "sites": Case(
        "[p] a = MatMul(x, w) [q] b = MatMul(x, w) y = Add(a, b)",
        {"w": (8, 8)},
        why={"q": "computes what 'p' does, but is a site"},
    ),
    "outputs": Case(
        "y = Relu(x) z = Relu(x)",
        outputs="float[batch,8] y, float[batch,8] z",
        why={"block/z": "computes what 'block/y' does, but leaves the graph"},
    ),
}


@pytest.mark.parametrize("case", NOT_TWINS)
def test_what_differs_is_computed_twice(case: str, tmp_path: Path) -> None:
    assert_left_alone(NOT_TWINS[case], ShareDuplicates(), tmp_path)
