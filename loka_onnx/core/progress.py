"""Long work: its progress, and work without the cyclic collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

UNTIL = ", until "
"""Marks a task that may end before its total: ``sensitivity, until decided``."""


class Progress(Protocol):
    """Callback with the work done so far."""

    def __call__(self, task: str, done: int, total: int) -> None:
        """Report that `done` of `total` units (0 for unknown) of `task` are finished.

        The first word of `task` names the work, the rest may change: ``build fp8-all``, ``build fp8-safe``.
        Units of one task should take about equal times: they predict the time left.
        """


def silent(task: str, done: int, total: int) -> None:
    """Report nothing."""


class JoinedProgress:
    """Reports consecutive pieces of work, `total` units together, as one task."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._before = progress, total, 0

    def __call__(self, task: str, done: int, total: int) -> None:
        """Report that `done` units of the running piece are finished."""
        self._progress(task, min(self._before + done, self._total), self._total)

    def skip_to_next(self, units: int) -> None:
        """End the running piece of planned `units`; it may have stopped before."""
        self._before += units


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the cyclic collector while a large graph is built; restore its state afterwards.

    A graph of n nodes has some 20·n lists and dictionaries that all stay; the collector walks them
    repeatedly: copying 10,000 nodes takes 0.66 s without it and 1.3 s with it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
