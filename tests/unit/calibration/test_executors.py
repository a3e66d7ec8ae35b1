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
    Span,
    first_rows,
    rows_of,
    scattered,
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
    apart = scattered(rows, size, seed) if rows else []
    ends = sorted((span.start, span.stop) for span in apart)
    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])][: len(ends)]
    assert all(start % size == 0 and (stop % size == 0 or stop == rows) for start, stop in ends)
    assert not rows or (apart == scattered(rows, size, seed) and rows_of(apart) == rows)


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


def test_ray_is_optional_and_refused_at_once_where_nothing_listens(monkeypatch):
    pytest.importorskip("ray", reason="needs ray")
    import ray

    assert not ray.is_initialized()
    with pytest.raises(CalibrationError) as caught:
        list(RayExecutor("127.0.0.1:1").run(FirstRow(Path("unused")), None, [], 1))  # type: ignore[arg-type]
    assert caught.value.code == "E0517" and "refused" in caught.value.evidence
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackage) as caught:
        RayExecutor()
    assert caught.value.code == "E0511"


# In which order rows are taken


def test_the_first_rows_come_from_everywhere():
    spans = scattered(10_000_000, 512, seed=0)
    first = first_rows(spans, 4096)
    assert [span.stop - span.start for span in first] == [512] * 8
    assert len({span.start // 1_000_000 for span in first}) >= 5
    assert first != first_rows(scattered(10_000_000, 512, seed=1), 4096)
    # Ends included: without going around them, they come first a hundred times as often.
    random = np.random.default_rng(0)
    counts = np.zeros(50)
    for seed in random.integers(0, 2**31, 400):
        for span in first_rows(scattered(500_000, 512, int(seed)), 8192):
            counts[span.start // 10_000] += 1
    # 6,400 spans over 50 places: 128 each, give or take 11 and a little more. Seen: 102 to 152.
    assert counts.min() > 85 and counts.max() < 175


def test_spans_are_cut_at_a_row_or_behind_a_batch():
    spans = [Span(1000, 1300), Span(0, 500), Span(500, 1000)]
    assert first_rows(spans, 350) == [Span(1000, 1300), Span(0, 50)]
    # The last batch of the file is short, and cut rows count from where a span begins.
    assert first_rows(spans, 350, 100) == [Span(1000, 1300), Span(0, 100)]
    assert first_rows(spans, 350, 400) == [Span(1000, 1300), Span(0, 400)]
    assert first_rows(spans, 10_000) == first_rows(spans, 10_000, 64) == spans
    assert rows_of(spans) == 1300
