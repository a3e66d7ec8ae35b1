"""Which rows come first where not all of them may be needed.

Files are sorted by time or by user, and neighbours are alike: the first rows of a file are not like the rest,
and 4096 rows from one place say less than as many from eight. But a row is read by decoding what precedes it.
So the first batches are drawn one by one from the whole file, and what is left of it follows in longer spans,
in random order too.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from loka_onnx.calibration.executors import Span, spans_in_random_order

SCATTERED_ROWS = 32768
"""Rows drawn batch by batch: twice as many as those at which the anytime intervals are tightest."""


def scattered(rows: int, batch_size: int, seed: int) -> list[Span]:
    """All rows, those of the first batches from everywhere.

    Args:
        rows: Rows of the data set.
        batch_size: Rows of a batch.
        seed: Of the order.
    """
    order = np.random.default_rng(seed).permutation(-(-rows // batch_size))
    first = order[: -(-SCATTERED_ROWS // batch_size)].tolist()
    found = [Span(batch * batch_size, min((batch + 1) * batch_size, rows)) for batch in first]
    for span in spans_in_random_order(rows, batch_size, seed):
        start = span.start
        for batch in sorted(first):
            if span.start <= batch * batch_size < span.stop:
                found.append(Span(start, batch * batch_size))
                start = min((batch + 1) * batch_size, rows)
        found.append(Span(start, span.stop))
    return [span for span in found if span.start < span.stop]


def first_rows(spans: Iterable[Span], rows: int) -> list[Span]:
    """The first spans, the last of them cut short, that hold so many rows or all there are."""
    found: list[Span] = []
    for span in spans:
        if rows <= 0:
            break
        found.append(Span(span.start, min(span.stop, span.start + rows)))
        rows -= found[-1].stop - span.start
    return found


def first_batches(spans: Iterable[Span], rows: int, batch_size: int) -> list[Span]:
    """The first spans, cut between batches, that hold at least so many rows or all there are."""
    found: list[Span] = []
    for span in spans:
        if rows <= 0:
            break
        needed = -(-rows // batch_size) * batch_size
        found.append(Span(span.start, min(span.stop, span.start + needed)))
        rows -= found[-1].stop - span.start
    return found


def rows_of(spans: Iterable[Span]) -> int:
    """Rows that spans hold."""
    return sum(span.stop - span.start for span in spans)
