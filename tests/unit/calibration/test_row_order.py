"""In which order rows are taken."""

from __future__ import annotations

import numpy as np
import pytest

from loka_onnx.calibration.executors import Span
from loka_onnx.calibration.row_order import first_batches, first_rows, rows_of, scattered


def rows_in(spans: list[Span]) -> np.ndarray:
    return np.concatenate([np.arange(span.start, span.stop) for span in spans])


@pytest.mark.parametrize(
    ("rows", "batch"), [(100_000, 512), (50_001, 512), (70_000, 2048), (300, 512), (1, 4)]
)
def test_every_row_comes_once_and_no_batch_is_cut(rows, batch):
    spans = scattered(rows, batch, seed=3)
    np.testing.assert_array_equal(np.sort(rows_in(spans)), np.arange(rows))
    assert all(span.start % batch == 0 and (span.stop % batch == 0 or span.stop == rows) for span in spans)
    assert spans == scattered(rows, batch, seed=3)


def test_the_first_rows_come_from_everywhere():
    spans = scattered(1_000_000, 512, seed=0)
    first = [span.start for span in first_rows(spans, 4096)]
    assert len(first) == 8 and len({start // 250_000 for start in first}) >= 3
    assert first != [span.start for span in first_rows(scattered(1_000_000, 512, seed=1), 4096)]
    # Later rows are read in long runs.
    assert len(spans) < 1_000_000 / 4096 + 3 * 64


def test_spans_are_cut_at_a_row_or_behind_a_batch():
    spans = [Span(1000, 1300), Span(0, 500), Span(500, 1000)]
    assert first_rows(spans, 350) == [Span(1000, 1300), Span(0, 50)]
    # The last batch of the file is short, and cut rows count from where a span begins.
    assert first_batches(spans, 350, 100) == [Span(1000, 1300), Span(0, 100)]
    assert first_batches(spans, 350, 400) == [Span(1000, 1300), Span(0, 400)]
    assert first_rows(spans, 10_000) == first_batches(spans, 10_000, 64) == spans
    assert rows_of(spans) == 1300
