"""Where batches are run: in threads of this process, or on the machines of a Ray cluster.

An executor returns what each batch left behind in the order of the batches, wherever it was run; whoever
asked adds it up. Sums are exact (`core.exact_sum`), so that a profile is the same to the last bit either way.
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
from loka_onnx.sessions.streams import map_in_order, stream_count

R = TypeVar("R")


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a data set, a whole number of batches unless they are the last."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start


SPAN_ROWS = 4096
"""Rows of a span, or one batch where that is more. Reading one decodes what precedes it in its row group."""


def spans_in_order(rows: int, batch_size: int) -> list[Span]:
    """All rows, in file order."""
    size = max(SPAN_ROWS // batch_size, 1) * batch_size
    return [Span(start, min(start + size, rows)) for start in range(0, rows, size)]


def spans_in_random_order(rows: int, batch_size: int, seed: int) -> list[Span]:
    """All rows, in spans whose order is drawn: a file may be sorted, and its first rows unlike its last.

    Args:
        rows: Rows of the data set.
        batch_size: Rows of a batch.
        seed: Of the order.
    """
    spans = spans_in_order(rows, batch_size)
    return [spans[position] for position in np.random.default_rng(seed).permutation(len(spans))]


def batch_numbers(spans: Iterable[Span], batch_size: int) -> Iterator[int]:
    """Number of each batch in file order, from 0, in the order in which the spans are run."""
    for span in spans:
        yield from range(span.start // batch_size, -(-span.stop // batch_size))


@dataclass(frozen=True)
class BatchResult(Generic[R]):
    """Result of one batch.

    Attributes:
        rows: Rows of the batch.
        value: What the work returned.
    """

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
    """Runs batches; a context manager that lets go of what it holds."""

    @abstractmethod
    def run(
        self, work: BatchWork[R], data: Dataset, spans: Iterable[Span], batch_size: int
    ) -> Generator[BatchResult[R]]:
        """What every batch left behind, in the order of the spans and of the batches in each.

        Consumed lazily: who closes it stops the work, but for a few batches that are under way.
        """

    def close(self) -> None:
        """Let go of what the executor holds; it may be used again."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalExecutor(Executor):
    """Several batches at once in this process, each on one thread.

    Args:
        threads: Batches at once; 0 for one a core.
    """

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
    """The same rows in the same order, with spans that follow one another read as one."""
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
