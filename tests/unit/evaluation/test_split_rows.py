"""Which rows of a split are judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loka_onnx.data import open_dataset
from loka_onnx.evaluation.engines import Split


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
