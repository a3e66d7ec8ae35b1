"""How long work reports that it moves."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with the work done so far."""

    def __call__(self, task: str, done: int, total: int) -> None:
        """Report that `done` of `total` units of `task` are finished."""


def silent(task: str, done: int, total: int) -> None:
    """Report nothing."""
