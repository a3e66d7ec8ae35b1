"""Executors of batches: threads of this process, or (`ray_executor`) a Ray cluster; and the order of rows.

Results come in the order of the batches, wherever they ran, and sums are exact (`core.exact_sum`), so a
profile is the same to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar

import numpy as np

from loka_onnx.calibration.observers.reductions import Outputs, reduced_only
from loka_onnx.data import Batch, Dataset
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import map_in_order, stream_count

R = TypeVar("R")


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a data set: whole batches, except at its end."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


SPAN_ROWS = 4096
"""Rows of a span, or one batch where that is more. Reading one decodes what precedes it in its row group."""

SCATTERED_ROWS = 32768
"""Rows that are drawn batch by batch: twice as many as those at which the anytime intervals are tightest."""
LARGEST_PART = 16
"""A span holds at most this part of the rows before it."""


def spans_in_order(rows: int, batch_size: int) -> list[Span]:
    """Return spans of all rows in file order."""
    size = max(SPAN_ROWS // batch_size, 1) * batch_size
    return [Span(start, min(start + size, rows)) for start in range(0, rows, size)]


def spans_in_random_order(rows: int, batch_size: int, seed: int) -> list[Span]:
    """Return `spans_in_order`, shuffled by the seed: a file may be sorted, its first rows unlike its last."""
    spans = spans_in_order(rows, batch_size)
    return [spans[position] for position in np.random.default_rng(seed).permutation(len(spans))]


def scattered_spans(rows: int, batch_size: int, seed: int) -> list[Span]:
    """Return spans of all rows (at least 1), in whole batches, for a pass that may not need all of them.

    Files are sorted by time or user, so neighbours are alike; but reading a row decodes the rows before it,
    so each position costs. Spans lie at random positions and grow: single batches, then 4096 rows, then at
    most a sixteenth of the rows before. So no position has much weight, and ten million rows take 150
    positions. The division begins at a random batch and wraps around the end of the file, which may cut a
    span in two; otherwise short spans would be too frequent at both ends.
    """
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


def span_rows(spans: Iterable[Span]) -> int:
    """Return the rows that spans hold."""
    return sum(span.rows for span in spans)


@dataclass(frozen=True)
class BatchResult(Generic[R]):
    """The value that the work returned for a batch of `rows` rows."""

    rows: int
    value: R


@dataclass(frozen=True)
class BatchWork(ABC, Generic[R]):
    """Work on each batch; picklable. `path` is the graph that `open` loads, readable where batches run."""

    path: Path

    @abstractmethod
    def open(self) -> Callable[[Batch], R]:
        """Load the graph, once in each process; the function returned is called from several threads."""


@dataclass(frozen=True)
class ReductionWork(BatchWork[Outputs]):
    """Runs a graph whose outputs are `Reductions`."""

    def open(self) -> Callable[[Batch], Outputs]:
        """See `BatchWork.open`."""
        session = OnnxSession(self.path, SessionOptions(threads=1))
        return lambda batch: reduced_only(session.run(batch.inputs))


class BatchExecutor(ABC):
    """Runs batches; a context manager that releases its resources."""

    @abstractmethod
    def run(
        self, work: BatchWork[R], data: Dataset, spans: Iterable[Span], batch_size: int
    ) -> Generator[BatchResult[R]]:
        """Yield the result of every batch, in the order of the spans and of the batches in each.

        Lazy: closing the generator stops the work, except for a few batches under way.
        """

    def close(self) -> None:
        """Release resources; the executor may be used again."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LocalExecutor(BatchExecutor):
    """Runs several batches at once in this process, each on one thread; 0 threads for one batch per core."""

    def __init__(self, threads: int = 0) -> None:
        self.streams = stream_count(threads)

    def run(
        self, work: BatchWork[R], data: Dataset, spans: Iterable[Span], batch_size: int
    ) -> Generator[BatchResult[R]]:
        """See `BatchExecutor.run`."""
        run = work.open()
        batches = (
            batch
            for span in _joined(spans)
            for batch in data.batches(batch_size, start=span.start, stop=span.stop)
        )
        yield from map_in_order(lambda batch: BatchResult(batch.rows, run(batch)), batches, self.streams)


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Merge consecutive spans, so that they are read at once."""
    whole = Span(0, 0)
    for span in spans:
        if whole.stop == span.start:
            whole = Span(whole.start, span.stop)
            continue
        if whole.rows:
            yield whole
        whole = span
    if whole.rows:
        yield whole
