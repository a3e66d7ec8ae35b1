"""Where batches are run: in threads of this process, or on the machines of a Ray cluster.

An executor returns what each batch left behind in the order of the batches, wherever it was run; whoever
asked adds it up. Sums are exact (`core.exact_sum`), so that a profile is the same to the last bit either way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from loka_onnx.data import Batch, Dataset
from loka_onnx.sessions.streams import map_in_order, stream_count

R = TypeVar("R")


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a data set, a whole number of batches unless they are the last."""

    start: int
    stop: int


@dataclass(frozen=True)
class BatchResult(Generic[R]):
    """What one batch left behind.

    Attributes:
        rows: Rows of the batch.
        value: What the work returned.
    """

    rows: int
    value: R


class BatchWork(ABC, Generic[R]):
    """What is done with each batch; can be pickled, as long as its files are where they are here."""

    @abstractmethod
    def open(self) -> Callable[[Batch], R]:
        """Load what is needed, once in each process. What it returns is called from several threads."""


class Executor(ABC):
    """Runs batches."""

    @abstractmethod
    def run(
        self, work: BatchWork[R], data: Dataset, spans: Iterable[Span], batch_size: int
    ) -> Iterator[BatchResult[R]]:
        """What every batch left behind, in the order of the spans and of the batches in each.

        Consumed lazily: who stops asking stops the work, but for a few batches that are under way.
        """


class LocalExecutor(Executor):
    """Several batches at once in this process, each on one thread.

    Args:
        threads: Batches at once; 0 for one a core.
    """

    def __init__(self, threads: int = 0) -> None:
        self.streams = stream_count(threads)

    def run(
        self, work: BatchWork[R], data: Dataset, spans: Iterable[Span], batch_size: int
    ) -> Iterator[BatchResult[R]]:
        """See `Executor.run`."""
        run = work.open()
        batches = (
            batch for span in spans for batch in data.batches(batch_size, start=span.start, stop=span.stop)
        )
        yield from map_in_order(lambda batch: BatchResult(batch.rows, run(batch)), batches, self.streams)
