"""Where zero is added to the rows of a table, and that it changes no value."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from ml_dtypes import float8_e4m3fn
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from loka_onnx.engines.tensorrt.dialect import keep_tables_once

TABLE = np.array([[1.5, -0.25, 3e-5], [np.inf, -np.inf, np.nan], [-0.0, 448.0, 1e30]], np.float32)


def lookup(other: str = "", kind: str = "float") -> onnx.ModelProto:
    """``rows`` (n, 3) of a table for ``ids``, quantized to ``q``; another node reads what it likes."""
    outputs = f"{kind} out" + (f", {kind} out2" if other else "")
    model: onnx.ModelProto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (int64[n] ids) => ({outputs}) {{
            [lookup] rows = Gather(table, ids)
            columns = Transpose<perm=[1,0]>(rows)
            q = QuantizeLinear(columns, scale, zero) dq = DequantizeLinear(q, scale, zero)
            out = Identity(dq) {other}
        }}"""
    )
    dtype = np.dtype({"float": "float32"}.get(kind, kind))
    constants = {"table": TABLE.astype(dtype), "scale": np.array(0.5, dtype)}
    constants["zero"] = np.zeros((), float8_e4m3fn)
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in constants.items())
    return model


def test_a_table_that_only_one_q_reads_is_left_to_the_compiler() -> None:
    model = lookup()
    before = model.SerializeToString()
    assert keep_tables_once(model) == ()
    assert model.SerializeToString() == before


@pytest.mark.parametrize("kind", ["float", "bfloat16"])
@pytest.mark.parametrize("other", ["Relu(rows)", "QuantizeLinear(rows, scale, zero)", "Squeeze(rows)"])
def test_zero_is_added_where_something_else_reads_the_table(other: str, kind: str) -> None:
    model = lookup(f"out2 = {other}", kind)
    assert keep_tables_once(model) == ("table",)
    assert [(n.op_type, list(n.input), list(n.output)) for n in model.graph.node][:2] == [
        ("Gather", ["table", "ids"], ["lookup/keep/rows"]),
        ("Add", ["lookup/keep/rows", "lookup/keep/zero"], ["rows"]),
    ]


def test_no_value_changes() -> None:
    before, after = (lookup("out2 = Relu(rows)") for _ in range(2))
    assert keep_tables_once(after)
    feeds = {"ids": np.array([2, 0, 1, 0])}
    expected, got = (ReferenceEvaluator(model).run(None, feeds) for model in (before, after))
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_array_equal(one, other)
