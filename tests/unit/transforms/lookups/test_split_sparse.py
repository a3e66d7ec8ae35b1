"""A model is cut at its embeddings; the halves give the bits of the whole; what cannot be cut says why."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import shape_models
from rewrite_models import artifact, op_types
from shape_cases import AXES, COLUMNS, LOOK_UP, TABLES
from shape_models import feeds

from loka_onnx.core.artifact import ModelArtifact, TensorSpec
from loka_onnx.core.rewrite import Declined
from loka_onnx.errors import InternalError
from loka_onnx.graph import storage
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.sessions.model_files import data_locations
from loka_onnx.transforms.lookups.split_sparse import SparseSplit, describe_halves, split_sparse, verify_split

IDS = "int64[batch,4] ids"
NUMERIC = "float[batch,4] x"
TURNED = "t = Transpose<perm=[1,0]>(ids) e = Gather<axis=0>(t0, t)"
TOP = "[fc] h = MatMul(c, w) y = Relu(h)"


@dataclass(frozen=True)
class Case(shape_models.Case):
    inputs: str = IDS
    shared: ClassVar[Any] = {**AXES, "t0": (9, 4), "w": (4, 8), "shape": [-1, 8]}


BAG = "e = Gather<axis=0>(t0, ids) p = ReduceSum<keepdims=0>(e, one)"
MIXED = f"{IDS}, {NUMERIC}"
CUT = {
    "columns": Case(f"{LOOK_UP} c = Concat<axis=1>(e0, e1, e2, e3, x) {TOP}",
        {**TABLES, "w": (20, 8), **COLUMNS}, MIXED),
    "a_bag_of_ids": Case(f"{BAG} c = Concat<axis=1>(p, x) {TOP}", {"w": (8, 8)}, MIXED),
    "a_masked_mean": Case(
        "e = Gather<axis=0>(t0, ids) g = Greater(ids, zero) m = Cast<to=1>(g) n = Unsqueeze(m, last)"
        " k = Mul(e, n) s = ReduceSum<keepdims=0>(k, one) d = ReduceSum<keepdims=0>(n, one)"
        f" f = Max(d, unit) q = Div(s, f) p = ReduceMax(q, last) c = Concat<axis=1>(p, x) {TOP}",
        {"w": (5, 8), "zero": 0, "unit": 1.0}, MIXED),
    "a_mask_of_two_comparisons": Case(
        "e = Gather<axis=0>(t0, ids) a = GreaterOrEqual(ids, zero) b = LessOrEqual(ids, most)"
        " k = And(a, b) l = Less(ids, zero) o = Or(k, l) m = Cast<to=1>(o) n = Unsqueeze(m, last)"
        f" v = Mul(e, n) c = ReduceSum<keepdims=0>(v, one) {TOP}", {"zero": 0, "most": 5}),
    "ids_that_arrive_as_floats": Case(
        f"i = Cast<to=7>(x) e = Gather<axis=0>(t0, i) c = ReduceSum<keepdims=0>(e, one) {TOP}",
        inputs=NUMERIC),
    "rows_are_counted_in_the_dense_part": Case(
        f"{BAG} n = Shape<end=1>(ids) s = Concat<axis=0>(n, width) r = Expand(row, s)"
        f" c = Concat<axis=1>(p, r) {TOP}", {"row": (1, 4), "w": (8, 8), "width": [4]}),
    "one_table_twice": Case(
        "i0 = Gather<axis=1>(ids, c0) e0 = Gather<axis=0>(t0, i0) i1 = Gather<axis=1>(ids, c1)"
        f" e1 = Gather<axis=0>(t0, i1) c = Concat<axis=1>(e0, e1, x) {TOP}", {"w": (12, 8), "c0": 0, "c1": 1},
        MIXED),
}  # fmt: skip
COUNTS = {"columns": 4, "one_table_twice": 2}
"""Of cut tensors, where there are several."""


def halved(path: Path) -> SparseSplit:
    split = split_sparse(GraphModel.load(path))
    assert isinstance(split, SparseSplit), split
    return split


def cut(case: Case, folder: Path) -> tuple[SparseSplit, GraphModel]:
    path = artifact(case.model(), folder / "whole.onnx").path
    return halved(path), GraphModel.load(path)


@pytest.mark.parametrize("case", CUT)
def test_the_halves_give_the_bits_of_the_whole(case, tmp_path):
    whole = CUT[case]
    split, _ = cut(whole, tmp_path)
    rows = [feeds(whole.model(), batch, seed) for seed, batch in enumerate((1, 5, 64))]
    rows = [{n: np.abs(np.round(v)) % 9 if "as_floats" in case else v for n, v in r.items()} for r in rows]
    assert verify_split(split, tmp_path / "whole.onnx", rows, tmp_path / "halves") is None
    more = [f"block_{number}" for number in range(1, COUNTS.get(case, 1))]
    assert [spec.name for spec in split.cut] == ["block", *more]
    for half in ("lookup", "dense"):
        onnx.checker.check_model(onnx.load(tmp_path / "halves" / f"{half}.onnx"), full_check=True)


def test_ids_go_in_on_one_side_and_numbers_on_the_other_and_names_follow_the_modules(tmp_path):
    split, model = cut(CUT["columns"], tmp_path)
    assert [t.name for t in split.lookup.inputs] == ["ids"]
    assert [t.name for t in split.dense.inputs] == ["x", "block", "block_1", "block_2", "block_3"]
    assert [t.name for t in split.dense.outputs] == [t.name for t in model.outputs]
    assert split.cut[0] == TensorSpec("block", "float32", (None, 4))
    split.lookup.save(tmp_path / "lookup.onnx")
    split.dense.save(tmp_path / "dense.onnx")
    assert set(op_types(onnx.load(tmp_path / "lookup.onnx"))) == {"Gather"}
    dense = onnx.load(tmp_path / "dense.onnx")
    assert op_types(dense) == ["Concat", "MatMul", "Relu"]
    assert not {t.name for t in dense.graph.initializer} & TABLES.keys()
    case = CUT["columns"]
    model = case.model()
    for node in model.graph.node:
        if node.output[0].startswith("e"):
            node.name = f"embeddings.{node.output[0]}/gather"
    split = halved(artifact(model, tmp_path / "whole.onnx").path)
    assert [spec.name for spec in split.cut] == [f"embeddings.e{i}" for i in range(4)]


def test_halves_that_differ_in_a_bit_are_refused(tmp_path):
    case = CUT["columns"]
    split, _ = cut(case, tmp_path)
    weight = next(t for t in split.dense.node("fc").inputs if t.name == "w")
    values: Any = values_of(weight).copy()
    values[0, 0] = np.nextafter(values[0, 0], np.float32(9))
    split.dense.node("fc").inputs[1] = split.dense.constant("w.off", values)
    refused = verify_split(split, tmp_path / "whole.onnx", [feeds(case.model())], tmp_path / "halves")
    assert refused is not None
    assert refused.at == "y"
    assert "the halves move it by up to" in refused.reason


WHOLE = {
    "no_table": Case("[fc] y = MatMul(x, w)", inputs=NUMERIC,
        why=Declined("model", "it has no lookup: no Gather reads rows of a constant table by ids")),
    "ids_as_numbers": Case(f"{BAG} f = Cast<to=1>(ids) c = Mul(p, f) {TOP}",
        why=Declined("block/f", "it reads the ids 'ids', and is no lookup")),
    "a_mask_outside_the_pooling": Case(
        f"i = Cast<to=7>(ids) {BAG.replace('ids', 'i')} f = Cast<to=1>(i) c = Mul(p, f) {TOP}",
        inputs="int32[batch,4] ids",
        why=Declined("block/f", "it reads 'i', which is made of ids, and is no lookup")),
    "a_tied_table": Case(f"{BAG} t = Transpose<perm=[1,0]>(t0) y = MatMul(p, t)",
        why=Declined("block/t", "it reads the table 't0', and is no lookup")),
    "an_embedding_that_leaves": Case(
        "i = Gather<axis=1>(ids, one) j = Squeeze(i, one) y = Gather<axis=0>(t0, j)",
        why=Declined("block/y", "its result 'y' leaves the graph")),
    "ids_out_of_a_layer": Case(
        "[route] s = MatMul(x, w) k = ArgMax<axis=1>(s) e = Gather<axis=0>(t0, k) y = Reshape(e, shape)",
        inputs=NUMERIC, why=Declined("route", "ids of a lookup come out of this layer")),
    # An engine takes one row of each input for a row of the batch.
    "rows_that_do_not_lie_along_axis_0": Case(
        f"{TURNED} c = Transpose<perm=[1,0,2]>(e) [fc] y = MatMul(c, w)", why=Declined("block/e",
        "its result 'e' has shape [4, 'batch', 4]: an engine takes the batch on axis 0 and fixed sizes "
        "on the others")),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_what_cannot_be_cut_says_why(case, tmp_path):
    path = artifact(WHOLE[case].model(), tmp_path / "whole.onnx").path
    assert split_sparse(GraphModel.load(path)) == WHOLE[case].why


def test_tables_outside_the_model_go_with_the_lookup_and_are_linked(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)
    case = CUT["columns"]
    onnx.save(
        case.model(),
        tmp_path / "raw.onnx",
        save_as_external_data=True,
        location="tables.bin",
        size_threshold=100,
    )
    GraphModel.load(tmp_path / "raw.onnx").save(tmp_path / "whole.onnx")
    assert set(GraphModel.load(tmp_path / "whole.onnx").tables) == TABLES.keys()
    split = halved(tmp_path / "whole.onnx")
    halves = tmp_path / "halves"
    assert verify_split(split, tmp_path / "whole.onnx", [feeds(case.model())], halves) is None
    assert (halves / "tables.bin").samefile(tmp_path / "tables.bin")
    assert data_locations(onnx.load(halves / "dense.onnx", load_external_data=False)) == ()


def test_rows_of_a_cut_tensor_are_those_of_the_batch_and_a_lost_site_is_a_bug(tmp_path):
    split, _ = cut(Case(f"{TURNED} c = ReduceMean<keepdims=0>(e, zero) {TOP}", {"zero": [0]}), tmp_path)
    assert [tensor.shape for tensor in split.cut] == [(None, 4)]
    # Found on data: no shape says that a bag has as many ids as the batch has rows.
    body = "f = Reshape(ids, all) e = Gather<axis=0>(t0, f) r = Reshape(e, bags) "
    case = Case(f"{body} c = ReduceMean<keepdims=0>(r, one) {TOP}", {"all": [-1], "bags": [-1, 4, 4]})
    split, _ = cut(case, tmp_path)
    refused = verify_split(split, tmp_path / "whole.onnx", [feeds(case.model(), 3)], tmp_path / "halves")
    assert refused == Declined("block", "it has 12 rows for a batch of 3")
    whole = described(CUT["columns"], tmp_path)
    split = halved(whole.path)
    split.lookup.save(tmp_path / "lookup.onnx")
    split.dense.save(tmp_path / "dense.onnx")
    other = replace(whole, sites=(*whole.sites, replace(whole.sites[0], name="lost")))
    with pytest.raises(InternalError, match=r"other sites than the whole\n  evidence: lost"):
        describe_halves(split, other, tmp_path)


def described(case: Case, folder: Path) -> ModelArtifact:
    inputs = (TensorSpec("ids", "int64", (None, 4)), TensorSpec("x", "float32", (None, 4)))
    outputs = (TensorSpec("y", "float32", (None, 8)),)
    return replace(artifact(case.model(), folder / "whole.onnx"), inputs=inputs, outputs=outputs)


@pytest.mark.parametrize("case", ["columns", "a_bag_of_ids"])
def test_the_halves_are_described_with_the_sites_of_the_whole(case, tmp_path):
    whole = described(CUT[case], tmp_path)
    merged = (replace(whole.sites[0], merged_from=("a", "b")), *whole.sites[1:])
    whole = replace(whole, sites=merged)
    split = halved(whole.path)
    assert verify_split(split, whole.path, [feeds(CUT[case].model())], tmp_path / "halves") is None
    halves = describe_halves(split, whole, tmp_path / "halves")
    assert halves.passed == ("x",)
    assert halves.cut == halves.lookup.outputs == halves.dense.inputs[1:]
    assert halves.dense.outputs == whole.outputs
    assert [(s.name, s.k, s.n, s.rows, s.merged_from) for s in halves.dense.sites] == [
        (s.name, s.k, s.n, s.rows, s.merged_from) for s in whole.sites
    ]
    assert halves.lookup.sites == ()
    for half in (halves.lookup, halves.dense):
        assert half.digest == storage.model_digest(half.path)
