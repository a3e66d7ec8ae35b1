"""Constants are folded into the values that ONNX Runtime computes, unless the model would grow or lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from rewrite_models import initializer, named, op_types, parse, random_rows
from shape_cases import FOLDED
from shape_models import Case, assert_left_alone, match, rewrite, run, weight

from loka_onnx.transforms.tidying.fold_constants import FoldConstants

EXPECTED = {
    "a_transposed_weight": ["MatMul"],
    "a_chain_with_two_ends": ["Add", "Mul"],
    "a_shape_that_is_put_together": ["Reshape", "Relu", "Reshape"],
    "rows_of_a_table_that_nothing_else_reads": ["Add"],
}


@pytest.mark.parametrize("case", FOLDED)
def test_every_form_is_folded_and_equal(case: str, tmp_path: Path) -> None:
    done = rewrite(FOLDED[case].model(), FoldConstants(), tmp_path)
    assert op_types(done.after) == EXPECTED[case]
    assert done.record.declined == ()


def test_the_values_are_those_that_onnxruntime_computes(tmp_path: Path) -> None:
    """Bit for bit, also where another order of the sums would round otherwise."""
    body = "p = MatMul(wa, wb) e = Exp(p) y = MatMul(x, e)"
    constants = {"wa": weight(8, 8), "wb": weight(8, 8, seed=1)}
    model = parse(body, constants)
    source = match(model, FoldConstants(), tmp_path)
    computed = parse("p = MatMul(x, wb) y = Exp(p)", {"wb": constants["wb"]})
    values = run(computed, {"x": constants["wa"]})["y"]
    assert [m.tensor.name for m in source.matches] == ["e"]
    assert source.matches[0].values.tobytes() == values.tobytes()


def test_a_site_gets_its_weight(tmp_path: Path) -> None:
    """A weight behind a Transpose makes the product an interaction; folded, it is a linear site."""
    done = rewrite(FOLDED["a_transposed_weight"].model(), FoldConstants(), tmp_path)
    site = done.artifact.site("block/y")
    assert site.weight is not None
    stored = onnx.numpy_helper.to_array(initializer(done.after, named(done.after, "block/y").input[1]))
    np.testing.assert_array_equal(stored, onnx.numpy_helper.to_array(initializer(done.before, "w")).T)


LEFT_ALONE = {
    "expand": Case(
        "r = Expand(row, shape) y = MatMul(x, r)",
        {"row": np.ones((1, 1024)), "shape": [8, 1024]},
        why={"block/r": "its result takes 32768 bytes, what it is made of 4112"},
    ),
    "a_product_of_thin_weights": Case(
        "w = MatMul(u, v) y = MatMul(x, w)",
        {"u": (8, 1), "v": (1, 1000)},
        why={"block/w": "its result takes 32000 bytes, what it is made of 4032"},
    ),
    "a_tied_embedding": Case(
        "e = Gather<axis=0>(table, ids) t = Transpose<perm=[1,0]>(table) z = MatMul(x, t) y ="
        " Concat<axis=1>(z, e)",
        {"table": (50, 8)},
        "float[batch,8] x, int64[batch] ids",
        why={"block/t": "made of the embedding table 'table', which would be stored twice"},
    ),
    "a_result_that_leaves": Case(
        "z = Relu(row) y = Add(x, row)",
        {"row": (8,)},
        outputs="float[batch,8] y, float[8] z",
        why={"block/z": "its result leaves the graph"},
    ),
    "random": Case("r = RandomNormal<shape=[8]>() y = Add(x, r)"),
    "quantized_on_purpose": Case(
        "q = QuantizeLinear(w, s, z) d = DequantizeLinear(q, s, z) y = MatMul(x, d)",
        {"w": (8, 8), "s": 0.1, "z": np.array(0, np.int8)},
    ),
    "a_shape_of_the_batch": Case("s = Shape(x) r = Reshape(x, s) y = Relu(r)"),
    "behind_something_left_alone": Case(
        "r = Expand(row, shape) n = Neg(r) y = MatMul(x, n)",
        {"row": np.ones((1, 1024)), "shape": [8, 1024]},
        why={"block/r": "its result takes 32768 bytes, what it is made of 4112"},
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_near_misses_are_left_alone_with_the_reason(case: str, tmp_path: Path) -> None:
    assert_left_alone(LEFT_ALONE[case], FoldConstants(), tmp_path)


def test_what_onnxruntime_cannot_compute_is_left_alone(tmp_path: Path) -> None:
    body = "p = Reshape(a, five) y = Add(x, p)"
    found = match(parse(body, {"a": weight(8), "five": np.array([5])}), FoldConstants(), tmp_path)
    assert found.matches == ()
    assert "ONNX Runtime does not compute it" in found.declined[0].reason


def test_a_cast_weight_becomes_a_weight(tmp_path: Path) -> None:
    half: Any = weight(8, 8).astype(np.float16)
    model = parse("w = Cast<to=1>(half) y = MatMul(x, w)", {"half": half})
    found = match(model, FoldConstants(), tmp_path)
    np.testing.assert_array_equal(found.matches[0].values, half.astype(np.float32))
    rows = {"x": random_rows(3, 8)}
    assert run(model, rows)["y"].shape == (3, 8)
