"""Collecting outputs over batches."""

from pathlib import Path
from threading import Barrier

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loka_onnx.data import Batch, open_dataset
from loka_onnx.errors import DataError, EngineError, EvaluationError
from loka_onnx.evaluation.engines import Split
from loka_onnx.evaluation.predictions import Streams, any_size, predict


def batches(*sizes):
    first = 0
    for size in sizes:
        rows = np.arange(first, first + size)
        yield Batch({"x": rows[:, None].astype(np.float32)}, {"y": rows * 10, "user": rows}, first)
        first += size


def test_outputs_and_columns_over_uneven_batches_in_order():
    buffer = np.zeros((4, 1, 1), np.float32)

    def run(inputs):
        x = inputs["x"]
        buffer[: len(x), :, 0] = 2 * x  # an engine that reuses its buffer
        return {"ctr": buffer[: len(x)], "wide": np.hstack([x, x]), "unused": None}

    seen = []
    got = predict(run, batches(4, 4, 1), ("ctr", "wide"), ("y",), seen.append)
    np.testing.assert_array_equal(got.outputs["ctr"], 2.0 * np.arange(9))
    assert got.outputs["wide"].shape == (9, 2)
    np.testing.assert_array_equal(got.columns["y"], 10 * np.arange(9))
    assert (got.rows, seen, set(got.columns)) == (9, [4, 8, 9], {"y"})


def test_streams_run_batches_at_once_and_keep_their_order():
    met = Barrier(2, timeout=20.0)

    def run(inputs):
        # Passed only by two batches at once.
        met.wait()
        return {"o": inputs["x"] * 2}

    seen = []
    got = predict(Streams(run, 2), batches(3, 5, 1, 4), ("o",), ("y",), seen.append)
    np.testing.assert_array_equal(got.outputs["o"], 2.0 * np.arange(13))
    np.testing.assert_array_equal(got.columns["y"], 10 * np.arange(13))
    assert seen == [3, 8, 9, 13]


def test_a_failure_in_a_stream_is_raised_as_it_is():
    def run(inputs):
        raise EngineError("the worker died", evidence="signal 11")

    with pytest.raises(EngineError, match="the worker died"):
        predict(Streams(run, 2), batches(1, 1, 1), ("o",))


def test_a_batch_of_one_row_keeps_its_axis():
    got = predict(lambda inputs: {"o": inputs["x"]}, batches(1, 1), ("o",))
    assert got.outputs["o"].shape == (2,)


@pytest.mark.parametrize(
    ("value", "code"),
    [(np.float32(1), "E1015"), (np.zeros((1, 3)), "E1015"), (np.zeros((3, 2, 2)), "E1016"), (None, "E1014")],
)
def test_outputs_that_are_not_per_row_are_refused(value, code):
    with pytest.raises(EvaluationError) as caught:
        predict(lambda inputs: {} if value is None else {"o": value}, batches(3), ("o",))
    assert caught.value.code == code


def test_an_output_that_changes_its_width_is_refused():
    with pytest.raises(EvaluationError) as caught:
        predict(lambda i: {"o": np.zeros((len(i["x"]), len(i["x"]) + 1))}, batches(3, 2), ("o",))
    assert caught.value.code == "E1011"


@pytest.mark.parametrize(("sizes", "columns", "code"), [((3,), ("label",), "E1012"), ((), (), "E1013")])
def test_missing_columns_and_rows_are_refused(sizes, columns, code):
    with pytest.raises(DataError) as caught:
        predict(lambda inputs: inputs, batches(*sizes), ("x",), columns)
    assert caught.value.code == code


def test_a_short_batch_repeats_rows_for_an_engine_that_takes_no_fewer():
    asked = []

    def run(inputs):
        x = inputs["x"]
        asked.append(x[:, 0].tolist())
        assert len(x) >= 4
        return {"ctr": 2 * x, "whole": np.zeros(3), "number": np.float32(1)}

    got = predict(any_size(run, 4), batches(5, 4, 3), ("ctr",))
    np.testing.assert_array_equal(got.outputs["ctr"], 2.0 * np.arange(12))
    assert asked == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 9]]
    # What does not follow the batch is left to whoever reads it.
    one = any_size(run, 4)({"x": np.ones((1, 1), np.float32)})
    assert [np.shape(one[name]) for name in ("ctr", "whole", "number")] == [(1, 1), (3,), ()]


# Which rows of a split are judged


@pytest.fixture
def split(tmp_path: Path) -> Split:
    pq.write_table(pa.table({"row": np.arange(1000)}), tmp_path / "rows.parquet")
    return Split("selection", open_dataset(tmp_path / "rows.parquet", (), ("row",)), ("row",), batch_size=64)


def judged(split: Split) -> list[list[int]]:
    return [batch.columns["row"].tolist() for batch in split.batches()]


def test_all_rows_in_order(split: Split) -> None:
    assert [row for batch in judged(split) for row in batch] == list(range(1000)) and split.rows == 1000


@pytest.mark.parametrize("most", [64, 130, 512, 999])
def test_some_rows_are_requests_at_even_distances(split: Split, most: int) -> None:
    """From the whole file, which may be in the order of time."""
    few = Split(split.name, split.data, split.columns, batch_size=64, most=most)
    found, count = judged(few), most // 64
    assert [len(batch) for batch in found] == [64] * count and few.rows == 64 * count
    starts = [batch[0] for batch in found]
    assert starts == [1000 * index // count for index in range(count)]
    rows = [row for batch in found for row in batch]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("most", [1, 63, 1000])
def test_fewer_rows_than_a_request_and_no_more_than_there_are(split: Split, most: int) -> None:
    few = Split(split.name, split.data, split.columns, batch_size=64, most=most)
    assert [row for batch in judged(few) for row in batch] == list(range(most)) and few.rows == most
