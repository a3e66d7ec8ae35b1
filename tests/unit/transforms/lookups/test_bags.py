"""Bags of one length are reduced without a loop, whichever exporter wrote it; others stay."""

import numpy as np
import pytest
from rewrite_models import op_types
from shape_cases import BAG, BAG_OF, BAGS, IDS_OF_THREE, OF_THREE, ROWS_OF_IDS, SUMMED
from shape_models import Case, assert_left_alone, feeds, rewrite, run

from loka_onnx.transforms.lookups.bags import BagsToSums, SplitToRows

IN_PARTS = {**BAG_OF, "r": np.array([0, 3, 4])}
NEAR = {
    "offsets_of_unlike_bags": Case(SUMMED, IN_PARTS, IDS_OF_THREE,
        why={"block/y": "bags are not known to have one length"}),
    "offsets_that_do_not_end_with_the_ids": Case(f"{OF_THREE} {SUMMED.replace('Shape(f)', 'Add(a1, three)')}"
        .replace("f =", "a1 = Unsqueeze(a, zero) f ="), BAG_OF, IDS_OF_THREE,
        why={"block/y": "bags are not known to have one length"}),
    "what_is_done_with_a_sum": Case(f"{OF_THREE} " + BAG.format(
        "q0 = ReduceSum<keepdims=0>(g, zero) q = Exp(q0)"), BAG_OF, IDS_OF_THREE),
}  # fmt: skip


@pytest.mark.parametrize("case", BAGS.values(), ids=BAGS)
def test_bags_of_one_length_need_no_loop(case, tmp_path):
    done = rewrite(case.model(), BagsToSums(), tmp_path)
    assert "Loop" not in op_types(done.after)
    for batch in (1, 5):
        rows = feeds(done.before, batch)
        np.testing.assert_allclose(run(done.after, rows)["y"], run(done.before, rows)["y"], atol=1e-6)


@pytest.mark.parametrize("case", NEAR.values(), ids=NEAR)
def test_other_loops_stay(case, tmp_path):
    assert_left_alone(case, BagsToSums(), tmp_path)


@pytest.mark.parametrize("case", ROWS_OF_IDS.values(), ids=ROWS_OF_IDS)
def test_parts_of_a_flat_tensor_are_its_rows(case, tmp_path):
    done = rewrite(case.model(), SplitToRows(), tmp_path)
    assert op_types(done.after).count("Gather") == 3
    assert "Split" not in op_types(done.after)
    for batch in (1, 5):
        rows = feeds(done.before, batch)
        np.testing.assert_array_equal(run(done.after, rows)["y"], run(done.before, rows)["y"])


def test_parts_that_may_be_unlike_stay_a_split(tmp_path):
    unlike = Case(
        "t = Transpose<perm=[1,0]>(ids) f = Reshape(t, minus) s = Shape(ids) k = Add(s, even)"
        " a, b = Split<axis=0>(f, k) d = Cast<to=1>(a) y = Unsqueeze(d, one)",
        {"minus": [-1], "one": [1], "even": [0, 0]},
        "int64[batch,2] ids",
        why={"block/a": "parts of a flat tensor are not known to be its rows"},
    )
    assert_left_alone(unlike, SplitToRows(), tmp_path)
