"""Runs from Python on a model and rows in memory, and what a notebook shows of their results."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx_text import parsed

import loka_onnx
from loka_onnx import RunOptions, RunResult, Stage
from loka_onnx.data.parquet import write_table
from loka_onnx.errors import ConfigError, DataError

DRAW = np.random.default_rng(0)
ROWS = {"x": DRAW.random((4000, 2), dtype=np.float32), "clicked": (np.arange(4000) % 3 == 0).astype(np.int64)}


SCALARS = {"price": ROWS["x"][:, 0], "clicked": ROWS["clicked"]}


@pytest.mark.parametrize(
    "rows",
    [
        SCALARS,
        pa.table(SCALARS),
        pa.table(SCALARS).to_reader(),
        # One method of polars's, and the interchange protocol alone.
        SimpleNamespace(to_arrow=lambda: pa.table(SCALARS)),
        SimpleNamespace(__dataframe__=pa.table(SCALARS).__dataframe__),
    ],
    ids=["dict", "pyarrow", "C stream", "to_arrow", "interchange"],
)
def test_rows_in_memory_are_written_as_they_are(tmp_path, rows):
    table = pq.read_table(write_table(rows, tmp_path / "deep" / "rows.parquet"))
    assert table.column_names == ["price", "clicked"]
    assert np.array_equal(table["price"].to_numpy(), SCALARS["price"])
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rows.parquet"]
    # A second axis is a list of one length.
    table = pq.read_table(write_table(ROWS, tmp_path / "rows.parquet"))
    assert table.schema.field("x").type == pa.list_(pa.float32(), 2)
    assert np.array_equal(np.stack(table["x"].to_numpy()), ROWS["x"])


@pytest.mark.parametrize("rows", [5, {"x": [1, 2], "y": [1]}, {"x": np.zeros((2, 2, 2))}])
def test_what_is_no_table_is_refused(tmp_path, rows):
    with pytest.raises(DataError) as caught:
        write_table(rows, tmp_path / "rows.parquet")
    assert caught.value.code == "E0232" and not list(tmp_path.iterdir())


def model_of(path: Path, more: str = "") -> Path:
    inputs = f"float[n, 2] x {more}"
    weight = {"w": [[0.5], [-0.25]]}
    model = parsed("y = MatMul(x, w) score = Sigmoid(y)", weight, inputs=inputs, outputs="float[n, 1] score")
    onnx.save(model, path)
    return path


def test_a_model_and_a_dict_are_enough(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    model = model_of(tmp_path / "ranker.onnx")
    with caplog.at_level(logging.WARNING):
        result = loka_onnx.run(model, ROWS, RunOptions(until=Stage.EXPORT))
    assert (result.directory / "model/exported.onnx").is_file() and "check this" in caplog.text
    outputs = [{"name": "score", "kind": "probability", "label": "clicked", "budget": 0.001}]
    again = RunOptions(until=Stage.EXPORT, force=True)
    given = loka_onnx.run(model, ROWS, again, outputs=outputs, overrides={"output": str(tmp_path / "b")})
    assert given.directory == tmp_path / "b"
    assert '"budget":0.001' in (tmp_path / "b" / "run.json").read_text().replace(" ", "")
    # An input without a column is named.
    with pytest.raises(ConfigError) as caught:
        loka_onnx.run(model_of(model, ", int64[n] merchant"), ROWS)
    assert caught.value.code == "E1642" and "merchant" in caught.value.evidence


def test_results_are_short_in_an_interpreter_and_tables_in_a_notebook(sample):
    result = RunResult(Path("runs/a"), sample.report.choice, sample.report)
    for value, rows in (
        (result, len(sample.report.engines)),
        (sample.report.profile, 2),
        (sample.report.plans, 9),
    ):
        assert len(repr(value)) < 500 and len(value.records()) == rows
        assert value._repr_html_().count("<tr>") == rows + 1
    assert repr(result).splitlines()[1].startswith("cpu: fp32, 123.4 µs at 1,024, ")
    assert repr(RunResult(Path("runs/a"))) == "RunResult('runs/a')"
    assert "<script" not in RunResult(Path("<script>"))._repr_html_()
