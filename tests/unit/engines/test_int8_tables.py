"""Embedding tables in INT8 with a scale for each row, against a reference in NumPy."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto as T
from onnx_text import parsed

from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.engines.onnxruntime.providers import CPU, provider_for
from loka_onnx.engines.onnxruntime.site_precision import dump_optimized
from loka_onnx.engines.onnxruntime.tables import StoredTables, write_tables
from loka_onnx.sessions.onnx_session import OnnxSession

LOOKUP = "y = Gather(table, ids)"


def lookup_model(path: Path, table: np.ndarray, body: str = LOOKUP) -> Path:
    constants = {"table": table, "c": np.array([1, 2])}
    onnx.save(parsed(body, constants, inputs="int64[batch,fields] ids"), path)
    return path


def rewritten(path: Path) -> tuple[onnx.ModelProto, StoredTables]:
    model = onnx.load(path)
    done = write_tables(model, OperandReader(path))
    onnx.save(model, path)
    return model, done


def reference(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as float64 arithmetic rounds them, and the scale of each."""
    largest = np.abs(table.astype(np.float64)).max(axis=1, keepdims=True)
    scale = np.where(largest > 0, largest / 127, 1.0).astype(np.float32)
    return np.clip(np.rint(table.astype(np.float64) / scale), -128, 127) * scale.astype(np.float64), scale


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(2, 33),
    magnitude=st.floats(-30, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_row_is_rounded_by_itself(rows, width, magnitude, seed, tmp_path_factory):
    random = np.random.default_rng(seed)
    spread = 10.0 ** random.uniform(-3, 3, (rows, 1))
    table = (random.standard_normal((rows, width)) * spread * 10.0**magnitude).astype(np.float32)
    table[random.random(rows) < 0.3] = 0
    path = lookup_model(tmp_path_factory.mktemp("t") / "m.onnx", table)
    ids = random.integers(-rows, rows, (5, 3))
    rewritten(path)
    with OnnxSession(path) as session:
        found = session.run({"ids": ids})["y"]
    exact, scale = reference(table)
    np.testing.assert_array_equal(found[(table[ids] == 0).all(axis=2)], 0)
    # Quotients next to a half may round to either side: one unit of that row, and elsewhere FP32's rounding.
    off = np.abs(found - exact[ids])
    assert (off <= 1.01 * scale[ids]).all()
    assert (off > 1e-5 * np.abs(exact[ids])).mean() <= 0.05
    assert (np.abs(found.astype(np.float64) - table[ids]) <= 0.501 * scale[ids].astype(np.float64)).all()


def test_a_shared_table_is_stored_once_and_the_optimizer_keeps_it(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
    body = "a = Gather(table, ids) b = Gather(table, ids) y = Add(a, b)"
    path = lookup_model(tmp_path / "m.onnx", table, body)
    before = path.stat().st_size
    _, done = rewritten(path)
    assert (done.written, done.declined) == (("table",), {})
    assert path.stat().st_size < before * 0.4
    dump_optimized(path, tmp_path / "optimized.onnx", provider_for("onnxruntime", CPU.key))
    stored = onnx.load(tmp_path / "optimized.onnx").graph.initializer
    assert sorted(t.data_type for t in stored if t.dims[:1] == [300]) == [T.FLOAT, T.INT8]
    assert next(list(t.dims) for t in stored if t.data_type == T.FLOAT) == [300, 1]


TABLE = np.ones((6, 8), np.float32)
DECLINED = {
    "columns": (TABLE, "y = Gather<axis=1>(table, ids)", "takes no whole rows of it"),
    "elements": (TABLE, "y = GatherElements(table, ids)", "takes no whole rows"),
    "gather_nd": (TABLE, "y = GatherND(table, ids)", "takes no whole rows of it"),
    "constant_ids": (TABLE, "y = Gather(table, c)", "constant"),
    "one_wide": (TABLE[:, :1], LOOKUP, "not smaller"),
    "not_finite": (np.full((6, 8), np.inf, np.float32), LOOKUP, "NaN or infinity"),
    "tied_to_a_product": (
        TABLE,
        "r = Gather(table, ids) t = Transpose(table) y = MatMul(r, t)",
        "not only lookups read it",
    ),
}


@pytest.mark.parametrize("case", DECLINED)
def test_other_uses_keep_the_table(case: str, tmp_path: Path) -> None:
    table, body, reason = DECLINED[case]
    path = lookup_model(tmp_path / "m.onnx", table, body)
    model, done = rewritten(path)
    assert done.written == ()
    assert reason in done.declined["table"]
    assert {t.data_type for t in model.graph.initializer} <= {T.FLOAT, T.INT64}
