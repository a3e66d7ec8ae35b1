"""Columns of an id matrix are looked up at once, and tables that must not be copied are left alone."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from rewrite_models import artifact, named, op_types
from shape_cases import COLUMNS, LOOKED_UP, TABLES
from shape_models import Case, assert_left_alone, feeds, match, reasons_of, rewrite, run

from loka_onnx.graph.model import GraphModel
from loka_onnx.transforms.lookups.merge_gathers import MergeGathers
from loka_onnx.transforms.sequence import apply_mods
from loka_onnx.transforms.tidying.join_parts import JoinParts
from loka_onnx.transforms.tidying.remove_no_ops import RemoveNoOps


@pytest.mark.parametrize(
    "case", ["stacked", "flat_and_out_of_order", "int32_ids_cast_on_the_way", "one_table"]
)
def test_every_id_that_gather_defines_finds_its_row(case, tmp_path):
    """From −rows to rows − 1, table by table: −1 is the last row of its own table."""
    done = rewrite(LOOKED_UP[case].model(), MergeGathers(), tmp_path)
    rows = feeds(done.before, 2 * 7)
    ids = np.arange(-7, 7)[:, None] + np.zeros(rows["ids"].shape[1], np.int64)
    rows["ids"] = ids.astype(rows["ids"].dtype)
    np.testing.assert_array_equal(run(done.after, rows)["y"], run(done.before, rows)["y"])


@pytest.mark.parametrize(("case", "operators"), [
    ("stacked", ["Less", "Where", "Add", "Gather", "Relu"]),
    ("flat_and_out_of_order", ["Gather", "Less", "Where", "Add", "Gather", "Reshape", "Split", "Concat"]),
])  # fmt: skip
def test_the_stack_needs_no_concat(case, operators, tmp_path):
    source = artifact(LOOKED_UP[case].model(), tmp_path / "before.onnx")
    mods = [MergeGathers(), JoinParts(), RemoveNoOps()]
    result = apply_mods(source, [feeds(LOOKED_UP[case].model())], tmp_path / "after.onnx", mods)
    assert op_types(onnx.load(result.model.path)) == operators


TWO = (
    "i0 = Gather<axis=1>(ids, c0) e0 = Gather<axis=0>({}, i0) i1 = Gather<axis=1>(ids, c1) e1 ="
    " Gather<axis=0>({}, i1)"
)
IDS_OF_TWO = "int64[batch,2] ids"

LEFT_ALONE = {
    "one_column": Case("i0 = Gather<axis=1>(ids, c0) y = Gather<axis=0>(t0, i0)", {"t0": (7, 8), **COLUMNS},
        IDS_OF_TWO),
    "ids_of_two_inputs": Case(
        "e0 = Gather<axis=0>(t0, p) e1 = Gather<axis=0>(t1, q) y = Concat<axis=1>(e0, e1)", TABLES,
        "int64[batch] p, int64[batch] q"),
    "widths_that_differ": Case(f"{TWO.format('t0', 'wide')} y = Concat<axis=1>(e0, e1)",
        {"t0": (7, 3), "wide": (9, 5), **COLUMNS}, IDS_OF_TWO, why=dict.fromkeys(("block/e0", "block/e1"),
        "no other table that is looked up in these ids has its width and type")),
    "a_table_that_others_read": Case(
        f"{TWO.format('t0', 't1')} c = Concat<axis=1>(e0, e1) m = ReduceMean(t1, axes) y = Add(c, m)",
        {"t0": (7, 4), "t1": (8, 4), **COLUMNS, "axes": [0, 1]}, IDS_OF_TWO, why={
        "block/e0": "no other table that is looked up in these ids has its width and type",
        "block/e1": "others read its table 't1', which would be stored twice"}),
    "a_lookup_of_every_column": Case("e = Gather<axis=0>(t0, ids) y = ReduceSum(e, axes)",
        {"t0": (7, 8), "axes": [1]}, IDS_OF_TWO),
    "ids_that_are_changed": Case("i0 = Gather<axis=1>(ids, c0) k0 = Mod(i0, five) e0 = Gather<axis=0>(t0, k0)"
        " i1 = Gather<axis=1>(ids, c1) k1 = Mod(i1, five) e1 = Gather<axis=0>(t1, k1)"
        " y = Concat<axis=1>(e0, e1)", {**TABLES, **COLUMNS, "five": 5}, IDS_OF_TWO),
    "columns_of_a_table": Case(
        "i0 = Gather<axis=1>(ids, c0) e0 = Gather<axis=1>(t0, i0) i1 = Gather<axis=1>(ids, c1)"
        " e1 = Gather<axis=1>(t1, i1) s = Concat<axis=0>(e0, e1) y = Relu(s)",
        {"t0": (4, 7), "t1": (4, 8), **COLUMNS}, IDS_OF_TWO),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_near_misses_are_left_alone_with_the_reason(case, tmp_path):
    assert_left_alone(LEFT_ALONE[case], MergeGathers(), tmp_path)


def test_large_stacks_are_left_alone_and_names_tell_the_tables(tmp_path):
    found = match(LOOKED_UP["stacked"].model(), MergeGathers(largest_bytes=543), tmp_path)
    # 7 + 8 + 9 + 10 rows of four FP32 numbers.
    assert reasons_of(found)["block/e0"] == "its stack would copy 544 bytes of tables, over 543"
    assert len(match(LOOKED_UP["stacked"].model(), MergeGathers(largest_bytes=544), tmp_path).matches) == 1
    model = LOOKED_UP["flat_and_out_of_order"].model()
    for node in model.graph.node:
        if node.output[0].startswith("e"):
            node.name = f"embeddings.{node.output[0]}/gather"
    done = rewrite(model, MergeGathers(), tmp_path)
    assert named(done.after, "embeddings.e0+e1+e2+e3/lookup/gather").op_type == "Gather"


def external(model: onnx.ModelProto, path: Path) -> GraphModel:
    """The model with its tables outside, as large ones are."""
    onnx.save(model, path, save_as_external_data=True, location="tables.bin", size_threshold=0)
    graph = GraphModel.load(path)
    for name in ("t0", "t1"):
        tensor = next((t for t in graph.tensors().values() if t.name == name), None)
        if tensor is not None:
            graph.tables[name] = TensorProto(name=name, dims=list(tensor.shape), data_type=TensorProto.FLOAT)
    return graph


def test_a_table_outside_the_model_is_not_copied_and_looked_up_once(tmp_path):
    model = Case(
        f"{TWO.format('t0', 't1')} y = Concat<axis=1>(e0, e1)",
        {"t0": (7, 4), "t1": (8, 4), **{k: COLUMNS[k] for k in ("c0", "c1")}},
        IDS_OF_TWO,
    ).model()
    found = MergeGathers().match(external(model, tmp_path / "model.onnx"))
    assert found.matches == ()
    assert reasons_of(found)["block/e1"] == (
        "its table 't1' stays outside the model, and stacking would copy it"
    )
    # Nothing is copied where all columns read one table.
    model = Case(
        f"{TWO.format('t0', 't0')} y = Concat<axis=1>(e0, e1)",
        {"t0": (7, 4), **{k: COLUMNS[k] for k in ("c0", "c1")}},
        IDS_OF_TWO,
    ).model()
    graph = external(model, tmp_path / "model.onnx")
    mod = MergeGathers()
    assert mod.rewrite(graph, mod.match(graph).matches[0]).what == "2 lookups in one table → one of width 4"


NOT_JOINED: dict[str, tuple[str, str]] = {
    "another_order": ("y = Concat<axis=1>(b, a)", "it concatenates parts of a Split, but not all in order"),
    "something_between": ("y = Concat<axis=1>(a, z, b)", ""),
    "another_axis": ("y = Concat<axis=0>(a, b)", "it concatenates parts of a Split, but not all in order"),
    "a_part_is_missing": ("y = Concat<axis=1>(a, z)", ""),
    "a_part_is_changed": ("r = Relu(a) y = Concat<axis=1>(r, b)", ""),
    "nothing_would_make_the_output": ("y = Concat<axis=1>(a, b)",
        "nothing is left to concatenate, and it leaves the graph"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_JOINED)
def test_other_parts_are_left_alone(case, tmp_path):
    body, reason = NOT_JOINED[case]
    model = Case(
        f"a, b = Split<axis=1>(x, sizes) {body}",
        {"sizes": [4, 4]},
        "float[batch,8] x, float[batch,4] z",
        outputs="float[rows,columns] y",
    ).model()
    found = match(model, JoinParts(), tmp_path)
    assert found.matches == ()
    assert reasons_of(found) == ({"block/y": reason} if reason else {})


@pytest.mark.parametrize(("axis", "joined"), [(1, ["block/s"]), (2, [])])
def test_rows_are_joined_where_they_are_stacked_as_rows(axis, joined, tmp_path):
    model = Case(
        "a, b = Split<axis=1>(x, sizes) ua = Unsqueeze(a, one) ub = Unsqueeze(b, one)"
        f" s = Concat<axis={axis}>(ua, ub) y = Flatten(s)",
        {"sizes": [4, 4], "one": [1]},
    ).model()
    assert [found.concat.name for found in match(model, JoinParts(), tmp_path).matches] == joined
