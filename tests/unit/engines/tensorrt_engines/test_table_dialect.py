"""Where zero is added to the rows of a table, and that it changes no value."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from loka_onnx.engines.tensorrt.dialect import keep_tables_once

TABLE = np.array([[1.5, -0.25, 3e-5], [np.inf, -np.inf, np.nan], [-0.0, 448.0, 1e30]], np.float32)


def lookup(
    *nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("out",), table: int = T.FLOAT
) -> onnx.ModelProto:
    """``rows`` (n, 3) of a table for ``ids``, quantized to ``q``; further nodes read what they like."""
    zero = h.make_tensor("zero", T.FLOAT8E4M3FN, (), b"\0", raw=True)
    values = TABLE.astype(h.tensor_dtype_to_np_dtype(table))
    scale = np.float32(0.5).astype(values.dtype)
    graph = h.make_graph(
        [
            h.make_node("Gather", ["table", "ids"], ["rows"], "lookup"),
            h.make_node("Transpose", ["rows"], ["columns"], "columns", perm=[1, 0]),
            h.make_node("QuantizeLinear", ["columns", "scale", "zero"], ["q"], "site/q"),
            h.make_node("DequantizeLinear", ["q", "scale", "zero"], ["dq"], "site/dq"),
            *nodes,
        ],
        "g",
        [h.make_tensor_value_info("ids", T.INT64, ["n"])],
        [h.make_tensor_value_info(name, table, None) for name in outputs],
        [
            numpy_helper.from_array(values, "table"),
            numpy_helper.from_array(np.asarray(scale), "scale"),
            zero,
        ],
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)


TO_OUT = h.make_node("Identity", ["dq"], ["out"], "leave")


def test_a_table_that_only_one_q_reads_is_left_to_the_compiler() -> None:
    model = lookup(TO_OUT)
    before = model.SerializeToString()
    assert keep_tables_once(model) == ()
    assert model.SerializeToString() == before


@pytest.mark.parametrize("table", [T.FLOAT, T.BFLOAT16])
@pytest.mark.parametrize(
    "other",
    [
        h.make_node("Relu", ["rows"], ["out2"], "other"),
        h.make_node("QuantizeLinear", ["rows", "scale", "zero"], ["out2"], "other"),
        h.make_node("Unsqueeze", ["rows", "axes"], ["out2"], "leaves"),
    ],
    ids=["another operator", "another Q", "an output"],
)
def test_zero_is_added_where_something_else_reads_the_table(other: onnx.NodeProto, table: int) -> None:
    model = lookup(TO_OUT, other, outputs=("out", "out2"), table=table)
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axes"))
    assert keep_tables_once(model) == ("table",)
    assert [(n.op_type, list(n.input), list(n.output)) for n in model.graph.node][:2] == [
        ("Gather", ["table", "ids"], ["lookup/keep/rows"]),
        ("Add", ["lookup/keep/rows", "lookup/keep/zero"], ["rows"]),
    ]


def test_no_value_changes() -> None:
    other = h.make_node("Relu", ["rows"], ["out2"], "other")
    before, after = (lookup(TO_OUT, other, outputs=("out", "out2")) for _ in range(2))
    assert keep_tables_once(after)
    feeds = {"ids": np.array([2, 0, 1, 0])}
    for expected, got in zip(
        ReferenceEvaluator(before).run(None, feeds), ReferenceEvaluator(after).run(None, feeds), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
