"""Several batches at once, each on one thread.

An operator on a batch of a ranker is too small to share between threads: it costs more to wake them than to
compute. Independent batches share nothing, so one stream a core is faster than one stream on all cores, and
each batch's result does not depend on how many there are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def stream_count(threads: int) -> int:
    """Streams for a number of threads; all cores for 0."""
    return threads or len(os.sched_getaffinity(0))


def map_in_order(work: Callable[[A], B], items: Iterable[A], streams: int) -> Iterator[B]:
    """Apply a function to items in several threads and yield the results in order.

    At most two items a stream are in flight, so that memory does not grow with the number of items.

    Args:
        work: Called in a worker thread.
        items: Consumed as results are.
        streams: Number of threads, at least 1.
    """
    waiting: deque[Future[B]] = deque()
    with ThreadPoolExecutor(streams, thread_name_prefix="stream") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= 2 * streams:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
