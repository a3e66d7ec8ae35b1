"""What every row of a batch shares is multiplied once; other parts of a concatenation stay together."""

from __future__ import annotations

from pathlib import Path

import pytest
from rewrite_models import artifact, op_types
from shape_cases import EXPANDED, TAKEN_APART
from shape_models import Case, assert_left_alone, feeds, rewrite

from loka_onnx.core.site import SiteKind
from loka_onnx.transforms.linears.split_concat import SplitConcat
from loka_onnx.transforms.sequence import apply_mods
from loka_onnx.transforms.tidying.fold_constants import FoldConstants


@pytest.mark.parametrize("case", TAKEN_APART)
def test_every_form_is_taken_apart_and_equal(case: str, tmp_path: Path) -> None:
    done = rewrite(TAKEN_APART[case].model(), SplitConcat(), tmp_path)
    assert done.sites()["fc"][0] < 15
    assert "Expand" not in op_types(done.after)


def test_two_layers_share_what_is_left_of_the_concat(tmp_path: Path) -> None:
    done = rewrite(TAKEN_APART["a_row_for_two_layers"].model(), SplitConcat(), tmp_path)
    assert op_types(done.after).count("Concat") == 1
    assert done.sites() == {"fc": (11, 8), "gate": (11, 8)}


def test_the_row_of_a_user_is_a_site(tmp_path: Path) -> None:
    """A computed row is no constant: its product stays, once instead of once a candidate."""
    case = Case(
        f"u = Relu(user) {EXPANDED.replace('row', 'u')} c = Concat<axis=1>(x, e) [fc] h = Gemm(c, w,"
        " b) y = Relu(h)",
        {"w": (12, 8), "b": (8,), "width": [4]},
        "float[batch,8] x, float[1,4] user",
    )
    done = rewrite(case.model(), SplitConcat(), tmp_path)
    assert [(s.name, s.kind, s.rows, s.k) for s in done.artifact.sites] == [
        ("fc", SiteKind.LINEAR, 1, 8),
        ("fc.shared", SiteKind.LINEAR, 1, 4),
    ]


def test_a_learned_row_is_folded_into_a_constant(tmp_path: Path) -> None:
    model = TAKEN_APART["a_learned_row"].model()
    source = artifact(model, tmp_path / "before.onnx")
    mods = [SplitConcat(), FoldConstants()]
    result = apply_mods(source, [feeds(model)], tmp_path / "after.onnx", mods)
    assert [(site.name, site.k) for site in result.model.sites] == [("fc", 11)]


TOGETHER = "c = Concat<axis={axis}>({parts}) [fc] y = MatMul(c, w)"

LEFT_ALONE = {
    "parts_that_differ_by_row": Case(
        TOGETHER.format(axis=1, parts="x, z"),
        {"w": (11, 8)},
        "float[batch,8] x, float[batch,3] z",
        why={"fc": "no part of its Concat is the same for every row: the copy costs less than 2 products"},
    ),
    "rows_are_concatenated": Case(
        TOGETHER.format(axis=1, parts="x, z"), {"w": (8, 8)}, "float[batch,2,8] x, float[batch,3,8] z"
    ),
    "an_expanded_batch": Case(
        f"{EXPANDED.replace('row', 'x')} {TOGETHER.format(axis=1, parts='x, e')}",
        {"w": (16, 8), "width": [8]},
        why={"fc": "no part of its Concat is the same for every row: the copy costs less than 2 products"},
    ),
    "nothing_else": Case(
        f"{EXPANDED} {TOGETHER.format(axis=1, parts='e, e')}",
        {"row": (1, 4), "w": (8, 8), "width": [4]},
        why={"fc": "every part of its Concat is the same for every row"},
    ),
    "an_unknown_width": Case(
        TOGETHER.format(axis=1, parts="x, z"),
        {"w": (11, 8)},
        "float[batch,8] x, float[batch,rest] z",
        why={"fc": "the width of a part of its Concat is not known"},
    ),
    "a_weight_on_the_left": Case(
        "c = Concat<axis=1>(x, z) [fc] y = MatMul(w, c)",
        {"w": (3, 5)},
        "float[batch,2,8] x, float[batch,3,8] z",
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_near_misses_are_left_alone_with_the_reason(case: str, tmp_path: Path) -> None:
    assert_left_alone(LEFT_ALONE[case], SplitConcat(), tmp_path)
