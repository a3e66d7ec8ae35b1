"""Order of rows where not all of them may be needed.

Files are sorted by time or user, so neighbours are alike: 4096 rows from one position tell less than as many
from eight. But reading a row decodes the rows before it, so each position costs. The file is therefore
divided into spans of growing length at random positions, taken from the shortest on: single batches, then
4096 rows, then a sixteenth of the rows taken before. No position has much weight, and ten million rows are
read from 150 positions.

The division begins at a random row and wraps around the end of the file; otherwise short spans would be too
frequent at both ends.
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
    """Return spans of all rows (at least 1), in whole batches, in the order described above."""
    batches = -(-rows // batch_size)
    lengths = np.array(_lengths(batches, batch_size))
    random = np.random.default_rng(seed)
    places = random.permutation(len(lengths))
    starts = np.empty_like(lengths)
    starts[places] = np.cumsum(lengths[places]) - lengths[places] + random.integers(batches)
    spans: list[Span] = []
    for start, length in zip((starts % batches).tolist(), lengths.tolist(), strict=True):
        stop = min(start + length, batches)
        spans.append(Span(start * batch_size, min(stop * batch_size, rows)))
        if start + length > batches:
            spans.append(Span(0, (start + length - batches) * batch_size))
    return spans


def _lengths(batches: int, batch_size: int) -> list[int]:
    """Return the batches of each span."""
    lengths: list[int] = []
    done = 0
    while done < batches:
        wanted = max(SPAN_ROWS // batch_size, done // LARGEST_PART, 1)
        lengths.append(min(1 if done * batch_size < SCATTERED_ROWS else wanted, batches - done))
        done += lengths[-1]
    return lengths


def first_rows(spans: Iterable[Span], rows: int, batch_size: int = 1) -> list[Span]:
    """Return the first spans that hold `rows` rows or all there are; the last is cut between batches."""
    taken: list[Span] = []
    for span in spans:
        if rows <= 0:
            break
        needed = -(-rows // batch_size) * batch_size
        taken.append(Span(span.start, min(span.stop, span.start + needed)))
        rows -= taken[-1].rows
    return taken


def rows_of(spans: Iterable[Span]) -> int:
    """Return the rows that spans hold."""
    return sum(span.rows for span in spans)
