"""The dialect of TensorRT: merged products split by heads, zero added to rows of tables; values stay."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from ml_dtypes import float8_e4m3fn
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from loka_onnx.engines.draft import GraphDraft
from loka_onnx.engines.tensorrt.dialect import keep_tables_once, split_by_heads

BODY = """
  [xq] xq = QuantizeLinear(x, one, zero) [xd] xd = DequantizeLinear(xq, one, zero)
  [wd] wd = DequantizeLinear<axis=1>(w, scales, zeros)
  [qk] p = MatMul(xd, wd)
  [cut] a, b = Split<axis=-1>(p, sizes)
  [hq] q = Reshape(a, two) [hk] k = Reshape(b, three)
"""
ENDS = "float[batch,5,2,4] q, float[batch,5,3,4] k"


def model(
    body: str = BODY, ends: str = ENDS, inputs: str = "float[batch,5,8] x", **shapes: Any
) -> onnx.ModelProto:
    weight = np.random.default_rng(0).integers(-8, 8, (8, 20))
    float8 = {"w": weight, "zero": 0, "zeros": np.zeros(20)}
    constants: dict[str, Any] = {
        n: np.asarray(v, np.float32).astype(float8_e4m3fn) for n, v in float8.items()
    }
    constants |= {"one": 1.0, "scales": np.linspace(1, 3, 20), "sizes": [8, 12]}
    constants |= {"two": [-1, 5, 2, 4], "three": [-1, 5, 3, 4], **shapes}
    return parsed(body, constants, inputs=inputs, outputs=ends)


def rewritten(
    made: onnx.ModelProto, rule: Callable[[GraphDraft], tuple[str, ...]], *expected: str
) -> onnx.ModelProto:
    draft = GraphDraft(deepcopy(made), Path())
    assert rule(draft) == expected
    return draft.finished()


def check_split(*row: int, **changes: Any) -> onnx.ModelProto:
    """Splits it, and holds all outputs against the model before."""
    before = model(**changes)
    after = rewritten(before, split_by_heads, "cut")
    onnx.checker.check_model(after, full_check=True)
    x = np.random.default_rng(1).normal(size=(3, *row)).astype(np.float32)
    expected, got = (ReferenceEvaluator(each).run(None, {"x": x}) for each in (before, after))
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_array_equal(one, other)
    return after


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"two": [0, 5, 2, 4], "three": [0, 5, 3, 4]},
        {"two": [3, -1, 2, 4], "three": [3, -1, 3, 4]},
        {"two": [-1, 2, 4], "three": [-1, 3, 4]},
    ],
    ids=["batch", "copied", "rows", "flat"],
)
def test_the_values_are_the_same(shapes: dict[str, list[int]]) -> None:
    is_flat = len(shapes.get("two", [0] * 4)) == 3
    after = check_split(5, 8, ends="float[n,2,4] q, float[n,3,4] k" if is_flat else ENDS, **shapes)
    assert [node.op_type for node in after.graph.node][4:6] == ["Reshape", "Split"]
    # A second time there is nothing left to do.
    rewritten(after, split_by_heads)


def test_a_gemm_and_a_known_axis_are_taken() -> None:
    body = BODY.replace("MatMul", "Gemm").replace("axis=-1", "axis=1")
    ends, inputs = "float[batch,2,4] q, float[batch,3,4] k", "float[batch,8] x"
    check_split(8, body=body, ends=ends, inputs=inputs, two=[0, 2, 4], three=[0, 3, 4])


def instead(old: str, new: str) -> dict[str, str]:
    return {"body": BODY.replace(old, new)}


STAYS: dict[str, dict[str, Any]] = {
    "base_precision": instead("DequantizeLinear<axis=1>(w, scales, zeros)", "Cast<to=1>(w)"),
    "another_axis": instead("axis=-1", "axis=1"),
    "one_part_whole": instead("k = Reshape(b, three)", "k = Relu(b)"),
    "part_leaves": {"ends": f"float[batch,5,8] a, {ENDS}"},
    "zero_means_zero": instead("q = Reshape(a, two)", "q = Reshape<allowzero=1>(a, two)"),
    "other_width": {"two": [-1, 5, 4, 2]},
    "other_rows": {"two": [-1, 10, 1, 4]},
    "width_not_told": {"two": [-1, 5, 2, -1]},
    "copied_axis": {"two": [-1, 0, 2, 4], "three": [-1, 0, 3, 4]},
    "no_heads": {"two": [-1, 5, 8], "three": [-1, 5, 12]},
}


@pytest.mark.parametrize("case", STAYS)
def test_what_is_not_read_by_heads_stays(case: str) -> None:
    made = model(**STAYS[case])
    assert list(rewritten(made, split_by_heads).graph.node) == list(made.graph.node)


# Tables ---------------------------------------------------------------------------------------------------

TABLE = np.array([[1.5, -0.25, 3e-5], [np.inf, -np.inf, np.nan], [-0.0, 448.0, 1e30]], np.float32)


def lookup(other: str = "", kind: str = "float") -> onnx.ModelProto:
    """``rows`` (n, 3) of a table for ``ids``, quantized to ``q``; another node reads what it likes."""
    outputs = f"{kind} out" + (f", {kind} out2" if other else "")
    body = f"""
        [lookup] rows = Gather(table, ids)
        columns = Transpose<perm=[1,0]>(rows)
        q = QuantizeLinear(columns, scale, zero) dq = DequantizeLinear(q, scale, zero)
        out = Identity(dq) {other}
    """
    dtype = np.dtype({"float": "float32"}.get(kind, kind))
    constants = {
        "table": TABLE.astype(dtype),
        "scale": np.array(0.5, dtype),
        "zero": np.zeros((), float8_e4m3fn),
    }
    return parsed(body, constants, inputs="int64[n] ids", outputs=outputs)


def test_a_table_that_only_one_q_reads_is_left_to_the_compiler() -> None:
    made = lookup()
    assert list(rewritten(made, keep_tables_once).graph.node) == list(made.graph.node)


@pytest.mark.parametrize("kind", ["float", "bfloat16"])
@pytest.mark.parametrize("other", ["Relu(rows)", "QuantizeLinear(rows, scale, zero)", "Squeeze(rows)"])
def test_zero_is_added_where_something_else_reads_the_table(other: str, kind: str) -> None:
    made = rewritten(lookup(f"out2 = {other}", kind), keep_tables_once, "table")
    assert [(n.op_type, list(n.input), list(n.output)) for n in made.graph.node][:2] == [
        ("Gather", ["table", "ids"], ["lookup/bare"]),
        ("Add", ["lookup/bare", f"{kind.replace('float', 'float32', kind == 'float')}/zero"], ["rows"]),
    ]


def test_no_value_changes() -> None:
    before = lookup("out2 = Relu(rows)")
    after = rewritten(before, keep_tables_once, "table")
    feeds = {"ids": np.array([2, 0, 1, 0])}
    expected, got = (ReferenceEvaluator(each).run(None, feeds) for each in (before, after))
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_array_equal(one, other)
