"""Which rows come first where not all of them may be needed.

Files are sorted by time or by user, and neighbours are alike: the first rows of a file are not like the rest,
and 4096 rows from one place say less than as many from eight. But a row is read by decoding what precedes
it, so that every place costs. The file is therefore divided into spans of growing length, which stand in it
in a random order and are taken from the shortest on: batches one by one, then 4096 rows at a time, then a
sixteenth of what was taken before. No place ever has much weight, and ten million rows are read from 150.

The division begins at a random row and goes around the end of the file; without that, short spans would be
too frequent at both ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from loka_onnx.calibration.passes.executors import SPAN_ROWS, Span

SCATTERED_ROWS = 32768
"""Rows that are drawn batch by batch: twice as many as those at which the anytime intervals are tightest."""
LARGEST_PART = 16
"""A span holds at most this part of the rows before it."""


def scattered(rows: int, batch_size: int, seed: int) -> list[Span]:
    """All rows, in spans of whole batches.

    Args:
        rows: Rows of the data set, at least 1.
        batch_size: Rows of a batch.
        seed: Of the order.
    """
    batches = -(-rows // batch_size)
    lengths = np.array(_lengths(batches, batch_size))
    random = np.random.default_rng(seed)
    places = random.permutation(len(lengths))
    starts = np.empty_like(lengths)
    starts[places] = np.cumsum(lengths[places]) - lengths[places] + random.integers(batches)
    found: list[Span] = []
    for start, length in zip((starts % batches).tolist(), lengths.tolist(), strict=True):
        stop = min(start + length, batches)
        found.append(Span(start * batch_size, min(stop * batch_size, rows)))
        if start + length > batches:
            found.append(Span(0, (start + length - batches) * batch_size))
    return found


def _lengths(batches: int, batch_size: int) -> list[int]:
    """Batches of each span."""
    found: list[int] = []
    done = 0
    while done < batches:
        wanted = max(SPAN_ROWS // batch_size, done // LARGEST_PART, 1)
        found.append(min(1 if done * batch_size < SCATTERED_ROWS else wanted, batches - done))
        done += found[-1]
    return found


def first_rows(spans: Iterable[Span], rows: int, batch_size: int = 1) -> list[Span]:
    """Return the first spans that hold `rows` rows or all there are; the last is cut between batches."""
    found: list[Span] = []
    for span in spans:
        if rows <= 0:
            break
        needed = -(-rows // batch_size) * batch_size
        found.append(Span(span.start, min(span.stop, span.start + needed)))
        rows -= found[-1].rows
    return found


def rows_of(spans: Iterable[Span]) -> int:
    """Rows that spans hold."""
    return sum(span.rows for span in spans)
