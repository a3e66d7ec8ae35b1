"""Spans of rows, and who runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.calibration.passes.executors import (
    BatchResult,
    BatchWork,
    LocalExecutor,
    batch_numbers,
    spans_in_order,
    spans_in_random_order,
)
from loka_onnx.calibration.passes.ray_executor import RayExecutor
from loka_onnx.data.batch import Batch, InputBinding
from loka_onnx.data.splits import open_dataset
from loka_onnx.errors import CalibrationError, MissingPackage

ROWS = 20_000


@given(st.integers(0, 50_000), st.sampled_from([1, 64, 512, 700, 4096, 10_000]), st.integers(0, 5))
def test_spans_are_whole_batches_that_cover_every_row_once(rows, size, seed):
    spans = spans_in_order(rows, size)
    assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])][: len(spans)]
    assert spans[-1].stop == rows if rows else not spans
    assert all((s.stop - s.start) % size == 0 for s in spans[:-1])
    # One batch, or about 4,096 rows.
    assert all(max(size, 4096 - size) < s.stop - s.start + 1 <= max(size, 4096) + 1 for s in spans[:-1])
    drawn = spans_in_random_order(rows, size, seed)
    assert sorted(drawn, key=lambda s: s.start) == spans
    assert drawn == spans_in_random_order(rows, size, seed)
    numbers = list(batch_numbers(drawn, size))
    assert sorted(numbers) == list(range(-(-rows // size)))


@dataclass(frozen=True)
class FirstRow(BatchWork[float]):
    """The first row's number, taken from the data."""

    seen: list[int] = field(default_factory=list)

    def open(self) -> Callable[[Batch], float]:
        def run(batch: Batch) -> float:
            self.seen.append(batch.first_row)
            return float(batch.inputs["x"][0])

        return run


@pytest.fixture
def data(tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.arange(ROWS, dtype=np.float32))
    return open_dataset(tmp_path / "rows.npz", (InputBinding("x", ("x",), "float32", 1),), ())


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_the_order_of_spans_and_batches(threads, data):
    spans = spans_in_random_order(ROWS, 300, seed=1)
    results = list(LocalExecutor(threads).run(FirstRow(Path("unused")), data, spans, 300))
    starts = [row for s in spans for row in range(s.start, s.stop, 300)]
    assert [r.value for r in results] == starts
    assert results[-1] == BatchResult(min(300, ROWS - starts[-1]), float(starts[-1]))
    assert sum(r.rows for r in results) == ROWS


def test_who_closes_the_results_stops_the_work(data):
    work = FirstRow(Path("unused"))
    with closing(LocalExecutor(2).run(work, data, spans_in_order(ROWS, 10), 10)) as results:
        next(results)
    assert 1 <= len(work.seen) <= 5


def test_ray_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackage) as caught:
        RayExecutor()
    assert str(caught.value).startswith("Ray is not installed")
    assert "pip install 'loka-onnx[ray]', or measure here with `--executor local`" in str(caught.value)


def test_an_address_where_nothing_listens_is_an_error_at_once():
    pytest.importorskip("ray", reason="needs ray")
    import ray

    assert not ray.is_initialized()
    with pytest.raises(CalibrationError) as caught:
        list(RayExecutor("127.0.0.1:1").run(FirstRow(Path("unused")), None, [], 1))  # type: ignore[arg-type]
    text = str(caught.value)
    assert text.startswith("no Ray cluster answers at '127.0.0.1:1'") and "refused" in text
    assert "correct `calibration.ray_address`, or measure here with `--executor local`" in text
