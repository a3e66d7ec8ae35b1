"""Executors of batches: threads of this process, or (`ray_executor`) a Ray cluster.

Results come in the order of the batches, wherever they ran, and sums are exact (`core.exact_sum`), so a
profile is the same to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
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


def spans_in_order(rows: int, batch_size: int) -> list[Span]:
    """Return spans of all rows in file order."""
    size = max(SPAN_ROWS // batch_size, 1) * batch_size
    return [Span(start, min(start + size, rows)) for start in range(0, rows, size)]


def spans_in_random_order(rows: int, batch_size: int, seed: int) -> list[Span]:
    """Return spans of all rows in random order: a file may be sorted, and its first rows unlike its last."""
    spans = spans_in_order(rows, batch_size)
    return [spans[position] for position in np.random.default_rng(seed).permutation(len(spans))]


def batch_numbers(spans: Iterable[Span], batch_size: int) -> Iterator[int]:
    """Yield the number of each batch in file order, from 0, in the order in which the spans run."""
    for span in spans:
        yield from range(span.start // batch_size, -(-span.stop // batch_size))


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


class Executor(ABC):
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalExecutor(Executor):
    """Runs several batches at once in this process, each on one thread; 0 threads for one batch per core."""

    def __init__(self, threads: int = 0) -> None:
        self.streams = stream_count(threads)

    def run(
        self, work: BatchWork[R], data: Dataset, spans: Iterable[Span], batch_size: int
    ) -> Generator[BatchResult[R]]:
        """See `Executor.run`."""
        run = work.open()
        batches = (
            batch
            for span in _joined(spans)
            for batch in data.batches(batch_size, start=span.start, stop=span.stop)
        )
        yield from map_in_order(lambda batch: BatchResult(batch.rows, run(batch)), batches, self.streams)


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Merge consecutive spans, so that they are read at once."""
    whole: Span | None = None
    for span in spans:
        if whole is not None and whole.stop == span.start:
            whole = Span(whole.start, span.stop)
            continue
        if whole is not None:
            yield whole
        whole = span
    if whole is not None:
        yield whole
