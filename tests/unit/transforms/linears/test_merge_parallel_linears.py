"""Linears that read one tensor become one, and what looks like it is left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from rewrite_models import artifact, initializer, named, op_types
from shape_cases import MERGED
from shape_models import Case, assert_left_alone, feeds, rewrite, weight

from loka_onnx.transforms.linears.merge_parallel_linears import MergeParallelLinears
from loka_onnx.transforms.sequence import apply_mods


@pytest.mark.parametrize("case", MERGED)
def test_every_form_is_merged_and_equal(case: str, tmp_path: Path) -> None:
    done = rewrite(MERGED[case].model(), MergeParallelLinears(), tmp_path)
    products = [op for op in op_types(done.after) if op in {"Gemm", "MatMul"}]
    before = [op for op in op_types(done.before) if op in {"Gemm", "MatMul"}]
    assert len(products) < len(before)
    assert len(done.record.applied) == op_types(done.after).count("Split")


def test_the_site_says_where_it_came_from(tmp_path: Path) -> None:
    done = rewrite(MERGED["query_key_value"].model(), MergeParallelLinears(), tmp_path)
    site = done.artifact.site("attention.query+key+value")
    assert site.merged_from == ("attention.query", "attention.key", "attention.value")
    assert (site.k, site.n, site.rows) == (8, 24, 4)
    assert [s.name for s in done.artifact.sites] == [site.name, "dot", "mix"]
    assert done.record.applied[0].what == "3 linears of K = 8 → one of N = 8 + 8 + 8"


def test_a_site_merged_twice_names_the_exported_sites(tmp_path: Path) -> None:
    """The second pass sees a merged site beside one that it may not have taken before."""
    case = Case(
        "[a] ha = Gemm(x, wa) [b] hb = Gemm(x, wb) [c] hc = Gemm(x, wc) ra = Relu(ha) rb = Relu(hb) s"
        " = Add(ra, rb) y = Mul(s, hc)",
        {"wa": (8, 8), "wb": (8, 8), "wc": 100 * weight(8, 8, seed=5)},
    )
    source = artifact(case.model(), tmp_path / "before.onnx")
    mods = [MergeParallelLinears(spread=10), MergeParallelLinears(spread=1000)]
    result = apply_mods(source, [feeds(case.model())], tmp_path / "after.onnx", mods)
    assert [len(record.applied) for record in result.log.records] == [0, 1]
    assert result.model.sites[0].merged_from == ("a", "b", "c")


def test_what_follows_reads_its_own_part(tmp_path: Path) -> None:
    done = rewrite(MERGED["gemms"].model(), MergeParallelLinears(), tmp_path)
    site, split = named(done.after, "a+b"), named(done.after, "a+b/split")
    assert list(split.output) == ["ha", "hb"]
    assert [list(n.input) for n in done.after.graph.node if n.op_type in {"Relu", "Sigmoid"}] == [
        ["ha"],
        ["hb"],
    ]
    stored = onnx.numpy_helper.to_array(initializer(done.after, site.input[1]))
    parts = [onnx.numpy_helper.to_array(initializer(done.before, name)) for name in ("wa", "wb")]
    # Both came as transB: the layout stays.
    np.testing.assert_array_equal(stored, np.concatenate(parts))


def test_five_or_more_are_counted_in_the_name(tmp_path: Path) -> None:
    body = " ".join(f"[experts__{i}__fc] h{i} = Gemm(x, w{i}) r{i} = Relu(h{i})" for i in range(6))
    case = Case(
        f"{body} y = Concat<axis=1>({', '.join(f'r{i}' for i in range(6))})",
        {**{f"w{i}": (8, 2) for i in range(6)}},
        outputs="float[batch,12] y",
    )
    done = rewrite(case.model(), MergeParallelLinears(), tmp_path)
    assert list(done.sites()) == ["experts.0.fc+5_more"]


TWO = "[a] ha = {a} [b] hb = {b} ra = Relu(ha) rb = Relu(hb) y = Concat<axis=-1>(ra, rb)"
SQUARE = {"wa": (8, 8), "wb": (8, 8)}
ROWS = "float[batch,4,8] x"

LEFT_ALONE = {
    "they_read_different_tensors": Case(
        "s = Sigmoid(x) [a] ha = Gemm(x, wa) [b] hb = Gemm(s, wb) y = Mul(ha, hb)", SQUARE
    ),
    "an_interaction_beside_a_linear": Case(
        "t = Transpose<perm=[0,2,1]>(x) [a] ha = MatMul(x, wa) [dot] s = MatMul(x, t) y = MatMul(s, ha)",
        SQUARE,
        ROWS,
    ),
    "wide": Case(
        TWO.format(a="Gemm(x, wa)", b="Gemm(x, wb)"),
        {"wa": (8, 8), "wb": (8, 1025)},
        why={"b": "N = 1025 fills a device by itself: layers of N ≤ 1024 are merged"},
    ),
    "results_that_leave_the_graph": Case(
        "[ctr] y = Gemm(x, wa) [cvr] z = Gemm(x, wb)",
        {"wa": (8, 1), "wb": (8, 1)},
        outputs="float[batch,1] y, float[batch,1] z",
        why={
            "ctr": "its result leaves the graph: a head keeps a product of its own",
            "cvr": "its result leaves the graph: a head keeps a product of its own",
        },
    ),
    "factors": Case(
        TWO.format(a="Gemm<alpha=0.3>(x, wa)", b="Gemm(x, wb)"),
        SQUARE,
        why={"a": "a Gemm with factors alpha or beta, which would round the weight"},
    ),
    "a_third_operand_of_the_batch": Case(
        TWO.format(a="Gemm(x, wa, z)", b="Gemm(x, wb)"),
        SQUARE,
        "float[batch,8] x, float[batch,8] z",
        why={"a": "a Gemm whose third operand is not a constant bias of N elements"},
    ),
    "a_weight_for_each_token": Case(
        TWO.format(a="MatMul(x, wa)", b="MatMul(x, wb)"),
        {"wa": (4, 8, 8), "wb": (8, 8)},
        "float[4,4,8] x",
        why={"a": "its weight has rank 3, not 2"},
    ),
    "weights_of_different_sides": Case(
        "[a] ha = MatMul(wa, x) [b] hb = MatMul(x, wb) y = Add(ha, hb)", SQUARE, "float[batch,8,8] x"
    ),
    "weights_of_different_range": Case(
        TWO.format(a="Gemm(x, wa)", b="Gemm(x, wb)"),
        {"wa": np.full((8, 8), 0.001), "wb": np.full((8, 8), 0.1)},
        why={"a": "its weights reach 0.001, those of 'b' 0.1: one scale for both would cost precision"},
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_near_misses_are_left_alone_with_the_reason(case: str, tmp_path: Path) -> None:
    assert_left_alone(LEFT_ALONE[case], MergeParallelLinears(), tmp_path)


def test_one_wide_layer_does_not_keep_the_others_apart(tmp_path: Path) -> None:
    case = Case(
        "[a] ha = Gemm(x, wa) [b] hb = Gemm(x, wb) [c] hc = Gemm(x, wc) ra = Relu(ha) rb = Relu(hb)"
        " rc = Relu(hc) y = Concat<axis=1>(ra, rb, rc)",
        {"wa": (8, 2), "wb": (8, 2000), "wc": (8, 4)},
    )
    done = rewrite(case.model(), MergeParallelLinears(), tmp_path)
    assert done.sites() == {"a+c": (8, 6), "b": (8, 2000)}
    assert list(done.reasons()) == ["b"]


def test_biases_of_their_own_stay_behind_the_split(tmp_path: Path) -> None:
    done = rewrite(MERGED["query_key_value"].model(), MergeParallelLinears(), tmp_path)
    operators = op_types(done.after)
    assert operators.index("Split") < operators.index("Add")
    assert operators.count("Add") == 2


def test_an_addition_of_other_rows_stays_behind(tmp_path: Path) -> None:
    done = rewrite(MERGED["a_residual_stays_behind"].model(), MergeParallelLinears(), tmp_path)
    assert op_types(done.after) == ["MatMul", "Split", "Add", "Add", "Mul"]
