"""In which order rows are taken."""

from __future__ import annotations

import numpy as np
import pytest

from loka_onnx.calibration.passes.executors import Span, first_rows, rows_of, scattered


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
    spans = scattered(10_000_000, 512, seed=0)
    first = first_rows(spans, 4096)
    assert [span.stop - span.start for span in first] == [512] * 8
    assert len({span.start // 1_000_000 for span in first}) >= 5
    assert first != first_rows(scattered(10_000_000, 512, seed=1), 4096)


def test_every_place_of_the_file_is_as_likely_to_come_first():
    """Ends included: without going around them, they come first a hundred times as often."""
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
