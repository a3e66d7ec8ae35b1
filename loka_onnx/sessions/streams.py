"""Parallel batches, each on one thread.

An operator on a ranker's batch is too small to share between threads: waking them costs more than the
computation. One stream per core is therefore faster than one stream on all cores, and a batch's result does
not depend on their number.
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
    """Number of streams for a number of threads; all cores for 0."""
    return threads or len(os.sched_getaffinity(0))


def map_in_order(work: Callable[[A], B], items: Iterable[A], streams: int) -> Iterator[B]:
    """Apply a function to items in several threads and yield the results in order.

    At most two items per stream are in flight, which bounds memory.
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
